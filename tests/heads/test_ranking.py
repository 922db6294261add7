"""Scores and top-k in blocks against the table of scores and a full sort."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from tests.heads.plain import Problem, make_problem

# (C, k) for all classes, for a plain topk (too few groups of 16 for k), and for the way through groups of 16.
SIZES = [
    (1, 1),
    (5, 5),
    (16, 3),
    (40, 40),
    (301, 1),
    (301, 4),
    (301, 5),
    (1003, 10),
    (1003, 15),
    (1003, 16),
    (1003, 1003),
]


def some_ids(*batch: int, num_classes: int, most: int, seed: int = 4) -> Tensor:
    """Ids to exclude: unsorted, some of them repeated, padded with -100."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(num_classes, (*batch, most), generator=random)
    return torch.where(torch.rand(*batch, most, generator=random) < 0.3, -100, ids)


def without_excluded(scores: Tensor, exclude: Tensor | None) -> Tensor:
    """The scores with -inf at the excluded ids, one row at a time."""
    rows = scores.reshape(-1, scores.shape[-1]).clone()
    if exclude is not None:
        for row, ids in zip(rows, exclude.reshape(len(rows), exclude.shape[-1]), strict=True):
            row[ids[ids >= 0].long()] = -torch.inf
    return rows


def check(problem: Problem, k: int, exclude: Tensor | None = None, **options: Any) -> None:
    """Fail unless values are those of a full sort, and ids have these scores, are not excluded and not repeated."""
    values, ids = manymax.linear_topk(
        problem.input, problem.linear_weight, k, linear_bias=problem.linear_bias, exclude=exclude, **options
    )
    assert values.shape == ids.shape == (*problem.input.shape[:-1], k)
    rows = without_excluded(problem.scores(), exclude)
    assert torch.equal(values.reshape(-1, k), rows.sort(descending=True).values[:, :k])
    for row, best, found in zip(rows, values.reshape(-1, k), ids.reshape(-1, k), strict=True):
        live = best > -torch.inf
        assert (found[~live] == -100).all()
        assert torch.equal(row[found[live]], best[live])
        assert len(found[live].unique()) == live.sum()


@pytest.mark.parametrize(("num_classes", "k"), SIZES)
def test_topk_is_that_of_a_full_sort(num_classes: int, k: int) -> None:
    for regime, bias, dtype in (("thin", True, torch.float64), ("mixed", False, torch.float32)):
        problem = make_problem(20, num_classes=num_classes, regime=regime, bias=bias)
        problem = Problem(*(part.to(dtype) for part in problem.parts()))
        check(problem, k)
        check(problem, k, some_ids(20, num_classes=num_classes, most=7))
        check(problem, k, some_ids(20, num_classes=num_classes, most=7), options={"block_rows": 3})


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(0, 5), st.integers(1, 4), st.data())
def test_topk_with_ties(num_classes: int, rows: int, levels: int, data: st.DataObject) -> None:
    """Scores with few different values: many classes tie for the best, and any of them may be returned."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    weight = torch.randint(levels, (num_classes, 1), generator=random).double()
    problem = Problem(torch.randint(-1, 2, (rows, 1), generator=random).double(), weight)
    exclude = some_ids(rows, num_classes=num_classes, most=data.draw(st.integers(0, 5)))
    check(problem, data.draw(st.integers(1, num_classes)), exclude)


@pytest.mark.parametrize("num_classes", [5, 40, 301, 1003])
def test_where_fewer_than_k_classes_are_left(num_classes: int) -> None:
    """Excluded and masked classes are never returned, nor is the padding to a multiple of 16."""
    problem = make_problem(6, num_classes=num_classes, regime="thin")
    everything = torch.arange(num_classes).expand(6, num_classes)
    for left in (0, 1, 3):
        check(problem, min(num_classes, 10), everything[:, left:])
    assert problem.linear_bias is not None
    masked = torch.where(torch.arange(num_classes) < 3, problem.linear_bias, -torch.inf)
    check(Problem(problem.input, problem.linear_weight, masked), min(num_classes, 10))
    check(Problem(problem.input, problem.linear_weight, masked), 4, torch.full((6, 2), 1))


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 0), (2, 3)], ids=str)
def test_batch_shapes(batch: tuple[int, ...]) -> None:
    problem = make_problem(*batch, num_classes=301)
    for most in (0, 1, 5):
        check(problem, 4, some_ids(*batch, num_classes=301, most=most))
    scores = manymax.linear_scores(problem.input, problem.linear_weight, problem.linear_bias)
    assert torch.equal(scores, problem.scores())


@pytest.mark.parametrize("block_rows", [1, 7, 1024])
def test_scores_are_the_table(block_rows: int) -> None:
    for bias in (False, True):
        problem = make_problem(3, 5, num_classes=301, bias=bias).leaves()
        scores = manymax.linear_scores(problem.input, problem.linear_weight, problem.linear_bias, block_rows)
        assert torch.equal(scores, problem.scores())
        assert not scores.requires_grad


def test_ids_of_any_integer_type_are_excluded() -> None:
    problem = make_problem(6, num_classes=301, regime="thin")
    for dtype in (torch.int16, torch.int32, torch.int64):
        check(problem, 4, some_ids(6, num_classes=301, most=3).to(dtype))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_queries_rank_by_float32_scores(half: torch.dtype) -> None:
    """Because rounded scores would tie; also under autocast, and with class vectors of another dtype."""
    problem = make_problem(6, num_classes=301, regime="near")
    queries, vectors = problem.input.to(half), problem.linear_weight
    assert torch.equal(queries.double(), problem.input)
    expected = (problem.input @ vectors.T).float()
    for weight, autocast in itertools.product((vectors.to(half), vectors.float(), vectors), (False, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            scores = manymax.linear_scores(queries, weight)
            values, _ = manymax.linear_topk(queries, weight, 5)
        assert scores.dtype == values.dtype == torch.float32
        assert torch.equal(scores, expected)
        assert torch.equal(values, expected.topk(5).values)


def test_the_same_bits_in_every_run() -> None:
    problem = make_problem(20, num_classes=1003)
    runs = [manymax.linear_topk(problem.input.float(), problem.linear_weight.float(), 7) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("order", [2, 4])
def test_taylor_softmax_ranks_by_its_probabilities(order: int) -> None:
    """Its probabilities fall and then rise with the scores."""
    random = torch.Generator().manual_seed(0)
    input, vectors = (torch.randn(size, 3, generator=random, dtype=torch.float64) for size in (6, 50))
    head = manymax.LinearTaylorSoftmaxLoss(None, 50, order)
    values, ids = head.topk(input, 9, vectors)
    scores = head.scores(input, vectors)
    expected, best = manymax.taylor_softmax(scores, order).topk(9)
    assert torch.equal(ids, best)
    assert not torch.equal(ids, scores.topk(9).indices)
    torch.testing.assert_close(values - values[:, :1], (expected / expected[:, :1]).log())


def test_a_masked_class_is_no_taylor_softmax_class() -> None:
    head = manymax.LinearTaylorSoftmaxLoss(1, 3, bias=True)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[-9.0], [1.0], [5.0]]))
        head.linear.bias.copy_(torch.tensor([0.0, 0.0, -torch.inf]))
    assert head.topk(torch.ones(1, 1), 3)[1].tolist() == [[0, 1, -100]]


def test_errors() -> None:
    problem = make_problem(6, num_classes=301)
    arguments: tuple[Tensor, Tensor] = (problem.input, problem.linear_weight)
    for k in (0, 302, -1, 2.0, True, "3"):
        with pytest.raises(manymax.ManymaxError, match=r"`k` must be an integer( from 1 to .* 301)?; got"):
            manymax.linear_topk(*arguments, k)  # type: ignore[arg-type]
    for exclude, got in (([1, 2], "list"), (torch.zeros(6, 2), "torch.float32"), (torch.zeros(6, 301).bool(), "bool")):
        with pytest.raises(manymax.ArgumentTypeError, match=rf"`exclude` must be a tensor.*{got}"):
            manymax.linear_topk(*arguments, 3, exclude=exclude)  # type: ignore[arg-type]
    for shape in ((5, 2), (6,), (1, 6, 2)):
        with pytest.raises(manymax.ArgumentError, match=r"`exclude` must have shape \(6, 'E'\)"):
            manymax.linear_topk(*arguments, 3, exclude=torch.zeros(shape, dtype=torch.long))
    for value in (301, -1):
        with pytest.raises(manymax.ArgumentError, match=r"`exclude` ids must be in \[0, 301\) or -100; got"):
            manymax.linear_topk(*arguments, 3, exclude=torch.full((6, 1), value))
    with pytest.raises(manymax.UnknownNameError, match="did you mean 'block_rows'"):
        manymax.linear_topk(*arguments, 3, options={"block_row": 3})
    for function in (manymax.linear_scores, lambda *arguments: manymax.linear_topk(*arguments, 3)):
        with pytest.raises(manymax.ArgumentError, match=r"`input` must be \(\.\.\., 6\) to fit `linear_weight`"):
            function(torch.zeros(6, 7), problem.linear_weight)
        with pytest.raises(manymax.ArgumentTypeError, match="`linear_weight` must be a float tensor"):
            function(problem.input, problem.linear_weight.long())
