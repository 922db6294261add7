"""Alpha, the setting of entmax: how it is read and checked, and how a learned one stays between 1 and 2."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible


def read_alpha(alpha: float | Tensor, scores: Tensor | None = None) -> Tensor:
    """Alpha as a float tensor; raises outside of [1, 2].

    Args:
        alpha: a number, or a float tensor that is () or broadcasts against (..., 1).
        scores: (..., C), against which the shape of one alpha per row is checked; None leaves this check out.

    Returns:
        (), or a tensor that broadcasts against (..., 1) in the dtype of the scores.
    """
    if not isinstance(alpha, Tensor):
        check_number(alpha)
        return torch.tensor(float(alpha), dtype=torch.float64)
    if not alpha.is_floating_point():
        raise ArgumentTypeError(f"`alpha` must be a number or a float tensor; got dtype {alpha.dtype}.")
    if alpha.ndim and scores is not None:
        batch = scores.shape[:-1]
        if alpha.ndim > scores.ndim or alpha.shape[-1] != 1 or not _broadcasts(alpha.shape[:-1], batch):
            raise ArgumentError(
                f"`alpha` must be a scalar or broadcast to one value per row, {(*batch, 1)}; got shape"
                f" {tuple(alpha.shape)}. For one alpha per row pass `alpha.unsqueeze(-1)`."
            )
        alpha = alpha.to(scores.dtype)
    if visible(alpha) and not ((alpha >= 1) & (alpha <= 2)).all():
        raise ArgumentError(f"`alpha` must be in [1, 2] (1 is softmax, 2 is sparsemax); got {alpha.detach()}.")
    return alpha


def check_number(alpha: object) -> None:
    """Raise unless alpha is a number in [1, 2]."""
    # a tuple of types: torch.compile of torch 2.6 cannot trace `int | float`
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ArgumentTypeError(f"`alpha` must be a number or a float tensor; got {type(alpha).__name__}.")
    if not 1 <= alpha <= 2:
        raise ArgumentError(f"`alpha` must be in [1, 2] (1 is softmax, 2 is sparsemax); got {alpha}.")


def raw_from_alpha(alpha: float) -> float:
    """The inverse of `alpha_from_raw`: the free number from which a learned alpha starts."""
    if not 1 < alpha < 2:
        raise ArgumentError(f"a learnable `alpha` must start inside (1, 2); got {alpha}.")
    return float(torch.tensor(alpha - 1.0).logit())


def alpha_from_raw(raw: Tensor) -> Tensor:
    """A learned alpha, 1 + sigmoid(raw), so that no step of an optimiser can leave the open interval (1, 2)."""
    # Far out the sigmoid rounds to 0 or 1, which would put alpha on an end of the interval.
    eps = torch.finfo(raw.dtype).eps
    return 1 + raw.sigmoid().clamp(eps, 1 - eps)


def _broadcasts(shape: torch.Size, batch: torch.Size) -> bool:
    """Whether a shape broadcasts to that of a batch without making it larger."""
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(batch), strict=False))
