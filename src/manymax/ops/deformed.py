"""The power-deformed exponential and what its derivative in alpha needs, stable down to alpha = 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# chi(u) = sum_n (n + 1) / (n + 2)! u^n; sixteen terms are exact to double rounding for |u| < 1/2
_SERIES = [(n + 1) / math.factorial(n + 2) for n in range(16)]


def chi(u: Tensor) -> Tensor:
    """(u e^u - expm1(u)) / u^2, which is 1/2 at u = 0.

    With beta = alpha - 1 and x = log p it is the second-order part of p^beta: the derivative of
    (p^beta - 1) / beta in beta is x^2 chi(beta x).
    """
    small = u.abs() < 0.5
    near, far = torch.where(small, u, 0), torch.where(small, 1, u)
    series = torch.full_like(u, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series = series * near + coefficient
    return torch.where(small, series, (far * far.exp() - far.expm1()) / far.square())


def log_of(probs: Tensor) -> Tensor:
    """log p on the support and 0 elsewhere, so that p log p needs no special case."""
    return torch.where(probs > 0, probs, 1).log()


def power(probs: Tensor, exponent: Tensor | float) -> Tensor:
    """p^exponent on the support and 0 elsewhere (0^0 is 0 here: outside of the support)."""
    return torch.where(probs > 0, torch.where(probs > 0, probs, 1) ** exponent, 0)
