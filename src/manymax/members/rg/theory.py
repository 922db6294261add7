"""Closed forms of RG: its Jacobian, (I - 1 1' / C) / C over the live classes, and the error of its log partition."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.approximation import TOLERANCE, ApproximationInput, Parts
from manymax.engine.member import Approximation, Theory
from manymax.members.rg.loss import rg_log_partition


def _jacobian(scores: Tensor, _: Tensor | None = None) -> Tensor:
    """(I - 1 1' / C) / C over the live classes, (..., C, C); 0 in rows and columns of masked classes."""
    live = (scores > -torch.inf).to(scores.dtype)
    count = live.sum(-1)[..., None, None]
    return (torch.diag_embed(live) - live.unsqueeze(-1) * live.unsqueeze(-2) / count) / count


def _norm_bounds(scores: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the Jacobian's norm, (...) each: both are its exact value 1 / C (0 for one class)."""
    count = (scores > -torch.inf).sum(-1)
    exact = torch.where(count > 1, 1 / count.to(scores.dtype), 0)
    return exact, exact


def _sharpest(num_classes: int) -> Tensor:
    """Scores (C,) at which the Jacobian's norm is largest: any will do, it is the same everywhere."""
    return torch.zeros(num_classes, dtype=torch.float64)


def rg_series(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first two terms of the error of RG's log partition, -mu_3/6 and -kappa_4/24, (...) each.

    mu_n is the mean of (s - mean(s))^n over the live classes, and kappa_4 = mu_4 - 3 mu_2^2.

    Args:
        scores: (..., C); -inf masks a class.

    >>> third, fourth = rg_series(torch.tensor([0.4, 0.0, 0.0], dtype=torch.float64))
    >>> print(f"{third.item():.6f} {fourth.item():.6f}")
    -0.000790 0.000079
    """
    live = scores > -torch.inf
    count = live.sum(-1, keepdim=True)
    centred = torch.where(live, scores - torch.where(live, scores, 0).sum(-1, keepdim=True) / count, 0)
    square = centred.square()
    second, third, fourth = (x.sum(-1) / count.squeeze(-1) for x in (square, square * centred, square.square()))
    return -third / 6, -(fourth - 3 * second.square()) / 24


def _parts(case: ApproximationInput) -> Parts:
    """Bias log C + mean(s) + var(s)/2 - log Z, exactly, and as predicted by its first two terms."""
    bias = (rg_log_partition(case.scores) - case.scores.logsumexp(-1)).unsqueeze(-1)
    third, fourth = rg_series(case.scores)
    series = (third + fourth).unsqueeze(-1)
    return Parts(series, bias, (series - bias).abs() <= TOLERANCE * bias.abs())


THEORY = Theory(jacobian=_jacobian, norm_bounds=_norm_bounds, sharpest=_sharpest, approximation=Approximation(_parts))
