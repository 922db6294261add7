"""The reductions "none", "mean" and "sum" of one loss per row."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible

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
    check_losses(rows)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / mean_divisor(divisor)


def check_losses(losses: Tensor) -> None:
    """Raise if a loss, of any shape, is infinite or nan: no number holds differences of its finite scores."""
    if visible(losses) and not losses.isfinite().all():
        raise ArgumentError(
            f"the loss is {losses[~losses.isfinite()].flatten()[0].item()}: scores are so far apart that"
            f" {losses.dtype} cannot hold what follows from them. Scale them down, or pass float64."
        )


def mean_divisor(divisor: Tensor) -> Tensor:
    """What a mean divides by, (): the sum of what the rows count; infinity where no row counts, for a mean of 0.

    Class weights may be negative, as in torch. Weights that cancel leave nothing to divide by, and are refused.
    """
    total, counted = divisor.sum(), divisor.any()
    if visible(total) and total == 0 and counted:
        raise ArgumentError(
            "`weight` sums to 0 over the positives of this batch, and a mean divides by that sum: take"
            ' `reduction="sum"`, or weights of one sign.'
        )
    # A `where` and not an `if`: it works under torch.compile and vmap, and no GPU has to wait for it.
    return torch.where(counted, total, torch.inf)
