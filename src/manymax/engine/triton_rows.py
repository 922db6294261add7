"""Device functions that the Triton kernels of members share: rows of scores, their targets, and lists of entries.

One program works on one row. A pointer to a row is made from a 64-bit offset, because a block can have more than 2^31
scores; columns within a row are 32-bit numbers. What differs between lanes of a program is added up at the end of a
pass: sums over lanes are trees, so that float32 keeps its digits over millions of classes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(table, row, stride):
    """The pointer to a row of a table."""
    return table + tl.cast(row, tl.int64) * tl.cast(stride, tl.int64)


@triton.jit
def load_scores(row, columns, classes):
    """Scores of a row; -inf, like a masked class, from its end on."""
    return tl.load(row + columns, mask=columns < classes, other=float("-inf"))


@triton.jit
def slope_of_cap(scores, cap):
    """d s' / d s = 1 - (s' / c)^2 of capped scores; 1 at a masked class, whose gradient is 0 anyway."""
    part = tl.where(scores > float("-inf"), scores, 0.0) / cap
    return 1 - part * part


@triton.jit
def inverse_of(total):
    """1 / total, and 0 for a row without a positive: nothing is subtracted there."""
    return tl.where(total != 0, 1 / tl.where(total != 0, total, 1.0), 0.0)


@triton.jit
def log1p(y):
    """log(1 + y) with the digits of a small y."""
    # The rounding error of 1 + y is in both the logarithm and the divisor, and cancels.
    u = 1 + y
    moved = u - 1
    small = moved == 0
    return tl.where(small, y, tl.log(tl.where(u > 0, u, 1.0)) * (y / tl.where(small, 1.0, moved)))


@triton.jit
def subtract_from_row(row, ids, amounts, positives, factor, LANES: tl.constexpr):
    """Subtract factor x amount at the listed classes of a dense row, which the threads of the program have written.

    Padding has amount 0.
    """
    # A barrier makes what all threads wrote visible to each. The additions are atomic because a class may be listed
    # twice, in two lanes.
    tl.debug_barrier()
    for start in range(0, positives, LANES):
        lanes = start + tl.arange(0, LANES)
        amount = tl.load(amounts + lanes, mask=lanes < positives, other=0.0)
        id = tl.load(ids + lanes, mask=lanes < positives, other=0)
        tl.atomic_add(row + id, -amount * factor, mask=amount != 0, sem="relaxed")


@triton.jit
def subtract_from_entries(values, places, size, ids, amounts, positives, factor, LANES: tl.constexpr):
    """Subtract factor x amount of the listed classes from entries of a row; one without an entry gets it at the end.

    Args:
        values, places: entries of a row and their classes, `size` of them, with room for `positives` more.
        ids, amounts: of the listed classes; padding has amount 0.

    Returns:
        The number of entries.
    """
    for p in range(positives):
        amount = tl.load(amounts + p) * factor
        if amount != 0:
            # The entries written so far, also those of the turn before, must be visible to all threads.
            tl.debug_barrier()
            id = tl.load(ids + p).to(tl.int32)
            found = 0
            for start in range(0, size, LANES):
                lanes = start + tl.arange(0, LANES)
                here = (lanes < size) & (tl.load(places + lanes, mask=lanes < size, other=-1) == id)
                value = tl.load(values + lanes, mask=here, other=0.0)
                tl.store(values + lanes, value - amount, mask=here)
                found += tl.sum(here.to(tl.int32), 0)
            if found == 0:
                tl.store(values + size, -amount)
                tl.store(places + size, id)
                size += 1
    tl.debug_barrier()
    return size
