"""The native back end of exact members: blocks of scores go through C++ kernels instead of a dozen torch operations.

A member's kernel.cpp works on one row after the other while it is in cache; `engine/native_library.py` loads what was
compiled of it. Nothing needs the native back end: a member's kernel.py does the same in plain torch, on any device, and
is what the results are tested against. The gradient comes back as a `Mixed` part, which `Gradients` adds up through the
functions at the end of this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Mixed, Sparse
from manymax.engine.native_library import SUFFIXES, call, resolve
from manymax.errors import ManymaxError
from manymax.ops.checks import visible


def level_for(block: Block) -> str | None:
    """The dispatch level of the native library that serves a block; None where plain torch does.

    Raises:
        ManymaxError: where `options.backend` demands the native back end and it cannot serve the block.
    """
    backend, scores = block.keywords.options.backend, block.scores
    level = resolve(backend)
    if level is None:
        return None
    reason = None
    if not visible(scores):  # on another device, or without values to read
        reason = f"it takes tensors on the CPU, in eager mode; got one on {scores.device.type}"
    elif scores.dtype not in SUFFIXES:
        reason = f"it takes float32 and float64; got {scores.dtype}"
    elif scores.shape[1] >= 1 << 31:  # entries have int32 classes
        reason = f"it takes fewer than 2^31 classes; got {block.num_classes}"
    if reason is None:
        return level
    if block.keywords.options.demands_native:
        raise ManymaxError(f"`options.backend={backend!r}` cannot serve this call: {reason}. Take 'auto' or 'torch'.")
    return None


class KernelCall:
    """The arguments that all native kernels share, for one block, and what they return.

    maximum: (n, 1) largest score of each row, an argument of kernels whose rows are split over ranks.
    value: (n,) float64, what the member's kernel sums up in each row.
    scale: (n,) factor of a dense row that is not multiplied into it.
    count: (n,) number of entries of a packed row, -1 of a dense one.
    """

    def __init__(self, block: Block, level: str, maximum: Tensor | None = None, count: Tensor | None = None) -> None:
        scores, target = block.scores, block.target
        n, self.stride = scores.shape  # the stride counts padding, which kernels must step over but not look at
        self.scores, self.level, self.num_classes = scores, level, block.num_classes
        self.maximum = scores.new_empty(n, 1) if maximum is None else maximum.contiguous()
        self.value = torch.empty(n, dtype=torch.float64)  # as kernels sum them; the member rounds them at the end
        self.scale = scores.new_empty(n)
        self.count = torch.empty(n, dtype=torch.long) if count is None else count

        # C reads memory as it lies: one dtype, no strides. The attributes keep the copies alive until the call returns.
        def plain(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.to(scores.dtype).contiguous()

        self.ids = None if target.ids is None else target.ids.contiguous()
        self.weights, self.share = plain(target.weights), plain(target.share)
        self.class_weight, self.total = plain(target.class_weight), plain(target.total)
        self.coefficient = plain(target.coefficient)

    def run(self, function: str, *more: Tensor | int | None) -> None:
        """Call a kernel with the shared arguments and `more`. The gradient takes the place of the scores."""
        assert self.weights is not None
        call(
            self.level,
            function,
            self.scores,
            *(self.scores, len(self.scores), self.stride, self.num_classes),
            *(self.ids, self.weights, self.weights.shape[1], self.share, self.class_weight),
            *(self.total, self.coefficient, self.maximum, self.value, self.scale, self.count),
            *more,
            threads=True,
        )

    @property
    def parts(self) -> list[Mixed]:
        """The gradient, for a `BlockResult`; empty if none is wanted."""
        return [] if self.coefficient is None else [Mixed(self.scores, self.count, self.scale, self.level)]


def pack_above(block: Block, level: str, origin: Tensor, cut: Tensor) -> Tensor:
    """Replace rows with few scores above origin + cut by these, in packed form; returns the counts (n,), -1 for others.

    For ranks that share the classes of a row: which of them can be in the support is decided by a bound that all ranks
    know, before any of them can finish the row.

    Args:
        block: the scores of this rank.
        level: the dispatch level.
        origin, cut: (n, 1).
    """
    scores = block.scores
    n, stride = scores.shape
    count = torch.empty(n, dtype=torch.long)
    bounds = origin.to(scores).contiguous(), cut.to(scores).contiguous()
    call(level, "pack_above", scores, scores, n, stride, block.num_classes, *bounds, count, threads=True)
    return count


# Gradients of packed rows ------------------------------------------------------------------------


def add_to_input(part: Mixed, vectors: Tensor, grad_input: Tensor) -> None:
    """grad_input[r] += sum of value x class vector over the entries of each packed row r, in place.

    Args:
        part: n rows.
        vectors: (C, d). grad_input: (n, d). Both contiguous and in the dtype of the scores.
    """
    n, stride = part.table.shape
    arguments = part.table, n, stride, vectors.shape[0], part.count, vectors, vectors.shape[1], grad_input
    call(part.level, "add_to_input", part.table, *arguments, threads=True)


def add_to_vectors(part: Mixed, input: Tensor, grad_vectors: Tensor | None, grad_bias: Tensor | None, C: int) -> None:
    """grad_vectors[c] += value x query and grad_bias[c] += value over the entries of packed rows, in place.

    Args:
        part: n rows.
        input: (n, d) their queries.
        grad_vectors: (C, d), grad_bias: (C,), or None where one is not wanted. All contiguous.
        C: the number of classes.
    """
    n, stride = part.table.shape
    arguments = part.table, n, stride, C, part.count, input, input.shape[1], grad_vectors, grad_bias
    call(part.level, "add_to_vectors", part.table, *arguments, threads=True)


def move_dense_rows(part: Mixed) -> None:
    """Move the dense rows of a table to its beginning, in their order; packed rows are overwritten."""
    call(part.level, "move_dense_rows", part.table, part.table, *part.table.shape, part.count)


def list_entries(part: Mixed) -> Sparse:
    """The entries of all packed rows, one row after the other."""
    n, stride = part.table.shape
    size = int(part.count.clamp(min=0).sum())
    rows, classes = part.count.new_empty(size), part.count.new_empty(size)
    values = part.table.new_empty(size)
    call(part.level, "list_entries", part.table, part.table, n, stride, part.count, rows, classes, values)
    return Sparse(rows, classes, values)
