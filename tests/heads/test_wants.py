"""Nothing is computed that nobody wants: no product for frozen tensors or under no_grad, no row that does not count."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import manymax
from tests.heads.plain import (
    CASES,
    HeadCase,
    Problem,
    agree,
    class_weights,
    compare,
    make_problem,
    make_target,
    upstream,
)
from tests.heads.products import Products, backward, leaf, products_of

ROWS, C, DIM = 24, 203, 6
BLOCKED = [case for case in CASES if case.values[0].member.kind == "exact"]
OPTIONS = {"block_rows": ROWS}  # one block


def step(case: HeadCase, learned: tuple[bool, bool, bool], regime: str = "wide", **options: Any) -> Products:
    """What a forward and its backward compute, where queries, class vectors and bias are learned or frozen."""
    problem = make_problem(ROWS, num_classes=C, regime=regime)
    leaves = Problem(*(leaf(part, wanted) for part, wanted in zip(problem.parts(), learned, strict=True)))
    target = problem.scores().argmax(1)
    return products_of(lambda: backward(case.head(leaves, target, options=OPTIONS, **options)), C)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", BLOCKED)
def test_a_product_for_each_gradient_that_is_wanted(case: HeadCase, reduction: str) -> None:
    """Of wide supports: one for the scores, one for each of queries and class vectors. A backward of rows scores twice.

    Nothing of the shape of a frozen tensor is made either.
    """
    for queries, vectors, bias in itertools.product((True, False), repeat=3):
        counted = step(case, (queries, vectors, bias), reduction=reduction)
        again = reduction == "none" and (queries or vectors or bias)
        assert counted.count == 1 + again + queries + vectors, (queries, vectors, bias)
        assert vectors or (C, DIM) not in counted.shapes
        assert queries or vectors or (ROWS, DIM) not in counted.shapes  # that of class vectors scales the queries
        assert bias or case.member.joint or (C,) not in counted.shapes  # a joint loss has discounts of all ranks


@pytest.mark.parametrize("case", [case for case in BLOCKED if case.values[0].member.sparse])
def test_entries_are_summed_only_for_what_is_wanted(case: HeadCase) -> None:
    """Of small supports: one product, and no table of the gradient of what is frozen."""
    if case.setting.get("alpha", 2) < 1.5:
        pytest.skip("near alpha = 1 supports are wide")
    for queries, vectors in itertools.product((True, False), repeat=2):
        counted = step(case, (queries, vectors, False), "thin")
        assert counted.count == 1
        assert ((C, DIM) in counted.shapes) == vectors
        assert ((ROWS, DIM) in counted.shapes) == queries


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", BLOCKED)
def test_one_product_where_no_gradient_is_wanted(case: HeadCase, reduction: str, mode: Any) -> None:
    """Although every argument requires a gradient; and the loss is the same, rounding aside."""
    problem = make_problem(ROWS, num_classes=C, regime="wide").leaves()
    target = make_target("ids", ROWS, num_classes=C)
    with mode(), Products(C) as counted:
        value = case.head(problem, target, reduction=reduction, options=OPTIONS)
    assert counted.count == 1
    assert not counted.shapes & ({(C, DIM)} if case.member.joint else {(C, DIM), (C,)})
    agree([value], [case.plain(problem, target, reduction=reduction).detach()], 1e-12)


def test_a_learned_setting_alone_needs_one_product() -> None:
    problem = make_problem(ROWS, num_classes=C, regime="wide")
    target, alpha = make_target("ids", ROWS, num_classes=C), torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    value = manymax.linear_entmax_loss
    counted = products_of(
        lambda: value(problem.input, problem.linear_weight, target, alpha=alpha, options=OPTIONS).backward(), C
    )
    assert counted.count == 1
    assert alpha.grad is not None
    assert alpha.grad != 0


# Rows --------------------------------------------------------------------------------------------


def without_weight(kind: str, rows: Tensor) -> Tensor:
    """A target of this kind for `ROWS` rows, of which `rows` have no target weight."""
    target = make_target("ids", ROWS, num_classes=C).clamp(min=0)
    target = torch.where(target == 1, 2, target)
    if kind == "class weight 0":
        target[rows] = 1
        return target
    target[rows] = -100
    if kind == "padded ids":
        return torch.stack([target, torch.full_like(target, -100)], 1)
    if kind == "bool rows":
        return (target.unsqueeze(1) == torch.arange(C)).contiguous()
    return target


@pytest.mark.parametrize("kind", ["ids", "padded ids", "bool rows", "class weight 0"])
@pytest.mark.parametrize("case", BLOCKED)
def test_rows_that_do_not_count_are_not_computed(case: HeadCase, kind: str) -> None:
    problem = make_problem(ROWS, num_classes=C, regime="wide")
    empty = torch.arange(ROWS) % 4 != 2
    target, weight = without_weight(kind, empty), class_weights(C)
    for reduction, multilabel in itertools.product(("mean", "none"), ("sum", "normalized")):
        options: dict[str, Any] = {"weight": weight, "reduction": reduction, "multilabel": multilabel}
        if kind == "bool rows":
            options["weight"] = None
        leaves = problem.leaves()
        with Products(C) as counted:
            value = case.head(leaves, target, options=OPTIONS, **options)
            grads = torch.autograd.grad(value, leaves.parts(), upstream(value))
        factors = upstream(value)[~empty] != 0 if reduction == "none" else ~empty[~empty]
        scored = int((~empty).sum())
        expected = 3 * scored if reduction == "mean" else scored + 3 * int(factors.sum())
        assert counted.rows == expected, options
        plain = problem.leaves()
        reference = case.plain(plain, target, **options)
        wanted = torch.autograd.grad(reference, plain.parts(), upstream(reference))
        agree([value.detach(), *grads], [reference.detach(), *wanted], 1e-10, options)


def test_a_table_of_targets_is_not_copied() -> None:
    """Of rows over all classes a block takes its own: neither rows that count nor rows with a factor are copied."""
    problem = make_problem(ROWS, num_classes=C, regime="wide").leaves()
    target = without_weight("bool rows", torch.arange(ROWS) % 4 == 2)
    factors = (torch.arange(ROWS) % 3 != 0).double()
    kept, wanted = 18, 12
    with Products(C) as counted:
        value = manymax.linear_softmax_loss(
            problem.input, problem.linear_weight, target, reduction="none", options={"block_rows": 5}
        )
        value.backward(factors)
    assert counted.rows == kept + 3 * wanted
    assert not counted.shapes & {(kept, C), (wanted, C)}


@pytest.mark.parametrize("case", BLOCKED)
def test_smoothing_gives_a_row_of_class_weight_0_a_loss(case: HeadCase) -> None:
    """Only rows without a positive are left out then."""
    if not case.member.takes.smoothing:
        pytest.skip("the loss takes no smoothing")
    problem = make_problem(ROWS, num_classes=C, regime="wide")
    target = without_weight("class weight 0", torch.arange(ROWS) < 6)
    target[6:10] = -100
    compare(case, problem, target, weight=class_weights(C), label_smoothing=0.25)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_queries_of_ignored_rows_may_hold_anything(case: HeadCase, reduction: str) -> None:
    """nan and inf in ignored rows change nothing, as in torch's cross_entropy; theirs are gradients of 0."""
    problem = make_problem(ROWS, num_classes=C, regime="near")
    empty = torch.arange(ROWS) % 3 == 1
    target = without_weight("ids", empty)
    results = []
    for content in (None, torch.nan, torch.inf):
        leaves = problem.leaves()
        with torch.no_grad():
            leaves.input[empty] = problem.input[empty] if content is None else content
        value = case.head(leaves, target, reduction=reduction)
        results.append([value.detach(), *torch.autograd.grad(value, leaves.parts(), torch.ones_like(value))])
    for found in results[1:]:
        assert all(torch.equal(ours, expected) for ours, expected in zip(found, results[0], strict=True))
    scores = problem.scores()
    scores[empty] = torch.nan
    if case.member.name == "softmax":
        agree([results[0][0]], [cross_entropy(scores, target, reduction=reduction)], 1e-12)


@pytest.mark.parametrize("case", BLOCKED)
def test_nothing_is_copied_where_every_row_counts(case: HeadCase) -> None:
    problem = make_problem(ROWS, num_classes=C, regime="wide").leaves()
    for reduction in ("mean", "none"):
        target = problem.scores().argmax(1)
        counted = products_of(lambda: backward(case.head(problem, target, reduction=reduction)), C)  # noqa: B023
        assert counted.queries == {problem.input.untyped_storage().data_ptr()}
