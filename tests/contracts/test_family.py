"""What every exact member does, asked of every row of the table and of none by its name."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import manymax
from manymax import FAMILY, ArgumentError, ArgumentTypeError, ManymaxError
from tests.exact import EXACT, INF, Case, cases, labels, normal

HALVES = [torch.bfloat16, torch.float16]
OPTIONS = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# The table ---------------------------------------------------------------------------------------


OURS = [member for member in EXACT if member.loss.__module__.startswith("manymax.")]


@pytest.mark.parametrize("member", OURS, ids=lambda m: m.name)
def test_a_member_has_its_three_public_names(member: Any) -> None:
    words = member.name.split("_")
    assert member.map is getattr(manymax, member.name)
    assert member.loss is getattr(manymax, f"{member.name}_loss")
    assert member.module is getattr(manymax, "".join(word.capitalize() for word in words) + "Loss")
    assert {member.map.__name__, member.loss.__name__, member.module.__name__} <= set(manymax.__all__)


@pytest.mark.parametrize("member", EXACT, ids=lambda m: m.name)
def test_the_options_are_those_of_cross_entropy(member: Any) -> None:
    ours = inspect.signature(member.loss).parameters
    torchs = inspect.signature(torch.nn.functional.cross_entropy).parameters
    assert list(ours)[:2] == ["scores", "target"]
    for name, default in OPTIONS.items():
        assert ours[name].default == torchs[name].default == default
        assert ours[name].kind == inspect.Parameter.KEYWORD_ONLY
    assert ours["multilabel"].default == "sum"
    assert set(member.examples[0]) <= set(ours)


@pytest.mark.parametrize("member", EXACT, ids=lambda m: m.name)
def test_map_and_loss_are_documented_with_an_example(member: Any) -> None:
    for function in (member.map, member.loss):
        for part in ("Args:", "Returns:", ">>> "):
            assert part in inspect.getdoc(function)


def test_members_are_found_by_any_of_their_names_and_missed_with_a_hint() -> None:
    for member in FAMILY.values():
        assert all(FAMILY[name] is member for name in (member.name, *member.aliases))
    with pytest.raises(KeyError, match="softmax"):
        FAMILY["sofmax"]


# The map -----------------------------------------------------------------------------------------

EXTREME = st.floats(-30, 30) | st.integers(-6, 6).map(lambda n: n / 2) | st.sampled_from([1e4, -1e4, 0.0, 1e9, -1e9])


@st.composite
def score_rows(draw: st.DrawFn, max_classes: int = 7) -> tuple[Tensor, Tensor]:
    """Scores (..., C) with ties, extremes and masks, and one live label for each row."""
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    num_classes = draw(st.integers(1, max_classes))
    size = math.prod(batch) * num_classes
    values = draw(st.lists(EXTREME | st.just(-INF), min_size=size, max_size=size))
    scores = torch.tensor(values, dtype=torch.float64).reshape(*batch, num_classes)
    target = torch.tensor(
        draw(st.lists(st.integers(0, num_classes - 1), min_size=math.prod(batch), max_size=math.prod(batch)))
    ).reshape(batch)
    alive = torch.where(scores.gather(-1, target[..., None]) > -INF, scores.gather(-1, target[..., None]), 0.5)
    return scores.scatter(-1, target[..., None], alive), target


@pytest.mark.parametrize("case", cases())
@settings(max_examples=25)
@given(row=score_rows())
def test_map_is_on_the_simplex(case: Case, row: tuple[Tensor, Tensor]) -> None:
    scores, target = row
    probs = case.probs(scores, target)
    assert probs.shape == scores.shape
    assert (probs >= 0).all()
    close(probs.sum(-1), torch.ones_like(probs.sum(-1)))
    assert (probs[scores == -INF] == 0).all()


@pytest.mark.parametrize("case", cases())
@settings(max_examples=25)
@given(row=score_rows())
def test_map_and_loss_of_a_batch_are_those_of_its_rows(case: Case, row: tuple[Tensor, Tensor]) -> None:
    scores, target = row
    probs, rows = case.probs(scores, target), case.loss(scores, target, reduction="none")
    flat = zip(scores.flatten(0, -2) if scores.ndim > 1 else [scores], target.flatten(), strict=True)
    for i, (one, label) in enumerate(flat):
        close(probs.reshape(-1, scores.shape[-1])[i], case.probs(one, label))
        close(rows.flatten()[i], case.loss(one, label))
    close(case.loss(scores, target), rows.mean())
    close(case.loss(scores, target, reduction="sum"), rows.sum())


@pytest.mark.parametrize("case", cases())
@settings(max_examples=25)
@given(row=score_rows(), seed=st.integers(0, 100))
def test_classes_have_no_order(case: Case, row: tuple[Tensor, Tensor], seed: int) -> None:
    scores, target = row
    order = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(seed))
    moved = order.argsort()[target]
    close(case.probs(scores[..., order], moved), case.probs(scores, target)[..., order])
    close(case.loss(scores[..., order], moved), case.loss(scores, target))


@pytest.mark.parametrize("case", cases())
@settings(max_examples=25)
@given(row=score_rows())
def test_loss_and_gradient_are_finite_and_masked_classes_get_no_gradient(
    case: Case, row: tuple[Tensor, Tensor]
) -> None:
    scores, target = row
    scores = scores.requires_grad_()
    loss = case.loss(scores, target, reduction="sum")
    (grad,) = torch.autograd.grad(loss, scores)
    (grad_map,) = torch.autograd.grad(case.probs(scores, target).square().sum(), scores)
    assert loss.isfinite()
    assert loss >= 0
    for g in (grad, grad_map):
        assert g.isfinite().all()
        assert (g[scores == -INF] == 0).all()


@pytest.mark.parametrize("case", cases())
@settings(max_examples=25)
@given(row=score_rows())
def test_a_masked_class_is_as_good_as_gone(case: Case, row: tuple[Tensor, Tensor]) -> None:
    scores, target = row
    wider = torch.cat([torch.full_like(scores[..., :1], -INF), scores, torch.full_like(scores[..., :2], -INF)], -1)
    close(case.probs(wider, target + 1)[..., 1 : scores.shape[-1] + 1], case.probs(scores, target))
    close(case.loss(wider, target + 1), case.loss(scores, target))


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_map_takes_the_dimension_of_the_classes(case: Case, dim: int) -> None:
    scores = normal(3, 4, 5)
    target = labels(*scores.movedim(dim, -1).shape[:-1], num_classes=scores.shape[dim])
    expected = case.probs(scores.movedim(dim, -1).contiguous(), target).movedim(-1, dim)
    assert torch.equal(case.probs(scores, target, dim=dim), expected)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("num_classes", [5, 700])
def test_memory_layout_does_not_matter(case: Case, num_classes: int) -> None:
    target = labels(4, num_classes=num_classes)
    plain = normal(4, num_classes).requires_grad_()
    strange = torch.zeros(num_classes, 4, 2, dtype=torch.float64)[..., 0].t().copy_(plain.detach()).requires_grad_()
    assert not strange.is_contiguous()
    hot = torch.nn.functional.one_hot(target, num_classes).bool()
    for function, goal in ((case.probs, target), (case.loss, target), (case.loss, hot)):
        value, other = function(plain, goal), function(strange, goal)
        close(other, value)
        upstream = normal(*value.shape, seed=5)
        (grad,) = torch.autograd.grad(value, plain, upstream)
        (grad_other,) = torch.autograd.grad(
            other, strange, upstream.mT.contiguous().mT if upstream.ndim > 1 else upstream
        )
        close(grad_other, grad)
    expanded = plain.detach()[:1].expand(4, num_classes)
    close(case.loss(expanded, target, reduction="none"), case.loss(expanded.clone(), target, reduction="none"))


# Edge cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
def test_one_class(case: Case) -> None:
    scores = torch.tensor([[0.0], [-7.5], [1e4], [-1e4], [1e9]], dtype=torch.float64, requires_grad=True)
    target = torch.zeros(5, dtype=torch.long)
    assert case.probs(scores, target).tolist() == [[1.0]] * 5
    loss = case.loss(scores, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    assert loss.tolist() == [0.0] * 5
    assert grad.tolist() == [[0.0]] * 5


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("num_classes", [2, 3, 600])
def test_equal_scores_are_uniform(case: Case, num_classes: int) -> None:
    for score in (0.0, 3.0, -1e4, 1e9):
        probs = case.probs(torch.full((num_classes,), score, dtype=torch.float64))
        close(probs, torch.full_like(probs, 1 / num_classes))


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e9, -1e9])
@pytest.mark.parametrize("num_classes", [3, 600])
def test_large_scores_stay_finite(case: Case, dtype: torch.dtype, offset: float, num_classes: int) -> None:
    rows = torch.zeros(3, num_classes, dtype=dtype)
    rows[0], rows[1, 0], rows[2, -1] = offset, offset, -offset
    ids = labels(3, num_classes=num_classes)
    for target in (ids, torch.nn.functional.one_hot(ids, num_classes).bool()):
        scores = rows.clone().requires_grad_()
        loss = case.loss(scores, target, reduction="sum")
        (grad,) = torch.autograd.grad(loss, scores)
        assert loss.isfinite()
        assert grad.isfinite().all()
    probs = case.probs(rows, torch.zeros(3, dtype=torch.long))
    assert probs.isfinite().all()
    close(probs.sum(-1), torch.ones(3, dtype=dtype), 1e-6)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("shape", [(0, 3), (0, 600), (2, 0, 3)])
def test_no_rows(case: Case, shape: tuple[int, ...]) -> None:
    scores = torch.zeros(shape, requires_grad=True)
    ids = torch.zeros(shape[:-1], dtype=torch.long)
    for target in (ids, torch.zeros((*shape[:-1], 2), dtype=torch.long), torch.zeros(shape, dtype=torch.bool)):
        for reduction in ("none", "mean", "sum"):
            for multilabel in ("sum", "normalized"):
                loss = case.loss(scores, target, reduction=reduction, multilabel=multilabel)
                (grad,) = torch.autograd.grad(loss.sum(), scores)
                assert loss.tolist() == (ids.tolist() if reduction == "none" else 0.0)
                assert grad.shape == scores.shape
    assert case.probs(scores, ids).shape == scores.shape


EMPTY = [
    torch.full((2,), -100),
    torch.full((2, 3), -100),
    torch.zeros(2, 0, dtype=torch.long),
    torch.zeros(2, 4, dtype=torch.bool),
]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("target", EMPTY, ids=["id", "ids", "no ids", "bool"])
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
def test_rows_without_a_positive_cost_nothing(case: Case, target: Tensor, multilabel: str) -> None:
    scores = normal(2, 4)
    scores[0, 0] = -INF  # the class that may stand in for a missing id
    scores.requires_grad_()
    for reduction in ("none", "sum", "mean"):
        loss = case.loss(scores, target, reduction=reduction, multilabel=multilabel)
        (grad,) = torch.autograd.grad(loss.sum(), scores)
        assert loss.sum().item() == 0
        assert grad.tolist() == torch.zeros(2, 4).tolist()


@pytest.mark.parametrize("case", cases(distributions=True))
def test_float_rows_of_zeros_cost_nothing(case: Case) -> None:
    scores, target = normal(3, 4).requires_grad_(), torch.tensor([[0.0] * 4, [0.5, 0.5, 0, 0], [0.0] * 4])
    for multilabel in ("sum", "normalized"):
        mean = case.loss(scores, target.double(), multilabel=multilabel)
        close(
            mean, case.loss(scores[1], target[1].double(), multilabel=multilabel)
        )  # only a row with a positive counts
        (grad,) = torch.autograd.grad(mean, scores)
        assert grad[0].tolist() == grad[2].tolist() == [0.0] * 4


# Targets: the loss of a row is sum_i t_i l(i, s) -------------------------------------------------

POSITIVES = torch.tensor([[0, 3, -100], [2, -100, -100], [4, 1, 0], [-100, -100, -100]])
MANY_HOT = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)


def rows_of(t: Tensor, singles: Tensor) -> Tensor:
    """sum_i t_i l(i, s), (...)."""
    return (t * singles).sum(-1)


def reduced(rows: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / divisor.sum()}[reduction]


@pytest.mark.parametrize("case", cases())
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


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("target", [POSITIVES, MANY_HOT], ids=["ids", "bool"])
def test_a_grouped_batch_is_a_batch_of_pairs(case: Case, weight: Tensor | None, target: Tensor) -> None:
    grouped, paired = normal(4, 5).requires_grad_(), normal(4, 5).requires_grad_()
    rows, ids = MANY_HOT.nonzero(as_tuple=True)
    for reduction in ("mean", "sum"):
        together = case.loss(grouped, target, weight=weight, reduction=reduction)
        apart = case.loss(paired[rows], ids, weight=weight, reduction=reduction)
        close(together, apart)
        close(torch.autograd.grad(together, grouped)[0], torch.autograd.grad(apart, paired)[0])


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


@pytest.mark.parametrize("case", cases())
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
    # scores of 0 for the positives and far below for the others: the map is uniform over the positives
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


@pytest.mark.parametrize("case", cases())
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


# Modules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
def test_the_module_is_the_function(case: Case) -> None:
    options: dict[str, Any] = {
        "weight": WEIGHT,
        "ignore_index": 4,
        "reduction": "none",
        "multilabel": "normalized",
        "label_smoothing": 0.1 if case.member.takes.smoothing else 0.0,
    }
    module = case.module(**options)
    scores, target = normal(2, 5), torch.tensor([[0, 2, 4], [1, 4, 4]])
    close(module(scores, target), case.loss(scores, target, **options))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        close(copied(scores, target), module(scores, target))
    other = case.module(**{**options, "weight": torch.ones_like(WEIGHT)})
    other.load_state_dict(module.state_dict())
    close(other(scores, target), module(scores, target))
    assert "reduction='none'" in repr(module)
    assert case.module()(scores, torch.tensor([0, 1])).shape == ()


# Half precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_classes", [5, 700])
def test_half_precision_is_float32_inside(case: Case, dtype: torch.dtype, num_classes: int) -> None:
    scores, target = normal(6, num_classes, scale=2, dtype=dtype).requires_grad_(), labels(6, num_classes=num_classes)
    wide = scores.detach().double().requires_grad_()
    eps = torch.finfo(dtype).eps
    probs, loss = case.probs(scores, target), case.loss(scores, target)
    (grad,) = torch.autograd.grad(loss, scores)
    assert probs.dtype == loss.dtype == grad.dtype == dtype
    # one rounding at the end, none inside
    torch.testing.assert_close(probs.double(), case.probs(wide, target).detach(), rtol=eps, atol=1e-7)
    torch.testing.assert_close(loss.double(), case.loss(wide, target).detach(), rtol=eps, atol=0)
    (expected,) = torch.autograd.grad(case.loss(wide, target), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=eps, atol=1e-7)
    # C rounded numbers, each off by at most half of eps times itself (or half of the smallest number)
    slack = eps / 2 + num_classes * torch.finfo(dtype).smallest_normal * eps
    assert ((probs.detach().double().sum(-1) - 1).abs() <= slack + 1e-6).all()


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_gives_float32(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(1003, 7, dtype=dtype).requires_grad_(), labels(1003, num_classes=7)
    hot = torch.nn.functional.one_hot(target, 7).bool() | (normal(1003, 7, seed=3) > 1)
    weight = torch.rand(7, generator=torch.Generator().manual_seed(0))
    for goal in (target, hot):
        for options in ({}, {"weight": weight}, {"multilabel": "normalized"}):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, probs = case.loss(scores, goal, **options), case.probs(scores, target)
            assert loss.dtype == probs.dtype == torch.float32
            torch.testing.assert_close(loss.double(), case.loss(scores.double(), goal, **options), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(probs.double(), case.probs(scores.double(), target), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(probs.sum(-1), torch.ones(1003), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(loss, scores)
    assert grad.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert case.loss(scores.float(), target).dtype == torch.float32


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_mean_counts_all_rows(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(1, 3, dtype=dtype).expand(70001, 3), torch.full((70001,), 2)
    one = case.loss(scores[0], target[0])
    assert one > 1
    torch.testing.assert_close(case.loss(scores, target), one, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("case", cases(distributions=True))
@pytest.mark.parametrize("dtype", HALVES)
def test_float_rows_keep_their_digits_beside_half_scores(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(3, 5, dtype=dtype), normal(3, 5, seed=1, dtype=torch.float32).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.loss(scores, target, reduction="none")
    torch.testing.assert_close(
        loss.double(), case.loss(scores.double(), target.double(), reduction="none"), rtol=1e-5, atol=1e-6
    )


# Errors ------------------------------------------------------------------------------------------


def refused(error: type[Exception], *words: str) -> Any:
    """pytest.raises for one of our errors whose message has all of the words, in this order."""
    pattern = r"[\s\S]*".join(words)
    assert issubclass(error, ManymaxError)
    return pytest.raises(error, match=pattern)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("scores", "error", "words"),
    [
        ([[1.0, 2.0]], ArgumentTypeError, ["`scores`", "tensor", "list"]),
        (torch.tensor([[1, 2]]), ArgumentTypeError, ["`scores`", "float", "int64"]),
        (torch.zeros(1, 2, dtype=torch.complex64), ArgumentTypeError, ["`scores`", "float", "complex64"]),
        (torch.tensor(1.0), ArgumentError, ["`scores`", r"\(\)"]),
        (torch.zeros(1, 0), ArgumentError, ["`scores`", r"\(1, 0\)"]),
    ],
    ids=["list", "int", "complex", "scalar", "no class"],
)
def test_scores_of_the_wrong_kind(case: Case, scores: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(scores, torch.tensor([0]))
    with refused(error, *words):
        case.member.map(scores, **({"target": torch.tensor([0])} if case.needs_label else {}), **case.setting)  # type: ignore[misc]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([0, 1], ArgumentTypeError, ["`target`", "list"]),
        (torch.zeros(2, dtype=torch.complex64), ArgumentTypeError, ["`target`", "complex64"]),
        (torch.tensor(0), ArgumentError, ["`target`", r"\(2,\)", r"\(\)"]),
        (torch.tensor([0, 1, 2]), ArgumentError, ["`target`", r"\(2,\)", r"\(3,\)"]),
        (torch.zeros(3, 4, dtype=torch.long), ArgumentError, ["`target`", r"\(2,\)", r"\(3, 4\)"]),
        (torch.zeros(2, 1, 4, dtype=torch.long), ArgumentError, ["`target`", r"\(2, 1, 4\)"]),
        (torch.zeros(2, 3, dtype=torch.bool), ArgumentError, ["`target`", "bool", r"\(2, 4\)", r"\(2, 3\)"]),
        (torch.tensor([0, 4]), ArgumentError, ["`target`", r"\[0, 4\)", "4"]),
        (torch.tensor([0, -1]), ArgumentError, ["`target`", r"\[0, 4\)", "-1"]),
        (torch.tensor([[0, 1], [2, 9]]), ArgumentError, ["`target`", r"\[0, 4\)", "9"]),
        (torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]]), ArgumentTypeError, ["`target`", "int64", r"target\.bool\(\)"]),
    ],
    ids=[
        "list",
        "complex",
        "scalar",
        "rows",
        "shape",
        "ndim",
        "bool shape",
        "id",
        "negative id",
        "ids",
        "int many-hot",
    ],
)
def test_targets_of_the_wrong_kind(case: Case, target: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), target)


@pytest.mark.parametrize("case", cases(distributions=True))
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1.0, 1.0, 0.0], ["`target`", "sum to 1", "2"]),
        ([0.2, 0.2, 0.2], ["`target`", "sum to 1", "0.6"]),
        ([1.5, -0.5, 0.0], ["`target`", "negative"]),
        ([math.nan, 0.5, 0.5], ["`target`", "sum to 1", "nan"]),
    ],
)
def test_float_rows_that_are_no_distribution(case: Case, row: list[float], words: list[str]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with refused(ArgumentError, *words):
            case.loss(normal(2, 3, dtype=dtype), torch.tensor([[1.0, 0, 0], row], dtype=dtype))
    with refused(ArgumentError, "`target`", r"\(2, 3\)", r"\(2, 2\)"):
        case.loss(normal(2, 3), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("member", [m for m in EXACT if not m.takes.float_rows], ids=lambda m: m.name)
def test_float_rows_are_refused_with_the_reason(member: Any) -> None:
    with refused(ArgumentTypeError, "`target`", "float rows", "sum over all"):
        member.loss(normal(2, 3), torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("member", [m for m in EXACT if not m.takes.smoothing], ids=lambda m: m.name)
def test_smoothing_is_refused_with_the_reason(member: Any) -> None:
    with refused(ArgumentError, "`label_smoothing`", "0.1", "sum over all"):
        member.loss(normal(2, 3), torch.tensor([0, 1]), label_smoothing=0.1)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reduction": "average"}, ArgumentError, ["`reduction`", "'none', 'mean', 'sum'", "'average'"]),
        ({"reduction": "meen"}, ArgumentError, ["`reduction`", "'meen'", "Did you mean 'mean'"]),
        ({"multilabel": "normalised"}, ArgumentError, ["`multilabel`", "'normalised'", "Did you mean 'normalized'"]),
        ({"label_smoothing": -0.1}, ArgumentError, ["`label_smoothing`", r"\[0, 1\]", "-0.1"]),
        ({"label_smoothing": 1.5}, ArgumentError, ["`label_smoothing`", r"\[0, 1\]", "1.5"]),
        ({"label_smoothing": math.nan}, ArgumentError, ["`label_smoothing`", r"\[0, 1\]", "nan"]),
    ],
)
def test_options_of_the_wrong_kind(case: Case, options: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), torch.tensor([0, 1]), **options)
    with refused(error, *words):
        case.module(**options)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        ([1.0, 1.0, 1.0, 1.0], ArgumentTypeError, ["`weight`", "list"]),
        (torch.ones(4, dtype=torch.long), ArgumentTypeError, ["`weight`", "int64"]),
        (torch.ones(3), ArgumentError, ["`weight`", r"\(4,\)", r"\(3,\)"]),
        (torch.ones(1, 4), ArgumentError, ["`weight`", r"\(4,\)", r"\(1, 4\)"]),
    ],
)
def test_class_weights_of_the_wrong_kind(case: Case, weight: Any, error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        case.loss(normal(2, 4), torch.tensor([0, 1]), weight=weight)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("weight", [None, torch.ones(5)], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 5, 7, 3)])
def test_the_layout_of_torch_is_recognised(case: Case, weight: Tensor | None, shape: tuple[int, ...]) -> None:
    target = torch.zeros(shape[:1] + shape[2:], dtype=torch.long)
    with refused(ArgumentError, r"scores\.movedim\(1, -1\)"):
        case.loss(torch.zeros(shape), target, weight=weight)
    assert case.loss(torch.zeros(shape).movedim(1, -1), target, weight=weight).isfinite()


BAD_VALUES = [(math.nan, "nan"), (INF, r"\+inf")]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("value", "words"), BAD_VALUES)
@pytest.mark.parametrize(("num_classes", "where"), [(1, 0), (4, 0), (4, -1), (700, 5), (700, -1)])
def test_scores_that_are_no_numbers(case: Case, value: float, words: str, num_classes: int, where: int) -> None:
    scores = normal(3, num_classes)
    scores[1, where] = value
    hot = torch.zeros(3, num_classes, dtype=torch.bool)
    hot[:, 0] = True
    for target in (
        torch.zeros(3, dtype=torch.long),
        torch.tensor([0, -100, 0]),
        torch.zeros(3, 1, dtype=torch.long),
        hot,
    ):
        with refused(ArgumentError, "`scores`", words):
            case.loss(scores, target)
    with refused(ArgumentError, "`scores`", words):
        case.probs(scores)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("num_classes", [1, 4, 700])
def test_rows_in_which_every_class_is_masked(case: Case, num_classes: int) -> None:
    scores = normal(3, num_classes)
    scores[1] = -INF
    with refused(ArgumentError, "`scores`", "masked"):
        case.loss(scores, torch.tensor([0, -100, 0]))
    with pytest.raises(ArgumentError, match="masked"):
        case.loss(scores, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ArgumentError, match="masked"):
        case.probs(scores)


MASKED = {
    "id": torch.tensor([0, 1]),
    "ids": torch.tensor([[0, -100], [0, 1]]),
    "bool": torch.tensor([[True, False, False, False], [True, True, False, False]]),
    "float": torch.tensor([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0]]),
}


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
def test_a_masked_class_cannot_be_a_positive(case: Case, multilabel: str) -> None:
    scores = normal(2, 4)
    scores[1, 1] = -INF
    for kind, target in MASKED.items():
        if kind != "float" or case.member.takes.float_rows:
            for label_smoothing in [0.0, 0.1] if case.member.takes.smoothing else [0.0]:
                with refused(ArgumentError, "`target`", "-inf", "masked"):
                    case.loss(scores, target, multilabel=multilabel, label_smoothing=label_smoothing)


# The Fenchel-Young foundation --------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(foundation=True))
def test_gradient_of_the_conjugate_is_the_map(case: Case) -> None:
    scores = normal(3, 6).requires_grad_()
    conjugate = case.member.conjugate(scores, **case.setting)
    assert conjugate.shape == (3,)
    (grad,) = torch.autograd.grad(conjugate.sum(), scores)
    close(grad, case.probs(scores).detach())


@pytest.mark.parametrize("case", cases(foundation=True))
@settings(max_examples=25)
@given(row=score_rows(), seed=st.integers(0, 1000))
def test_fenchel_inequality(case: Case, row: tuple[Tensor, Tensor], seed: int) -> None:
    scores, _ = row
    live = scores > -INF
    conjugate = case.member.conjugate(scores, **case.setting)
    own = case.probs(scores)
    other = torch.where(live, normal(*scores.shape, seed=seed, scale=2), -INF).softmax(-1)
    finite = torch.where(live, scores, 0)
    slack = 1e-12 * (1 + finite.abs().amax(-1))
    # <p, s> <= Omega(p) + Omega*(s), with equality at the map
    assert (conjugate + case.member.omega(other, **case.setting) - (other * finite).sum(-1) >= -slack).all()
    gap = conjugate + case.member.omega(own, **case.setting) - (own * finite).sum(-1)
    assert (gap.abs() <= slack).all()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_omega_is_zero_at_vertices_and_negative_inside(case: Case) -> None:
    close(case.member.omega(torch.eye(4, dtype=torch.float64), **case.setting), torch.zeros(4, dtype=torch.float64))
    inside = case.member.omega(normal(5, 4).softmax(-1), **case.setting)
    assert (inside < 0).all()
    uniform = case.member.omega(torch.full((4,), 0.25, dtype=torch.float64), **case.setting)
    assert (uniform <= inside).all()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_the_loss_is_at_least_the_bregman_divergence(case: Case) -> None:
    scores = torch.cat([normal(50, 5, scale=2), normal(50, 5, scale=0.1)])
    target = normal(100, 5, seed=1, scale=2).softmax(-1)
    loss = case.loss(scores, target, multilabel="normalized", reduction="none")
    probs = case.probs(scores)
    bregman = case.member.bregman(target, probs, **case.setting)
    assert (loss >= bregman - 1e-12).all()
    whole = (probs > 0).all(-1)  # no class is cut off: then they are equal
    assert whole.any()
    close(loss[whole], bregman[whole], 1e-10)
    if not whole.all():
        assert (loss[~whole] > bregman[~whole] + 1e-9).any()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_bregman_divergence_is_a_divergence(case: Case) -> None:
    sparse = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.6, 0.4]], dtype=torch.float64)
    for p in sparse:
        divergences = case.member.bregman(p.expand(4, 3), sparse, **case.setting)
        same = (sparse == p).all(-1)
        assert (divergences[~same] > 1e-3).all()
        close(divergences[same], torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("member", [m for m in EXACT if m.foundation is None], ids=lambda m: m.name)
def test_a_member_without_omega_says_so(member: Any) -> None:
    for function in (member.conjugate, member.omega, lambda p: member.bregman(p, p)):
        with pytest.raises(ManymaxError, match=f"{member.name} is not a Fenchel-Young loss"):
            function(torch.full((3,), 1 / 3))


@pytest.mark.parametrize("case", cases(foundation=True))
@pytest.mark.parametrize("dtype", HALVES)
def test_conjugate_of_half_precision(case: Case, dtype: torch.dtype) -> None:
    scores = normal(3, 6, dtype=dtype)
    conjugate = case.member.conjugate(scores, **case.setting)
    assert conjugate.dtype == dtype
    expected = case.member.conjugate(scores.double(), **case.setting)
    torch.testing.assert_close(conjugate.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
