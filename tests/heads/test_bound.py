"""The bound of a list of K: exact or given, in losses and heads, over all classes of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from manymax import FAMILY, ArgumentError, ArgumentTypeError
from manymax.engine.list_bound import block_bound
from manymax.engine.member import Member
from manymax.engine.ranks import ALONE
from manymax.heads import head_class, head_function
from manymax.ops.topk import kth_largest

BOUNDED = [member for member in FAMILY.values() if member.bounded]
members = pytest.mark.parametrize("member", BOUNDED, ids=lambda member: member.name)
INF = float("inf")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_whoever_has_a_bound_holds_it_and_has_the_length_of_a_list() -> None:
    assert BOUNDED
    for member in BOUNDED:
        assert member.held is not None
        assert member.setting("k").least == 1


@pytest.mark.parametrize("classes", [1, 5, 16 * 40])  # too few for groups, and enough
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_kth_largest_is_that_of_a_sort(classes: int, k: int) -> None:
    """With masked classes, ties, and rows that have fewer than K classes, whose bound is their lowest score."""
    scores = (2 * normal(6, classes)).round()
    scores[:4, ::2] = -INF
    scores[0, 1:] = -INF
    scores[:4, -1] = torch.arange(4.0).double()
    padded = torch.nn.functional.pad(scores, (0, -classes % 16), value=-INF)
    live = [row[row > -INF].sort(descending=True).values for row in scores]
    expected = torch.stack([row[min(k, len(row)) - 1] for row in live]).unsqueeze(1)
    assert torch.equal(kth_largest(scores, k), expected)
    assert torch.equal(block_bound(padded, k, ALONE), expected)


@members
def test_a_given_bound_of_the_kth_largest_changes_nothing(member: Member) -> None:
    """In the loss, its module, the head and its module; also where rows are left out and the target is bool rows."""
    settings, input, vectors = member.examples[0], normal(5, 4), normal(40, 4, seed=1)
    scores, target = input @ vectors.T, torch.zeros(5, 40, dtype=torch.bool)
    target[torch.arange(5), torch.arange(5) * 7] = True
    target[1] = False
    bound = kth_largest(scores, settings["k"]).squeeze(1)
    expected = member.loss(scores, target, **settings)
    assert member.module is not None
    module, head = member.module(**settings), head_class(member)(None, 40, **settings)
    for own in (
        member.loss(scores, target, bound=bound, **settings),
        module(scores, target, bound),
        head_function(member)(input, vectors, target, bound=bound, **settings),
        head(input, target, vectors, bound=bound),
        head(input.view(5, 1, 4), target.view(5, 1, 40), vectors, bound=bound.view(5, 1)),
    ):
        torch.testing.assert_close(own, expected)


@members
def test_a_given_bound_is_used(member: Member) -> None:
    """With it the gradient holds nothing back: it is the derivative of the loss."""
    settings, target, bound = member.examples[0], torch.tensor([0, 3, 4, 1]), normal(4, seed=2)
    scores = normal(4, 6).requires_grad_()

    def loss(scores: Tensor) -> Tensor:
        return member.loss(scores, target, bound=bound, reduction="none", **settings)

    assert gradcheck(loss, scores)
    assert (loss(scores) - member.loss(scores, target, reduction="none", **settings)).abs().min() > 1e-4
    each = torch.vmap(lambda s, y, b: member.loss(s, y, bound=b, **settings))(scores, target, bound)
    torch.testing.assert_close(each, loss(scores))


@members
def test_a_class_that_is_left_out_of_the_sums_stays_in_the_list(member: Member) -> None:
    """The K-th largest of all classes, with the other positives of a user left out of the sum of each."""
    settings = {**member.examples[0], "k": 3}
    input, vectors = torch.ones(1, 1), torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
    head, left_out = head_function(member), torch.tensor([[0, 1]])
    loss = head(input, vectors, torch.tensor([3]), exclude=left_out, **settings)
    given = head(input, vectors, torch.tensor([3]), exclude=left_out, bound=torch.tensor([2.0]), **settings)
    torch.testing.assert_close(loss, given)
    without = head(input, vectors[2:], torch.tensor([1]), **settings)  # its third is 0
    assert (loss - without).abs() > 1e-2


BAD: list[tuple[Any, type[Exception], str]] = [
    (torch.ones(3), ArgumentError, r"`bound` must have a number for each row, \(4,\); got shape \(3,\)"),
    (torch.ones(4, 1), ArgumentError, "a number for each row"),
    (torch.ones(4, dtype=torch.long), ArgumentTypeError, r"`bound` must be a float tensor; got torch.int64"),
    ([1.0] * 4, ArgumentTypeError, "`bound` must be a tensor or None; got list"),
    (torch.tensor([0.0, 1.0, 2.0, INF]), ArgumentError, "`bound` must hold finite numbers"),
    (torch.ones(4, requires_grad=True), ArgumentError, r"`bound` requires a gradient, .* `bound.detach\(\)`"),
]


@pytest.mark.parametrize(("bound", "error", "words"), BAD, ids=lambda value: str(value)[:30])
@members
def test_bad_bounds_are_refused(member: Member, bound: Any, error: type[Exception], words: str) -> None:
    input, vectors, target = normal(4, 2), normal(9, 2), torch.arange(4)
    with pytest.raises(error, match=words):
        head_function(member)(input, vectors, target, bound=bound)
    with pytest.raises(error, match=words):
        member.loss(input @ vectors.T, target, bound=bound)


@members
def test_scores_that_are_no_numbers_are_refused_with_a_bound_too(member: Member) -> None:
    for bad in (INF, float("nan")):
        vectors = torch.tensor([[1.0], [bad], [0.0]])
        for bound in (None, torch.zeros(1)):
            with pytest.raises(ArgumentError, match="must not hold"):
                head_function(member)(torch.ones(1, 1), vectors, torch.tensor([0]), bound=bound, k=1)
