"""Pairs grouped by row: loss and gradients of the batch of pairs, with the scores of each row computed once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manymax
from tests.heads.plain import (
    CASES,
    TOLERANCE,
    HeadCase,
    Problem,
    agree,
    class_weights,
    make_problem,
    make_target,
    value_and_gradients,
)

C = 301
DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=30)


def some_pairs(num_pairs: int = 60, num_rows: int = 9) -> tuple[Tensor, Tensor]:
    """Rows and classes of pairs, unsorted, with repeated pairs and a row that is in no pair."""
    random = torch.Generator().manual_seed(2)
    rows = torch.randint(num_rows, (num_pairs,), generator=random)
    rows[rows == 4] = 3
    classes = torch.randint(C, (num_pairs,), generator=random)
    rows, classes = torch.cat([rows, rows[:20], rows[:5]]), torch.cat([classes, classes[:20], classes[:5]])
    permutation = torch.randperm(len(rows), generator=random)
    return rows[permutation], classes[permutation]


@given(pairs=PAIRS)
def test_every_pair_is_in_its_group_as_often_as_it_occurs(pairs: list[tuple[int, int]]) -> None:
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.long)
    classes = torch.tensor([c for _, c in pairs], dtype=torch.long)
    groups, target = manymax.group_pairs(rows, classes)
    assert groups.tolist() == sorted(set(rows.tolist()))
    assert target.ids is not None
    found: Counter[tuple[int, int]] = Counter()
    for row, ids, weights in zip(groups.tolist(), target.ids.tolist(), target.weights.tolist(), strict=True):
        named = [c for c, w in zip(ids, weights, strict=True) if w]
        assert len(named) == len(set(named))  # one entry for each class, with its multiplicity
        found.update({(row, c): int(w) for c, w in zip(ids, weights, strict=True) if w})
    assert found == Counter(pairs)
    assert target.count.tolist() == [rows.tolist().count(row) for row in groups.tolist()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"weight": class_weights(C)},
    {"label_smoothing": 0.25},
    {"label_smoothing": 0.25, "weight": class_weights(C), "reduction": "sum"},
]
# A row is the sum of its pairs, unless a loss takes all positives of a row together.
EACH = [case for case in CASES if not case.values[0].member.joint]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EACH)
def test_a_grouped_batch_is_the_batch_of_pairs(case: HeadCase, dtype: torch.dtype) -> None:
    problem = make_problem(9, num_classes=C)
    rows, classes = some_pairs()
    groups, target = manymax.group_pairs(rows, classes)
    assert len(groups) == 8

    def paired(problem: Problem, target: Tensor, **options: Any) -> Tensor:
        return case.plain(Problem(problem.input[rows], problem.linear_weight, problem.linear_bias), target, **options)

    def grouped(problem: Problem, target: Tensor, **options: Any) -> Tensor:
        queries = problem.input[groups]
        return case.head(Problem(queries, problem.linear_weight, problem.linear_bias), target, **options)

    for options in OPTIONS:
        if not case.member.takes.smoothing and options.get("label_smoothing"):
            continue
        expected = value_and_gradients(paired, problem.leaves(), classes, **options)
        actual = value_and_gradients(grouped, problem.leaves(dtype), target, options={"block_rows": 3}, **options)
        agree(actual, expected, TOLERANCE[dtype], options)


@pytest.mark.parametrize("case", EACH)
def test_the_losses_of_groups_are_sums_over_their_pairs(case: HeadCase) -> None:
    problem = make_problem(9, num_classes=C)
    rows, classes = some_pairs()
    groups, target = manymax.group_pairs(rows, classes)
    pairs = case.plain(
        Problem(problem.input[rows], problem.linear_weight, problem.linear_bias), classes, reduction="none"
    )
    expected = torch.zeros(9, dtype=torch.float64).index_add_(0, rows, pairs)[groups]
    queries = Problem(problem.input[groups], problem.linear_weight, problem.linear_bias)
    agree([case.head(queries, target, reduction="none")], [expected], 1e-10)
    each = torch.bincount(rows)[groups]
    options = {"reduction": "none", "multilabel": "normalized"}
    if case.member.foundation is None:  # otherwise Omega(t / |t|) is added, which a batch of pairs does not have
        agree([case.head(queries, target, **options)], [expected / each], 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_a_group_is_a_row_with_several_positives(case: HeadCase) -> None:
    """Without repeated pairs a grouped target is the same as padded ids, in both multilabel modes."""
    problem, padded = make_problem(9, num_classes=C), make_target("padded ids", 9, num_classes=C)
    rows, column = (padded[:, :-1] != -100).nonzero(as_tuple=True)
    groups, target = manymax.group_pairs(rows, padded[rows, column])
    assert torch.equal(groups, torch.arange(9))
    for multilabel in ("sum", "normalized"):
        for reduction in ("mean", "none"):
            options = {"multilabel": multilabel, "reduction": reduction}
            agree([case.head(problem, target, **options)], [case.plain(problem, padded, **options)], 1e-10, options)


@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
def test_a_grouped_batch_of_a_sampled_head(loss: str) -> None:
    """With negatives that all rows share, the draws do not depend on the order of the pairs."""
    function = getattr(manymax, f"linear_{loss}_loss")
    problem = make_problem(9, num_classes=C)
    rows, classes = some_pairs()
    groups, target = manymax.group_pairs(rows, classes)
    sampler = manymax.samplers.LogUniformSampler(C)
    results = []
    for queries, positives in ((rows, classes), (groups, target)):
        leaves = problem.leaves()
        value = function(
            leaves.input[queries],
            leaves.linear_weight,
            positives,
            sampler,
            7,
            shared=True,
            generator=torch.Generator().manual_seed(0),
            linear_bias=leaves.linear_bias,
            weight=class_weights(C),
        )
        results.append([value.detach(), *torch.autograd.grad(value, leaves.parts())])
    agree(results[1], results[0], 1e-10)


def test_no_pairs() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    groups, target = manymax.group_pairs(empty, empty)
    problem = make_problem(0, num_classes=C)
    assert groups.shape == (0,)
    assert manymax.linear_softmax_loss(problem.input, problem.linear_weight, target) == 0


def test_errors() -> None:
    rows, classes = some_pairs()
    with pytest.raises(manymax.ArgumentError, match=r"`rows` and `target` must be 1-D and equally long; got \(5,\)"):
        manymax.group_pairs(rows[:5], classes)
    for wrong in (classes / 2, classes > 3, classes.tolist()):
        with pytest.raises(manymax.ArgumentTypeError, match=r"`target` must be a tensor( of integer ids)?"):
            manymax.group_pairs(rows, wrong)
    with pytest.raises(manymax.ArgumentError, match=r"1-D"):
        manymax.group_pairs(rows[:4].view(2, 2), classes[:4].view(2, 2))
    problem = make_problem(9, num_classes=C)
    groups, target = manymax.group_pairs(rows, classes)
    with pytest.raises(manymax.ArgumentError, match="grouped for another number of rows"):
        manymax.linear_softmax_loss(problem.input, problem.linear_weight, target)
    with pytest.raises(
        manymax.ArgumentError, match=rf"`target` ids must be in \[0, 40\); got \d+ to {int(classes.max())}"
    ):
        manymax.linear_softmax_loss(problem.input[groups], problem.linear_weight[:40], target)
    classes[7] = -100
    with pytest.raises(manymax.ArgumentError, match=r"-100"):
        manymax.linear_softmax_loss(problem.input[groups], problem.linear_weight, manymax.group_pairs(rows, classes)[1])
    with pytest.raises(manymax.ArgumentError, match="label_smoothing"):
        manymax.linear_rankmax_loss(problem.input[groups], problem.linear_weight, target, label_smoothing=0.1)
