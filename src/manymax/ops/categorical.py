"""Draws from categorical distributions, one distribution per row."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def draw_categorical(log_weights: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw positions with replacement, with the probabilities softmax(log_weights).

    The running sum of the weights is inverted at random heights. This is faster than `torch.multinomial` and has no
    limit of 2^24 positions.

    Args:
        log_weights: (..., M); a position with -inf is never drawn.
        num: draws per row.
        generator: the source of randomness, on the device of `log_weights`; by default torch's global one.

    Returns:
        (..., num) int64 positions.

    Example:
        >>> inf = float("inf")
        >>> draw_categorical(torch.tensor([[-inf, 0.0, -inf], [3.0, -inf, -inf]]), 2).tolist()
        [[1, 1], [0, 0]]
    """
    top = log_weights.amax(-1, keepdim=True)
    if visible(top) and not top.isfinite().all():
        raise ArgumentError("`log_weights` must have a finite largest value in every row; got nan, +inf or only -inf.")
    # In float64: a float32 running sum over many positions stops growing where a weight is below its last digit, and
    # such a position would never be drawn. Minus the largest first, so that nothing overflows.
    running = (log_weights - top).exp().cumsum(-1, dtype=torch.float64)
    shape = (*log_weights.shape[:-1], num)
    height = torch.rand(shape, generator=generator, device=log_weights.device, dtype=torch.float64) * running[..., -1:]
    # The first position whose running sum is strictly above the height (right=True): positions of weight 0 do not
    # raise the sum and are stepped over, also at height 0. A height that rounds to the whole sum would be one past the
    # end.
    return torch.searchsorted(running, height, right=True).clamp_(max=log_weights.shape[-1] - 1)
