"""Putting together the values of a metric, one per row. A row without a positive has no value: nan stands for it."""

from __future__ import annotations

from torch import Tensor

from manymax.errors import check_choice
from manymax.ops.reduction import REDUCTIONS


def reduce_rows(values: Tensor, reduction: str) -> Tensor:
    """Reduce one value per row, without the rows whose value is nan.

    Args:
        values: (...) one value per row; nan for a row without a positive.
        reduction: "none", "mean" or "sum".

    Returns:
        `values` for "none", otherwise a scalar. A mean over no row is nan, because it says nothing about a model.

    Example:
        >>> import torch
        >>> reduce_rows(torch.tensor([1.0, 3.0, float("nan")]), "mean")
        tensor(2.)
    """
    check_choice("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return values
    return values.nansum() if reduction == "sum" else values.nanmean()
