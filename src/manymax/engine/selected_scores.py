"""Scores of a few classes for each query, with gradients of the rows that they touch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.engine.blocks import bags, refuse_second_derivatives, row_sparse
from manymax.ops.lookup import lookup
from manymax.ops.selected_scores import entry_scores, flat_positions, selected_scores, table_is_cheaper


class SelectedScores(torch.autograd.Function):
    """`selected_scores`, (M, k), without keeping what was gathered.

    Both gradients are weighted sums of rows, of class vectors for x and of queries for w; that of w has one row for
    each distinct id, as a sparse tensor if `sparse_grad` is set. Where a table of all scores is small, they are matmuls
    with the table of the scores' gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse_grad = sparse_grad
        return selected_scores(input, linear_weight, ids, rows)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, rows, ids = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        if not ctx.sparse_grad and table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            return *_from_table(input, linear_weight, rows, ids, grad, wants), None, None, None
        grad_input = grad_weight = None
        if wants[0]:
            each = embedding_bag(ids, linear_weight, mode="sum", per_sample_weights=grad.contiguous())
            grad_input = torch.zeros_like(input).index_add_(0, rows, each)
        if wants[1]:
            order = ids.flatten().int().argsort(stable=True)
            owners, values = lookup(rows, order // ids.shape[1]), lookup(grad.flatten(), order)
            classes = lookup(ids.flatten(), order)
            grad_weight = sum_by_class(classes, owners, values, input, linear_weight.shape, ctx.sparse_grad)
        return grad_input, grad_weight, None, None, None


def _from_table(
    input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients from G (R, C), which has the scores' gradients where they were picked: G W and G^T X."""
    shape = len(input), len(linear_weight)
    G = grad.new_zeros(shape)
    G.view(-1).index_add_(0, flat_positions(rows, ids, shape[1]), grad.flatten())
    return (G @ linear_weight if wants[0] else None), (G.T @ input if wants[1] else None)


def sum_by_class(
    classes: Tensor, rows: Tensor, values: Tensor, input: Tensor, shape: torch.Size, sparse_grad: bool
) -> Tensor:
    """sum of value x input[row] for each class; `classes` is sorted."""
    if not sparse_grad:
        return bags(classes, rows, values, input, shape[0])
    touched, position = classes.unique_consecutive(return_inverse=True)
    product = bags(position, rows, values, input, len(touched))
    return row_sparse(touched, product, shape)


class SharedRows(torch.autograd.Function):
    """w[ids] for ids (k,), with a gradient of the touched rows, sparse if asked for."""

    @staticmethod
    def forward(ctx: Any, linear_weight: Tensor, ids: Tensor, sparse_grad: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.sparse_grad = linear_weight.shape, sparse_grad
        return linear_weight[ids]

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        if not ctx.sparse_grad:
            return grad.new_zeros(ctx.shape).index_add_(0, ids, grad), None, None
        touched, position = ids.unique(return_inverse=True)
        product = grad.new_zeros(len(touched), grad.shape[1]).index_add_(0, position, grad)
        return row_sparse(touched, product, ctx.shape), None, None


class EntryScores(torch.autograd.Function):
    """`entry_scores`, (E,), with gradients."""

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
        if ctx.needs_input_grad[0]:
            grad_input = bags(rows, ids, grad, linear_weight, len(input))
        if ctx.needs_input_grad[1]:
            order = ids.int().argsort(stable=True)
            shape = linear_weight.shape
            grad_weight = sum_by_class(ids[order], rows[order], grad[order], input, shape, ctx.sparse_grad)
        return grad_input, grad_weight, None, None, None
