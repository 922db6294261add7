"""Exact heads where numbers are difficult: offsets, vanishing probabilities, masks, and scores that are refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import manymax
from tests.heads.plain import (
    CASES,
    KINDS,
    HeadCase,
    Problem,
    agree,
    compare,
    make_problem,
    make_target,
    value_and_gradients,
)

DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("case", CASES)
def test_an_offset_of_the_scores_costs_no_digits(case: HeadCase, offset: float) -> None:
    problem = make_problem(40, num_classes=301, regime="near")
    assert problem.linear_bias is not None
    shifted = Problem(problem.input, problem.linear_weight, problem.linear_bias + offset)
    assert torch.equal(shifted.scores(), shifted.scores().float().double())
    for kind, label_smoothing in itertools.product(("ids", "bool rows"), (0.0, 0.25)):
        if case.takes(kind, label_smoothing):
            target = make_target(kind, 40, num_classes=301)
            for reduction in ("none", "mean"):
                options = {"label_smoothing": label_smoothing, "reduction": reduction}
                compare(case, shifted, target, dtype=torch.float32, **options)


@pytest.mark.parametrize("case", CASES)
def test_an_offset_from_the_queries_costs_no_digits(case: HeadCase) -> None:
    """The gradient in the queries has a sum of 301 terms of size 100 that cancel, so only the value is compared."""
    problem = make_problem(12, num_classes=301, regime="near", bias=False)
    problem.input[:, 0], problem.linear_weight[:, 0] = 100, 100
    narrow = Problem(problem.input.float(), problem.linear_weight.float())
    for kind, label_smoothing in itertools.product(("ids", "bool rows"), (0.0, 0.25)):
        if case.takes(kind, label_smoothing):
            target = make_target(kind, 12, num_classes=301)
            options = {"label_smoothing": label_smoothing, "reduction": "none"}
            agree([case.head(narrow, target, **options)], [case.plain(problem, target, **options)], 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_padding_beside_a_masked_class_and_full_smoothing(case: HeadCase) -> None:
    """No positive has a weight of its own then, and padding points at class 0, whose score is -inf."""
    weight, bias = torch.tensor([[0.0], [1.0], [2.0]]).double(), torch.tensor([-torch.inf, 0, 0]).double()
    problem = Problem(torch.ones(1, 1).double(), weight, bias)
    if case.takes("ids", 1.0):
        for backend in ("auto", "torch"):
            for target in (torch.tensor([[1, -100]]), torch.tensor([[1, 2, -100]])):
                for given in ({"label_smoothing": 1.0}, {"label_smoothing": 0.5, "weight": torch.tensor([1.0, 0, 1])}):
                    compare(replace(case, backend=backend), problem, target, reduction="none", **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_positives_without_any_probability(case: HeadCase, dtype: torch.dtype) -> None:
    """Some positives have a probability below 1e-30, some below the smallest number of the dtype."""
    problem = make_problem(12, num_classes=40, regime="thin")
    problem = Problem(problem.input * (4 if dtype == torch.float32 else 64), problem.linear_weight, problem.linear_bias)
    for kind, label_smoothing in itertools.product(("ids", "padded ids", "bool rows"), (0.0, 0.25)):
        if case.takes(kind, label_smoothing):
            target = make_target(kind, 12, num_classes=40)
            compare(case, problem, target, dtype=dtype, label_smoothing=label_smoothing)
    smallest = math.log(torch.finfo(dtype).smallest_normal) - 40  # below it are denormal numbers, then none
    assert (problem.scores().log_softmax(-1).amin(1) < smallest).all()


@pytest.mark.parametrize("case", CASES)
def test_masked_classes_get_no_gradient(case: HeadCase) -> None:
    problem = make_problem(12, num_classes=60, masked=True).leaves(torch.float32)
    for kind in KINDS:
        if case.takes(kind):
            label_smoothing = 0.25 if case.member.takes.smoothing else 0.0
            target = make_target(kind, 12, num_classes=60)
            results = value_and_gradients(case.head, problem, target, label_smoothing=label_smoothing)
            assert (results[2][3::5] == 0).all()
            assert (results[3][3::5] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_where_values_cannot_be_looked_at(case: HeadCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where looking at values would make the host wait: no checks, and the same results."""
    for module in ("engine.linear", "engine.row_target", "members.rg.kernel"):
        monkeypatch.setattr(f"manymax.{module}.visible", lambda *_: False, raising=False)
    problem = make_problem(12, num_classes=60, masked=True)
    label_smoothing = 0.25 if case.member.takes.smoothing else 0.0
    for kind, multilabel in itertools.product(KINDS, ("sum", "normalized")):
        if case.takes(kind):
            target = make_target(kind, 12, num_classes=60)
            compare(case, problem, target, multilabel=multilabel, label_smoothing=label_smoothing)


# Scores that are refused -------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinite_scores_are_refused(case: HeadCase, reduction: str) -> None:
    """In rows that count, as the plain loss refuses them."""
    for value in (torch.nan, torch.inf):
        problem = make_problem(8, num_classes=40)
        problem.input[5, 0] = value
        target = make_target("ids", 8, num_classes=40)
        target[5] = 3
        for loss in (case.plain, case.head):
            with pytest.raises(manymax.ArgumentError, match=r"must not hold (nan|\+inf)"):
                loss(problem, target, reduction=reduction)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_masked_positives_are_refused(case: HeadCase, kind: str) -> None:
    if not case.takes(kind):
        pytest.skip("the plain loss takes no such target")
    problem = make_problem(8, num_classes=40)
    assert problem.linear_bias is not None
    target = make_target(kind, 8, num_classes=40)
    listed = (
        [int(i) for i in target[target != -100].flatten()[:1]] if "ids" in kind else target[0].nonzero()[0].tolist()
    )
    problem.linear_bias[listed] = -torch.inf
    for reduction in ("mean", "none"):
        with pytest.raises(manymax.ArgumentError, match="masked class cannot be a positive"):
            case.head(problem, target, reduction=reduction)


@pytest.mark.parametrize("case", CASES)
def test_a_mask_on_every_class_is_refused(case: HeadCase) -> None:
    problem = make_problem(8, num_classes=40)
    masked = Problem(problem.input, problem.linear_weight, torch.full((40,), -torch.inf, dtype=torch.float64))
    for target in (make_target("ids", 8, num_classes=40), torch.full((8,), -100)):
        for loss in (case.plain, case.head):
            with pytest.raises(manymax.ArgumentError, match="masked"):
                loss(masked, target)
