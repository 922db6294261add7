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
    unit = max(1.0, float(problem.input.abs().max()))
    agree([value.detach(), *(grad.to_dense() for grad in grads)], expected, 1e-5, unit=unit)
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


class Tables(TorchDispatchMode):
    """Collects the storages of at least `size` float32 numbers that operations make, each once."""

    def __init__(self, size: int, *given: Tensor) -> None:
        super().__init__()
        self.size, self.given = size, [tensor.untyped_storage().data_ptr() for tensor in given]
        self.found: dict[int, Tensor] = {}  # tensors are kept, so that their memory is not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor):
                storage = (result._values() if result.is_sparse else result).untyped_storage()
                if storage.nbytes() >= 4 * self.size and storage.data_ptr() not in self.given:
                    self.found.setdefault(storage.data_ptr(), result)
        return out


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].member.sparse])
def test_a_row_sparse_gradient_of_wide_supports_has_one_table(
    case: HeadCase, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four classes are touched: their rows are in the memory of the dense sum, in `.grad` too."""
    monkeypatch.setattr("manymax.engine.row_sparse.ROWS_AT_A_TIME", 64)
    random, dim = torch.Generator().manual_seed(0), 256
    weight = torch.randint(-8, 9, (C, dim), generator=random).double() / 8
    input = torch.randint(-8, 9, (24, dim), generator=random).double() / 2**17
    bias = torch.where(torch.arange(C) % 4 == 1, -1000.0, 0.0).double()
    problem, target = Problem(input, weight, bias), 4 * torch.arange(24)
    leaves = problem.leaves(torch.float32)
    options = {"block_rows": 12, "sparse_grad": True}
    with Tables(C * dim // 4, leaves.linear_weight) as tables:
        value = factor * case.head(leaves, target, options=options)
        gradient = torch.autograd.grad(value, leaves.linear_weight)[0]
    assert C / 2 < gradient._indices().shape[1] < 0.8 * C
    assert list(tables.found) == [gradient._values().untyped_storage().data_ptr()]
    (factor * case.head(leaves, target, options=options)).backward()
    # A copy would have the memory of its rows alone.
    assert leaves.linear_weight.grad._values().untyped_storage().nbytes() == 4 * C * dim
    expected = value_and_gradients(case.plain, problem.leaves(), target)[2] * (factor / 1.5)
    agree([gradient.to_dense()], [expected], 1e-5)


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
