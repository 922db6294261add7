"""No head makes a (rows, classes) table: the largest storage of a step is counted, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from tests.heads.plain import CASES, HeadCase, Problem, agree, make_problem, upstream, value_and_gradients

ROWS, C, DIM, BLOCK_ROWS = 300, 1003, 6, 8
LIMIT = BLOCK_ROWS * 1008  # numbers in a block, classes padded to a multiple of 16: 8 C, where the table has 300 C


class Largest(TorchDispatchMode):
    """Records the largest storage that any operation returned, in numbers; storages of `arguments` do not count."""

    def __init__(self, *arguments: Tensor) -> None:
        super().__init__()
        self.size, self.where = 0, ""
        self.given = {argument.untyped_storage().data_ptr() for argument in arguments}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor) and result.layout == torch.sparse_csr:
                result = result.values()  # a sparse matrix has as many numbers as entries
            if isinstance(result, Tensor) and not result.is_sparse:
                size = result.untyped_storage().nbytes() // result.element_size()
                if size > self.size and result.untyped_storage().data_ptr() not in self.given:
                    self.size, self.where = size, f"{func} {tuple(result.shape)}"
        return out


def largest_of_a_step(case: HeadCase, problem: Problem, target: Any, **options: Any) -> Largest:
    """The largest storage of a step, whose result is checked too: entries are summed in parts, none may get lost."""
    expected = value_and_gradients(case.plain, problem.leaves(), target, **options)
    leaves = problem.leaves(torch.float32)
    with Largest() as largest:
        value = case.head(leaves, target, **options)
        grads = torch.autograd.grad(value, leaves.parts(), upstream(value))
    agree([value.detach(), *(grad.to_dense() for grad in grads)], expected, 1e-5)
    return largest


@pytest.mark.parametrize(
    ("regime", "reduction", "smooth", "sparse_grad"),
    [("thin", "mean", False, True), ("mixed", "none", True, False), ("wide", "mean", False, False)],
)
@pytest.mark.parametrize("case", CASES)
def test_a_step_makes_nothing_larger_than_a_block(
    case: HeadCase, regime: str, reduction: str, smooth: bool, sparse_grad: bool
) -> None:
    problem = make_problem(ROWS // 2, num_classes=C, regime=regime)
    row = torch.arange(ROWS // 2)
    target = torch.where(row % 2 == 0, problem.scores().argmax(1), row)
    smoothing = 0.25 if case.member.takes.smoothing else 0.0
    settings = {"multilabel": "normalized", "label_smoothing": smoothing} if smooth else {}
    options = {"block_rows": BLOCK_ROWS, "sparse_grad": sparse_grad}
    largest = largest_of_a_step(case, problem, target, reduction=reduction, options=options, **settings)
    assert largest.size <= LIMIT, largest.where


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_supports_as_large_as_the_thin_way_takes_them(case: HeadCase, sparse_grad: bool) -> None:
    """30 equal best classes in every row: few enough to be listed as entries, too many to keep those of all rows."""
    best = (torch.arange(2)[:, None] + 63 * torch.arange(15)).flatten()  # all in two of the 63 groups of classes
    weight = torch.zeros(C, DIM, dtype=torch.float64)
    weight[best, 0] = 1.0
    problem = Problem(torch.full((ROWS, DIM), 32.0, dtype=torch.float64), weight)
    target = best[torch.arange(ROWS) % 30]
    largest = largest_of_a_step(case, problem, target, options={"block_rows": BLOCK_ROWS, "sparse_grad": sparse_grad})
    assert largest.size <= LIMIT, largest.where
    assert 30 * ROWS > LIMIT


@pytest.mark.parametrize("case", CASES)
def test_many_positives_in_a_row(case: HeadCase) -> None:
    """Positives at the top of the scores, where rankmax lists the classes above each, and positives anywhere."""
    problem = make_problem(24, num_classes=C, regime="thin")
    for target in (problem.scores().topk(30).indices, torch.arange(24 * 30).view(24, 30)):
        largest = largest_of_a_step(case, problem, target, options={"block_rows": BLOCK_ROWS})
        assert largest.size <= LIMIT, largest.where


def test_the_default_block_follows_from_the_number_of_classes() -> None:
    """About 2^23 scores at a time, between 64 and 1024 rows, on every machine."""
    options = manymax.HeadOptions()
    for num_classes, rows in ((16, 1024), (4096, 1024), (40_992, 192), (200_000, 64), (1_000_000, 64)):
        assert options.rows(num_classes) == rows
    assert manymax.HeadOptions(block_scores=1 << 20).rows(4096) == 256
    assert manymax.HeadOptions(block_rows=7).rows(10**6) == 7


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("loss", ["sampled_softmax", "nce"])
def test_a_sampled_step_touches_no_table_of_all_classes(loss: str, shared: bool) -> None:
    """With row-sparse gradients nothing grows with C, and the scores do not even copy the drawn class vectors."""
    num_classes, dim, rows, k = 100_000, 32, 256, 200
    weight = torch.randn(num_classes, dim, requires_grad=True)
    input = torch.randn(rows, dim, requires_grad=True)
    sampler = manymax.samplers.UniformSampler(num_classes)
    with Largest(input, weight) as forward:
        value = getattr(manymax, f"linear_{loss}_loss")(
            input, weight, torch.arange(rows), sampler, k, shared=shared, sparse_grad=True
        )
    assert forward.size <= 2 * rows * k, forward.where
    with Largest(input, weight) as backward:
        torch.autograd.grad(value, [input, weight])
    touched = k if shared else rows * (k + 1)  # the rows of the gradient, if all are different
    assert backward.size <= max(touched * dim, 2 * rows * k), backward.where


def test_ranking_keeps_a_block() -> None:
    problem = make_problem(ROWS, num_classes=C)
    exclude = torch.arange(ROWS).unsqueeze(1) % C
    with Largest() as largest:
        manymax.linear_topk(
            problem.input, problem.linear_weight, 10, exclude=exclude, options={"block_rows": BLOCK_ROWS}
        )
    assert largest.size <= LIMIT, largest.where


def test_the_plain_loss_would_be_seen() -> None:
    problem = make_problem(ROWS, num_classes=C).leaves()
    with Largest() as largest:
        manymax.softmax_loss(problem.scores(), torch.arange(ROWS) % C)
    assert largest.size >= ROWS * C
