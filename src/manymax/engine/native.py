"""The native back end of members with a sparse map: on a CPU.

native_library.py loads the library and calls its functions. Nothing needs the native back end: what it does not do
(smoothing, float rows, a learned setting, other devices) is done by the member's kernel.py, which is also what its
results are tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Dense, Sparse
from manymax.engine.native_library import SUFFIXES, call, resolve
from manymax.ops import simplex
from manymax.ops.checks import check_finite

SPARSE = 48  # as in rows.h: a row with one class in so many, or fewer, above a cut gives them as a list


def serves(block: Block) -> bool:
    """Whether a native kernel can take a block: the options do not forbid it, on a CPU, in float32 or float64."""
    scores = block.scores
    fits = scores.device.type == "cpu" and scores.dtype in SUFFIXES and scores.is_contiguous()
    # Classes of entries are int32.
    return fits and scores.shape[1] < 1 << 31 and resolve(block.keywords.options.backend) is not None


def level_of(block: Block) -> str:
    """The level of the native library that a block which it serves is handed to."""
    level = resolve(block.keywords.options.backend)
    assert level is not None
    return level


def lists_positives(block: Block) -> bool:
    """Whether a block has listed positives and no label smoothing.

    The C++ kernels read lists of ids; and smoothing gives every class a part of the target, so that no gradient has
    few entries.
    """
    return block.target.ids is not None and block.target.share is None


def run(
    block: Block, function: str, variant: int = 0, labels: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Dense | Sparse]]:
    """Run a member's native kernel on a block; the gradient takes the place of the scores.

    Args:
        block: with all classes of its rows: a rank that holds some of them cannot finish a row by itself.
        function: the C function of the member, without the suffix of its precision.
        variant: a number that tells the kernel which of its formulas to use.
        labels: (n, P) scores of the positives, lowest first, for a member that needs them.

    Returns:
        Maxima (n, 1), values of the rows (n,) in float64, and the parts of the gradient. The values are Omega*(s) -
        max s, or the losses, as the member's kernel defines them.
    """
    target, scores = block.target, block.scores
    assert target.ids is not None
    n, stride = scores.shape  # the stride counts padding, which the kernel must step over but not look at
    maximum, count = scores.new_empty(n, 1), torch.empty(n, dtype=torch.long)
    value = torch.empty(n, dtype=torch.float64)  # as the kernel sums them; the member rounds them at the end
    # C reads memory as it lies: one dtype, no strides. The names also keep the copies alive until the call returns.
    ids, weights, total = (x.contiguous() for x in (target.ids, target.weights.to(scores), target.total.to(scores)))
    coefficient = None if target.coefficient is None else target.coefficient.to(scores).contiguous()
    labels = None if labels is None else labels.contiguous()
    given = scores, n, stride, block.num_classes, ids, weights, ids.shape[1], total, coefficient
    call(level_of(block), function, scores, *given, maximum, value, count, labels, numbers=(variant,), threads=True)
    check_finite(maximum)  # a row with nan or +inf was left alone
    if coefficient is None:
        return maximum, value, []
    parts: list[Dense | Sparse] = []
    wide, entries = (count < 0).nonzero().squeeze(1), count.clamp(min=0)
    size = int(entries.sum())
    rows, classes, values = entries.new_empty(size), entries.new_empty(size), scores.new_empty(size)
    # Before any row is cleared below: entries are stored in the rows themselves.
    call(level_of(block), "entries", scores, scores, n, stride, count, rows, classes, values)
    # The coefficient of the dense parts is 1: the C code has multiplied it in.
    if len(wide) > n // 2:
        # Most rows are dense. The whole block goes into the products, with zeros for the sparse rows: a copy of the
        # dense rows would be almost as large as the block.
        if len(wide) < n:
            scores[count >= 0] = 0
        parts.append(Dense(scores, scores.new_ones(n)))
    elif len(wide):
        parts.append(Dense(scores[wide], scores.new_ones(len(wide)), wide))
    if size:
        parts.append(Sparse(rows, classes, values))
    return maximum, value, parts


def collect(
    level: str, scores: Tensor, num_classes: int, maximum: Tensor, origin: Tensor, cut: Tensor
) -> tuple[list[simplex.Candidates], Tensor]:
    """The native form of `ops.simplex.collect`: the classes with s - origin > cut, for rows that have few of them.

    For ranks that share the classes of a row: which of them can be in the support is decided by a bound that all ranks
    know, before any of them can finish the row.

    Args:
        level: of the native library, as `level_of` gives it.
        scores: (n, stride), of which the first num_classes columns are classes.
        num_classes: classes of this rank.
        maximum, origin, cut: (n, 1).

    Returns:
        Candidates of the rows with at most one class in `SPARSE` above the cut, and the other rows (m,).
    """
    n, stride = scores.shape
    count = torch.empty(n, dtype=torch.long)
    where = scores, n, stride, num_classes, origin.to(scores).contiguous(), cut.to(scores).contiguous()
    call(level, "count_above", scores, *where, count, threads=True)
    few = count * SPARSE <= num_classes  # counted first, so that the table below has as many columns as are needed
    rows, wide = few.nonzero().squeeze(1), (~few).nonzero().squeeze(1)
    if not len(rows):
        return [], wide
    width = max(1, int(count[rows].max()))
    place = torch.where(few, few.cumsum(0) - 1, -1)  # the rows that are taken are numbered; -1 leaves a row out
    found = scores.new_full((len(rows), width), -torch.inf)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    call(level, "gather_above", scores, *where, width, place, found, ids, threads=True)
    return [simplex.Candidates(rows, maximum[rows], found, ids)], wide
