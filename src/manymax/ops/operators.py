"""`simplex.solve` and `simplex.apply` as operators that autograd, vmap and torch.compile do not look into.

Both hold data-dependent searches. A vmapped dimension becomes more rows; torch.compile sees the
shapes only; members/entmax/loss.py differentiates around them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops import simplex

solve = torch.library.custom_op("manymax::simplex_solve", simplex.solve, mutates_args=())
apply = torch.library.custom_op("manymax::simplex_apply", simplex.apply, mutates_args=())


@solve.register_fake
def _(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[0]
    return scores.new_empty(rows), scores.new_empty(rows, dtype=torch.float64), scores.new_empty(rows)


@apply.register_fake
def _(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _merge(size: int, x: Tensor, dim: int | None) -> Tensor:
    """Fold a vmapped dimension into the rows."""
    batched = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return batched.flatten(0, 1)


def _merge_alpha(size: int, rows: int, alpha: Tensor, dim: int | None) -> Tensor:
    if dim is None and alpha.ndim == 0:
        return alpha
    batched = alpha.expand(size, *alpha.shape) if dim is None else alpha.movedim(dim, 0)
    return batched.reshape(size, -1, 1).expand(size, rows, 1).reshape(size * rows, 1)


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
