"""Class weights of any sign, asked of every loss and head: the loss is sum_i w_i t_i l(i, s), as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import manymax
from manymax import FAMILY, ArgumentError
from manymax.engine.member import Member
from manymax.heads import head_class, head_function
from manymax.members import REFERENCE_LOSSES
from tests.exact import INF, MANY_HOT, POSITIVES, Case, cases, close, labels, normal
from tests.heads.plain import CASES, HeadCase, compare, make_problem, make_target

# The weights of the classes 0 and 3, two positives of one row, cancel; others are of both signs.
MIXED = torch.tensor([0.5, -2.0, -1.0, -0.5, 3.0], dtype=torch.float64)
DRAWN = [member for member in [*FAMILY.values(), *REFERENCE_LOSSES.values()] if member.kind == "sampled"]
HEADS = [member for member in [*FAMILY.values(), *REFERENCE_LOSSES.values()] if member.kind != "tree"]
FORMS = [POSITIVES, MANY_HOT, MANY_HOT.double() / MANY_HOT.sum(1, keepdim=True).clamp(min=1)]


def named(member: Member) -> str:
    return member.name


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", cases(each=True))
def test_losses_of_negative_weights_are_subtracted(case: Case, label_smoothing: float) -> None:
    takes = case.member.takes
    for target in FORMS:
        if (takes.smoothing or not label_smoothing) and (takes.float_rows or not target.is_floating_point()):
            check_negative_weights(case, target, label_smoothing)


def check_negative_weights(case: Case, target: Tensor, label_smoothing: float) -> None:
    scores = normal(4, 5)
    t = (target if target.ndim == 2 and target.dtype != torch.long else MANY_HOT).double()
    spread = t.sum(-1, keepdim=True) / 5
    rows = (((1 - label_smoothing) * t + label_smoothing * spread) * MIXED * case.singles(scores)).sum(-1)
    divisor = (t.sum(-1) > 0).double() if target.is_floating_point() else (t * MIXED).sum(-1)
    for reduction, expected in (("none", rows), ("sum", rows.sum()), ("mean", rows.sum() / divisor.sum())):
        options: dict[str, Any] = {"weight": MIXED, "reduction": reduction, "label_smoothing": label_smoothing}
        close(case.loss(scores, target, **options), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_softmax_with_negative_weights_is_that_of_torch(label_smoothing: float) -> None:
    for target in (torch.tensor([1, 1, 3, 0]), torch.tensor([1, -100, -100, 1]), FORMS[2][:3]):
        scores = normal(len(target), 5)
        for reduction in ("none", "sum", "mean"):
            options: dict[str, Any] = {"weight": MIXED, "reduction": reduction, "label_smoothing": label_smoothing}
            expected = cross_entropy(scores, target, **options)
            close(manymax.softmax_loss(scores, target, **options), expected)
            close(manymax.linear_softmax_loss(scores, torch.eye(5).double(), target, **options), expected)


@pytest.mark.parametrize("kind", ["ids", "padded ids", "bool rows", "float rows"])
@pytest.mark.parametrize("case", CASES)
def test_heads_take_weights_of_both_signs(case: HeadCase, kind: str) -> None:
    problem, target = make_problem(12, num_classes=40, masked=True), make_target(kind, 12, num_classes=40)
    weight = (torch.arange(40) % 5 - 2.25).double()
    if kind == "padded ids":  # a row whose weights cancel, and whose gradient does not
        target[0], weight[2], weight[7] = torch.tensor([2, 7, -100, -100, -100]), 1.5, -1.5
    for label_smoothing in (0.0, 0.25):
        for reduction in ("none", "sum", "mean"):
            if case.takes(kind, label_smoothing):
                options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
                compare(case, problem, target, **options)


@pytest.mark.parametrize("keyword", ["exclude", "decoupled"])
@pytest.mark.parametrize("member", [m for m in HEADS if m.log_partition and m.kind == "exact"], ids=named)
def test_sums_of_their_own_and_weights_of_both_signs(member: Member, keyword: str) -> None:
    """What weights of both signs add up to is what each of them alone gives, with the others so small as to be 0."""
    given = {"exclude": {"exclude": torch.tensor([[2, 4, 11]])}, "decoupled": {"decoupled": True}}[keyword]
    target, weight = torch.tensor([[2, 4, 6, 9]]), (torch.arange(12) % 4 - 1.75).double()

    def results(weight: Tensor) -> list[Tensor]:
        leaves = make_problem(1, num_classes=12).leaves()
        bias = {"linear_bias": leaves.linear_bias, "weight": weight, "reduction": "sum", **given}
        value = head_function(member)(leaves.input, leaves.linear_weight, target, **member.examples[0], **bias)
        return [value.detach(), *torch.autograd.grad(value, leaves.parts())]

    each = [results(torch.where(torch.arange(12) == y, 1.0, 1e-30).double()) for y in target[0].tolist()]
    for place, together in enumerate(results(weight)):
        apart = sum(weight[y] * one[place] for y, one in zip(target[0].tolist(), each, strict=True))
        close(together, torch.as_tensor(apart), 1e-10)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("member", DRAWN, ids=named)
def test_heads_that_draw_take_weights_of_both_signs(member: Member, shared: bool) -> None:
    problem, target = make_problem(12, num_classes=40, regime="wide"), labels(12, num_classes=40)
    weight = (torch.arange(40) % 5 - 2.25).double()
    for reduction in ("none", "sum", "mean"):
        results = []
        for given in ({"weight": weight, "reduction": reduction}, {"reduction": "none"}):
            leaves, sampler = problem.leaves(), manymax.samplers.UniformSampler(40)
            given |= {"linear_bias": leaves.linear_bias, "generator": torch.Generator().manual_seed(3)}
            value = head_function(member)(
                leaves.input, leaves.linear_weight, target, sampler, 9, shared=shared, **given
            )
            if "weight" not in given:
                value = weight[target] * value
                value = value if reduction == "none" else value.sum()
                value = value / weight[target].sum() if reduction == "mean" else value
            results.append([value.detach(), *torch.autograd.grad(value.sum(), leaves.parts())])
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs, 1e-10)


def test_trees_take_weights_of_both_signs() -> None:
    torch.manual_seed(0)
    head = manymax.LinearHierarchicalSoftmaxLoss(6, 5, dtype=torch.float64)
    input = normal(4, 6)
    singles = -head.scores(input)
    for target, label_smoothing in ((POSITIVES, 0.0), (MANY_HOT, 0.3)):
        head.weight, head.label_smoothing = MIXED, label_smoothing
        t = MANY_HOT.double()
        t = (1 - label_smoothing) * t + label_smoothing * t.sum(-1, keepdim=True) / 5
        close(head(input, target), (t * MIXED * singles).sum() / (MANY_HOT * MIXED).sum(), 1e-10)


@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
def test_weights_that_are_no_numbers_are_refused_everywhere(bad: float) -> None:
    weight, scores, target = torch.tensor([1.0, bad, 1.0, 1.0, 1.0]), torch.zeros(2, 5), torch.tensor([0, 1])
    for case in cases(first=True):
        member, setting = case.values[0].member, case.values[0].setting
        for call in (lambda m=member, s=setting: m.loss(scores, target, weight=weight, **s), member.module):
            with pytest.raises(ArgumentError, match="`weight` must hold finite numbers"):
                call() if call is not member.module else call(weight=weight, **setting)
    for member in [*HEADS, FAMILY["hierarchical_softmax"]]:
        with pytest.raises(ArgumentError, match="`weight` must hold finite numbers"):
            head_class(member)(6, 5, weight=weight)
        drawn = (manymax.samplers.UniformSampler(5),) if member.kind == "sampled" else ()
        vectors = torch.zeros(4 if member.kind == "tree" else 5, 6)
        with pytest.raises(ArgumentError, match="`weight` must hold finite numbers"):
            head_function(member)(torch.zeros(2, 6), vectors, target, *drawn, weight=weight)


@pytest.mark.parametrize("case", cases(first=True))
def test_what_has_no_meaning_with_negative_weights_is_refused(case: Case) -> None:
    scores, target = normal(4, 5), POSITIVES
    with pytest.raises(ArgumentError, match='`weight` must not be negative with `multilabel="normalized"`'):
        case.loss(scores, target, weight=MIXED, multilabel="normalized")
    head = head_function(case.member)
    with pytest.raises(ArgumentError, match='`weight` must not be negative with `multilabel="normalized"`'):
        head(scores, torch.eye(5).double(), target, weight=MIXED, multilabel="normalized", **case.setting)
    with pytest.raises(ArgumentError, match="`weight` must not be negative with `stats`"):
        head(scores, torch.eye(5).double(), target, weight=MIXED, stats=("argmax",), **case.setting)


def test_a_mean_whose_weights_cancel_is_refused() -> None:
    """torch divides by the sum of the weights, which is 0 here, and returns nan or inf."""
    scores, weight = normal(2, 5), torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for call in (
        lambda **given: manymax.softmax_loss(scores, torch.tensor([0, 1]), **given),
        lambda **given: manymax.linear_softmax_loss(scores, torch.eye(5).double(), torch.tensor([0, 1]), **given),
        lambda **given: manymax.linear_rg_loss(scores, torch.eye(5).double(), torch.tensor([0, 1]), **given),
    ):
        with pytest.raises(ArgumentError, match="`weight` sums to 0 over the positives of this batch"):
            call(weight=weight)
        assert call(weight=weight, reduction="sum").isfinite()
        assert call(weight=torch.zeros_like(weight)) == 0  # no positive counts: the mean is 0
