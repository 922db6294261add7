"""Device functions that the Triton kernels of members share: rows of scores, their targets, and lists of entries.

One program works on one row. A pointer to a row is made from a 64-bit offset, because a block can have more than 2^31
scores; columns within a row are 32-bit numbers. What differs between lanes of a program is added up at the end of a
pass: sums over lanes are trees, so that float32 keeps its digits over millions of classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below this the series of 1 - exp(-y) is taken; the terms that are left out are 3e-12 of it at most.
SMALL = tl.constexpr(0.05)


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
def one_minus_exp(y):
    """1 - exp(-y) with the digits of a small y."""
    series = y * (1 - y / 2 * (1 - y / 3 * (1 - y / 4 * (1 - y / 5 * (1 - y / 6)))))
    return tl.where(tl.abs(y) < SMALL, series, 1 - tl.exp(-y))


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


@triton.jit
def append(values, places, size, numbers, columns, chosen, capacity):
    """Append the chosen numbers and their columns to a list; returns its size, which counts what found no room too."""
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > 0:
        at = size + tl.cumsum(chosen.to(tl.int32), 0) - 1
        room = chosen & (at < capacity)
        tl.store(values + at, numbers, mask=room)
        tl.store(places + at, columns, mask=room)
    return size + count


@triton.jit
def gather_above(row, classes, values, places, capacity, origin, cut, BLOCK: tl.constexpr):
    """The scores of a row above origin + cut, and their classes, as a list; returns how many there are."""
    size = 0
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = load_scores(row, columns, classes)
        # The difference first: the sum would be rounded to the origin where scores are large.
        size = append(values, places, size, s, columns, s - origin > cut, capacity)
    tl.debug_barrier()
    return size


@triton.jit
def gather_near_maximum(row, classes, values, places, capacity, reach, BLOCK: tl.constexpr):
    """The maximum of a row, and a list of scores that holds all that are less than `reach` below it; one read.

    What is listed was near the largest score so far, so that the list may hold more. The maximum is nan where a score
    is nan. Returns the maximum and the size of the list.
    """
    top = tl.full([], float("-inf"), row.dtype.element_ty)
    nan = tl.zeros([BLOCK], tl.int32)
    size = 0
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = load_scores(row, columns, classes)
        nan |= (s != s).to(tl.int32)
        top = tl.maximum(top, tl.max(s, 0))
        size = append(values, places, size, s, columns, (s > float("-inf")) & (s - top > -reach), capacity)
    tl.debug_barrier()
    return tl.where(tl.max(nan, 0) > 0, float("nan"), top), size


@triton.jit
def sum_below_maximum(row, ids, weights, positives, maximum, LANES: tl.constexpr):
    """sum_i t_i (s_i - max s) over the listed classes: only differences of scores, whatever their offset is."""
    part = tl.zeros([LANES], row.dtype.element_ty)
    for start in range(0, positives, LANES):
        lanes = start + tl.arange(0, LANES)
        weight = tl.load(weights + lanes, mask=lanes < positives, other=0.0)
        id = tl.load(ids + lanes, mask=lanes < positives, other=0)
        s = tl.load(row + id, mask=weight != 0, other=0.0)
        part += tl.where(weight != 0, weight * (s - maximum), 0.0)
    return tl.sum(part, 0)


@triton.jit
def scale_entries(row, values, places, size, factor, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply entries by a factor, and under a soft cap by the slopes at their scores, which the row still holds."""
    for start in range(0, size, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        value = tl.load(values + lanes, mask=lanes < size, other=0.0) * factor
        if CAP:
            place = tl.load(places + lanes, mask=lanes < size, other=0)
            value *= slope_of_cap(tl.load(row + place, mask=lanes < size, other=0.0), cap)
        tl.store(values + lanes, value, mask=lanes < size)
