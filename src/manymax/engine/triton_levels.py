"""Device functions that find the level of a row of scores, from which all of its probabilities follow.

As in ops/levels.py: with beta = alpha - 1 and d = s - max s a row has p = u^(1 / beta), u = max(0, w + beta d), and a
level w at which the p sum to 1; below beta = 1/4 it is kept as v = (w - 1) / beta. A program finds it without a sort:
by Newton's steps in a bracket, over a list of the classes that can have p > 0 where that is short.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manymax.engine.triton_rows import gather_above, load_scores, log1p, one_minus_exp

# Kinds of power: p = u, p = u^2, any other, and any other with the level kept as v.
LINEAR, SQUARE, POWER, LOG_POWER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
STEP_LIMIT = tl.constexpr(60)  # about 6 are taken; no loop may run forever, whatever the scores are
BOUND_STEPS = tl.constexpr(8)  # over the maxima of the lanes, which are in registers
BLOCKS_PER_SAMPLE = tl.constexpr(16)  # one block in so many is a sample
CUT_SLACK = tl.constexpr(1e-5)  # by how much a cut is lowered for the rounding of the level: no class gets lost
SMALLEST = tl.constexpr(1e-30)  # a base of which every power counts as 0


@triton.jit
def power_terms(d, level, beta, inverse, KIND: tl.constexpr):
    """u, p and p / u of d = s - max s at a level; all of them 0 outside of the support. `inverse` is 1 / beta."""
    if KIND == LINEAR:
        u = tl.maximum(level + d, 0.0)
        return u, u, (u > 0).to(u.dtype)
    if KIND == SQUARE:
        u = tl.maximum(level + 0.5 * d, 0.0)
        return u, u * u, u
    # The sum first: w + beta d would round digits of v away.
    y = beta * (level + d) if KIND == LOG_POWER else level + beta * d - 1
    u = 1 + y if KIND == LOG_POWER else level + beta * d
    inside = u > SMALLEST
    kept = tl.where(inside, u, 1.0)
    log_u = log1p(tl.where(inside, y, 0.0)) if KIND == LOG_POWER else tl.log(kept)
    p = tl.where(inside, tl.exp(log_u * inverse), 0.0)
    return tl.where(inside, u, 0.0), p, p / kept


@triton.jit
def highest_level(like, KIND: tl.constexpr):
    """The level of a row with a single class, above that of every other."""
    return tl.full([], 0.0 if KIND == LOG_POWER else 1.0, like.dtype)


@triton.jit
def lowest_level(like, classes, beta, inverse, KIND: tl.constexpr):
    """The level of twice as many equal classes as the row has, below that of the row."""
    lost = one_minus_exp(beta * tl.log(2 * tl.full([], classes, like.dtype)))
    return -lost * inverse if KIND == LOG_POWER else 1 - lost


@triton.jit
def unit_of(level, KIND: tl.constexpr):
    """What an error of a level is relative to: w can be small, v reaches 0."""
    return tl.abs(level) + 1 if KIND == LOG_POWER else level


@triton.jit
def cut_of(level, inverse, KIND: tl.constexpr):
    """Classes with p > 0 at a level, or at one that is slightly higher, have d above this."""
    higher = level + CUT_SLACK * unit_of(level, KIND)
    return -inverse - higher if KIND == LOG_POWER else -inverse * higher


@triton.jit
def newton_step(total, slope, beta, inverse, KIND: tl.constexpr):
    """How far a step of Newton's towards F^beta = 1 lowers the level, from F = sum p and A = sum p / u."""
    if KIND == LINEAR:
        return (total - 1) / slope
    step = total * one_minus_exp(beta * tl.log(total)) / slope
    return step * inverse if KIND == LOG_POWER else step


@triton.jit
def sums_at(numbers, size, step, top, level, beta, inverse, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """F = sum p, A = sum p / u and how many p > 0, over the blocks that begin every `step` of the numbers."""
    total = tl.zeros([BLOCK], numbers.dtype.element_ty)
    slope = tl.zeros([BLOCK], numbers.dtype.element_ty)
    inside = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, step):
        # The difference comes first: s + level would be rounded to s where the scores have a large offset.
        d = load_scores(numbers, start + tl.arange(0, BLOCK), size) - top
        _, p, a = power_terms(d, level, beta, inverse, KIND)
        total += p
        slope += a
        inside += (p > 0).to(tl.int32)
    return tl.sum(total, 0), tl.sum(slope, 0), tl.sum(inside, 0)


@triton.jit
def search(
    numbers, size, step, mass, top, start, low, high, tolerance, beta, inverse, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """The level between `low` and `high` at which the p sum to `mass`, and the size of the support one step before.

    Newton's steps; from below one may go far above the level, and from above there may be many, where classes leave the
    support one by one: then the bracket is halved.
    """
    level = start
    excess = tl.full([], float("inf"), start.dtype)
    change = tl.full([], float("inf"), start.dtype)
    support = 0
    steps = 0
    while (change > tolerance) & (steps < STEP_LIMIT):  # ends for nan
        total, slope, support = sums_at(numbers, size, step, top, level, beta, inverse, KIND, BLOCK)
        total /= mass
        above = total >= 1
        high = tl.where(above, level, high)
        low = tl.where(above, low, level)
        newton = level - newton_step(total, slope / mass, beta, inverse, KIND)
        slow = above & (total - 1 > tl.maximum(0.5 * excess, 1e-3))
        chosen = (newton >= low) & (newton <= high) & (slow == 0)
        excess = tl.where(above, total - 1, excess)
        new = tl.where(chosen, newton, 0.5 * (low + high))
        change = tl.abs(new - level) / unit_of(new, KIND)
        level = new
        steps += 1
    return level, support


@triton.jit
def bound_of(row, classes, beta, inverse, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum of a row, nan where a score is, and a level above its own: that over the maxima of the lanes.

    Leaving classes out of the sum can only raise the level at which it is 1.
    """
    tops = tl.full([BLOCK], float("-inf"), row.dtype.element_ty)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, classes, BLOCK):
        s = load_scores(row, start + tl.arange(0, BLOCK), classes)
        tops = tl.maximum(tops, s)
        nan |= (s != s).to(tl.int32)
    maximum = tl.where(tl.max(nan, 0) > 0, float("nan"), tl.max(tops, 0))
    level = highest_level(maximum, KIND)
    for _ in range(BOUND_STEPS):  # from above, where Newton's steps stay
        _, p, a = power_terms(tops - maximum, level, beta, inverse, KIND)
        level -= tl.maximum(newton_step(tl.sum(p, 0), tl.sum(a, 0), beta, inverse, KIND), 0.0)
    # Rounding must not take the bound below the level.
    return maximum, tl.minimum(level + CUT_SLACK * unit_of(level, KIND), highest_level(maximum, KIND))


@triton.jit
def sample_size(classes, BLOCK: tl.constexpr):
    """How many classes a sample has."""
    last = (tl.cdiv(classes, BLOCKS_PER_SAMPLE * BLOCK) - 1) * BLOCKS_PER_SAMPLE
    return last // BLOCKS_PER_SAMPLE * BLOCK + tl.minimum(BLOCK, classes - last * BLOCK)


@triton.jit
def level_of_row(
    row,
    classes,
    values,
    places,
    capacity,
    maximum,
    bound,
    tolerance,
    beta,
    inverse,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The level of a row; and the size of the list that then holds its support, above `capacity` if there is none."""
    low = lowest_level(maximum, classes, beta, inverse, KIND)
    portion = tl.full([], sample_size(classes, BLOCK), maximum.dtype) / classes
    level, inside = search(
        row, classes, BLOCKS_PER_SAMPLE * BLOCK, portion, maximum, bound, low, bound, 0.1, beta, inverse, KIND, BLOCK
    )
    size = capacity + 1
    if inside <= 2 * capacity * portion:
        size = gather_above(row, classes, values, places, capacity, maximum, cut_of(bound, inverse, KIND), BLOCK)
    if size <= capacity:
        level, _ = search(values, size, BLOCK, 1.0, maximum, bound, low, bound, tolerance, beta, inverse, KIND, BLOCK)
    else:
        level, support = search(
            row, classes, BLOCK, 1.0, maximum, level, low, bound, tolerance, beta, inverse, KIND, BLOCK
        )
        if support <= capacity:
            size = gather_above(row, classes, values, places, capacity, maximum, cut_of(level, inverse, KIND), BLOCK)
    return level, size
