"""Entmax of rows of scores in Triton, for every alpha in (1, 2]: one program finds the level of a row and its gradient.

With beta = alpha - 1 and d = s - max s a row has p = u^(1 / beta), u = max(0, w + beta d), and a level w at which the p
sum to 1; below beta = 1/4 it is kept as v = (w - 1) / beta. See ops/levels.py. The steps of a row are

    1. its maximum, and with it those of the lanes of the program, from which a bound of the level follows
    2. a level on one block of classes in 16; if it says that the support may be small, a list of the classes above the
       cut that belongs to the bound
    3. the level: over the list if all of it found room, and over the whole row if not, with Newton's steps in a bracket
    4. loss and gradient: as entries if the support is small, else in place of the scores

All of it is decided on the device. Alpha is a run-time argument: four kinds of power are compiled, whatever it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manymax.engine import triton_backend
from manymax.engine.blocks import Block, BlockResult, Listed
from manymax.engine.triton_backend import launch, plain
from manymax.engine.triton_levels import LINEAR, LOG_POWER, POWER, SQUARE, bound_of, level_of_row, power_terms
from manymax.engine.triton_rows import (
    append,
    inverse_of,
    load_scores,
    row_of,
    scale_entries,
    slope_of_cap,
    subtract_from_entries,
    subtract_from_row,
    sum_below_maximum,
)
from manymax.members.entmax.from_levels import grad_alpha
from manymax.members.entmax.statistics import statistics
from manymax.ops.checks import check_finite
from manymax.ops.levels import V_BELOW


@triton.jit
def slope_term(d, level, p, alpha, beta, KIND: tl.constexpr):
    """p ((u log u - (u - 1)) / beta^2 - (u - 1) / (alpha beta)) / alpha: d Omega(p) / d alpha of a class at fixed p."""
    y = beta * (level + d) if KIND == LOG_POWER else (level - 1) + beta * d
    y = tl.where(p > 0, y, 0.0)  # u - 1
    # Near u = 1 the terms of u log u - (u - 1) cancel down to y^2 / 2: there it is y^2 times the sum of
    # (-y)^(k - 2) / (k (k - 1)) for k from 2.
    near = tl.zeros_like(y)
    for j in tl.static_range(14):
        k = 15 - j
        near = 1.0 / (k * (k - 1)) - y * near
    u = tl.where(p > 0, 1 + y, 1.0)
    entropy = tl.where(tl.abs(y) < 0.1, y * y * near, u * tl.log(u) - y)
    return p * (entropy / (beta * beta) - y / (alpha * beta)) / alpha


@triton.jit
def plogp(p):
    """p log p, 0 for p = 0."""
    return tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)


@triton.jit
def finish_list(
    values,
    places,
    size,
    top,
    level,
    total,
    alpha,
    beta,
    inverse,
    KIND: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over the scores of a list, which become total x p, without those that are 0.

    Returns sum u p, sum p log p, the support, sum d Omega / d alpha, and the number of entries.
    """
    moment = tl.zeros([BLOCK], values.dtype.element_ty)
    entropy = tl.zeros([BLOCK], values.dtype.element_ty)
    slopes = tl.zeros([BLOCK], values.dtype.element_ty)
    support = tl.zeros([BLOCK], tl.int32)
    kept = 0
    for start in range(0, size, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        d = load_scores(values, lanes, size) - top
        u, p, _ = power_terms(d, level, beta, inverse, KIND)
        moment += u * p
        support += (p > 0).to(tl.int32)
        if STATS:
            entropy += plogp(p)
        if SLOPE:
            slopes += slope_term(d, level, p, alpha, beta, KIND)
        if GRADIENT:
            place = tl.load(places + lanes, mask=lanes < size, other=0)
            # All threads have read their part before any of it is overwritten.
            tl.debug_barrier()
            kept = append(values, places, kept, p * total, place, p > 0, size)
    return tl.sum(moment, 0), tl.sum(entropy, 0), tl.sum(support, 0), tl.sum(slopes, 0), kept


@triton.jit
def finish_row(
    row,
    classes,
    weights,
    class_weight,
    top,
    level,
    divisor,
    share,
    cap,
    alpha,
    beta,
    inverse,
    KIND: tl.constexpr,
    IDS: tl.constexpr,
    SHARE: tl.constexpr,
    CAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over a whole row, which becomes p - t / total, but for listed classes; `divisor` is 1 / total.

    Returns sum u p, sum p log p, the support, sum d Omega / d alpha, and sum_c t_c (s_c - max s) of a row without ids.
    """
    moment = tl.zeros([BLOCK], row.dtype.element_ty)
    entropy = tl.zeros([BLOCK], row.dtype.element_ty)
    slopes = tl.zeros([BLOCK], row.dtype.element_ty)
    inner = tl.zeros([BLOCK], row.dtype.element_ty)
    support = tl.zeros([BLOCK], tl.int32)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = load_scores(row, columns, classes)
        d = s - top
        u, p, _ = power_terms(d, level, beta, inverse, KIND)
        moment += u * p
        support += (p > 0).to(tl.int32)
        if STATS:
            entropy += plogp(p)
        if SLOPE:
            slopes += slope_term(d, level, p, alpha, beta, KIND)
        gradient = p
        if not IDS:
            weight = tl.load(weights + columns, mask=columns < classes, other=0.0)
            # Where there is no weight the score may be -inf.
            inner += tl.where(weight != 0, weight * d, 0.0)
            gradient -= weight * divisor
        if SHARE:
            gradient -= share * divisor * tl.load(class_weight + columns, mask=columns < classes, other=0.0)
        if CAP:
            gradient *= slope_of_cap(s, cap)
        if GRADIENT:
            tl.store(row + columns, gradient, mask=columns < classes)
    return tl.sum(moment, 0), tl.sum(entropy, 0), tl.sum(support, 0), tl.sum(slopes, 0), tl.sum(inner, 0)


@triton.jit(do_not_specialize=["classes", "positives", "capacity", "room"])
def entmax_rows(
    scores,
    stride,
    classes,
    ids,
    weights,
    positives,
    total,
    share,
    class_weight,
    amounts,
    coefficient,
    values,
    places,
    capacity,
    room,
    count,
    scale,
    losses,
    maxima,
    levels,
    entropies,
    supports,
    slopes,
    alpha: tl.float64,
    cap: tl.float64,
    tolerance: tl.float64,
    KIND: tl.constexpr,
    IDS: tl.constexpr,
    SHARE: tl.constexpr,
    CAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Loss, level, statistics and gradient of one row, which has all of its classes here."""
    r = tl.program_id(0)
    row = row_of(scores, r, stride)
    own_values, own_places = row_of(values, r, room), row_of(places, r, room)
    beta = tl.full([], alpha - 1, row.dtype.element_ty)
    inverse = tl.full([], 1 / (alpha - 1), row.dtype.element_ty)
    alpha = tl.full([], alpha, row.dtype.element_ty)
    cap = tl.full([], cap, row.dtype.element_ty)
    tolerance = tl.full([], tolerance, row.dtype.element_ty)
    maximum, bound = bound_of(row, classes, beta, inverse, KIND, BLOCK)
    level, size = level_of_row(
        row, classes, own_values, own_places, capacity, maximum, bound, tolerance, beta, inverse, KIND, BLOCK
    )
    own_ids, own_weights = row_of(ids, r, positives), row_of(weights, r, positives)
    row_total = tl.load(total + r)
    inner = tl.zeros([], row.dtype.element_ty)
    if IDS:
        inner = sum_below_maximum(row, own_ids, own_weights, positives, maximum, LANES)
        # The scores of all positives have been read before any of them is overwritten.
        tl.debug_barrier()
    factor = tl.load(coefficient + r) if GRADIENT else 0.0
    moment = tl.zeros([], row.dtype.element_ty)
    entropy, slope = moment, moment
    support, entries = 0, -1
    # Rows over all classes and smoothing give every class a part of the target: no entries.
    if IDS and not (SHARE and GRADIENT) and size <= capacity:
        moment, entropy, support, slope, entries = finish_list(
            *(own_values, own_places, size, maximum, level, row_total, alpha, beta, inverse),
            *(KIND, GRADIENT, STATS, SLOPE, BLOCK),
        )
        if GRADIENT:
            entries = subtract_from_entries(
                own_values, own_places, entries, own_ids, own_weights, positives, 1.0, BLOCK
            )
            scale_entries(row, own_values, own_places, entries, factor, cap, CAP, BLOCK)
    else:
        divisor = inverse_of(row_total)
        row_share = tl.load(share + r) if SHARE else 0.0
        moment, entropy, support, slope, found = finish_row(
            *(row, classes, own_weights, class_weight, maximum, level, divisor, row_share, cap, alpha, beta, inverse),
            *(KIND, IDS, SHARE, CAP, GRADIENT, STATS, SLOPE, BLOCK),
        )
        if not IDS:
            inner = found
        if GRADIENT and IDS:
            subtract_from_row(row, own_ids, row_of(amounts, r, positives), positives, divisor, LANES)
    v = level if KIND == LOG_POWER else (level - 1) * inverse
    # total (Omega*(s) - max s) - sum_i t_i (s_i - max s)
    tl.store(losses + r, row_total * ((moment - 1) / alpha - v) - inner)
    tl.store(maxima + r, maximum)
    tl.store(levels + r, level)
    if GRADIENT:
        tl.store(count + r, entries)
        tl.store(scale + r, factor * row_total)
    if STATS:
        tl.store(entropies + r, -entropy.to(tl.float64))
        tl.store(supports + r, support.to(tl.int64))
    if SLOPE:
        tl.store(slopes + r, slope.to(tl.float64))


def kind_of(alpha: float) -> int:
    """Which kind of power an alpha takes."""
    if alpha in (1.5, 2.0):
        return int((LINEAR if alpha == 2.0 else SQUARE).value)
    return int((POWER if alpha - 1 >= V_BELOW else LOG_POWER).value)


def block_entmax_triton(block: Block, alpha: float, wants_alpha: bool) -> BlockResult:
    """Losses, statistics and gradient of a block of scores (n, C'), which holds all classes of its rows."""
    target, scores, keywords = block.target, block.scores, block.keywords
    n, stride = scores.shape
    wants = target.coefficient is not None
    listed = target.ids is not None and target.share is None
    # Few numbers, and only where somebody needs them. For float rows `pick` is a view of the scores, hence the copy.
    picked = target.pick(scores).clone() if keywords.softcap is not None or keywords.stats else None
    weights = plain(target.weights, scores)
    capacity = block.num_classes // triton_backend.SPARSE
    # A positive outside of the support is an entry too.
    room = capacity + (weights.shape[1] if wants and listed else 0)
    part = Listed.empty(scores, room)
    losses, maxima, level = (scores.new_empty(n) for _ in range(3))
    entropy, slopes = (scores.new_empty(n, dtype=torch.float64) for _ in range(2))
    support = torch.empty_like(entropy, dtype=torch.long)
    launch(
        entmax_rows,
        (n,),
        *(scores, stride, block.num_classes, scores if target.ids is None else target.ids.contiguous(), weights),
        *(weights.shape[1], plain(target.total, scores), plain(target.share, scores)),
        *(plain(target.class_weight, scores), target.amounts(weights, picked, keywords.softcap)),
        *(plain(target.coefficient, scores), part.values, part.classes, capacity, room, part.count, part.scale),
        *(losses, maxima, level, entropy, support, slopes),
        *(float(alpha), float(keywords.softcap or 1.0), _tolerance(alpha, scores.dtype)),
        KIND=kind_of(alpha),
        IDS=target.ids is not None,
        SHARE=target.share is not None,
        CAP=keywords.softcap is not None,
        GRADIENT=wants,
        STATS=bool(keywords.stats),
        SLOPE=wants_alpha,
        BLOCK=triton_backend.BLOCK,
        LANES=triton_backend.POSITIVES,
    )
    check_finite(maxima)
    if target.share is not None:
        losses = losses - target.spread_part(maxima.unsqueeze(1), block.spread)
    stats = {}
    if picked is not None:
        stats = statistics(block, picked, maxima.unsqueeze(1), level, alpha, *_asked(block, entropy, support))
    grad = grad_alpha(target, slopes if wants_alpha else None)
    return BlockResult(losses, [part] if wants else [], grad, stats)


def _asked(block: Block, entropy: Tensor, support: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Entropy and support of the rows, where they are asked for."""
    wanted = block.keywords.stats
    return entropy if "entropy" in wanted else None, support if "support" in wanted else None


def _tolerance(alpha: float, dtype: torch.dtype) -> float:
    """How small the last step has to be, relative to the unit of the level."""
    eps = torch.finfo(dtype).eps
    # Up to alpha = 1.5 a step leaves an error of the order of its square; above, a class that drops out leaves more.
    return float(eps**0.6 if alpha <= 1.5 else 16 * eps)
