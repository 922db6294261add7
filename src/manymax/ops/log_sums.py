"""The exact mean and variance of the logarithm of a sum of independent draws.

A sampled loss is such a logarithm, and its bias is the difference between the mean of the logarithm and the logarithm
of the mean. A simulation would need millions of draws to see a bias of 1e-6; two integrals give it to rounding. For
S = fixed + sum of k draws, log S and its square are integrals of exp(-t S) over u = log t,

    log S    = integral of (exp(-t) - exp(-t S)) du
    log^2 S  = integral of 2 (u + Euler's constant) (exp(-t S) - exp(-t)) du

and the mean of exp(-t S) is exp(-t fixed) phi(t)^k with the transform phi(t) = E[exp(-t x)] of one draw x. The
integrands are analytic in the strip |Im u| < pi/2 and vanish at both ends, so that the trapezoidal rule with a step of
1/4 is exact to rounding. The work does not grow with k, and one transform serves many k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EULER = 0.5772156649015329
STEP = 0.25  # of the trapezoidal rule in u; its error is about exp(-pi^2 / step) = 1e-17
BINS = 512  # more than 4 times as many classes are merged into this many bins
NEGLIGIBLE_LOG = 60  # e^-60 = 1e-26: a weight so much smaller than the largest adds nothing in float64
NUMBERS_PER_BLOCK = 2**20  # numbers of a temporary table: 8 MB of float64


def log_sum_moments(first: Tensor, terms: Tensor, q: Tensor, num_negatives: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of log(first + sum of k terms), where each term is drawn from `terms` with probabilities q.

    Args:
        first: (...) the part of the sum that is not random.
        terms: (..., C) the values that can be drawn, not negative.
        q: (C,) or (..., C) their probabilities.
        num_negatives: k.

    Returns:
        Mean and variance, (...) each, exact to rounding; -inf and nan where the sum can be 0.

    Example: a fair coin decides between log 1 and log 3.

        >>> values = torch.tensor([0.0, 2.0], dtype=torch.float64)
        >>> log_sum_moments(torch.ones(()).double(), values, torch.tensor([0.5, 0.5]).double(), 1)
        (tensor(0.5493, dtype=torch.float64), tensor(0.3017, dtype=torch.float64))
    """
    q = q.expand_as(terms)
    # terms of mean 1, so that the grid below does not depend on their scale: log(c S) = log c + log S
    mean_term = (q * terms).sum(-1)
    weights, fixed = terms / mean_term.unsqueeze(-1), first / mean_term
    # terms that are never drawn (q = 0) do not make the sum small
    smallest = fixed + num_negatives * torch.where(q > 0, weights, torch.inf).amin(-1)
    log_points = grid(smallest, fixed + num_negatives, second_moment(weights, q))
    mean, variance = moments(fixed, fixed + num_negatives, transform(weights, q, log_points), log_points, num_negatives)
    return torch.where(smallest > 0, mean + mean_term.log(), -torch.inf), torch.where(smallest > 0, variance, torch.nan)


def second_moment(weights: Tensor, q: Tensor) -> Tensor:
    """E[w^2], (...), for weights and probabilities q, (..., C) each."""
    return (q * weights.square()).sum(-1)


def grid(smallest: Tensor, largest_mean: Tensor, second: Tensor) -> Tensor:
    """The points u = log t of the trapezoidal rule, (T,), the same for all rows.

    They begin where the transforms of all rows are 1 to rounding and end where they are 0.

    Args:
        smallest: (...) the smallest value that the sum of each row can have.
        largest_mean: (...) the mean of the sum of each row; the largest one if the grid serves several k.
        second: (...) the second moment of one draw of mean 1.
    """
    # Left end: E[exp(-t S)] and exp(-t E[S]) agree to first order in t, so that the integrand of `moments`, their
    # difference, falls as t^2. At t = e^-20 / (E[S] sqrt(E[w^2])) it is about e^-40 = 4e-18.
    start = -20 - math.log(float(largest_mean.max())) - math.log(max(1.0, float(second.max()))) / 2
    # Right end: exp(-t S) is at most e^-40 there. Rows whose sum can be 0 have no right end; their result is -inf, and
    # they must not stretch the grid of the others.
    positive = smallest[smallest > 0]
    stop = math.log(40 / float(positive.min())) if len(positive) else 0.0
    return torch.arange(start, stop + STEP, STEP, dtype=torch.float64)


def transform(weights: Tensor, q: Tensor, log_points: Tensor) -> Tensor:
    """phi(t) - 1 = E[exp(-t w)] - 1, (..., T), for weights and probabilities q, (..., C) each.

    Minus 1, by expm1, because for small t all information is in the difference from 1.
    """
    # some points at a time: the table (..., T, C) of all exponentials could be larger than memory
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
        transformed: (..., T) phi - 1 of one draw at the points.
        log_points: (T,), from `grid`.
        num_negatives: k.
    """
    # The integrals are those of S / E[S], whose logarithm is near 0 where draws vary little: the variance below is then
    # a difference of small numbers, and the integrand is small at the left end.
    u = log_points + mean.log().unsqueeze(-1)
    t = u.exp()
    # log(exp(-t fixed) phi^k), by log1p: k times the rounding error of a plain log(phi) would show for large
    # k. The transform is in [-1, 0], and rounding must not bring it out of there.
    log_laplace = num_negatives * torch.log1p(transformed.clamp(-1, 0)) - log_points.exp() * fixed.unsqueeze(-1)
    gap = log_laplace.exp() - (-t).exp()
    log_mean = -STEP * gap.sum(-1)
    square = STEP * (2 * (u + EULER) * gap).sum(-1)
    return mean.log() + log_mean, square - log_mean.square()


def in_bins(weights: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Merge many classes into bins of like weight: two weights and two probabilities per bin in place of its classes.

    Bins have equal widths in log w, except for the first, which takes all weights that are negligible beside the
    largest. The two weights of a bin lie one standard deviation to both sides of its mean, each with half of its
    probability, so that probability, mean and variance of the bin are kept; the error is of fourth order in the width
    of a bin.

    Args:
        weights: (N, C).
        q: (N, C) probabilities.

    Returns:
        weights and probabilities, (N, 2 BINS) each; unchanged if there are at most 4 BINS classes.
    """
    if weights.shape[-1] <= 4 * BINS:
        return weights, q
    logs = weights.log()
    high = logs.amax(-1, keepdim=True)
    matters = logs > high - NEGLIGIBLE_LOG  # a masked class has the weight 0 and the logarithm -inf
    low = torch.where(matters, logs, high).amin(-1, keepdim=True)
    # at least 1e-12: in a row of equal weights all of them fall into bin 1, not 0 / 0
    width = ((high - low) / (BINS - 2)).clamp(min=1e-12)
    bins = torch.where(matters, 1 + (logs - low) / width, 0).long()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(values), BINS).scatter_add(-1, bins, values)

    mass = summed(q)
    mean = summed(q * weights) / torch.where(mass > 0, mass, 1)
    # the variance from differences to the mean: E[w^2] - mean^2 would cancel in a narrow bin
    centred = weights - mean.gather(-1, bins)
    spread = (summed(q * centred.square()) / torch.where(mass > 0, mass, 1)).sqrt()
    # In the first bin, which is wide, one standard deviation below the mean can be negative, which no weight is.
    return torch.cat([(mean - spread).clamp(min=0), mean + spread], -1), torch.cat([mass, mass], -1) / 2
