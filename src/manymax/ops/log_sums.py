"""The logarithm of a sum of independent draws: its exact mean and variance, and when the Delta method is near them.

For S = fixed + sum of k draws, log S and its square are integrals of exp(-t S) over u = log t,

    log S    = integral of (exp(-t) - exp(-t S)) du
    log^2 S  = integral of 2 (u + Euler's constant) (exp(-t S) - exp(-t)) du

and the mean of exp(-t S) is exp(-t fixed) phi(t)^k with the transform phi(t) = E[exp(-t x)] of one draw x. The
integrands are analytic in the strip |Im u| < pi/2 and die out at both ends, so that the trapezoidal rule with a step
of 1/4 is exact to rounding. Nothing here grows with k, and the transform can be used for many k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EULER = 0.5772156649015329
STEP = 0.25  # in u: the error of the rule is about exp(-pi^2 / step), 1e-17
BINS = 512  # that many classes, four times, are summed one by one; more of them in bins
NOTHING = 60  # by so much is log w below the largest where w is nothing beside it
NUMBERS_PER_BLOCK = 2**20  # numbers at once


def log_sum_moments(first: Tensor, terms: Tensor, q: Tensor, num_negatives: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of log(first + sum of k terms), each drawn from `terms` with probabilities q.

    Args:
        first: (...) what is in the sum in any case.
        terms: (..., C), not negative.
        q: (C,) or (..., C).
        num_negatives: k.

    Returns:
        Mean and variance, (...) each; exact to rounding. -inf and nan where the sum can be 0.

    Example: a fair coin, log 1 or log 3.

        >>> values = torch.tensor([0.0, 2.0], dtype=torch.float64)
        >>> log_sum_moments(torch.ones(()).double(), values, torch.tensor([0.5, 0.5]).double(), 1)
        (tensor(0.5493, dtype=torch.float64), tensor(0.3017, dtype=torch.float64))
    """
    q = q.expand_as(terms)
    size = (q * terms).sum(-1)  # the terms are brought to mean 1
    weights, fixed = terms / size.unsqueeze(-1), first / size
    smallest = fixed + num_negatives * torch.where(q > 0, weights, torch.inf).amin(-1)
    log_points = grid(smallest, fixed + num_negatives, second_moment(weights, q))
    mean, variance = moments(fixed, fixed + num_negatives, transform(weights, q, log_points), log_points, num_negatives)
    return torch.where(smallest > 0, mean + size.log(), -torch.inf), torch.where(smallest > 0, variance, torch.nan)


def second_moment(weights: Tensor, q: Tensor) -> Tensor:
    """E[w^2], (...), for weights and q (..., C)."""
    return (q * weights.square()).sum(-1)


def grid(smallest: Tensor, largest_mean: Tensor, second: Tensor) -> Tensor:
    """u = log t, (T,), from where all transforms are 1 to rounding until they are 0, for all rows together.

    Args:
        smallest: the smallest sums that can come out.
        largest_mean: the means of the sums, the largest of them if there are several.
        second: the second moments of one draw of mean 1.
    """
    start = -20 - math.log(float(largest_mean.max())) - math.log(max(1.0, float(second.max()))) / 2
    positive = smallest[smallest > 0]
    stop = math.log(40 / float(positive.min())) if len(positive) else 0.0
    return torch.arange(start, stop + STEP, STEP, dtype=torch.float64)


def transform(weights: Tensor, q: Tensor, log_points: Tensor) -> Tensor:
    """phi(t) - 1 = E[exp(-t w)] - 1, (..., T), for weights and q (..., C), where few of them need memory at once."""
    size = max(1, NUMBERS_PER_BLOCK // weights.numel())
    blocks = [
        torch.einsum("...c,...tc->...t", q, torch.expm1(-t.unsqueeze(-1) * weights.unsqueeze(-2)))
        for t in log_points.exp().split(size)
    ]
    return torch.cat(blocks, -1)


def moments(
    fixed: Tensor, mean: Tensor, transformed: Tensor, log_points: Tensor, num_negatives: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of log S, (...) each, for S = fixed + sum of k draws.

    Args:
        fixed: (...), not negative.
        mean: (...) E[S].
        transformed: (..., T) phi - 1 at the points, of one draw.
        log_points: (T,) as `grid` gives them.
        num_negatives: k.
    """
    u = log_points + mean.log().unsqueeze(-1)  # of t E[S]: the sum is measured by its mean
    t = u.exp()
    log_laplace = num_negatives * torch.log1p(transformed.clamp(-1, 0)) - log_points.exp() * fixed.unsqueeze(-1)
    gap = log_laplace.exp() - (-t).exp()
    log_mean = -STEP * gap.sum(-1)
    square = STEP * (2 * (u + EULER) * gap).sum(-1)
    return mean.log() + log_mean, square - log_mean.square()


def in_bins(weights: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights and probabilities for each of many bins, (N, 2 BINS) each, in place of many classes (N, C).

    Bins are even in log w, but for the first, which takes what is nothing beside the largest. The two weights of a bin
    lie a standard deviation to both sides of its mean, so that its probability, mean and variance are kept; what is
    lost is of fourth order in the width of a bin.
    """
    if weights.shape[-1] <= 4 * BINS:
        return weights, q
    logs = weights.log()
    high = logs.amax(-1, keepdim=True)
    counts = logs > high - NOTHING
    low = torch.where(counts, logs, high).amin(-1, keepdim=True)
    width = ((high - low) / (BINS - 2)).clamp(min=1e-12)
    bins = torch.where(counts, 1 + (logs - low) / width, 0).long()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(values), BINS).scatter_add(-1, bins, values)

    mass = summed(q)
    mean = summed(q * weights) / torch.where(mass > 0, mass, 1)
    centred = weights - mean.gather(-1, bins)
    spread = (summed(q * centred.square()) / torch.where(mass > 0, mass, 1)).sqrt()
    # a few small and one large weight of one bin could reach below 0
    return torch.cat([(mean - spread).clamp(min=0), mean + spread], -1), torch.cat([mass, mass], -1) / 2
