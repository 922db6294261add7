"""The discounts of positions in a ranking, as in DCG."""

from __future__ import annotations

import torch
from torch import Tensor


def discounts(positions: int, cutoff: int | None = None) -> Tensor:
    """w_i = 1 / log2(i + 1) for the positions i = 1, 2, ..., and 0 beyond the cutoff.

    Args:
        positions: how many positions.
        cutoff: the last position that counts; None for all.

    Returns:
        (positions,) float64.

    Example:
        >>> discounts(4, cutoff=3)
        tensor([1.0000, 0.6309, 0.5000, 0.0000], dtype=torch.float64)
    """
    # i + 1 = 2, 3, ...: the first position has the weight 1 / log2(2) = 1
    weights = 1 / torch.arange(2, positions + 2, dtype=torch.float64).log2()
    if cutoff is not None:
        weights[cutoff:] = 0
    return weights
