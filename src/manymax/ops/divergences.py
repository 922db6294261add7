"""Divergences between two distributions; the bias and variance of a sampled loss depend on them."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(probs: Tensor, q: Tensor) -> Tensor:
    """The chi-square divergence sum_j q_j (p_j / q_j - 1)^2; +inf where q_j = 0 < p_j.

    Args:
        probs: (..., C) the distribution p.
        q: (..., C) or (C,).

    Returns:
        (...).

    Example:
        >>> chi_square(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
        tensor(0.3333)
    """
    # a sum of squares is never negative; sum p^2 / q - 1 would cancel to a small negative number for p = q
    # every division has a divisor of 1 where q = 0, so that gradients stay finite in the classes that do not count
    ratio = torch.where(q > 0, probs / torch.where(q > 0, q, 1), torch.where(probs > 0, torch.inf, 1))
    return torch.where(q > 0, q * (ratio - 1).square(), torch.where(probs > 0, torch.inf, 0)).sum(-1)


def kl(probs: Tensor, q: Tensor) -> Tensor:
    """The Kullback-Leibler divergence sum_j p_j log(p_j / q_j); +inf where q_j = 0 < p_j.

    Args:
        probs: (..., C) the distribution p.
        q: (..., C) or (C,).

    Returns:
        (...).

    Example:
        >>> kl(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
        tensor(0.1438)
    """
    # a difference of logarithms, because the ratio p / q may overflow; 0 log 0 counts as 0
    both = (probs > 0) & (q > 0)
    terms = torch.where(both, probs * (torch.where(both, probs, 1).log() - torch.where(both, q, 1).log()), 0)
    return torch.where((probs > 0) & (q <= 0), torch.inf, terms).sum(-1)


def jensen_shannon(probs: Tensor, q: Tensor, weight: float = 0.5) -> Tensor:
    """The Jensen-Shannon divergence weight KL(p || m) + (1 - weight) KL(q || m) with m = weight p + (1 - weight) q.

    Args:
        probs: (..., C) the distribution p.
        q: (..., C).
        weight: of p, between 0 and 1.

    Returns:
        (...); finite for 0 < weight < 1.

    Example:
        >>> jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(0.6931)
    """
    # both terms are finite, because the mixture is positive wherever p or q is
    mixture = weight * probs + (1 - weight) * q
    return weight * kl(probs, mixture) + (1 - weight) * kl(q, mixture)
