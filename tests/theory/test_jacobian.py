"""Jacobians against autograd and finite differences, norms against singular values, suprema against searches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.members.entmax.theory import entmax_norm, sharpest_scores
from manymax.theory.jacobian import (
    jacobian,
    norm_bounds,
    null_space,
    rank,
    spectral_norm,
    supremum,
)
from manymax.theory.order_preservation import member_map

CLOSED = [name for name, member in FAMILY.items() if member.theory.jacobian is not None]
CASES = [
    pytest.param(FAMILY[name], setting, id=f"{name}-{setting}") for name in CLOSED for setting in FAMILY[name].examples
]
BOUNDED = [case for case in CASES if case.values[0].name != "taylor_softmax"]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(map: Any, scores: Tensor) -> Tensor:
    """J by central differences, (C, C)."""
    steps = 1e-6 * torch.eye(len(scores), dtype=scores.dtype)
    return ((map(scores + steps) - map(scores - steps)) / 2e-6).mT


@pytest.mark.parametrize(("member", "setting"), CASES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_formula_equals_autograd_and_differences(member: Member, setting: dict, scale: float) -> None:
    scores, target = normal(20, 6, scale=scale), torch.arange(20) % 6
    closed = jacobian(member, scores, target, **setting)
    assert closed.shape == (20, 6, 6)
    torch.testing.assert_close(closed, jacobian(member, scores, target, method="autograd", **setting))
    for row, label, matrix in zip(scores[:5], target, closed, strict=False):
        map = member_map(member, label.expand(6), **setting)
        torch.testing.assert_close(matrix, differences(map, row), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("member", "setting"), CASES)
def test_a_masked_class_adds_a_row_and_a_column_of_zeros(member: Member, setting: dict) -> None:
    scores, target = normal(20, 5), torch.arange(20) % 5
    masked = torch.cat([scores, torch.full((20, 1), -torch.inf, dtype=torch.float64)], -1)
    expected = torch.nn.functional.pad(jacobian(member, scores, target, **setting), (0, 1, 0, 1))
    torch.testing.assert_close(jacobian(member, masked, target, **setting), expected)
    if member.name != "taylor_softmax":  # no bound of its norm is known
        torch.testing.assert_close(
            norm_bounds(member, masked, target, **setting), norm_bounds(member, scores, target, **setting)
        )


def test_only_members_with_a_map_have_a_formula() -> None:
    assert {"softmax", "sparsemax", "entmax", "rankmax", "taylor_softmax", "rg"} <= set(CLOSED)
    assert set(CLOSED) <= {name for name, member in FAMILY.items() if member.map}


@pytest.mark.parametrize(("member", "setting"), CASES)
def test_power_iteration_finds_the_largest_singular_value(member: Member, setting: dict) -> None:
    scores = normal(12, 9, seed=2, scale=1.5)
    expected = torch.linalg.matrix_norm(jacobian(member, scores, **setting), 2)
    found = spectral_norm(member_map(member, **setting), scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-12)
    assert (found <= expected * (1 + 1e-12) + 1e-15).all()


@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0])
def test_large_rows_need_no_square_table(alpha: float) -> None:
    """The full Jacobian would take 20 GB."""
    scores = normal(50_000, scale=3.0)
    exact = entmax_norm(manymax.entmax(scores, alpha), alpha)
    found = spectral_norm(lambda s: manymax.entmax(s, alpha), scores, iterations=100)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)


@given(
    st.lists(st.floats(-4, 4), min_size=1, max_size=8),
    st.floats(1, 2),
)
@settings(max_examples=60)
def test_secular_root_is_the_largest_eigenvalue(values: list[float], alpha: float) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    matrix = jacobian(FAMILY["entmax"], scores, alpha=alpha)
    largest = torch.linalg.eigvalsh(matrix)[-1].clamp_min(0)
    torch.testing.assert_close(entmax_norm(manymax.entmax(scores, alpha), alpha), largest, rtol=1e-9, atol=1e-12)


def test_secular_root_in_batches_and_with_equal_tops() -> None:
    probs = torch.tensor(
        [[0.5, 0.5, 0.0], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64
    )
    torch.testing.assert_close(entmax_norm(probs, 1.0), torch.tensor([0.5, 0.4, 0.0, 1 / 3], dtype=torch.float64))
    torch.testing.assert_close(entmax_norm(probs, 2.0), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(("member", "setting"), BOUNDED)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_bounds_hold_at_every_point(member: Member, setting: dict, scale: float) -> None:
    for num_classes in (1, 2, 7):
        scores = normal(60, num_classes, seed=num_classes, scale=scale)
        norms = torch.linalg.matrix_norm(jacobian(member, scores, **setting), 2)
        low, high = norm_bounds(member, scores, **setting)
        assert (norms >= low - 1e-12).all()
        assert (norms <= high + 1e-12).all()
        assert (high <= supremum(member, num_classes, **setting) + 1e-12).all()


def test_the_papers_bound_of_rankmax_is_looser() -> None:
    scores = normal(100, 6)
    violation = torch.relu(scores - scores[:, :1] + 1)
    printed = (violation > 0).sum(-1) / violation.sum(-1)
    tight = norm_bounds(FAMILY["rankmax"], scores)[1]
    assert (tight <= printed + 1e-12).all()
    assert tight.mean() < 0.8 * printed.mean()


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_rankmax_reaches_the_number_of_classes(num_classes: int) -> None:
    inside = torch.full((num_classes,), -1 + 1e-10, dtype=torch.float64)
    inside[0] = 0
    norm = torch.linalg.matrix_norm(jacobian(FAMILY["rankmax"], inside), 2)
    assert norm == pytest.approx(supremum(FAMILY["rankmax"], num_classes), rel=1e-8)


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("num_classes", [2, 3, 47, 48, 1000, 63_001])
def test_the_entmax_bound_is_reached(alpha: float, num_classes: int) -> None:
    norm = entmax_norm(manymax.entmax(sharpest_scores(num_classes, alpha), alpha), alpha)
    assert norm == pytest.approx(supremum(FAMILY["entmax"], num_classes, alpha=alpha), rel=1e-8)


def test_values_of_the_entmax_bound() -> None:
    """Values, and the first C whose supremum exceeds 2^(alpha - 2), computed independently with 50 digits."""
    values = {C: supremum(FAMILY["entmax"], C, alpha=1.5) for C in (47, 100, 1000, 3307, 40_981, 63_001)}
    rounded = {C: round(value, 3) for C, value in values.items()}
    assert rounded == {47: 0.707, 100: 0.753, 1000: 0.868, 3307: 0.907, 40_981: 0.958, 63_001: 0.963}
    for alpha, first in ((1.25, 1674), (1.5, 48), (1.75, 14)):
        assert supremum(FAMILY["entmax"], first - 1, alpha=alpha) == 2 ** (alpha - 2)
        assert supremum(FAMILY["entmax"], first, alpha=alpha) > 2 ** (alpha - 2)


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "num_classes"), [(1.5, 60), (1.75, 20), (1.2, 5)])
def test_no_gradient_ascent_exceeds_the_entmax_bound(alpha: float, num_classes: int) -> None:
    """Gradient ascent of z'J z over unit vectors z and probabilities p, from random starts."""
    bound = supremum(FAMILY["entmax"], num_classes, alpha=alpha)
    logits, direction = normal(24, num_classes, scale=2.0), normal(24, num_classes, seed=1)
    logits, direction = logits.requires_grad_(), direction.requires_grad_()
    optimizer = torch.optim.Adam([logits, direction], lr=0.05)
    for _ in range(500):
        a, z = torch.softmax(logits, -1) ** (2 - alpha), torch.nn.functional.normalize(direction, dim=-1)
        value = (a * z.square()).sum(-1) - (a * z).sum(-1).square() / a.sum(-1)
        optimizer.zero_grad()
        (-value.sum()).backward()
        optimizer.step()
    assert value.max() <= bound + 1e-12
    assert value.max() > 0.98 * bound


def test_ranks_and_null_spaces() -> None:
    scores = normal(40, 7, scale=0.7)
    assert (rank(jacobian(FAMILY["softmax"], scores)) == 6).all()
    for name in ("sparsemax", "entmax"):
        probs = member_map(FAMILY[name])(scores)
        matrices = jacobian(FAMILY[name], scores)
        sizes = (probs > 0).sum(-1)
        assert (rank(matrices) == sizes - 1).all()
        assert len(sizes.unique()) > 2
        for matrix, size in zip(matrices, sizes, strict=True):
            basis = null_space(matrix)
            assert basis.shape == (7, 7 - int(size) + 1)
            assert (matrix @ basis).abs().max() < 1e-12
            torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64))


def test_a_jacobian_of_zeros_and_of_float32() -> None:
    still = jacobian(FAMILY["sparsemax"], torch.tensor([9.0, 0.0, 0.0]))
    assert rank(still) == 0
    assert null_space(still).shape == (3, 3)
    assert (rank(jacobian(FAMILY["softmax"], normal(20, 6).float())) == 5).all()


def test_the_jacobian_of_a_single_class_is_0() -> None:
    for name in CLOSED:
        assert jacobian(FAMILY[name], torch.zeros(1)).abs().item() < 1e-12
        assert supremum(FAMILY[name], 1) == 0
    assert entmax_norm(torch.ones(3, 1), 1.5).tolist() == [0, 0, 0]


def test_no_supremum_is_known_for_taylor_softmax() -> None:
    assert math.isnan(supremum(FAMILY["taylor_softmax"], 4))


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="`method` must be one of 'closed', 'autograd'"):
        jacobian(FAMILY["softmax"], torch.zeros(3), method="numeric")
    with pytest.raises(ArgumentError, match="`member` must have a map"):
        jacobian(FAMILY["nce"], torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"no bound is known for taylor_softmax: .* `theory\.norm_bounds`"):
        norm_bounds(FAMILY["taylor_softmax"], torch.zeros(3))
    with pytest.raises(ArgumentError, match="`num_classes` must be at least 2"):
        sharpest_scores(1)
