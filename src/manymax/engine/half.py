"""Class vectors in half precision: widened some at a time, never as a whole table; gradients rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manymax.engine.row_sparse import row_sparse

# Class vectors that are widened at a time: with d = 64, 4 MB of float32, which stay in the second-level cache.
WIDENED = 1 << 14
# Numbers that are rounded at a time.
ROUNDED = 1 << 20


def widened(table: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a table (C, d) in another dtype, each with the slice of rows that it is."""
    for start in range(0, len(table), WIDENED):
        rows = slice(start, min(start + WIDENED, len(table)))
        yield rows, table[rows].to(dtype)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in the dtype of its tensor; a float32 one is rounded to half precision in its own memory.

    A second tensor beside the sums in float32 would make a head in half precision need more memory than one in float32.
    `values` must not be used afterwards.
    """
    if values.is_sparse and values.dtype != dtype:  # the rows, of which there may be as many as classes
        ids, rows = values._indices()[0], values._values()
        return row_sparse(ids, rounded(rows, dtype), values.shape)
    if values.dtype == dtype or not values.is_contiguous() or not _fits(values, dtype):
        return values.to(dtype)
    sums = values.view(-1)
    halves = sums.view(dtype)  # the same memory, as twice as many numbers
    for start in range(0, len(sums), ROUNDED):
        # What is written lies before what is still to be read.
        part = sums[start : start + ROUNDED].to(dtype)
        halves[start : start + len(part)] = part
    result = halves[: len(sums)].view(values.shape)
    result.untyped_storage().resize_(len(sums) * result.element_size())
    return result


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a tensor is all its own, and twice what the other dtype needs."""
    own = values.untyped_storage().nbytes() == values.numel() * values.element_size()
    return own and values.numel() > 0 and values.element_size() == 2 * dtype.itemsize and not values.requires_grad
