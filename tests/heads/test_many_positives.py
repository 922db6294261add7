"""Rankmax with several positives per row: by a pass for each of them, or by one search for the place of every score."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import manymax
from manymax import FAMILY
from manymax.members.rankmax import kernel as kernels
from tests.heads.plain import TOLERANCE, HeadCase, Problem, compare, make_problem

RANKMAX = HeadCase(FAMILY["rankmax"])
C, ROWS = 301, 24


@pytest.fixture(params=["passes", "buckets"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs both ways, a few rows at a time, however many positives there are."""
    monkeypatch.setattr(kernels, "MOST_PASSES", 100 if request.param == "passes" else 1)
    monkeypatch.setattr(kernels, "piece_size", lambda scores: 5 * 304)
    return str(request.param)


def ragged(most: int, num_classes: int = C) -> Tensor:
    """Padded ids (ROWS, most): from no positive to `most` in a row, unsorted, with padding at any place."""
    random = torch.Generator().manual_seed(3)
    ids = torch.rand(ROWS, num_classes, generator=random).argsort(1)[:, :most]
    count = torch.randint(0, most + 1, (ROWS, 1), generator=random)
    return torch.where(torch.rand(ROWS, most, generator=random).argsort(1) < count, ids, -100)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("regime", ["wide", "near", "thin", "mixed"])
@pytest.mark.parametrize("most", [1, 2, 7, 40])
def test_rows_of_different_numbers_of_positives(most: int, regime: str, dtype: torch.dtype) -> None:
    problem = make_problem(ROWS, num_classes=C, regime=regime, masked=True)
    target = ragged(most)
    target = torch.where(target % 5 == 3, -100, target)  # no masked class is a positive
    for reduction in ("mean", "none"):
        compare(RANKMAX, problem, target, dtype=dtype, reduction=reduction)


def test_equal_scores_and_repeated_pairs() -> None:
    """Positives that tie with each other and with all other classes; a pair counts as often as it occurs."""
    problem = Problem(torch.ones(2, 1, dtype=torch.float64), torch.zeros(64, 1, dtype=torch.float64))
    rows, classes = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([5, 5, 9, 5, 2])
    groups, target = manymax.group_pairs(rows, classes)
    leaves = problem.leaves()
    loss = RANKMAX.head(Problem(leaves.input[groups], leaves.linear_weight), target)
    assert loss.item() == pytest.approx(math.log(64), abs=1e-12)  # S = 64 for every pair
    loss.backward()
    count = torch.bincount(classes, minlength=64).double()
    expected = (5 / 64 - count) / 5  # each of five pairs: (1_P - 64 e_y) / 64
    assert leaves.linear_weight.grad is not None
    assert torch.allclose(leaves.linear_weight.grad.squeeze(1), expected, atol=1e-12)


@pytest.mark.parametrize("spread", [1 / 64, 1.0, 64.0])
def test_an_offset_of_all_scores_costs_no_digits(spread: float) -> None:
    """A bias of 2^22, at which float32 numbers are half a unit apart, so that integer scores stay exact."""
    problem = make_problem(ROWS, num_classes=C, regime="near", bias=True)
    scores = (problem.scores() * spread).round(decimals=0)
    shifted = Problem(torch.eye(ROWS, dtype=torch.float64), scores.T.contiguous(), torch.full((C,), 2.0**22).double())
    still = Problem(shifted.input, shifted.linear_weight, torch.zeros(C, dtype=torch.float64))
    target = ragged(7)
    values = []
    for each in (shifted, still):
        leaves = each.leaves(torch.float32)
        loss = RANKMAX.head(leaves, target)
        values.append([loss.detach(), *torch.autograd.grad(loss, [leaves.input, leaves.linear_weight])])
    for ours, theirs in zip(*values, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
