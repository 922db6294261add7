"""none / mean / sum, written once."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")


def reduce(rows: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    """Reduce one loss per row.

    Args:
        rows: (...) losses, 0 for rows that do not count.
        divisor: (...) what each row adds to the denominator of the mean.
        reduction: "none", "mean" or "sum".

    Returns:
        `rows`, or a scalar. A mean over nothing is 0 with zero gradient.
    """
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    total = divisor.sum()
    return torch.where(total > 0, rows.sum() / torch.where(total > 0, total, 1), 0 * rows.sum())
