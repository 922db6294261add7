"""Rankmax: its formulas against 50 digits, its kinks, and why it is not a Fenchel-Young loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax import ArgumentError, ArgumentTypeError, rankmax, rankmax_loss, sparsemax
from tests import high_precision
from tests.exact import INF, labels, normal

VALUES = st.floats(-4, 4) | st.integers(-4, 4).map(lambda n: n / 2)


def gradient(scores: Tensor, target: Tensor) -> Tensor:
    """The gradient of the summed loss in the scores."""
    leaf = scores.clone().requires_grad_()
    return torch.autograd.grad(rankmax_loss(leaf, target, reduction="sum"), leaf)[0]


@settings(max_examples=60)
@given(values=st.lists(VALUES | st.just(-INF), min_size=1, max_size=7), target=st.integers(0, 6), alive=VALUES)
def test_values_against_fifty_digits(values: list[float], target: int, alive: float) -> None:
    label = target % len(values)
    values[label] = alive
    scores, ids = torch.tensor([values], dtype=torch.float64), torch.tensor([label])
    hot = torch.nn.functional.one_hot(ids, len(values)).bool()
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(
        rankmax(scores, ids)[0], high_precision.as_tensor(high_precision.rankmax(values, label)), **close
    )
    for goal in (ids, ids[:, None], hot):
        value = rankmax_loss(scores, goal)
        torch.testing.assert_close(value, high_precision.as_tensor(high_precision.rankmax_loss(values, label)), **close)
        expected = high_precision.as_tensor(high_precision.rankmax_gradient(values, label))
        torch.testing.assert_close(gradient(scores, goal)[0], expected, **close)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, -16383.7, 3e7, 1e9])
@pytest.mark.parametrize("num_classes", [4, 600])
def test_offsets_against_fifty_digits(dtype: torch.dtype, tolerance: float, offset: float, num_classes: int) -> None:
    """A large offset of the scores costs no digits: only differences matter, and those of nearby numbers are exact."""
    rows = (torch.stack([normal(num_classes, scale=s) for s in (1e-3, 1.0, 30.0)]) + offset).to(dtype)
    target = torch.tensor([0, 2, 3])
    hot = torch.nn.functional.one_hot(target, num_classes).bool()
    probs = [high_precision.rankmax(row, y) for row, y in zip(rows.tolist(), target.tolist(), strict=True)]
    values = [high_precision.rankmax_loss(row, y) for row, y in zip(rows.tolist(), target.tolist(), strict=True)]
    slopes = [high_precision.rankmax_gradient(row, y) for row, y in zip(rows.tolist(), target.tolist(), strict=True)]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(rankmax(rows, target).double(), high_precision.as_tensor(probs), **close)
    for goal in (target, hot):
        loss = rankmax_loss(rows, goal, reduction="none")
        torch.testing.assert_close(loss.double(), high_precision.as_tensor(values), **close)
        torch.testing.assert_close(gradient(rows, goal).double(), high_precision.as_tensor(slopes), **close)


def test_bool_rows_and_ids_are_the_same_loss() -> None:
    scores = normal(6, 40, scale=2)
    ids = labels(6, 4, num_classes=40)
    hot = torch.zeros(6, 40, dtype=torch.bool).scatter(1, ids, True)
    for options in ({}, {"multilabel": "normalized"}, {"reduction": "none"}):
        torch.testing.assert_close(rankmax_loss(scores, hot, **options), rankmax_loss(scores, ids, **options))
    torch.testing.assert_close(gradient(scores, hot), gradient(scores, ids))


def test_bool_rows_with_ties_and_masks() -> None:
    scores = torch.tensor([[1.0, 0.0, 1.0, 2.0, -INF], [0.5, -0.5, -INF, 0.5, 1.5]], dtype=torch.float64)
    hot = torch.tensor([[True, True, True, False, False], [True, True, False, True, True]])
    ids = torch.tensor([[0, 1, 2, -100], [0, 1, 3, 4]])
    torch.testing.assert_close(rankmax_loss(scores, hot, reduction="none"), rankmax_loss(scores, ids, reduction="none"))
    torch.testing.assert_close(gradient(scores, hot), gradient(scores, ids))
    assert gradient(scores, hot)[0, 4] == gradient(scores, hot)[1, 2] == 0


# Kinks -------------------------------------------------------------------------------------------


def test_a_class_one_below_the_label_is_outside_of_the_support() -> None:
    scores = torch.tensor([[1.0, 0.0, 1.5]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0])
    assert rankmax(scores, target).tolist() == [[0.4, 0.0, 0.6]]
    for goal in (target, torch.tensor([[True, False, False]])):
        assert gradient(scores.detach(), goal).tolist() == [[-0.4, 0.0, 0.4]]
    (slope,) = torch.autograd.grad(rankmax(scores, target)[0, 2], scores)
    assert slope[0, 1] == 0  # the one-sided derivative from outside of the support; from inside it is negative
    inside = torch.tensor([[1.0, 1e-9, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(gradient(inside, target), torch.tensor([[-0.8, 0.4, 0.4]], dtype=torch.float64))


def test_the_loss_is_zero_at_a_lead_of_one() -> None:
    scores = torch.tensor([[2.0, 1.0, -5.0, -INF]], dtype=torch.float64)
    assert rankmax_loss(scores, torch.tensor([0])).item() == 0
    assert gradient(scores, torch.tensor([0])).tolist() == [[0.0] * 4]
    assert rankmax(scores, torch.tensor([0])).tolist() == [[1.0, 0.0, 0.0, 0.0]]


@settings(max_examples=40)
@given(values=st.lists(VALUES, min_size=2, max_size=7), target=st.integers(0, 6))
def test_bounds_of_the_gradient(values: list[float], target: int) -> None:
    label = target % len(values)
    excess = [max(0.0, s - values[label] + 1) for s in values]
    size, total = sum(u > 0 for u in excess), sum(excess)
    grad = gradient(torch.tensor([values], dtype=torch.float64), torch.tensor([label]))
    assert grad.min() >= -(size - 1) / total - 1e-12
    assert grad.max() <= 1 / total + 1e-12


# Not Fenchel-Young -------------------------------------------------------------------------------


def test_no_loss_has_the_gradient_map_minus_label() -> None:
    scores, target = torch.tensor([1.0, 0.7, 0.4], dtype=torch.float64), torch.tensor(0)
    jacobian = torch.func.jacrev(lambda s: rankmax(s, target))(scores)
    assert (jacobian - jacobian.T).abs().max() > 0.05
    grad = gradient(scores, target)
    assert (grad - (rankmax(scores, target) - torch.tensor([1.0, 0, 0]))).abs().max() > 0.1


def test_jacobian_of_the_map() -> None:
    """J = ((I - p 1') - (1 - m p) e_y') / S on the support, with norm at most m |p| / S."""
    scores, y = torch.tensor([1.0, 0.7, 1.4, -3.0, 0.2], dtype=torch.float64), 0
    jacobian = torch.func.jacrev(lambda s: rankmax(s, torch.tensor(y)))(scores)
    support = scores > scores[y] - 1
    size, total, p = (
        int(support.sum()),
        (scores - scores[y] + 1)[support].sum(),
        rankmax(scores, torch.tensor(y))[support],
    )
    ones, label = torch.ones(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)[0]
    expected = (torch.eye(size) - torch.outer(p, ones) - torch.outer(1 - size * p, label)) / total
    torch.testing.assert_close(jacobian[support][:, support], expected)
    assert jacobian[3].abs().max() == jacobian[:, 3].abs().max() == 0
    assert torch.linalg.matrix_norm(jacobian, 2) <= size * p.norm() / total + 1e-12


def test_hessian_between_kinks_is_concave() -> None:
    """-(1_P - m e_y)(1_P - m e_y)' / S^2, with norm m (m - 1) / S^2."""
    scores, y = torch.tensor([1.0, 0.7, 1.4, -3.0], dtype=torch.float64), torch.tensor(0)
    for goal in (y, torch.tensor([True, False, False, False])):
        hessian = torch.func.jacrev(torch.func.jacrev(lambda s, g=goal: rankmax_loss(s, g)))(scores)
        direction, total = torch.tensor([-2.0, 1, 1, 0], dtype=torch.float64), 1 + 0.7 + 1.4
        torch.testing.assert_close(hessian, -torch.outer(direction, direction) / total**2)
        torch.testing.assert_close(torch.linalg.matrix_norm(hessian, 2).item(), 3 * 2 / total**2)


def test_the_loss_of_two_classes_is_not_convex() -> None:
    def f(gap: float) -> float:
        return rankmax_loss(torch.tensor([[gap, 0.0]], dtype=torch.float64), torch.tensor([0])).item()

    assert abs(f(-1) - math.log(3)) < 1e-12
    assert f(-1) > (f(-3) + f(1)) / 2 + 0.29


def test_map_is_sparsemax_of_scores_divided_by_the_sum_of_violations() -> None:
    scores, target = normal(20, 6), labels(20, num_classes=6)
    total = (scores - scores.gather(1, target[:, None]) + 1).clamp(min=0).sum(-1, keepdim=True)
    torch.testing.assert_close(rankmax(scores, target), sparsemax(scores / total), rtol=1e-12, atol=1e-14)


def test_minimiser_of_the_risk_ties_distinct_classes() -> None:
    probs = torch.tensor([0.6, 0.22, 0.18], dtype=torch.float64)

    def risk(*values: float) -> float:
        scores = torch.tensor(values, dtype=torch.float64).expand(3, 3)
        return float(probs @ rankmax_loss(scores, torch.arange(3), reduction="none"))

    assert abs(risk(1, 0, 0) - 0.5545) < 1e-4
    assert abs(risk(2, 1, 0) - 0.5642) < 1e-4


# What it refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (torch.tensor([[0, 1], [2, -100]]), ArgumentError, "`target`.*one id per row"),
        (torch.zeros(2, 3, dtype=torch.bool), ArgumentError, "`target`.*one id per row"),
        (torch.full((2, 3), 1 / 3), ArgumentTypeError, "`target`.*float rows"),
        (torch.tensor([0, -100]), ArgumentError, "`target`.*every row.*-100"),
        (torch.tensor([0, 3]), ArgumentError, r"`target`.*\[0, 3\).*3"),
        (torch.tensor([0]), ArgumentError, r"`target`.*\(2,\).*\(1,\)"),
        ([0, 1], ArgumentTypeError, "`target`.*list"),
    ],
)
def test_the_map_needs_one_label_per_row(target: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rankmax(normal(2, 3), target)


def test_a_masked_label_is_refused() -> None:
    scores = torch.tensor([[0.0, -INF, 1.0]])
    for function in (rankmax, rankmax_loss):
        with pytest.raises(ArgumentError, match="masked"):
            function(scores, torch.tensor([1]))
