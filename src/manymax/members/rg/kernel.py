"""The kernel of RG: the loss from queries and class vectors, by the mean and the covariance of the class vectors.

For a query x with scores s_j = <x, w_j>, mean(s) = <x, mean(w)> and var(s) = <x, cov(w) x>. So no score but those of
the positives is computed: the moments cost C d^2 once per step, and a row costs d^2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from manymax.engine.cost import FLOAT, PER_STEP, Cost, Shape, Traffic, Way, Work, gather, of_tables, written
from manymax.engine.linear import HeadCall
from manymax.engine.row_target import RowTarget
from manymax.ops.checks import check_finite, visible
from manymax.ops.forward_mode import differentiable
from manymax.ops.lookup import lookup


def rg_kernel() -> Callable[[HeadCall], Tensor]:
    """The kernel of RG for a head: from a call to the losses of its rows, (N,), the same on every rank.

    Each loss is |t| (log C + mean(s) + var(s)/2) - sum_i t_i s_i. The ranks exchange the moments of the class vectors
    and one number per row.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.0], [0.0, 5.0], [-0.3, 3.0]])
        >>> manymax.linear_rg_loss(input, vectors, torch.tensor([0]))
        tensor(0.8286)
    """
    return _losses


def _losses(call: HeadCall) -> Tensor:
    """The losses of the rows of a call, (N,), in the dtype of the arithmetic (float32 at least)."""
    ranks, queries, vectors = call.shards.ranks, call.queries, call.vectors
    if call.bias is not None:
        # A bias is one more feature of the class vectors, for which every query has a 1. The maximum over all ranks
        # shows nan, +inf, and -inf for all classes, and makes every rank raise the same error. A masked class has the
        # bias -inf, and 0 x -inf is nan: it gets 0 here, and `_centred` drops its whole vector.
        check_finite(ranks.maximum(call.bias.amax()))
        bias = call.bias if call.live is None else torch.where(call.live, call.bias, 0)
        vectors = torch.cat([vectors, bias.unsqueeze(1)], 1)
        queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)
    rows = call.rows()[:]
    centred, count = _centred(vectors, call)
    # The ranks add up their parts of the sum of all class vectors, (d,), and of their squares, (d, d). Both results
    # are shared, and so is all that follows from them and the queries: every rank finds the whole gradient of the
    # queries through `mean` and `square` by itself, and nothing of it may be added up over the ranks.
    mean = queries @ (ranks.total(centred.sum(0)) / count)
    square = ((queries @ (ranks.total(gram(centred)) / count)) * queries).sum(1)
    # var(s) = mean(s^2) - mean(s)^2 loses no digits, because the vectors are centred and the mean is next to 0. The
    # mean is not left out: it carries the gradient that the centring does not have.
    partition = count.log() + mean + (square - mean.square()) / 2
    # The scores of the positives are local: a rank has those of its own classes. Here the gradient of the queries
    # differs from rank to rank and has to be added up, which `spread` does; one number per row travels forward.
    value = rows.total * partition - ranks.total(_positive_scores(ranks.spread(queries), centred, rows))
    check_finite(value)
    if call.keywords.multilabel != "normalized":
        return value
    # "normalized": the loss for the target t / |t|, with Omega(t / |t|) = (C |t / |t||^2 - 1) / 2 - log C added, which
    # makes it (C / 2) |p - t / |t||^2. The squared norm is a sum over the classes of all ranks; it is taken without a
    # derivative, as a constant of the targets. A row without positives costs 0.
    scale = 1 / torch.where(rows.total > 0, rows.total, 1)
    omega = (count * ranks.total(square_norm(rows)) * scale.square() - 1) / 2 - count.log()
    return torch.where(rows.total > 0, value * scale + omega, 0)


def _centred(vectors: Tensor, call: HeadCall) -> tuple[Tensor, Tensor]:
    """The class vectors of this rank minus the mean over all ranks, 0 for masked classes; and the number of the others.

    Returns:
        Vectors, (classes of this rank, d), and the number of classes that are not masked, (), over all ranks.
    """
    # Taking the same vector off all class vectors adds a constant to the scores of a row, which leaves the loss as it
    # is: any vector may be taken off, without a gradient (`sum` instead of `total`), even one with rounding errors.
    # The mean is the one for which the differences of squares in `_losses` do not cancel.
    ranks, live = call.shards.ranks, call.live
    if live is None:
        count = vectors.new_tensor(call.shards.num_classes)
        return vectors - ranks.sum(vectors.sum(0)) / count, count
    alive = live.to(vectors.dtype)
    count = ranks.sum(alive.sum())
    return (vectors - ranks.sum(alive @ vectors) / count) * alive.unsqueeze(1), count


class Gram(torch.autograd.Function):
    """V^T V, (d, d), for V (C, d); its gradient V (G + G^T) is one product with V, for which autograd takes two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(vectors: Tensor) -> Tensor:
        return vectors.T @ vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        # Saved for reverse mode and for forward mode; both formulas are made of torch operations and can be
        # differentiated again, and `generate_vmap_rule` makes `torch.vmap` work on them.
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        return vectors @ (grad + grad.T)

    @staticmethod
    def tangent(ctx: Any, step: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        half = vectors.T @ step
        return half + half.T


gram = differentiable(Gram)


def _positive_scores(queries: Tensor, vectors: Tensor, rows: RowTarget) -> Tensor:
    """sum_i t_i s_i over the classes i of this rank, (N,), without a table of scores."""
    # Full rows of weights: sum_i t_i <x, w_i> = <x, sum_i t_i w_i>, one product of (N, C) weights with the vectors.
    if rows.ids is None:
        inner = ((rows.weights @ vectors) * queries).sum(1)
    # Several listed positives: one entry per positive, so that no row is padded to the row with the most. Ids of other
    # ranks have weight 0 here and are left out as padding is.
    elif rows.ids.shape[1] > 1 and visible(rows.weights):
        row, column = rows.weights.nonzero(as_tuple=True)
        scores = (lookup(vectors, rows.ids[row, column]) * lookup(queries, row)).sum(1)
        inner = queries.new_zeros(len(queries)).index_add(0, row, rows.weights[row, column] * scores)
    else:
        inner = (rows.weights * (embedding(rows.ids, vectors) @ queries.unsqueeze(2)).squeeze(2)).sum(1)
    # Smoothing gives every class of a row the weight share x class_weight: again one weighted sum of the vectors.
    if rows.share is not None and rows.class_weight is not None:
        inner = inner + rows.share * (queries @ (rows.class_weight @ vectors))
    return inner


def square_norm(rows: RowTarget) -> Tensor:
    """sum_i t_i^2 over the classes i of this rank, (n,), smoothing included."""
    square = rows.weights.square().sum(1)
    if rows.share is None or rows.class_weight is None:
        return square
    # t_i = weights_i + share x class_weight_i: the square of a sum, of which only the first part is listed by id.
    weights = rows.class_weight if rows.ids is None else rows.class_weight[rows.ids]
    cross = 2 * rows.share * (rows.weights * weights).sum(1)
    return square + cross + rows.share.square() * rows.class_weight.square().sum()


def cost(shape: Shape, way: Way, **settings: object) -> Cost:
    """Cost of a step: the Gram matrix of the class vectors and its gradient, C d^2 each, and d^2 per row."""
    if way == "plain":
        work = (
            Work(flops=6 * shape.table * shape.dim, calls=PER_STEP) + written(shape.table, 22) + written(shape.vectors)
        )
        return of_tables(work, 3, shape, 6 * shape.table)
    products = (2 * shape.num_classes + 3 * shape.batch) * float(shape.dim)
    work = Work(flops=2 * products * shape.dim, calls=PER_STEP + 150) + written(shape.vectors, 4)
    work += gather(shape.num_classes, shape.dim, 2 * shape.pairs)
    return Cost(work, products, shape.vectors, FLOAT * (3 * shape.vectors + 4 * shape.queries))


def traffic(shape: Shape, ranks: int) -> Traffic:
    """What the ranks add up in the forward pass: mean and centred mean, (d,) each, Gram matrix, one number per row."""
    return Traffic(4, FLOAT * (2 * shape.dim + shape.dim**2 + shape.batch))
