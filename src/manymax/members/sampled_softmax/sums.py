"""Sums over the logits of a sample, on one rank or on many, and two corrections of the bias of their logarithm.

Citation: jackknife, Quenouille 1956.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import SampledScores
from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def sampled_log_sum(positive: Tensor, negative: Tensor, ranks: Ranks, with_positive: bool = True) -> Tensor:
    """log(exp(c_y) + sum_j exp(c_j)) over the negatives of all ranks, (...), a shared value; c_y may be left out."""
    if ranks.alone:
        every = torch.cat([positive.unsqueeze(-1), negative], -1) if with_positive else negative
        return every.logsumexp(-1)
    # Relative to the maximum over all ranks no exponential exceeds 1, and the largest is 1: nothing overflows, and the
    # sum cannot vanish. The positive is finite, so the maximum is finite although all negatives may be masked; nan or
    # +inf on one rank reaches all of them, which then raise the same error.
    top = ranks.maximum(torch.maximum(positive.detach(), negative.detach().amax(-1)))
    if visible(top) and not top.isfinite().all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {top[~top.isfinite()][0].item()}."
        )
    # Every rank has the positive: inside of the sum over the ranks it would be counted once per rank.
    total = ranks.total((negative - top.unsqueeze(-1)).exp().sum(-1))
    return (((positive - top).exp() + total) if with_positive else total).log() + top


def delta(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """Var(X) / (2 k Z^2), (...): the bias of log Z that comes from the curvature of the logarithm, estimated.

    The estimate of Z is exp(c_y) + mean_j X_j over k draws X_j, with X_j / Z = k softmax(c)_j. A masked hit is a draw
    with X_j = 0.
    """
    k, ranks = sample.num_negatives, sample.ranks
    log_sum = sampled_log_sum(positive, negative, ranks)
    # Ratios instead of X and Z themselves, which overflow for large scores. `log_sum` and `mean` are shared values in
    # formulas about the negatives of this rank: `spread` adds their gradients up over the ranks.
    ratios = k * (negative - ranks.spread(log_sum).unsqueeze(-1)).exp()
    mean = ranks.total(ratios.sum(-1)) / k
    # Two passes, mean first: mean(X^2) - mean(X)^2 would cancel where the terms are nearly equal. Columns that only
    # fill up a row of this rank would add mean^2 each.
    difference = _zero_padding(ratios - ranks.spread(mean).unsqueeze(-1), sample)
    return ranks.total(difference.square().sum(-1)) / (k - 1) / (2 * k)


def jackknife(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """(k - 1) / k sum_j (log Z - log Z_j), (...): what the jackknife adds to log Z.

    Z_j is the estimate of Z from the k - 1 draws other than j, each of which then has the weight 1 / (k - 1).
    """
    k, ranks = sample.num_negatives, sample.ranks
    reweighted = negative + math.log(k / (k - 1))  # logits with weight 1 / (k - 1) instead of 1 / k
    largest = _largest(negative, ranks)
    log_z, log_all = sampled_log_sum(positive, negative, ranks), sampled_log_sum(positive, reweighted, ranks)
    # Z_j is the sum over all draws minus term j, log Z_j = log_all + log(1 - share_j): k sums at the price of one. For
    # any j but the largest the share is at most 1/2, and nothing cancels. The largest term can be nearly all of the
    # sum, and the difference would have no digits left: the sum without it is taken anew.
    log_without_largest = sampled_log_sum(positive, torch.where(largest, -torch.inf, reweighted), ranks)
    local_log_all = ranks.spread(log_all).unsqueeze(-1)
    # The share of the largest is set to 0 before the logarithm: both branches of `where` are differentiated, and
    # log(1 - 1) in the one that is not used would make the gradient nan.
    shares = torch.where(largest, 0, (reweighted - local_log_all).exp())
    log_z_without = torch.where(
        largest, ranks.spread(log_without_largest).unsqueeze(-1), local_log_all + torch.log1p(-shares)
    )
    differences = _zero_padding(ranks.spread(log_z).unsqueeze(-1) - log_z_without, sample)
    return (k - 1) / k * ranks.total(differences.sum(-1))


def _largest(negative: Tensor, ranks: Ranks) -> Tensor:
    """(..., K) bool, True at the largest negative of each row: at one place, on one of the ranks."""
    best, column = negative.detach().max(-1, keepdim=True)
    largest = torch.arange(negative.shape[-1], device=negative.device) == column
    if ranks.alone:
        return largest
    # A rank whose best is the best of all ranks bids minus its number, the others bid less than any rank can: the
    # highest bid is that of the first such rank. Two exchanges of one number per row (and its mark).
    owner = -ranks.maximum(torch.where(best == ranks.maximum(best), -float(ranks.rank), -float(ranks.size)))
    return largest & (owner == ranks.rank)


def _zero_padding(values: Tensor, sample: SampledScores) -> Tensor:
    """The values (..., K), with 0 in the columns that are no draws: on several ranks rows are padded to one length.

    Draws that are masked stay: they count as draws with weight 0.
    """
    return values if sample.own is None else torch.where(sample.own, values, 0)
