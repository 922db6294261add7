"""Draws from a categorical distribution per row."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def draw_categorical(log_weights: Tensor, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Positions drawn with replacement, with probability softmax(log_weights), by inverting the running sum.

    Faster than `torch.multinomial`, and without its limit of 2^24 positions.

    Args:
        log_weights: (..., M); -inf is never drawn.
        num: draws per row.
        generator: of the randomness, on the device of `log_weights`.

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
    running = (log_weights - top).exp().cumsum(-1, dtype=torch.float64)
    shape = (*log_weights.shape[:-1], num)
    height = torch.rand(shape, generator=generator, device=log_weights.device, dtype=torch.float64) * running[..., -1:]
    # The first position whose running sum is above the height: positions of weight 0 are stepped over.
    return torch.searchsorted(running, height, right=True).clamp_(max=log_weights.shape[-1] - 1)
