"""RG from queries and class vectors: mean and covariance of the vectors instead of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from manymax.engine.cost import FLOAT, PER_STEP, Cost, Shape, Traffic, Work, gather, of_tables
from manymax.engine.linear import Options, check_linear, read_head_target
from manymax.engine.options import read_options
from manymax.engine.row_target import RowTarget, live_classes, row_target
from manymax.engine.target import Target, check_options
from manymax.ops.checks import check_finite, full_precision, visible, working
from manymax.ops.lookup import lookup
from manymax.ops.reduction import reduce


def linear_rg_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`rg_loss` of `input @ linear_weight.T + linear_bias` from moments: no score but the positives' is computed.

    mean(s) = <x, mean(w)> and var(s) = <x, cov(w) x>, so that a row costs d^2 and the class vectors C d^2, once.
    Arguments as in `linear_softmax_loss`; second derivatives exist, and `options` change nothing.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.0], [0.0, 5.0], [-0.3, 3.0]])
        >>> manymax.linear_rg_loss(input, vectors, torch.tensor([0]))
        tensor(0.8286)
    """
    check_linear(input, linear_weight, linear_bias)
    check_options(reduction, label_smoothing, multilabel)
    read_options(options)
    queries, dtype = working(input)
    flat, vectors = queries.reshape(-1, queries.shape[-1]), linear_weight.to(queries.dtype)
    read = read_head_target(queries, target, weight, ignore_index, multilabel, vectors.shape[0])
    live = live_classes(linear_bias)
    if linear_bias is not None:  # a bias is one more feature of the class vectors
        check_finite(linear_bias.amax())
        bias = linear_bias if live is None else torch.where(live, linear_bias, 0)
        vectors = torch.cat([vectors, bias.to(queries.dtype).unsqueeze(1)], 1)
        flat = torch.cat([flat, torch.ones_like(flat[:, :1])], 1)
    with full_precision(input):
        rows = row_target(read, weight, live, vectors.shape[0], label_smoothing)
        near, count = _near_zero(vectors, live)
        value = _rows(flat, near, count, rows)
        check_finite(value)
        if multilabel == "normalized":
            total = rows.total
            scale = 1 / torch.where(total > 0, total, 1)
            square = square_norm(rows) * scale.square()
            omega = (count * square - 1) / 2 - count.log()
            value = torch.where(total > 0, value * scale + omega, 0)
    value = reduce(value, read.divisor, reduction)
    return (value.reshape(input.shape[:-1]) if reduction == "none" else value).to(dtype)


def _near_zero(vectors: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """The vectors minus their mean as rounding leaves it, 0 for masked classes, and the number of the others.

    The loss is that of any scores moved by a constant, so what is taken off needs no gradient; and a large mean costs
    no digits.
    """
    if live is None:
        return vectors - vectors.detach().mean(0), vectors.new_tensor(vectors.shape[0])
    alive = live.to(vectors.dtype)
    count = alive.sum()
    return (vectors - (alive @ vectors.detach()) / count) * alive.unsqueeze(1), count


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


def _rows(flat: Tensor, vectors: Tensor, count: Tensor, rows: RowTarget) -> Tensor:
    """total (log C + mean(s) + var(s) / 2) - sum_i t_i s_i, with var(s) = mean(s^2) - mean(s)^2 for a mean near 0."""
    mean = flat @ (vectors.sum(0) / count)
    square = ((flat @ (Gram.apply(vectors) / count)) * flat).sum(1)
    partition = count.log() + mean + (square - mean.square()) / 2
    if rows.ids is None:
        inner = ((rows.weights @ vectors) * flat).sum(1)
    elif rows.ids.shape[1] > 1 and visible(rows.weights):  # rows with fewer positives than others are not padded
        row, column = rows.weights.nonzero(as_tuple=True)
        scores = (lookup(vectors, rows.ids[row, column]) * lookup(flat, row)).sum(1)
        inner = flat.new_zeros(len(flat)).index_add(0, row, rows.weights[row, column] * scores)
    else:
        inner = (rows.weights * (embedding(rows.ids, vectors) @ flat.unsqueeze(2)).squeeze(2)).sum(1)
    if rows.share is not None and rows.class_weight is not None:
        inner = inner + rows.share * (flat @ (rows.class_weight @ vectors))
    return rows.total * partition - inner


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
    """Count, two means and the covariance, a number per row; the two means again in the backward."""
    return Traffic(1 + 2 + 1 + 1 + 2, FLOAT * (1 + 4 * shape.dim + shape.dim**2 + shape.batch))
