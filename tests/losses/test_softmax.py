"""Softmax against `torch.nn.functional.cross_entropy` for every kind of target and option, and against 50 digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from manymax import SoftmaxLoss, softmax, softmax_loss
from tests import high_precision
from tests.exact import INF, labels, normal

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
REDUCTIONS = ["none", "mean", "sum"]


def assert_same(found: Tensor, expected: Tensor, scores: Tensor, tolerance: float = 1e-12) -> None:
    """Equal losses, and equal gradients in the scores for an upstream gradient that differs from row to row."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    upstream = normal(*found.shape, seed=9, dtype=found.dtype)
    (grad,) = torch.autograd.grad(found, scores, upstream, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected, scores, upstream)
    torch.testing.assert_close(grad, expected_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 2, -1])
def test_ids_match_cross_entropy(
    reduction: str, label_smoothing: float, weight: Tensor | None, ignore_index: int
) -> None:
    options: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "weight": weight,
        "ignore_index": ignore_index,
    }
    scores = normal(6, 5, scale=3).requires_grad_()
    target = torch.tensor([0, ignore_index, 2, 4, ignore_index, 1])
    assert_same(softmax_loss(scores, target, **options), cross_entropy(scores, target, **options), scores)
    assert_same(SoftmaxLoss(**options)(scores, target), torch.nn.CrossEntropyLoss(**options)(scores, target), scores)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_float_rows_match_cross_entropy(reduction: str, label_smoothing: float, weight: Tensor | None) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "weight": weight}
    scores, target = normal(4, 5).requires_grad_(), normal(4, 5, seed=1).softmax(-1)
    assert_same(softmax_loss(scores, target, **options), cross_entropy(scores, target, **options), scores)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_batch_dimension_matches_cross_entropy(reduction: str, label_smoothing: float) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "weight": WEIGHT}
    scores = normal(5).requires_grad_()
    for target in (torch.tensor(1), normal(5, seed=1).softmax(-1)):
        assert_same(softmax_loss(scores, target, **options), cross_entropy(scores, target, **options), scores)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 5, 3, 4)])
def test_several_batch_dimensions_match_cross_entropy(reduction: str, shape: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "weight": WEIGHT, "ignore_index": 3}
    scores, target = normal(*shape).requires_grad_(), labels(*shape[:1], *shape[2:], num_classes=5)
    assert_same(
        softmax_loss(scores.movedim(1, -1), target, **options), cross_entropy(scores, target, **options), scores
    )
    options.pop("ignore_index")
    rows = normal(*shape, seed=1).softmax(1)
    found = softmax_loss(scores.movedim(1, -1), rows.movedim(1, -1), **options)
    assert_same(found, cross_entropy(scores, rows, **options), scores)


def test_a_learned_target_row_has_a_gradient_where_it_is_zero() -> None:
    scores, rows = normal(3, 5), torch.eye(5, dtype=torch.float64)[:3].requires_grad_()
    found = torch.autograd.grad(softmax_loss(scores, rows, reduction="sum"), rows)
    torch.testing.assert_close(found, torch.autograd.grad(cross_entropy(scores, rows, reduction="sum"), rows))
    scores[:, 4] = -torch.inf  # the gradient in its weight would be infinite, and is left out
    assert torch.autograd.grad(softmax_loss(scores, rows, reduction="sum"), rows)[0].isfinite().all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_a_row_of_several_positives_equals_as_many_rows_of_one(label_smoothing: float, weight: Tensor | None) -> None:
    scores = normal(3, 5).requires_grad_()
    hot = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 1]]).bool()
    ids = torch.tensor([[3, 0, -100], [-100, -100, -100], [0, 4, 1]])
    rows, classes = hot.nonzero(as_tuple=True)
    for reduction in ("mean", "sum"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "weight": weight}
        for target in (hot, ids):
            assert_same(
                softmax_loss(scores, target, **options), cross_entropy(scores[rows], classes, **options), scores
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("num_classes", [2, 700])
def test_offsets_and_spreads(dtype: torch.dtype, offset: float, scale: float, num_classes: int) -> None:
    scores = (normal(4, num_classes, scale=scale) + offset).to(dtype).requires_grad_()
    target = labels(4, num_classes=num_classes)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    exact = cross_entropy(scores.double(), target, reduction="none")
    assert_same(softmax_loss(scores, target, reduction="none").double(), exact, scores, tolerance)


@settings(max_examples=50)
@given(
    values=st.lists(st.floats(-40, 40) | st.integers(-3, 3).map(float) | st.just(-INF), min_size=4, max_size=4),
    target=st.integers(0, 3),
    alive=st.floats(-40, 40),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_masked_classes_match_cross_entropy(values: list[float], target: int, alive: float, reduction: str) -> None:
    values[target] = alive
    scores = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([target])
    found, expected = (loss(scores, label, reduction=reduction) for loss in (softmax_loss, cross_entropy))
    assert_same(found, expected, scores)


def test_a_mean_over_nothing_is_zero_where_torch_gives_nan() -> None:
    scores, target = normal(2, 3).requires_grad_(), torch.tensor([-100, -100])
    loss = softmax_loss(scores, target)
    (grad,) = torch.autograd.grad(loss, scores)
    assert cross_entropy(scores, target).isnan()
    assert loss.item() == 0
    assert grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("num_classes", [3, 600])
def test_values_against_fifty_digits(dtype: torch.dtype, tolerance: float, num_classes: int) -> None:
    rows = torch.stack(
        [normal(num_classes, scale=s, dtype=dtype) for s in (1e-3, 1, 30)] + [normal(num_classes, dtype=dtype) + 1e4]
    )
    rows[1, 1] = -INF
    scores, target = rows.requires_grad_(), torch.tensor([0, 2, 0, 1])
    probs = high_precision.as_tensor([high_precision.entmax(row, 1) for row in scores.tolist()])
    values = high_precision.as_tensor(
        [high_precision.entmax_loss(row, y, 1) for row, y in zip(scores.tolist(), target.tolist(), strict=True)]
    )
    loss = softmax_loss(scores, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(softmax(scores).double(), probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss.double(), values, rtol=tolerance, atol=tolerance)
    expected = probs - torch.nn.functional.one_hot(target, num_classes)
    torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)


def test_map_matches_torch_softmax() -> None:
    scores = normal(2, 3, 4)
    for dim in (0, 1, 2, -2):
        torch.testing.assert_close(softmax(scores, dim=dim), torch.softmax(scores, dim))
