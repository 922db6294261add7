"""The reductions "none", "mean" and "sum" of one loss per row."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")


def reduce(rows: Tensor, divisor: Tensor, reduction: str) -> Tensor:
    """Reduce one loss per row to what `reduction` asks for.

    Args:
        rows: (...) losses; 0 for rows that do not count.
        divisor: (...) what each row adds to the denominator of the mean; 0 for rows that do not count.
        reduction: "none", "mean" or "sum".

    Returns:
        `rows` for "none", otherwise a scalar. A mean over no row is 0 and has a gradient of 0.

    Example:
        >>> reduce(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]), "mean")
        tensor(2.)
    """
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    total = divisor.sum()
    # The decision is a `where`, not an `if`: it works under torch.compile and vmap, and no GPU has to wait for it. The
    # inner one keeps 0/0 out of the unused branch; 0 * sum stays in the graph, so that backward() works.
    return torch.where(total > 0, rows.sum() / torch.where(total > 0, total, 1), 0 * rows.sum())
