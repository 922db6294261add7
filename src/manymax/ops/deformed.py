"""Powers of probabilities p^(alpha - 1) and their derivative in alpha, without cancellation down to alpha = 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The Taylor series chi(u) = sum_n (n + 1) / (n + 2)! u^n; sixteen terms are exact to float64 rounding for |u| < 1/2.
_SERIES = [(n + 1) / math.factorial(n + 2) for n in range(16)]


def chi(u: Tensor) -> Tensor:
    """(u e^u - expm1(u)) / u^2, which is 1/2 at u = 0.

    It is needed for gradients in alpha: with beta = alpha - 1 and x = log p, the derivative of (p^beta - 1) / beta in
    beta is x^2 chi(beta x).

    Args:
        u: of any shape.

    Returns:
        the shape of `u`.

    Example:
        >>> chi(torch.tensor([0.0, 1.0]))
        tensor([0.5000, 1.0000])
    """
    # Near 0 both terms of the numerator are about u, and their difference u^2 / 2 would have lost its digits.
    small = u.abs() < 0.5
    # Each branch gets harmless numbers where the other one is taken: nan or inf in the unused branch of `where` would
    # still turn the gradient into nan.
    near, far = torch.where(small, u, 0), torch.where(small, 1, u)
    series = torch.full_like(u, _SERIES[-1])  # Horner's rule, from the last term
    for coefficient in reversed(_SERIES[:-1]):
        series = series * near + coefficient
    return torch.where(small, series, (far * far.exp() - far.expm1()) / far.square())


def log_of(probs: Tensor) -> Tensor:
    """log p on the support and 0 elsewhere, so that p log p needs no special case."""
    return torch.where(probs > 0, probs, 1).log()


def power(probs: Tensor, exponent: Tensor | float) -> Tensor:
    """p^exponent on the support and 0 elsewhere, also for the exponent 0: a class of probability 0 does not count."""
    # the inner `where` keeps 0^exponent, whose gradient is infinite for an exponent below 1, out of the backward pass
    return torch.where(probs > 0, torch.where(probs > 0, probs, 1) ** exponent, 0)
