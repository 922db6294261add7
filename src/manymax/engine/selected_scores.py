"""Scores of a few classes for each query, as autograd functions whose gradients touch those classes alone.

Autograd's own gather would keep a copy of every class vector that it read, (M, k, d), and give one gradient row per
score. These functions keep ids only, and sum the gradients of each class before they are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.engine.autograd import refuse_second_derivatives
from manymax.engine.gradients import row_sparse, sum_bags
from manymax.ops.lookup import lookup
from manymax.ops.selected_scores import entry_scores, flat_positions, selected_scores, table_is_cheaper


class SelectedScores(torch.autograd.Function):
    """`ops.selected_scores.selected_scores`, (M, k), with gradients.

    Both gradients are weighted sums of rows, of class vectors for x and of queries for w; that of w has one row for
    each distinct id, as a sparse tensor if `sparse_grad` is set. Where a table of all scores is small, they are matmuls
    with the table of the scores' gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, sparse_grad: bool) -> Tensor:
        # Tensors that exist anyway, and ids: no class vector is copied for the backward.
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse_grad = sparse_grad
        return selected_scores(input, linear_weight, ids, rows)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, rows, ids = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        # The same rule as in the forward, from sizes alone: the same way in every run. A table gives a dense gradient
        # of w, so that it is no choice where a sparse one is asked for.
        if not ctx.sparse_grad and table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            return *_from_table(input, linear_weight, rows, ids, grad, wants), None, None, None
        grad_input = grad_weight = None
        if wants[0]:
            # 2-D ids are bags by themselves, one per row of ids; several of them may belong to one query.
            each = embedding_bag(ids, linear_weight, mode="sum", per_sample_weights=grad.contiguous())
            grad_input = torch.zeros_like(input).index_add_(0, rows, each)
        if wants[1]:
            # int32 keys, which torch sorts by radix; stable, so that sums have the same bits in every run.
            permutation = ids.flatten().int().argsort(stable=True)
            queries, values = lookup(rows, permutation // ids.shape[1]), lookup(grad.flatten(), permutation)
            classes = lookup(ids.flatten(), permutation)
            grad_weight = sum_by_class(classes, queries, values, input, linear_weight.shape, ctx.sparse_grad)
        return grad_input, grad_weight, None, None, None


def _from_table(
    input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients as matmuls, G W and G^T X, with G (R, C) the gradients of the scores at their rows and classes."""
    shape = len(input), len(linear_weight)
    G = grad.new_zeros(shape)
    # Added and not assigned: a class that was drawn twice for a query gets both gradients.
    G.view(-1).index_add_(0, flat_positions(rows, ids, shape[1]), grad.flatten())
    return (G @ linear_weight if wants[0] else None), (G.T @ input if wants[1] else None)


def sum_by_class(
    classes: Tensor, rows: Tensor, values: Tensor, input: Tensor, shape: torch.Size, sparse_grad: bool
) -> Tensor:
    """For each class the sum of value x input[row] over its entries, (C, d): a gradient of the class vectors.

    Args:
        classes: (K,) sorted.
        rows: (K,) rows of `input`.
        values: (K,).
        input: (R, d) queries.
        shape: (C, d).
        sparse_grad: whether to return a row-sparse tensor of the touched classes alone.
    """
    if not sparse_grad:
        return sum_bags(classes, rows, values, input, shape[0])
    # Sorted classes: runs of equal ones are found in one pass, and number themselves.
    touched, position = classes.unique_consecutive(return_inverse=True)
    product = sum_bags(position, rows, values, input, len(touched))
    return row_sparse(touched, product, shape)


class SharedRows(torch.autograd.Function):
    """The class vectors w[ids], (k, d), of negatives that all rows share; row-sparse gradient if asked for."""

    @staticmethod
    def forward(ctx: Any, linear_weight: Tensor, ids: Tensor, sparse_grad: bool) -> Tensor:
        # The class vectors are not needed: the gradient of a lookup does not depend on them.
        ctx.save_for_backward(ids)
        ctx.shape, ctx.sparse_grad = linear_weight.shape, sparse_grad
        return linear_weight[ids]

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        # Here index_add_ is good enough: k vectors are few beside the matmul of all rows with them.
        if not ctx.sparse_grad:
            return grad.new_zeros(ctx.shape).index_add_(0, ids, grad), None, None
        touched, position = ids.unique(return_inverse=True)  # a class may have been drawn more than once
        product = grad.new_zeros(len(touched), grad.shape[1]).index_add_(0, position, grad)
        return row_sparse(touched, product, ctx.shape), None, None


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
        input, linear_weight, rows, ids = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:  # entries are sorted by row: bags without a sort
            grad_input = sum_bags(rows, ids, grad, linear_weight, len(input))
        if ctx.needs_input_grad[1]:
            permutation = ids.int().argsort(stable=True)
            entries = ids[permutation], rows[permutation], grad[permutation]
            grad_weight = sum_by_class(*entries, input, linear_weight.shape, ctx.sparse_grad)
        return grad_input, grad_weight, None, None, None
