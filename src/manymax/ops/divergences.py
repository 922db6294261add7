"""How far a distribution is from another: what bias and variance of a sampled loss depend on."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(probs: Tensor, q: Tensor) -> Tensor:
    """sum_j q_j (p_j / q_j - 1)^2, (...); +inf where q_j = 0 < p_j.

    Written as a sum of squares: sum p^2/q - 1 would cancel to a negative number for p = q.

    >>> chi_square(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.3333)
    """
    ratio = torch.where(q > 0, probs / torch.where(q > 0, q, 1), torch.where(probs > 0, torch.inf, 1))
    return torch.where(q > 0, q * (ratio - 1).square(), torch.where(probs > 0, torch.inf, 0)).sum(-1)


def kl(probs: Tensor, q: Tensor) -> Tensor:
    """sum_j p_j log(p_j / q_j), (...); +inf where q_j = 0 < p_j.

    >>> kl(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.1438)
    """
    both = (probs > 0) & (q > 0)
    terms = torch.where(both, probs * (torch.where(both, probs, 1).log() - torch.where(both, q, 1).log()), 0)
    return torch.where((probs > 0) & (q <= 0), torch.inf, terms).sum(-1)


def jensen_shannon(probs: Tensor, q: Tensor, weight: float = 0.5) -> Tensor:
    """weight KL(p || m) + (1 - weight) KL(q || m) with m = weight p + (1 - weight) q, (...).

    >>> jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """
    mixture = weight * probs + (1 - weight) * q
    return weight * kl(probs, mixture) + (1 - weight) * kl(q, mixture)
