"""Targets of every exact member: the loss of a row is sum_i t_i l(i, s), whatever form t is given in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.exact import INF, MANY_HOT, POSITIVES, WEIGHT, Case, cases, close, labels, normal


def rows_of(t: Tensor, singles: Tensor) -> Tensor:
    """sum_i t_i l(i, s), (...)."""
    return (t * singles).sum(-1)


def reduced(rows: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    """The losses of the rows after a reduction."""
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / divisor.sum()}[reduction]


@pytest.mark.parametrize("case", cases(each=True))
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("target", [POSITIVES, MANY_HOT], ids=["ids", "bool"])
@pytest.mark.parametrize("num_classes", [5, 600])
def test_several_positives_sum(case: Case, weight: Tensor | None, target: Tensor, num_classes: int) -> None:
    scores = normal(4, num_classes)
    pad = num_classes - 5
    target = torch.nn.functional.pad(target, (0, pad)) if target.dtype == torch.bool else target
    t = torch.nn.functional.pad(MANY_HOT.double() * (1 if weight is None else weight), (0, pad))
    full = None if weight is None else torch.nn.functional.pad(weight, (0, pad), value=0.7)
    positives = scores[..., None, :].expand(4, 5, num_classes)
    first = case.loss(positives, torch.arange(5).expand(4, 5), reduction="none")
    for reduction in ("none", "mean", "sum"):
        expected = reduced(rows_of(t[:, :5], first), t.sum(-1), reduction)
        close(case.loss(scores, target, weight=full, reduction=reduction), expected)


@pytest.mark.parametrize("case", cases(each=True))
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("target", [POSITIVES, MANY_HOT], ids=["ids", "bool"])
def test_a_grouped_batch_is_a_batch_of_pairs(case: Case, weight: Tensor | None, target: Tensor) -> None:
    grouped, paired = normal(4, 5).requires_grad_(), normal(4, 5).requires_grad_()
    rows, ids = MANY_HOT.nonzero(as_tuple=True)
    for reduction in ("mean", "sum"):
        together = case.loss(grouped, target, weight=weight, reduction=reduction)
        one_by_one = case.loss(paired[rows], ids, weight=weight, reduction=reduction)
        close(together, one_by_one)
        close(torch.autograd.grad(together, grouped)[0], torch.autograd.grad(one_by_one, paired)[0])


@pytest.mark.parametrize("case", cases())
def test_positives_are_a_set(case: Case) -> None:
    scores = normal(2, 5)
    repeated = torch.tensor([[3, 1, 3, -100, 1], [2, 2, 2, 2, 2]])
    once = torch.tensor([[1, 3, -100], [2, -100, -100]])
    for reduction in ("none", "mean"):
        for multilabel in ("sum", "normalized"):
            options: dict[str, Any] = {"reduction": reduction, "multilabel": multilabel, "weight": WEIGHT}
            close(case.loss(scores, repeated, **options), case.loss(scores, once, **options))


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("ignored", [0, 4, -1, 17])
def test_any_number_can_be_ignored(case: Case, ignored: int) -> None:
    scores = normal(3, 5)
    ids = torch.tensor([1, ignored, 3])
    close(case.loss(scores, ids, ignore_index=ignored), case.loss(scores[[0, 2]], ids[[0, 2]]))
    none = case.loss(scores, ids, ignore_index=ignored, reduction="none")
    assert none[1].item() == 0
    several = torch.tensor([[1, ignored, 3], [ignored, ignored, 1], [3, 3, ignored]])
    padded = torch.where(several == ignored, -100, several)
    close(case.loss(scores, several, ignore_index=ignored), case.loss(scores, padded))


@pytest.mark.parametrize("case", cases())
def test_ids_of_any_integer_dtype(case: Case) -> None:
    scores, target = normal(4, 5), labels(4, num_classes=5)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        close(case.loss(scores, target.to(dtype)), case.loss(scores, target))


@pytest.mark.parametrize("case", cases(distributions=True))
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_float_rows(case: Case, weight: Tensor | None, label_smoothing: float) -> None:
    scores = normal(3, 5)
    target = normal(3, 5, seed=1).softmax(-1)
    t = ((1 - label_smoothing) * target + label_smoothing / 5) * (1 if weight is None else weight)
    rows = rows_of(t, case.singles(scores))
    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
        close(case.loss(scores, target, **options), reduced(rows, torch.ones_like(rows), reduction))


@pytest.mark.parametrize("case", cases(smoothing=True))
@pytest.mark.parametrize("target", [POSITIVES, MANY_HOT], ids=["ids", "bool"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("label_smoothing", [0.2, 1.0])
def test_smoothing_spreads_each_positive_over_the_live_classes(
    case: Case, target: Tensor, weight: Tensor | None, label_smoothing: float
) -> None:
    scores = normal(4, 5)
    scores[1, 4], scores[1, 0] = -INF, -INF
    live = (scores > -INF).double()
    spread = live / live.sum(-1, keepdim=True) * MANY_HOT.sum(-1, keepdim=True)
    w = torch.ones(5, dtype=torch.float64) if weight is None else weight
    t = ((1 - label_smoothing) * MANY_HOT.double() + label_smoothing * spread) * w
    expected = rows_of(t, case.singles(scores))
    options: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
    close(case.loss(scores, target, reduction="none", **options), expected)
    close(case.loss(scores, target, **options), expected.sum() / (MANY_HOT * w).sum())


@pytest.mark.parametrize("case", cases(smoothing=True))
def test_smoothing_keeps_masked_gradients_at_zero(case: Case) -> None:
    scores = normal(2, 5)
    scores[:, 2] = -INF
    scores.requires_grad_()
    (grad,) = torch.autograd.grad(case.loss(scores, torch.tensor([0, 1]), label_smoothing=0.1), scores)
    assert grad.isfinite().all()
    assert grad[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", cases(each=True))
@pytest.mark.parametrize("target", [POSITIVES, MANY_HOT], ids=["ids", "bool"])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_normalized_is_the_fenchel_young_loss_or_the_mean_over_positives(
    case: Case, target: Tensor, weight: Tensor | None
) -> None:
    scores = normal(4, 5)
    t = MANY_HOT.double() * (1 if weight is None else weight)
    t = t / t.sum(-1, keepdim=True).clamp(min=1e-300)
    expected = rows_of(t, case.singles(scores))
    if case.member.foundation is not None:
        expected = torch.where(MANY_HOT.any(-1), expected + case.member.omega(t, **case.setting), 0)
    options: dict[str, Any] = {"weight": weight, "multilabel": "normalized"}
    close(case.loss(scores, target, reduction="none", **options), expected)
    close(case.loss(scores, target, **options), expected.sum() / 3)  # three rows have a positive


@pytest.mark.parametrize("case", cases(foundation=True))
def test_normalized_is_zero_exactly_when_the_map_equals_the_target(case: Case) -> None:
    # Scores of 0 for the positives and far below for the others: the map is uniform over the positives.
    for dtype in (torch.float64, torch.float32):
        scores = torch.where(MANY_HOT[:3], 0.0, -200.0).to(dtype).requires_grad_()
        loss = case.loss(scores, MANY_HOT[:3], multilabel="normalized", reduction="none")
        close(loss, torch.zeros_like(loss), 1e-6 if dtype == torch.float32 else 1e-13)
        (grad,) = torch.autograd.grad(loss.sum(), scores)
        close(grad, torch.zeros_like(grad), 1e-6 if dtype == torch.float32 else 1e-13)
    own = case.probs(normal(4, 5)).detach()
    close(case.loss(normal(4, 5), own, multilabel="normalized", reduction="none"), torch.zeros(4, dtype=torch.float64))
    away = case.loss(normal(4, 5), case.probs(normal(4, 5, seed=1)), multilabel="normalized", reduction="none")
    assert (away > 1e-3).all()


@pytest.mark.parametrize("case", cases(foundation=True))
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradient_of_normalized_is_map_minus_target(case: Case, label_smoothing: float) -> None:
    scores = normal(4, 5).requires_grad_()
    t = MANY_HOT[:3].double()
    t = t / t.sum(-1, keepdim=True)
    t = (1 - label_smoothing) * t + label_smoothing / 5
    options: dict[str, Any] = {"multilabel": "normalized", "reduction": "sum", "label_smoothing": label_smoothing}
    for target in (POSITIVES[:3], MANY_HOT[:3], t if label_smoothing == 0 else MANY_HOT[:3]):
        (grad,) = torch.autograd.grad(case.loss(scores[:3], target, **options), scores)
        close(grad[:3], case.probs(scores[:3]).detach() - t)


@pytest.mark.parametrize("case", cases())
def test_no_batch_dimension_and_several(case: Case) -> None:
    scores, ids = normal(2, 3, 5), labels(2, 3, num_classes=5)
    rows = case.loss(scores, ids, reduction="none")
    assert rows.shape == (2, 3)
    close(case.loss(scores[1, 2], ids[1, 2]), rows[1, 2])
    close(case.loss(scores[1, 2], ids[1, 2, None]), rows[1, 2])  # a set of one id
    close(case.loss(scores[1, 2], torch.nn.functional.one_hot(ids[1, 2], 5).bool()), rows[1, 2])
    close(case.loss(scores, torch.nn.functional.one_hot(ids, 5).bool(), reduction="none"), rows)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("target", [labels(4, num_classes=5), POSITIVES, MANY_HOT], ids=["id", "ids", "bool"])
@pytest.mark.parametrize("num_classes", [5, 600])
def test_each_row_gets_its_own_upstream_gradient(case: Case, target: Tensor, num_classes: int) -> None:
    if target.dtype == torch.bool:
        target = torch.nn.functional.pad(target, (0, num_classes - 5))
    scores = normal(4, num_classes).requires_grad_()
    upstream = torch.tensor([2.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    (grad,) = torch.autograd.grad(case.loss(scores, target, reduction="none"), scores, upstream)
    for row in range(4):
        (one,) = torch.autograd.grad(case.loss(scores[row], target[row], reduction="sum"), scores)
        close(grad[row], upstream[row] * one[row])


@pytest.mark.parametrize("case", cases())
def test_class_weights_can_be_learned(case: Case) -> None:
    weight = WEIGHT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: case.loss(normal(4, 5), POSITIVES, weight=w), weight)


@pytest.mark.parametrize("case", cases(each=True))
def test_a_class_weight_of_zero_has_a_gradient_too(case: Case) -> None:
    options = [{}, {"label_smoothing": 0.2}] if case.member.takes.smoothing else [{}]
    for setting in options:
        total = torch.func.grad(
            lambda w, extra=setting: case.loss(normal(4, 5), POSITIVES, weight=w, reduction="sum", **extra)
        )
        weight = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.5], dtype=torch.float64)
        leaf = weight.clone().requires_grad_()
        case.loss(normal(4, 5), POSITIVES, weight=leaf, reduction="sum", **setting).backward()
        close(leaf.grad, total(torch.ones_like(weight)))  # the loss is linear in the weights


@pytest.mark.parametrize("case", cases())
def test_ignore_index_none_is_that_of_torch(case: Case) -> None:
    target = torch.tensor([1, -100, 0])
    close(case.loss(normal(3, 4), target, ignore_index=None), case.loss(normal(3, 4), target))


@pytest.mark.parametrize("case", cases(first=True))
def test_fake_tensors_have_no_values_to_check(case: Case) -> None:
    with FakeTensorMode():
        assert case.loss(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), reduction="none").shape == (4,)
