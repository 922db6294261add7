"""What the block loop and a member's kernel hand to each other.

A head never holds the (rows, classes) table of scores. `engine/block_loop.py` computes the scores of one block of rows
after the other, as one matmul into a buffer that is used again, and gives each block to the member's kernel. The kernel
turns the scores into the losses of the rows and into their gradient g in the scores: dense and written over the scores,
or sparse, as the few entries that are not zero. `engine/gradients.py` then adds

    grad input = g W         grad W += g' x

where both are sums over the entries if g is sparse, so that the matmul of the scores is the only one over all classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manymax.engine.keywords import Keywords
from manymax.engine.ranks import Ranks
from manymax.engine.row_target import RowTarget
from manymax.errors import ManymaxError

# Scores that a kernel works on at a time where it goes over them several times. 2^17 float32 scores are 512 KB: they
# and two tables of the same size stay in the processor's cache, where a whole block (32 MB or more) would not.
PIECE = 1 << 17
# On a device there is no cache to stay in, and a launch costs as much as a pass over a million scores: 128 MB.
DEVICE_PIECE = 1 << 25


def piece_size(scores: Tensor) -> int:
    """The number of scores that a kernel in plain torch works on at a time, by the device that they are on."""
    return PIECE if scores.device.type == "cpu" else DEVICE_PIECE


@dataclass(frozen=True)
class Dense:
    """A dense part of a block's gradient: row n of the table, times coefficient_n.

    Row coefficients (1/N of a mean, class weights, a factor from above) are not multiplied into the table: the products
    with it put them on x and on grad input, which have d numbers per row where the table has C.

    table: (n, C'), padding included.
    coefficient: (n,).
    rows: (n,) the rows of the block that it is about, or None for all of them in order.
    """

    table: Tensor  # may be the block's own scores, overwritten: it is used before the next block is computed
    coefficient: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class Sparse:
    """A sparse part of a block's gradient: entries in any order, with the row coefficients already in the values.

    rows, classes, values: (K,) each; `rows` are rows of the block.
    """

    rows: Tensor
    classes: Tensor  # as this rank numbers its classes
    values: Tensor  # an entry may occur several times, and its values are then summed


@dataclass(frozen=True)
class Mixed:
    """The gradient of a block as a native kernel leaves it in place of the scores: each row is dense or packed.

    A packed row has the values of its entries at the beginning, row coefficients included, and their classes, ascending
    int32 numbers, from its middle on. See engine/rows.h.

    table: (n, C'), padding included.
    count: (n,) int64, the number of entries of a packed row; -1 of a dense row.
    scale: (n,) the factor of each dense row.
    level: the dispatch level of the native library, for the functions that read packed rows.
    """

    table: Tensor
    count: Tensor
    scale: Tensor
    level: str


@dataclass(frozen=True)
class Listed:
    """The gradient of a block as a Triton kernel leaves it: each row is dense, or a list of entries in other memory.

    Which rows are of which kind is known to the device alone: engine/triton_entries.py adds up both.

    table: (n, C') the dense rows, padding included; of the others whatever is there.
    values: (n, K) entries, row coefficients included. classes: (n, K) int32, theirs. Beyond the count is anything.
    count: (n,) int32, the number of entries of a row; -1 of a dense row.
    scale: (n,) the factor of each dense row.
    """

    table: Tensor
    values: Tensor
    classes: Tensor
    count: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, scores: Tensor, room: int) -> Listed:
        """Memory for the gradient of scores (n, C'), with room for some entries in each row."""
        n = len(scores)
        values, classes = scores.new_empty(n, room), scores.new_empty(n, room, dtype=torch.int32)
        return cls(scores, values, classes, scores.new_empty(n, dtype=torch.int32), scores.new_empty(n))

    def apart(self) -> tuple[Dense, Sparse]:
        """The dense rows and the entries; the host waits for the device, to know how many there are."""
        rows = (self.count < 0).nonzero().squeeze(1)
        column = torch.arange(self.values.shape[1], device=self.count.device)
        row, place = (column < self.count.unsqueeze(1)).nonzero(as_tuple=True)
        entries = Sparse(row, self.classes[row, place].long(), self.values[row, place])
        return Dense(self.table[rows], self.scale[rows], rows), entries


def merged(*columns: Tensor) -> Sparse:
    """One list of entries from two: rows, classes and values of the first, then of the second, (K,) each.

    An entry that is in both lists stays twice in the result: all that happens to entries is that they are summed.
    """
    return Sparse(*(torch.cat([columns[i], columns[i + 3]]) for i in range(3)))


@dataclass
class BlockResult:
    """What a kernel returns for a block.

    losses: (n,) of the rows, without their coefficients.
    parts: the gradient in the scores. A row is in at most one dense part, and a dense part comes before sparse entries
        of the same rows; see `Gradients.add`. Empty if no gradient is wanted.
    grad_setting: (), the gradient in the kernel's setting, row coefficients included; None where it has none.
    stats: by name, (n,) each, what `keywords.stats` asks for and the kernel knows; see `LossResult`.
    log_sums: (n, 1) or (n, P) in float64, of softmax: the log of the sum of exponentials that each positive is compared
        with. For kernels that build on its kernel.
    """

    losses: Tensor  # on several ranks the same on each: a kernel completes its sums before it returns
    parts: list[Dense | Sparse | Mixed | Listed] = field(default_factory=list)
    grad_setting: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)
    log_sums: Tensor | None = None


@dataclass(frozen=True)
class Filtered:
    """What engine/filter.py has left of the rows of a block.

    count: (n,) int64, how many classes are left of a row, whose scores are at its beginning and whose numbers are in
        its middle, as in `Mixed`; -1 where a row has all of its scores.
    positives: (n, P) the scores of the listed classes.
    """

    count: Tensor
    positives: Tensor


@dataclass(frozen=True)
class Block:
    """What a kernel sees of some rows: their scores and their target.

    On several ranks all of this is what the rank holds: the scores of its classes, the positives among them, its part
    of the sums.

    scores: (n, C') and contiguous; the kernel may overwrite them. Columns from num_classes on are padding and hold
        -inf, so that they take part in a maximum, a softmax or a threshold without any effect.
    target: the target weights of these rows.
    num_classes: C, the number of columns that are classes.
    spread: (n,) float64, sum_c class_weight_c s_c; None without label smoothing.
    rescore: from rows of the block (m,) to fresh scores (m, C'), for a kernel that has overwritten them too early.
    ranks: complete sums and maxima over the classes of a row.
    keywords: those of the call, with its options.
    level: the dispatch level of the native library that serves the call; None where plain torch does.
    tops: (n, groups) the largest score of each group of 64 classes, where the native products have found it; else None.
    bound: (n, 1) what a kernel with a `list_length` compares the scores with; None for others.
    triton: whether the member's Triton kernels serve the call.
    filtered: what is left of rows in which classes have been ruled out, for a kernel with `rule_out`; None where
        `scores` has all of them.
    """

    scores: Tensor
    target: RowTarget
    num_classes: int
    spread: Tensor | None
    rescore: Callable[[Tensor], Tensor]
    ranks: Ranks
    keywords: Keywords
    level: str | None = None
    tops: Tensor | None = None
    bound: Tensor | None = None
    triton: bool = False
    filtered: Filtered | None = None

    @property
    def row_bound(self) -> Tensor:
        """The bound, in a kernel that has a `list_length`."""
        if self.bound is None:
            raise ManymaxError("a kernel asked for the bound of its rows without a `list_length`")
        return self.bound


def native_rows(block: Block) -> bool:
    """Whether native code serves a block and sees all classes of its rows."""
    return block.level is not None and block.ranks.alone


def triton_rows(block: Block) -> bool:
    """Whether Triton kernels serve a block and see all classes of its rows."""
    return block.triton and block.ranks.alone


@dataclass(frozen=True)
class Kernel:
    """What an exact member computes in its head, made for one call.

    run: from a block of scores to its losses and gradient.
    setting: a scalar tensor in which the loss is differentiated too (a learned alpha), or None.
    omega: the regulariser Omega of the normalized form, from rows on the simplex (n, P) or (n, C), of which zeros may
        be left out, to (n,). Where there is a setting it is passed as the keyword `setting`. None where the normalized
        form is the loss divided by |t| and nothing more.
    ranking_key: from scores to the numbers that classes are ranked by; None where those are the scores.
    undoes_cap: whether the gradient that `run` returns for a block is that of the scores before their soft cap; of the
        others a copy of the scores is kept until the gradient is there.
    list_length: K of a kernel that compares scores with the K-th largest of their row, over all classes: those that are
        left out of sums are among them. None where it does not.
    triton: the name of its Triton kernels, which are checked once per name and device; "" where it has none.
    rule_out: leaves in rows the classes that can count, from small integers; see engine/filter.py. None where a member
        needs all scores, or has no native kernel for it.
    moved: what becomes of the sums of rows (n, k), the second of two exchanges, when the maximum that was the first
        rises; see engine/class_blocks.py. None where a kernel exchanges something else.
    """

    run: Callable[[Block], BlockResult]
    setting: Tensor | None = None  # an argument of the autograd function, which is how it gets a gradient
    omega: Callable[..., Tensor] | None = None
    ranking_key: Callable[[Tensor], Tensor] | None = None
    undoes_cap: Callable[[Block], bool] = lambda block: False
    list_length: int | None = None
    triton: str = ""
    rule_out: Callable[..., Tensor] | None = None
    moved: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
