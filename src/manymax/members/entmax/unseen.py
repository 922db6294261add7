"""Entmax on a device without a kernel of its own: whole rows, and a search whose number of steps is fixed.

A search that ends when all rows are done asks the device after every step, and the host waits for the answer; looking
for the few classes above a cut asks how many there are. Here nothing is asked. That Newton's method needs few steps is
usual and not certain, so that every row has a bracket, lo <= level <= hi, which is halved wherever a step of Newton's
leaves it or gains too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.blocks import Block, BlockResult, piece_size
from manymax.engine.ranks import Ranks, columns
from manymax.members.entmax.autograd import omega_slope
from manymax.members.entmax.from_levels import bases_and_probs_, conjugate_of, dense_gradient, grad_alpha
from manymax.members.entmax.level_search import Piece, plain_sums
from manymax.members.entmax.statistics import add_statistics, statistics, wanted_sums
from manymax.ops import levels, simplex
from manymax.ops.checks import check_finite
from manymax.ops.row_blocks import row_blocks

# Steps over the maxima of groups of 16 classes, which cost a sixteenth each, and over whole rows.
GROUP_STEPS, ROW_STEPS = 10, 8
LEAST_TOP = -math.log(2**31)  # of the log of the largest probability: that of more classes than a row can have
GAIN = 0.5  # of the excess F - 1 at least this part must go in a step, as long as it is above `SMALL_EXCESS`
SMALL_EXCESS = 1e-3


def unseen_rows(block: Block, positive_scores: Tensor, alpha: float, wants_alpha: bool) -> BlockResult:
    """The result of a block on one rank or on several, without a look at its values; arguments as in the kernel."""
    target, scores, ranks, beta = block.target, block.scores, block.ranks, alpha - 1
    maximum = ranks.maximum(scores.amax(1, keepdim=True))
    check_finite(maximum)
    inner = target.inner(positive_scores, maximum, block.spread)
    # The difference comes first in every formula: s + level would be rounded to s where the scores have a large offset.
    d = scores.sub_(maximum)
    pieces = [Piece(rows, d[rows]) for rows in row_blocks(d.shape[0], d.shape[1], piece_size(d))]
    level = _levels(d, pieces, beta, ranks)
    moment = torch.zeros_like(level)
    slopes, alpha_tensor = torch.zeros_like(level), torch.tensor(alpha, dtype=torch.float64)
    entropy, support = wanted_sums(block)
    for rows, part in pieces:
        u, probs = bases_and_probs_(part, level[rows].to(part.dtype), beta)  # in place: `d` holds probabilities then
        moment[rows] = u.mul_(probs).sum(1, keepdim=True, dtype=torch.float64)
        add_statistics(probs, rows, entropy, support)
        if wants_alpha:
            slopes[rows] = omega_slope(probs.double(), alpha_tensor)
    # What the losses need of all ranks: sum u p and sum_i t_i (s_i - max s).
    sums, inner = ranks.sum(columns(moment.squeeze(1), inner)).unbind(1)
    losses = target.total * conjugate_of(sums, level.squeeze(1), alpha) - inner
    result = BlockResult(losses.to(scores.dtype))
    if target.coefficient is not None:
        result.parts.append(dense_gradient(target, d, torch.arange(len(d), device=d.device)))
    result.grad_setting = grad_alpha(target, slopes.squeeze(1) if wants_alpha else None)
    result.stats = statistics(block, positive_scores, maximum, level.squeeze(1), alpha, entropy, support)
    return result


def _levels(d: Tensor, pieces: list[Piece], beta: float, ranks: Ranks) -> Tensor:
    """The level of each row, (n, 1) in float64, from d = s - max s (n, C') of the classes of this rank."""
    # The level of a row lies between those of equal probabilities and of a single class; the same on every rank.
    low, high = (
        levels.level_from_log_top(d.new_full((len(d), 1), top, dtype=torch.float64), beta) for top in (LEAST_TOP, 0.0)
    )
    tops = plain_sums([], [Piece(slice(None), simplex.group_maxima(d))], beta)
    # Over some of the classes the level is above that over all of them, and near it where these are the support.
    start = _search(lambda level: tops(level, 1), high, low, high, GROUP_STEPS, beta, ranks)
    sums = plain_sums([], pieces, beta)
    return _search(lambda level: sums(level, 1), start, low, high, ROW_STEPS, beta, ranks)


def _search(
    sums: Callable[[Tensor], Tensor], level: Tensor, low: Tensor, high: Tensor, steps: int, beta: float, ranks: Ranks
) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1), in a fixed number of steps.

    Args:
        sums: F = sum p and A = sum p^(1 - beta) at a level, over the classes of this rank, (n, 2).
        level: (n, 1) where the search begins.
        low, high: (n, 1), between which the level is.
        steps: evaluations of the sums.
        beta: alpha - 1.
        ranks: the ranks that share the classes; all of them take the same steps.
    """
    excess = torch.full_like(level, torch.inf)
    for _ in range(steps):
        total, slope = ranks.sum(sums(level)).split(1, 1)
        above = total >= 1
        high, low = torch.where(above, level, high), torch.where(above, low, level)
        gap = -levels.scaled_expm1(-total.log(), beta)  # (1 - F^-beta) / beta; see ops/levels.py
        step = total * gap / slope if levels.level_is_v(beta) else beta * total * gap / slope
        newton = level - step
        # From below a step may go far above the level, and from above steps may be many where classes leave the support
        # one by one: both are halved instead. A row of nan is nan whatever is done.
        slow = above & (total - 1 > (GAIN * excess).clamp(min=SMALL_EXCESS))
        inside = (newton >= low) & (newton <= high)
        excess = torch.where(above, total - 1, excess)
        level = torch.where(inside & ~slow, newton, (low + high) / 2)
    return level
