"""Softmax of rows of scores in Triton: losses and statistics in one read of the scores, gradients in one more.

The maximum and the sum of exponentials come from one pass, relative to the largest score so far: where a larger one is
met, the sum is multiplied by e^(old - new). The second pass writes

    total (1 + 2 c log Z) p - t,   divided by the total, which the products put on the queries

in place of the scores, with the target, label smoothing and the slope of a soft cap in it. With `LINK` a score s stands
for log sigma(s - b) / tau, whose softmax is taken and whose slope sigma(b - s) / tau is in the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine import triton_backend
from manymax.engine.blocks import Block, BlockResult, Dense
from manymax.engine.row_target import RowTarget
from manymax.engine.statistics import target_statistics
from manymax.engine.triton_backend import launch, plain
from manymax.engine.triton_rows import inverse_of, load_scores, row_of, slope_of_cap, subtract_from_row
from manymax.ops.checks import check_finite


@triton.jit
def linked(scores, bound, tau, LINK: tl.constexpr):
    """What softmax is taken of: the scores, or log sigma(s - b) / tau."""
    if LINK:
        x = scores - bound
        return (tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))) / tau
    return scores


@triton.jit
def slope_of_link(scores, bound, tau):
    """sigma(b - s) / tau, 0 at a masked class."""
    x = tl.where(scores > float("-inf"), bound - scores, float("-inf"))
    small = tl.exp(-tl.abs(x))  # of the two forms of the function the one that cannot overflow
    return tl.where(x > 0, 1.0, small) / (1 + small) / tau


@triton.jit
def exponential_sums(row, classes, bound, tau, LINK: tl.constexpr, MOMENT: tl.constexpr, BLOCK: tl.constexpr):
    """One read of a row: its maximum m, sum e^(s - m), sum e^(s - m) (s - m), and the number of live classes.

    The maximum is nan where a score is nan, and -inf where every class is masked.
    """
    # Each lane has a maximum and sums of its own, which are brought together at the end.
    top = tl.full([BLOCK], float("-inf"), row.dtype.element_ty)
    total = tl.zeros([BLOCK], row.dtype.element_ty)
    moment = tl.zeros([BLOCK], row.dtype.element_ty)
    live = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, classes, BLOCK):
        s = linked(load_scores(row, start + tl.arange(0, BLOCK), classes), bound, tau, LINK)
        alive = s > float("-inf")
        d = s - top
        # One exponential per score: of the smaller of the two relative to the larger.
        e = tl.exp(-tl.abs(d))
        higher = d > 0
        if MOMENT:
            gap = tl.where(top > float("-inf"), d, 0.0)
            moved = tl.where(higher, e * (moment - total * gap), moment + e * gap)
            moment = tl.where(alive, moved, moment)
        total = tl.where(alive, tl.where(higher, total * e + 1, total + e), total)
        top = tl.maximum(top, s)
        live += alive.to(tl.int32)
        nan |= (s != s).to(tl.int32)
    maximum = tl.max(top, 0)
    below = tl.where(top > float("-inf"), top - maximum, 0.0)
    factor = tl.exp(below)
    sum_of_moments = tl.sum(factor * (moment + total * below), 0)
    is_nan = tl.max(nan, 0) > 0
    largest = tl.where(is_nan, float("nan"), maximum)
    return largest, tl.sum(factor * total, 0), sum_of_moments, tl.sum(live, 0)


@triton.jit
def positive_part(row, ids, weights, positives, maximum, bound, tau, LINK: tl.constexpr, LANES: tl.constexpr):
    """sum_i t_i (s_i - max s) over the listed classes: only differences of scores, whatever their offset is."""
    part = tl.zeros([LANES], row.dtype.element_ty)
    for start in range(0, positives, LANES):
        lanes = start + tl.arange(0, LANES)
        weight = tl.load(weights + lanes, mask=lanes < positives, other=0.0)
        id = tl.load(ids + lanes, mask=lanes < positives, other=0)
        s = linked(tl.load(row + id, mask=weight != 0, other=0.0), bound, tau, LINK)
        part += tl.where(weight != 0, weight * (s - maximum), 0.0)
    return tl.sum(part, 0)


@triton.jit
def write_gradient(
    row,
    classes,
    weights,
    class_weight,
    maximum,
    factor,
    inverse,
    share,
    cap,
    bound,
    tau,
    IDS: tl.constexpr,
    SHARE: tl.constexpr,
    CAP: tl.constexpr,
    LINK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """factor e^(s - m) - t / total in place of a row, but for listed classes; returns sum_c t_c (s_c - m) without ids.

    Args:
        weights: (classes,) target weights of the row, if it has no ids. class_weight: (classes,), with a share.
        factor: the probability of the largest score, and what a z_loss makes of it. inverse: 1 / total.
    """
    inner = tl.zeros([BLOCK], row.dtype.element_ty)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = load_scores(row, columns, classes)
        x = linked(s, bound, tau, LINK)
        gradient = factor * tl.exp(x - maximum)
        if not IDS:
            weight = tl.load(weights + columns, mask=columns < classes, other=0.0)
            # Where there is no weight the score may be -inf.
            inner += tl.where(weight != 0, weight * (x - maximum), 0.0)
            gradient -= weight * inverse
        if SHARE:
            gradient -= share * inverse * tl.load(class_weight + columns, mask=columns < classes, other=0.0)
        if LINK:
            gradient *= slope_of_link(s, bound, tau)
        if CAP:
            gradient *= slope_of_cap(s, cap)
        if GRADIENT:
            tl.store(row + columns, gradient, mask=columns < classes)
    return tl.sum(inner, 0)


@triton.jit(do_not_specialize=["classes", "positives"])
def softmax_rows(
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
    bounds,
    losses,
    maxima,
    log_sums,
    moments,
    support,
    z_loss: tl.float64,
    cap: tl.float64,
    tau: tl.float64,
    IDS: tl.constexpr,
    SHARE: tl.constexpr,
    CAP: tl.constexpr,
    LINK: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Loss, maximum, log Z, statistics and gradient of one row, which has all of its classes here."""
    r = tl.program_id(0)
    row, own_ids, own_weights = row_of(scores, r, stride), row_of(ids, r, positives), row_of(weights, r, positives)
    z_loss = tl.full([], z_loss, row.dtype.element_ty)
    cap = tl.full([], cap, row.dtype.element_ty)
    tau = tl.full([], tau, row.dtype.element_ty)
    bound = tl.load(bounds + r) if LINK else 0.0
    maximum, sums, moment, live = exponential_sums(row, classes, bound, tau, LINK, STATS, BLOCK)
    log_sum = tl.log(sums)
    log_z = maximum + log_sum
    row_total = tl.load(total + r)
    inverse = inverse_of(row_total)
    factor = (1 + 2 * z_loss * log_z) / sums
    inner = tl.zeros([], scores.dtype.element_ty)
    if IDS:
        inner = positive_part(row, own_ids, own_weights, positives, maximum, bound, tau, LINK, LANES)
        # The scores of all positives have been read before any of them is overwritten.
        tl.debug_barrier()
    if GRADIENT or not IDS:
        row_share = tl.load(share + r) if SHARE else 0.0
        found = write_gradient(
            row,
            classes,
            own_weights,
            class_weight,
            maximum,
            factor,
            inverse,
            row_share,
            cap,
            bound,
            tau,
            IDS,
            SHARE,
            CAP,
            LINK,
            GRADIENT,
            BLOCK,
        )
        if not IDS:
            inner = found
    if GRADIENT and IDS:
        subtract_from_row(row, own_ids, row_of(amounts, r, positives), positives, inverse, LANES)
    tl.store(losses + r, row_total * (log_sum + z_loss * log_z * log_z) - inner)
    tl.store(maxima + r, maximum)
    # Apart in float32, the sum has the digits of both in float64.
    tl.store(log_sums + r, maximum.to(tl.float64) + log_sum.to(tl.float64))
    if STATS:
        tl.store(moments + r, moment / sums - log_sum)  # sum p log p
        tl.store(support + r, live.to(tl.int64))


@triton.jit(do_not_specialize=["classes"])
def parts_of_rows(scores, stride, classes, maxima, sums, moments, MOMENT: tl.constexpr, BLOCK: tl.constexpr):
    """The softmax over the classes of this rank in place of a row; its maximum, sum of exponentials and sum p log p."""
    r = tl.program_id(0)
    row = row_of(scores, r, stride)
    maximum, total, moment, _ = exponential_sums(row, classes, 0.0, 1.0, False, MOMENT, BLOCK)
    # All classes of the row may be masked on this rank: then the sum is 1, and every probability 0.
    total = tl.where(maximum > float("-inf"), total, 1.0)
    offset = tl.where(maximum > float("-inf"), maximum, 0.0)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        probs = tl.exp(load_scores(row, columns, classes) - offset) / total
        tl.store(row + columns, probs, mask=columns < classes)
    tl.store(maxima + r, maximum)
    tl.store(sums + r, total.to(tl.float64))
    if MOMENT:
        tl.store(moments + r, (moment / total - tl.log(total)).to(tl.float64))


class LogSigmoid(NamedTuple):
    """What softmax is taken of, where that is log sigma(s - b) / tau. bound: (n, 1) b. tau: the divisor."""

    bound: Tensor
    tau: float

    def values(self, scores: Tensor) -> Tensor:
        """log sigma(s - b) / tau of scores (n, P)."""
        return logsigmoid(scores - self.bound) / self.tau

    def slopes(self, scores: Tensor) -> Tensor:
        """Its derivative."""
        return torch.sigmoid(self.bound - scores) / self.tau


def block_softmax_triton(block: Block, link: LogSigmoid | None = None) -> BlockResult:
    """Losses, statistics and gradient of a block of scores (n, C'), which holds all classes of its rows."""
    target, scores, keywords = block.target, block.scores, block.keywords
    n, stride = scores.shape
    # Few numbers, and only where somebody needs them. For float rows `pick` is a view of the scores, hence the copy.
    needed = keywords.softcap is not None or link is not None or bool(keywords.stats)
    picked = target.pick(scores).clone() if needed else None
    losses, maxima, moments = (scores.new_empty(n) for _ in range(3))
    log_sums = scores.new_empty(n, dtype=torch.float64)
    support = target.weights.new_empty(n, dtype=torch.long)
    weights = plain(target.weights, scores)
    cap, tau = keywords.softcap or 1.0, 1.0 if link is None else link.tau
    launch(
        softmax_rows,
        (n,),
        *(scores, stride, block.num_classes, scores if target.ids is None else target.ids.contiguous(), weights),
        *(weights.shape[1], plain(target.total, scores), plain(target.share, scores)),
        *(plain(target.class_weight, scores), _amounts(target, weights, picked, keywords.softcap, link)),
        *(plain(None if link is None else link.bound, scores), losses, maxima, log_sums, moments, support),
        *(float(keywords.z_loss), float(cap), float(tau)),
        IDS=target.ids is not None,
        SHARE=target.share is not None,
        CAP=keywords.softcap is not None,
        LINK=link is not None,
        GRADIENT=target.coefficient is not None,
        STATS=bool(keywords.stats),
        BLOCK=triton_backend.BLOCK,
        LANES=triton_backend.POSITIVES,
    )
    check_finite(maxima)
    if target.share is not None:
        losses = losses - target.spread_part(maxima.unsqueeze(1), block.spread)
    result = BlockResult(losses, log_sums=log_sums.unsqueeze(1))
    if target.coefficient is not None:
        result.parts.append(Dense(scores, target.row_coefficient))
    if keywords.stats and picked is not None:
        values = picked if link is None else link.values(picked)
        log_probs = values.double() - log_sums.unsqueeze(1)
        found = target_statistics(keywords.stats, target, log_probs, block.ranks.sum)
        known = found | {"log_z": log_sums, "entropy": -moments, "support": support}
        result.stats = {name: known[name] for name in keywords.stats if name in known}
    return result


def _amounts(
    target: RowTarget, weights: Tensor, picked: Tensor | None, softcap: float | None, link: LogSigmoid | None
) -> Tensor:
    """What is subtracted at the listed classes: their weights, times the slopes of what the scores went through."""
    if target.ids is None or picked is None:
        return weights
    if link is not None:
        weights = weights * torch.where(weights != 0, link.slopes(picked), 0)
    if softcap is not None:
        weights = weights * torch.where(weights != 0, 1 - (picked / softcap).square(), 0)
    return weights.contiguous()


def sum_in_place_triton(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Maxima (n, 1), sums of exponentials (n,) and sums of p log p (n,); the softmax over this rank's classes in place.

    As `_sum_in_place` of kernel.py, which this is for.
    """
    scores, n = block.scores, len(block.scores)
    maxima = scores.new_empty(n, 1)
    sums, moments = scores.new_empty(n, dtype=torch.float64), scores.new_empty(n, dtype=torch.float64)
    wanted = "entropy" in block.keywords.stats
    launch(
        parts_of_rows,
        (n,),
        *(scores, scores.shape[1], block.num_classes, maxima, sums, moments),
        MOMENT=wanted,
        BLOCK=triton_backend.BLOCK,
    )
    return maxima, sums, moments if wanted else None
