"""Native selected scores against float64, and sampled heads that never copy their table of class vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from manymax.engine import native_library
from manymax.engine.keywords import Keywords
from manymax.engine.native_selected import TABLE_KINDS
from manymax.engine.options import HeadOptions
from manymax.engine.selected_scores import SelectedScores, class_scores
from manymax.errors import ArgumentError
from manymax.heads import head_function
from manymax.members import FAMILY, REFERENCE_LOSSES
from tests.heads.plain import needs_library

QUERIES, CLASSES = 60, 5000


@pytest.fixture
def threads() -> Iterator[None]:
    """Any number of threads in the test, one after it."""
    yield
    torch.set_num_threads(1)


def problem(dtype: torch.dtype, table: torch.dtype, d: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, class vectors, rows, ids and an upstream gradient; a few classes have most of the draws."""
    random = torch.Generator().manual_seed(3)
    input = torch.randn(QUERIES, d, dtype=dtype, generator=random)
    weight = torch.randn(CLASSES, d, generator=random).to(table)
    # Some queries have no row, others several.
    rows = torch.randint(QUERIES, (90,), generator=random).sort().values
    ids = (CLASSES * torch.rand(90, k, generator=random) ** 6).long()
    return input, weight, rows, ids, torch.randn(90, k, dtype=dtype, generator=random)


def expected(input: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """Slow reference in float64: scores, gradient of the queries and gradient of the class vectors."""
    x, w = (value.detach().double().requires_grad_() for value in (input, weight))
    scores = torch.einsum("md,mkd->mk", x[rows], w[ids])
    return scores.detach(), *torch.autograd.grad(scores, (x, w), upstream.double())


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("level", native_library.levels_here())
def test_scores_and_gradients_of_every_precision(level: str, dtype: torch.dtype) -> None:
    """Widths with and without a rest, tables whose rows are apart, one class per row."""
    cases = zip(TABLE_KINDS, ((64, 9), (13, 1), (70, 4), (1, 6)), strict=True)
    for (table, (d, k)), sparse in itertools.product(cases, (True, False)):
        input, weight, rows, ids, upstream = problem(dtype, table, d, k)
        apart = torch.cat([weight, weight], 1).requires_grad_()
        view, input = apart[:, :d], input.requires_grad_()
        scores = SelectedScores.apply(input, view, rows, ids, sparse, level)
        want = expected(input, weight, rows, ids, upstream)
        got = scores.detach(), *torch.autograd.grad(scores, (input, view), upstream)
        assert got[2].is_sparse == sparse
        assert got[2].dtype == table
        # Sums in the dtype of the queries; the gradient of the class vectors is then rounded to theirs.
        for name, ours, theirs in zip(("scores", "queries", "class vectors"), got, want, strict=True):
            unit = torch.finfo(ours.dtype).eps if name == "class vectors" else torch.finfo(dtype).eps
            limit = max(unit, 64 * torch.finfo(dtype).eps) * theirs.abs().max()
            assert (ours.to_dense().double() - theirs).abs().max() <= limit, (name, table, d)


@needs_library
def test_every_half_precision_number_is_read_right() -> None:
    """All 65,536 patterns of 16 bits: subnormal numbers, infinities and nan included."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).unsqueeze(1)
    level = native_library.resolve("native")
    rows, ids = torch.zeros(1, dtype=torch.long), torch.arange(1 << 16).unsqueeze(0)
    for dtype in (torch.float16, torch.bfloat16):
        table = patterns.view(dtype)
        found = SelectedScores.apply(torch.ones(1, 1), table, rows, ids, True, level)
        torch.testing.assert_close(found, table.float().T, rtol=0, atol=0, equal_nan=True)


@needs_library
def test_the_same_bits_on_any_number_of_threads(threads: None) -> None:
    input, weight, rows, ids, upstream = problem(torch.float32, torch.float32, 64, 40)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        x, w = input.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = SelectedScores.apply(x, w, rows, ids, True, native_library.resolve("native"))
        grad_x, grad_w = torch.autograd.grad(scores, (x, w), upstream)
        assert grad_w.is_coalesced()
        assert (grad_w.indices()[0].diff() > 0).all()
        results.append((scores.detach(), grad_x, grad_w.indices(), grad_w.values()))
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


@needs_library
def test_ids_are_checked_before_memory_is_read() -> None:
    input, weight, rows, ids, _ = problem(torch.float32, torch.float32, 8, 4)
    for wrong in (CLASSES, -1):
        ids[-1, -1] = wrong
        with pytest.raises(ArgumentError, match=rf"`ids` must be in \[0, {CLASSES}\); got {wrong}"):
            SelectedScores.apply(input, weight, rows, ids, True, native_library.resolve("native"))
    with pytest.raises(ArgumentError, match=rf"`rows` must be in \[0, {QUERIES}\); got {QUERIES}"):
        SelectedScores.apply(input, weight, rows + QUERIES - rows[-1], ids[:1], True, native_library.resolve("native"))


@needs_library
def test_what_native_code_cannot_read_is_refused_if_demanded() -> None:
    input, weight, rows, ids, _ = problem(torch.float32, torch.float32, 8, 4)
    turned = weight.T.contiguous().T
    demanded = Keywords(options=HeadOptions(backend="native"))
    with pytest.raises(ArgumentError, match="numbers of a vector next to each other"):
        class_scores(input, turned, rows, ids, demanded)
    with pytest.raises(ArgumentError, match="rows of each query next to each other"):
        class_scores(input, weight, rows.flip(0), ids, demanded)
    # Otherwise torch does it.
    torch.testing.assert_close(
        class_scores(input, turned, rows.flip(0), ids, Keywords()),
        expected(input, weight, rows.flip(0), ids, torch.ones(ids.shape))[0].float(),
    )


# Heads -------------------------------------------------------------------------------------------

BACKENDS = ["torch", pytest.param("native", marks=needs_library)]


class NoCopyOfTheTable(TorchDispatchMode):
    """Refuses new tensors as large as the table of class vectors, in whatever precision."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.own, self.size = table.untyped_storage().data_ptr(), table.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(value, Tensor):
                held = value._values() if value.is_sparse else value
                if held.numel() >= self.size and held.untyped_storage().data_ptr() != self.own:
                    raise AssertionError(f"{func} made a tensor of {held.numel()} numbers")
        return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [False, True], ids=["per row", "shared"])
@pytest.mark.parametrize("table", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_step_makes_no_copy_of_the_class_vectors(table: torch.dtype, shared: bool, backend: str) -> None:
    """Whatever their precision, the gradient is summed in float32 and rounded once."""
    random = torch.Generator().manual_seed(0)
    input = torch.randn(9, 4, generator=random)
    weight = torch.randn(CLASSES, 4, generator=random).to(table)
    sampler, target = manymax.samplers.UniformSampler(CLASSES), torch.randint(CLASSES, (9,), generator=random)
    options = {"shared": shared, "sparse_grad": True, "options": {"backend": backend}}

    def step(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        loss = manymax.linear_sampled_softmax_loss(
            input, weight, target, sampler, 20, generator=torch.Generator().manual_seed(1), **options
        )
        return loss.detach(), *torch.autograd.grad(loss, (input, weight))

    x, w = input.clone().requires_grad_(), weight.clone().requires_grad_()
    with NoCopyOfTheTable(w):
        found = step(x, w)
    assert found[2].dtype == table
    # The same with a table in float32, which holds the same numbers.
    wide = step(x, weight.float().requires_grad_())
    torch.testing.assert_close(found[:2], wide[:2])
    torch.testing.assert_close(
        found[2].coalesce().values(), wide[2].coalesce().values().to(table), rtol=torch.finfo(table).eps, atol=1e-6
    )


@needs_library
@pytest.mark.parametrize("loss", ["sampled_softmax", "nce", "bpr"])
def test_a_head_gives_the_same_on_both_back_ends(loss: str) -> None:
    random = torch.Generator().manual_seed(0)
    input, weight = torch.randn(9, 4, generator=random), torch.randn(CLASSES, 4, generator=random)
    bias, target = torch.randn(CLASSES, generator=random), torch.randint(CLASSES, (9, 2), generator=random)
    head = head_function((FAMILY if loss in FAMILY else REFERENCE_LOSSES)[loss])
    for shared, sparse in itertools.product((False, True), (False, True)):
        results = []
        for backend in ("torch", "native"):
            leaves = [value.clone().requires_grad_() for value in (input, weight, bias)]
            value = head(
                *leaves[:2],
                target,
                manymax.samplers.LogUniformSampler(CLASSES),
                7,
                linear_bias=leaves[2],
                shared=shared,
                sparse_grad=sparse,
                generator=torch.Generator().manual_seed(1),
                options={"backend": backend},
            )
            results.append([value.detach(), *torch.autograd.grad(value, leaves)])
        for ours, theirs in zip(*results, strict=True):
            assert ours.is_sparse == theirs.is_sparse
            torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
