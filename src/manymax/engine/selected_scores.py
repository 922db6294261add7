"""Scores of a few classes for each query, as autograd functions whose gradients touch those classes alone.

Autograd's own gather would keep a copy of every class vector that it read, (M, k, d), and give one gradient row per
score. These functions keep ids only, and sum the gradients of each class before they are written. Scores have the dtype
of the queries, the gradient of the class vectors has that of the class vectors: it is summed in the dtype of the scores
and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manymax.engine.autograd import refuse_second_derivatives
from manymax.engine.gradients import sum_bags
from manymax.engine.keywords import Keywords
from manymax.engine.native_selected import native_gradients, native_scores, serving_level
from manymax.engine.row_sparse import row_sparse
from manymax.ops.checks import refuse_transforms
from manymax.ops.lookup import lookup
from manymax.ops.selected_scores import (
    entry_scores,
    flat_positions,
    selected_scores,
    selected_sums,
    table_is_cheaper,
)


def class_scores(input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, keywords: Keywords) -> Tensor:
    """The scores <x_{rows_m}, w_{ids_mj}> with gradients, by the back end that the keywords ask for.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors, in any precision.
        rows: (M,) the query of each row of ids, or (E,) that of each entry; sorted.
        ids: (M, k) the selected classes, or (E,) that of each entry.
        keywords: of the head.

    Returns:
        (M, k), or (E,), in the dtype of the queries.
    """
    entries, sparse_grad = ids.dim() == 1, keywords.sparse_grad
    wanted = ids.unsqueeze(1) if entries else ids
    # Few classes are scored by one matmul with all of them, also where native code could do it: it is faster. Only
    # whoever demands native code gets it there too.
    matmul = not entries and table_is_cheaper(len(input), len(linear_weight), ids.numel())
    if not matmul or keywords.options.demands_native:
        level = serving_level(keywords.options, input, linear_weight, rows, wanted)
        if level is not None:
            found: Tensor = SelectedScores.apply(input, linear_weight, rows, wanted, sparse_grad, level)
            return found.squeeze(1) if entries else found
    if entries:
        return EntryScores.apply(input, linear_weight, rows, ids, sparse_grad)
    return SelectedScores.apply(input, linear_weight, rows, ids, sparse_grad, None)


class SelectedScores(torch.autograd.Function):
    """The scores <x_{rows_m}, w_{ids_mj}>, (M, k), with gradients.

    Both gradients are weighted sums of rows, of class vectors for x and of queries for w; that of w has one row for
    each distinct id, as a sparse tensor if `sparse_grad` is set. `level` is that of the native library, or None for
    plain torch, where both are matmuls with the table of the scores' gradients if that table is small.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        rows: Tensor,
        ids: Tensor,
        sparse_grad: bool,
        level: str | None,
    ) -> Tensor:
        # Tensors that exist anyway, and ids: no class vector is copied for the backward.
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse_grad, ctx.level = sparse_grad, level
        if level is not None:
            return native_scores(level, input, linear_weight, rows, ids)
        return selected_scores(input, linear_weight, ids, rows)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(grad)
        input, linear_weight, rows, ids = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        no_tensors = None, None, None, None
        if ctx.level is not None:
            grad_input, sums = native_gradients(ctx.level, input, linear_weight, rows, ids, grad, wants)
            return grad_input, None if sums is None else class_rows(*sums, linear_weight, ctx.sparse_grad), *no_tensors
        # The same rule as in the forward, from sizes alone: the same way in every run. A table gives a dense gradient
        # of w, so that it is no choice where a sparse one is asked for.
        if not ctx.sparse_grad and table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            return *_from_table(input, linear_weight, rows, ids, grad, wants), *no_tensors
        grad_input = grad_weight = None
        if wants[0]:
            # Several rows of ids may belong to one query.
            grad_input = torch.zeros_like(input).index_add_(0, rows, selected_sums(linear_weight, ids, grad))
        if wants[1]:
            # int32 keys, which torch sorts by radix; stable, so that sums have the same bits in every run.
            permutation = ids.flatten().int().argsort(stable=True)
            queries, values = lookup(rows, permutation // ids.shape[1]), lookup(grad.flatten(), permutation)
            classes = lookup(ids.flatten(), permutation)
            grad_weight = sum_by_class(classes, queries, values, input, linear_weight, ctx.sparse_grad)
        return grad_input, grad_weight, *no_tensors


def _from_table(
    input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients as matmuls, G W and G^T X, with G (R, C) the gradients of the scores at their rows and classes."""
    shape = len(input), len(linear_weight)
    G = grad.new_zeros(shape)
    # Added and not assigned: a class that was drawn twice for a query gets both gradients.
    G.view(-1).index_add_(0, flat_positions(rows, ids, shape[1]), grad.flatten())
    dtype = linear_weight.dtype
    grad_input = G @ linear_weight.to(input.dtype) if wants[0] else None
    return grad_input, ((G.T @ input).to(dtype) if wants[1] else None)


def class_rows(touched: Tensor, rows: Tensor, linear_weight: Tensor, sparse_grad: bool) -> Tensor:
    """The gradient of the class vectors (C, d) from its rows (U, d) at distinct sorted classes (U,)."""
    rows = rows.to(linear_weight.dtype)
    if sparse_grad:
        return row_sparse(touched, rows, linear_weight.shape)
    return torch.zeros_like(linear_weight).index_copy_(0, touched, rows)


def sum_by_class(
    classes: Tensor, rows: Tensor, values: Tensor, input: Tensor, linear_weight: Tensor, sparse_grad: bool
) -> Tensor:
    """For each class the sum of value x input[row] over its entries, (C, d): a gradient of the class vectors.

    Args:
        classes: (K,) sorted.
        rows: (K,) rows of `input`.
        values: (K,).
        input: (R, d) queries.
        linear_weight: (C, d) class vectors, whose shape and dtype the gradient gets.
        sparse_grad: whether to return a row-sparse tensor of the touched classes alone.
    """
    if not sparse_grad and input.dtype == linear_weight.dtype:
        return sum_bags(classes, rows, values, input, linear_weight.shape[0])
    # Sorted classes: runs of equal ones are found in one pass, and number themselves. Sums in the dtype of the queries
    # have rows for the touched classes alone: a whole table of them would be twice as large as one in half precision.
    touched, position = classes.unique_consecutive(return_inverse=True)
    product = sum_bags(position, rows, values, input, len(touched))
    return class_rows(touched, product, linear_weight, sparse_grad)


class SharedRows(torch.autograd.Function):
    """The class vectors w[ids], (k, d) in the given dtype, of negatives that all rows share.

    Their gradient has the dtype of the class vectors, and is row-sparse if asked for.
    """

    @staticmethod
    def forward(ctx: Any, linear_weight: Tensor, ids: Tensor, sparse_grad: bool, dtype: torch.dtype) -> Tensor:
        # Saved for its shape and dtype; it exists anyway, and its values are not needed.
        ctx.save_for_backward(linear_weight, ids)
        ctx.sparse_grad = sparse_grad
        return lookup(linear_weight, ids).to(dtype)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_transforms(grad)
        linear_weight, ids = ctx.saved_tensors
        touched, position = ids.unique(return_inverse=True)  # a class may have been drawn more than once
        # Here index_add_ is good enough: k vectors are few beside the matmul of all rows with them.
        product = grad.new_zeros(len(touched), grad.shape[1]).index_add_(0, position, grad)
        return class_rows(touched, product, linear_weight, ctx.sparse_grad), None, None, None


class SelectedBias(torch.autograd.Function):
    """The biases b[ids], in the shape of the ids, with a gradient (C,) that is row-sparse.

    Autograd's own indexing gives a dense one, which no sparse optimizer takes.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size = len(bias)
        return lookup(bias, ids)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_transforms(grad)
        (ids,) = ctx.saved_tensors
        # int32 keys, which torch sorts by radix; stable, so that sums have the same bits in every run.
        permutation = ids.flatten().int().argsort(stable=True)
        classes, values = lookup(ids.flatten(), permutation), lookup(grad.flatten(), permutation)
        touched, position = classes.unique_consecutive(return_inverse=True)
        sums = grad.new_zeros(len(touched)).index_add_(0, position, values)
        return row_sparse(touched, sums, (ctx.size,)), None


def class_bias(bias: Tensor, ids: Tensor, keywords: Keywords) -> Tensor:
    """The biases b[ids], in the shape of the ids, with a gradient (C,) that is row-sparse if the keywords ask for it.

    Args:
        bias: (C,).
        ids: of any shape.
        keywords: of the head.
    """
    return SelectedBias.apply(bias, ids) if keywords.sparse_grad else bias[ids]


class EntryScores(torch.autograd.Function):
    """`ops.selected_scores.entry_scores`, (E,), with gradients: single (row, class) pairs, sorted by row.

    For several ranks, where each holds another number of a row's negatives and a rectangle (M, k) would not fit.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse_grad = sparse_grad
        return entry_scores(input, linear_weight, rows, ids)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(grad)
        input, linear_weight, rows, ids = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            if linear_weight.dtype == input.dtype:  # entries are sorted by row: bags without a sort
                grad_input = sum_bags(rows, ids, grad, linear_weight, len(input))
            else:
                each = selected_sums(linear_weight, ids.unsqueeze(1), grad.unsqueeze(1))
                grad_input = torch.zeros_like(input).index_add_(0, rows, each)
        if ctx.needs_input_grad[1]:
            permutation = ids.int().argsort(stable=True)
            entries = ids[permutation], rows[permutation], grad[permutation]
            grad_weight = sum_by_class(*entries, input, linear_weight, ctx.sparse_grad)
        return grad_input, grad_weight, None, None, None
