"""Class vectors in half precision: widened some at a time, never as a whole table; gradients rounded once.

On CUDA bfloat16 goes into the products as it is, and what comes out is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine.keywords import Keywords
from manymax.engine.row_sparse import row_sparse

# Class vectors that are widened at a time: with d = 64, 4 MB of float32, which stay in the second-level cache.
WIDENED = 1 << 14
# Numbers that are rounded at a time.
ROUNDED = 1 << 20
# Whether torch has products of halves that are not rounded after they were summed.
WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of two matrices; of halves on CUDA in float32, and elsewhere in their dtype."""
    if left.device.type == "cuda" and left.dtype == torch.bfloat16 and WIDE_PRODUCTS:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def for_products(vectors: Tensor) -> Tensor:
    """Class vectors for products in bfloat16.

    On CUDA another tensor than the class vectors even if these are bfloat16, by which gradients know that their
    products are to be in bfloat16 too. Elsewhere they are widened for those: the products would be rounded.
    """
    halves = vectors.bfloat16()
    return halves.detach() if halves.device.type == "cuda" and WIDE_PRODUCTS else halves


def products_as_given(keywords: Keywords, input: Tensor, linear_weight: Tensor) -> Keywords:
    """The keywords with products in bfloat16 where queries and class vectors are bfloat16 on CUDA, as they come.

    Products of such numbers are exact in float32, in which they are summed. Queries that are divided by a norm or by a
    temperature would have to be rounded again, and stay in float32. A processor has such products too, but its own are
    rounded afterwards.
    """
    plain = not keywords.normalize and not isinstance(keywords.temperature, Tensor) and keywords.temperature == 1
    halves = input.dtype == linear_weight.dtype == torch.bfloat16
    if not (plain and halves and input.device.type == "cuda" and WIDE_PRODUCTS):
        return keywords
    return replace(keywords, options=replace(keywords.options, matmul="bf16"))


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
