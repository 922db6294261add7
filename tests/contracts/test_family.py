"""What every exact member does, asked of every entry of the family and of none by its name: names, map, edge cases."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import FAMILY
from tests.exact import EXACT, INF, WEIGHT, Case, cases, close, labels, normal, score_rows

OPTIONS = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


# The table ---------------------------------------------------------------------------------------


OURS = [member for member in EXACT if member.loss.__module__.startswith("manymax.")]


@pytest.mark.parametrize("member", OURS, ids=lambda m: m.name)
def test_a_member_has_its_three_public_names(member: Any) -> None:
    words = member.loss_name.split("_")
    assert member.loss is getattr(manymax, member.loss_name)
    assert member.module is getattr(manymax, "".join(word.capitalize() for word in words))
    assert {member.loss.__name__, member.module.__name__} <= set(manymax.__all__)
    if member.map is not None:
        assert member.map is getattr(manymax, member.name)
        assert member.name in manymax.__all__


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
    for function in filter(None, (member.map, member.loss)):
        for part in ("Args:", "Returns:", ">>> "):
            assert part in inspect.getdoc(function)


def test_members_are_found_by_any_of_their_names_and_missed_with_a_hint() -> None:
    for member in FAMILY.values():
        assert all(FAMILY[name] is member for name in (member.name, *member.aliases))
    with pytest.raises(KeyError, match="softmax"):
        FAMILY["sofmax"]


# The map -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(mapped=True))
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
def test_the_order_of_the_classes_does_not_matter(case: Case, row: tuple[Tensor, Tensor], seed: int) -> None:
    scores, target = row
    permutation = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(seed))
    moved = permutation.argsort()[target]
    close(case.probs(scores[..., permutation], moved), case.probs(scores, target)[..., permutation])
    close(case.loss(scores[..., permutation], moved), case.loss(scores, target))


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
def test_a_masked_class_changes_nothing(case: Case, row: tuple[Tensor, Tensor]) -> None:
    scores, target = row
    wider = torch.cat([torch.full_like(scores[..., :1], -INF), scores, torch.full_like(scores[..., :2], -INF)], -1)
    close(case.probs(wider, target + 1)[..., 1 : scores.shape[-1] + 1], case.probs(scores, target))
    close(case.loss(wider, target + 1), case.loss(scores, target))


@pytest.mark.parametrize("case", cases(mapped=True))
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


@pytest.mark.parametrize("case", cases(mapped=True))
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
    scores[0, 0] = -INF  # padding is read as class 0 with weight 0: its score must not matter
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
