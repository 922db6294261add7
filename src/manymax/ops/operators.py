"""`simplex.solve` and `simplex.apply` as operators that autograd, vmap and torch.compile do not look into.

Both run loops whose length depends on the values, which torch.compile and vmap cannot trace. As operators they have a
rule for each: torch.compile is told the shapes of the results, vmap turns its dimension into more rows, and
members/entmax/autograd.py has the derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops import simplex

solve = torch.library.custom_op("manymax::simplex_solve", simplex.solve, mutates_args=())
apply = torch.library.custom_op("manymax::simplex_apply", simplex.apply, mutates_args=())


# What torch.compile and fake tensors get: the shapes and dtypes of the results, (rows,) each.
@solve.register_fake
def _(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[0]
    return scores.new_empty(rows), scores.new_empty(rows, dtype=torch.float64), scores.new_empty(rows)


@apply.register_fake
def _(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _merge(size: int, x: Tensor, dim: int | None) -> Tensor:
    """(size, rows, ...) flattened to (size * rows, ...), whether or not vmap maps over x; `dim` is None if not."""
    batched = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return batched.flatten(0, 1)


def _merge_alpha(size: int, rows: int, alpha: Tensor, dim: int | None) -> Tensor:
    """`alpha` for the merged rows: still () if it is one number for all, else (size * rows, 1)."""
    if dim is None and alpha.ndim == 0:
        return alpha  # one shared number can take the search for long rows, one per row cannot
    # (), (rows, 1) or with the mapped dimension in front of either: all become (size, 1 or rows, 1)
    batched = alpha.expand(size, *alpha.shape) if dim is None else alpha.movedim(dim, 0)
    return batched.reshape(size, -1, 1).expand(size, rows, 1).reshape(size * rows, 1)


# Rules for vmap: no loop over the mapped dimension, whose entries become rows of one larger call.
@solve.register_vmap
def _(info, in_dims, scores: Tensor, alpha: Tensor):  # type: ignore[no-untyped-def]
    size = info.batch_size
    merged = _merge(size, scores, in_dims[0])
    rows = merged.shape[0] // size
    results = solve(merged, _merge_alpha(size, rows, alpha, in_dims[1]))
    return tuple(r.unflatten(0, (size, rows)) for r in results), (0, 0, 0)


@apply.register_vmap
def _(info, in_dims, scores: Tensor, alpha: Tensor, *row_tensors: Tensor):  # type: ignore[no-untyped-def]
    size = info.batch_size
    merged = _merge(size, scores, in_dims[0])
    rows = merged.shape[0] // size
    flat = [_merge(size, x, dim) for x, dim in zip(row_tensors, in_dims[2:], strict=True)]
    result = apply(merged, _merge_alpha(size, rows, alpha, in_dims[1]), *flat)
    return result.unflatten(0, (size, rows)), 0
