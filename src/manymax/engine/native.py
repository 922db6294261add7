"""The native back end of exact members: products made for blocks of scores, and C++ kernels of members.

engine/products.cpp computes scores and the gradients of dense tables, for every member. A member's kernel.cpp works on
one row after the other while it is in cache, where plain torch takes a dozen operations over the block. Nothing needs
the native back end: torch's matmul and a member's kernel.py do the same, on any device, and are what the results are
tested against. The gradient of a kernel comes back as a `Mixed` part, which `Gradients` adds up through the functions
at the end of this file. `engine/native_library.py` loads what was compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Mixed, Sparse
from manymax.engine.native_library import SUFFIXES, call, find_level, resolve
from manymax.engine.options import HeadOptions
from manymax.errors import ManymaxError
from manymax.ops.checks import visible

GROUP = 64  # neighbouring classes of which the maximum is kept: GROUP in engine/rows.h
# Sums over parts of the classes of which the gradient of a query is the sum. Up to 8 threads their number does not
# depend on that of the threads, so that the result does not either.
CHUNKS = 16


def level_for(options: HeadOptions, scores: Tensor) -> str | None:
    """The dispatch level of the native library that serves blocks of scores (n, C'); None where plain torch does.

    Raises:
        ManymaxError: where `options.backend` demands the native back end and it cannot serve them.
    """
    level = resolve(options.backend)
    if level is None:
        return None
    reason = None
    if not visible(scores):  # on another device, or without values to read
        reason = f"it takes tensors on the CPU, in eager mode; got one on {scores.device.type}"
    elif scores.dtype not in SUFFIXES:
        reason = f"it takes float32 and float64; got {scores.dtype}"
    elif scores.shape[1] >= 1 << 31:  # entries have int32 classes
        reason = f"it takes fewer than 2^31 classes; got {scores.shape[1]}"
    if reason is None:
        return level
    if options.demands_native:
        raise ManymaxError(
            f"`options.backend={options.backend!r}` cannot serve this call: {reason}. Take 'auto' or 'torch'."
        )
    return None


# Products ----------------------------------------------------------------------------------------


def multiplies(level: str | None, *operands: Tensor) -> bool:
    """Whether the products of a level are used for these operands: C reads memory as it lies, in one dtype."""
    if level is None or not find_level(level).products:
        return False
    return all(operand.is_contiguous() and operand.dtype == operands[0].dtype for operand in operands)


class Transform(NamedTuple):
    """What turns products into scores: factors of the classes (C,) or None, and a soft cap or None.

    capped: (n, C') capped scores, which dense_gradients reads; None without a cap, or where the gradient has been taken
        through it already.
    """

    factor: Tensor | None = None
    softcap: float | None = None
    capped: Tensor | None = None

    def arguments(self, like: Tensor) -> tuple[Tensor | None, Tensor]:
        """The factors as C reads them, and the cap, 0 for none."""
        factor = None if self.factor is None else self.factor.to(like.dtype).contiguous()
        return factor, cap_argument(self.softcap)


PLAIN = Transform()


def cap_argument(softcap: float | None) -> Tensor:
    """A soft cap as C reads it: float64, 0 for none."""
    return torch.tensor(softcap or 0.0, dtype=torch.float64)


def block_scores(
    level: str, queries: Tensor, vectors: Tensor, bias: Tensor | None, out: Tensor, transform: Transform = PLAIN
) -> Tensor:
    """Write the scores of queries (n, d) to out (n, C'), -inf to its padding; returns the maxima of groups of classes.

    Args:
        level: of which `multiplies` is true.
        queries: (n, d). vectors: (C, d). bias: (C,) or None.
        out: (n, C'), C' >= C.
        transform: of products into scores.
    """
    (n, d), num_classes = queries.shape, vectors.shape[0]
    tops = out.new_empty(n, -(-num_classes // GROUP))
    given = None if bias is None else bias.to(out.dtype).contiguous()
    factor, cap = transform.arguments(out)
    arguments = queries, n, d, vectors, factor, given, cap, num_classes, out, out.shape[1], tops
    call(level, "block_scores", out, *arguments, threads=True)
    return tops


def gradient_chunks(num_classes: int, d: int) -> int:
    """The number of sums over classes of `dense_gradients`; 0 where they would be too many for so few classes.

    Each of them has the size of the gradient of the queries: together they stay below half of the block of scores.
    """
    threads = torch.get_num_threads()
    chunks = min(max(CHUNKS, 2 * threads), num_classes // max(1, 2 * d))
    return chunks if chunks >= threads else 0


def dense_gradients(
    level: str,
    table: Tensor,
    places: Tensor | None,
    vectors: Tensor,
    scale: Tensor,
    queries: Tensor | None,
    grad_vectors: Tensor | None,
    grad_bias: Tensor | None,
    wants_product: bool,
    transform: Transform = PLAIN,
) -> Tensor | None:
    """Both products with rows g (n, C') of a table in one pass: grad_vectors += g' queries, and g vectors (n, d).

    The latter is returned. What is None, or not wanted, is not computed.

    Args:
        level: of which `multiplies` is true.
        table: (rows, C'); columns from C on are padding. Its rows may be apart, its columns not.
        places: (n,) int64, the rows of the table that are meant; None for all of them in order.
        vectors: (C, d).
        scale: (n,) the factors of the rows, for the bias: grad_bias += g' scale.
        queries: (n, d), with these factors in them; with grad_vectors.
        grad_vectors: (C, d). grad_bias: (C,).
        wants_product: whether g vectors is wanted.
        transform: of products into scores: the table then holds the gradient of scores.
    """
    num_classes, d = vectors.shape
    product = vectors.new_empty(len(scale), d) if wants_product else None
    sizes = len(scale), table.stride(0), num_classes
    results = product, grad_vectors, grad_bias, gradient_chunks(num_classes, d)
    factor, cap = transform.arguments(table)
    operands = queries, scale, d, vectors, factor, transform.capped, cap
    call(level, "dense_gradients", table, table, places, *sizes, *operands, *results, threads=True)
    return product


def finish_scores(
    level: str,
    scores: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    num_classes: int,
) -> Tensor:
    """Turn products (n, C') into scores, in place; returns the maxima of groups of classes. See `Scoring.finish`."""
    tops = scores.new_empty(len(scores), -(-num_classes // GROUP))
    parts = (None if part is None else part.to(scores.dtype).contiguous() for part in (scale, bias))
    cap = cap_argument(softcap)
    call(level, "finish_scores", scores, scores, *scores.shape, num_classes, *parts, cap, tops, threads=True)
    return tops


def leave_out(level: str, scores: Tensor, ids: Tensor, tops: Tensor | None, num_classes: int) -> None:
    """Mask classes `ids` (n, E) of the rows of a block, in place, and find the maxima of their groups anew.

    Args:
        scores: (n, C').
        ids: negative where there is none.
        tops: (n, groups), the maxima of groups of classes, or None.
    """
    ids = ids.contiguous()
    arguments = scores, *scores.shape, num_classes, ids, ids.shape[1], tops
    call(level, "leave_out", scores, *arguments, threads=True)


def chain_gradient(
    level: str,
    table: Tensor,
    count: Tensor | None,
    places: Tensor | None,
    scale: Tensor | None,
    capped: Tensor | None,
    softcap: float | None,
    num_classes: int,
    packed_alone: bool = False,
) -> None:
    """Turn the gradient of scores into that of products, in place. See `Scoring.chain`.

    Args:
        table: (n, C').
        count: (n,) as in `Mixed`, or None where all rows are dense.
        places: (n,) the rows of `capped` that the rows of the table are; None for all of them in order.
        scale: (C,) or None. capped: (rows, C') or None.
        packed_alone: whether dense rows are left as they are.
    """
    cap = cap_argument(softcap)
    factor = None if scale is None else scale.to(table.dtype).contiguous()
    sizes = len(table), table.stride(0), num_classes
    more = count, places, factor, capped, cap, int(packed_alone)
    call(level, "chain_gradient", table, table, *sizes, *more, threads=True)


# Kernels -----------------------------------------------------------------------------------------


class KernelCall:
    """The arguments that all native kernels share, for one block, and what they return.

    maximum: (n, 1) largest score of each row, an argument of kernels whose rows are split over ranks.
    value: (n,) float64, what the member's kernel sums up in each row.
    scale: (n,) factor of a dense row that is not multiplied into it.
    count: (n,) number of entries of a packed row, -1 of a dense one.
    """

    def __init__(self, block: Block, maximum: Tensor | None = None, count: Tensor | None = None) -> None:
        assert block.level is not None
        scores, target = block.scores, block.target
        n, self.stride = scores.shape  # the stride counts padding, which kernels must step over but not look at
        self.scores, self.level, self.num_classes, self.tops = scores, block.level, block.num_classes, block.tops
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
        # Parts of rows, of which another rank or another pass knows more, are taken through the cap by the caller.
        whole = maximum is None and count is None
        self.cap = cap_argument(block.keywords.softcap if whole else None)

    def run(self, function: str, *more: Tensor | int | None) -> None:
        """Call a kernel with the shared arguments and `more`. The gradient takes the place of the scores."""
        assert self.weights is not None
        call(
            self.level,
            function,
            self.scores,
            *(self.scores, len(self.scores), self.stride, self.num_classes),
            *(self.ids, self.weights, self.weights.shape[1], self.share, self.class_weight),
            *(self.total, self.coefficient, self.maximum, self.value, self.scale, self.count, self.tops, self.cap),
            *more,
            threads=True,
        )

    @property
    def parts(self) -> list[Mixed]:
        """The gradient, for a `BlockResult`; empty if none is wanted."""
        return [] if self.coefficient is None else [Mixed(self.scores, self.count, self.scale, self.level)]


def pack_above(block: Block, origin: Tensor, cut: Tensor) -> Tensor:
    """Replace rows with few scores above origin + cut by these, in packed form; returns the counts (n,), -1 for others.

    For ranks that share the classes of a row: which of them can be in the support is decided by a bound that all ranks
    know, before any of them can finish the row.

    Args:
        block: the scores of this rank.
        origin, cut: (n, 1).
    """
    assert block.level is not None
    scores = block.scores
    n, stride = scores.shape
    count = torch.empty(n, dtype=torch.long)
    bounds = origin.to(scores).contiguous(), cut.to(scores).contiguous()
    arguments = scores, n, stride, block.num_classes, block.tops, *bounds, count
    call(block.level, "pack_above", scores, *arguments, threads=True)
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
