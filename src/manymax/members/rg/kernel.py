"""RG from queries and class vectors: mean and covariance of the vectors instead of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from manymax.engine.cost import FLOAT, PER_STEP, Cost, Shape, Traffic, Work, gather, of_tables
from manymax.engine.linear import HeadCall
from manymax.engine.row_target import RowTarget
from manymax.ops.checks import check_finite, visible
from manymax.ops.lookup import lookup


def rg_kernel() -> Callable[[HeadCall], Tensor]:
    """From a call to the losses of its rows, (N,).

    mean(s) = <x, mean(w)> and var(s) = <x, cov(w) x>, so that a row costs d^2 and the class vectors C d^2, once.
    No score but the positives' is computed. What ranks exchange are the moments and one number per row.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.0], [0.0, 5.0], [-0.3, 3.0]])
        >>> manymax.linear_rg_loss(input, vectors, torch.tensor([0]))
        tensor(0.8286)
    """
    return _losses


def _losses(call: HeadCall) -> Tensor:
    ranks, queries, vectors = call.shards.ranks, call.queries, call.vectors
    if call.bias is not None:  # a bias is one more feature of the class vectors
        check_finite(ranks.maximum(call.bias.amax()))
        bias = call.bias if call.live is None else torch.where(call.live, call.bias, 0)
        vectors = torch.cat([vectors, bias.unsqueeze(1)], 1)
        queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)
    rows = call.rows()
    near, count = _near_zero(vectors, call)
    mean = queries @ (ranks.total(near.sum(0)) / count)
    square = ((queries @ (ranks.total(Gram.apply(near)) / count)) * queries).sum(1)
    # var(s) = mean(s^2) - mean(s)^2, which loses no digits because the mean is next to 0
    partition = count.log() + mean + (square - mean.square()) / 2
    value = rows.total * partition - ranks.total(_inner(ranks.spread(queries), near, rows))
    check_finite(value)
    if call.keywords.multilabel != "normalized":
        return value
    scale = 1 / torch.where(rows.total > 0, rows.total, 1)
    omega = (count * ranks.sum(square_norm(rows)) * scale.square() - 1) / 2 - count.log()
    return torch.where(rows.total > 0, value * scale + omega, 0)


def _near_zero(vectors: Tensor, call: HeadCall) -> tuple[Tensor, Tensor]:
    """The vectors minus their mean as rounding leaves it, 0 for masked classes, and the number of the others.

    The loss is that of any scores moved by a constant, so what is taken off needs no gradient; and a large mean costs
    no digits.
    """
    ranks, live = call.shards.ranks, call.live
    if live is None:
        count = vectors.new_tensor(call.shards.num_classes)
        return vectors - ranks.sum(vectors.sum(0)) / count, count
    alive = live.to(vectors.dtype)
    count = ranks.sum(alive.sum())
    return (vectors - ranks.sum(alive @ vectors) / count) * alive.unsqueeze(1), count


class Gram(torch.autograd.Function):
    """V^T V, whose gradient V (G + G^T) is one product; autograd by itself takes two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor) -> Tensor:
        return vectors.T @ vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return vectors @ (grad + grad.T)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        half = vectors.T @ tangent
        return half + half.T


def _inner(queries: Tensor, vectors: Tensor, rows: RowTarget) -> Tensor:
    """sum_i t_i s_i over the classes of this rank, (N,)."""
    if rows.ids is None:
        inner = ((rows.weights @ vectors) * queries).sum(1)
    elif rows.ids.shape[1] > 1 and visible(rows.weights):  # rows with fewer positives than others are not padded
        row, column = rows.weights.nonzero(as_tuple=True)
        scores = (lookup(vectors, rows.ids[row, column]) * lookup(queries, row)).sum(1)
        inner = queries.new_zeros(len(queries)).index_add(0, row, rows.weights[row, column] * scores)
    else:
        inner = (rows.weights * (embedding(rows.ids, vectors) @ queries.unsqueeze(2)).squeeze(2)).sum(1)
    if rows.share is not None and rows.class_weight is not None:
        inner = inner + rows.share * (queries @ (rows.class_weight @ vectors))
    return inner


def square_norm(rows: RowTarget) -> Tensor:
    """sum_i t_i^2, (n,), smoothing included."""
    square = rows.weights.square().sum(1)
    if rows.share is None or rows.class_weight is None:
        return square
    weights = rows.class_weight if rows.ids is None else rows.class_weight[rows.ids]
    cross = 2 * rows.share * (rows.weights * weights).sum(1)
    return square + cross + rows.share.square() * rows.class_weight.square().sum()


def cost(shape: Shape, plain: bool) -> Cost:
    """The Gram matrix of the class vectors and its gradient, and d^2 for each row."""
    if plain:
        work = Work(flops=6 * shape.table * shape.dim, fresh=22 * shape.table + shape.vectors, calls=PER_STEP)
        return of_tables(work, 3, shape, 6 * shape.table)
    products = (2 * shape.num_classes + 3 * shape.batch) * float(shape.dim)
    work = Work(flops=2 * products * shape.dim, fresh=4 * shape.vectors, calls=PER_STEP + 200)
    work += gather(shape.num_classes, shape.dim, 2 * shape.pairs)
    return Cost(work, products, shape.vectors, FLOAT * (2 * shape.vectors + 4 * shape.queries))


def traffic(shape: Shape, ranks: int) -> Traffic:
    """A mean twice, once as rounding leaves it, the square of the vectors, and a number per row."""
    return Traffic(4, FLOAT * (2 * shape.dim + shape.dim**2 + shape.batch))
