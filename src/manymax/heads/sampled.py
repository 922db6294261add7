"""The sampled losses from queries and class vectors: one step touches only the drawn rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.engine.blocks import bags, first_order, in_dtype, row_sparse
from manymax.engine.linear import check_linear, read_head_target
from manymax.engine.target import MULTILABEL, Target
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.members.nce.loss import nce_loss
from manymax.members.sampled_softmax.loss import sampled_softmax_loss
from manymax.ops.checks import full_precision, working
from manymax.ops.lookup import lookup
from manymax.ops.picked import in_table, picked_scores, table_is_cheaper
from manymax.ops.reduction import REDUCTIONS, reduce
from manymax.samplers.base import Draw, Sampler


class PickedScores(torch.autograd.Function):
    """`picked_scores`, (M, k), without keeping what was gathered.

    Both gradients are weighted sums of rows, of class vectors for x and of queries for w; that of w has one row for
    each distinct id, as a sparse tensor if `sparse` is set. Where a table of all scores is small, they are matmuls
    with the table of the scores' gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse = sparse
        return picked_scores(input, linear_weight, ids, rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, rows, ids = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        if not ctx.sparse and table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            return *_from_table(input, linear_weight, rows, ids, grad, wants), None, None, None
        grad_input = grad_weight = None
        if wants[0]:
            each = embedding_bag(ids, linear_weight, mode="sum", per_sample_weights=grad.contiguous())
            grad_input = torch.zeros_like(input).index_add_(0, rows, each)
        if wants[1]:
            order = ids.flatten().int().argsort(stable=True)
            owners, values = lookup(rows, order // ids.shape[1]), lookup(grad.flatten(), order)
            classes = lookup(ids.flatten(), order)
            grad_weight = sum_by_class(classes, owners, values, input, linear_weight.shape, ctx.sparse)
        return grad_input, grad_weight, None, None, None


def _from_table(
    input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients from G (R, C), which has the scores' gradients where they were picked: G W and G^T X."""
    shape = len(input), len(linear_weight)
    G = grad.new_zeros(shape)
    G.view(-1).index_add_(0, in_table(rows, ids, shape[1]), grad.flatten())
    return (G @ linear_weight if wants[0] else None), (G.T @ input if wants[1] else None)


def sum_by_class(
    classes: Tensor, rows: Tensor, values: Tensor, input: Tensor, shape: torch.Size, sparse: bool
) -> Tensor:
    """sum of value x input[row] for each class; `classes` is sorted."""
    if not sparse:
        return bags(classes, rows, values, input, shape[0])
    touched, position = classes.unique_consecutive(return_inverse=True)
    product = bags(position, rows, values, input, len(touched))
    return row_sparse(touched, product, shape)


class SharedRows(torch.autograd.Function):
    """w[ids] for ids (k,), with a gradient of the touched rows, sparse if asked for."""

    @staticmethod
    def forward(ctx: Any, linear_weight: Tensor, ids: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.sparse = linear_weight.shape, sparse
        return linear_weight[ids]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        if not ctx.sparse:
            return grad.new_zeros(ctx.shape).index_add_(0, ids, grad), None, None
        touched, position = ids.unique(return_inverse=True)
        product = grad.new_zeros(len(touched), grad.shape[1]).index_add_(0, position, grad)
        return row_sparse(touched, product, ctx.shape), None, None


class Pairs(NamedTuple):
    """One row per positive: its query's row, its class and its weight."""

    rows: Tensor
    classes: Tensor
    weights: Tensor

    @property
    def owner(self) -> Tensor | None:
        """`rows`, where a query has more than one positive."""
        return self.rows if (self.rows[1:] == self.rows[:-1]).any() else None


def read_pairs(read: Target) -> Pairs:
    """The positives of a target, row after row."""
    rows, column = (read.weights != 0).nonzero(as_tuple=True)
    classes = column if read.ids is None else read.ids[rows, column]
    return Pairs(rows, classes, read.weights[rows, column])


def _scores_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, rows: Tensor
) -> Callable[[Tensor], Tensor]:
    """What a sampler that follows the model asks: the scores of ids (m,) or (M, m), without gradients."""

    @torch.no_grad()
    def scores(ids: Tensor) -> Tensor:
        if ids.dim() == 1:
            found = input[rows] @ lookup(linear_weight, ids).T
        else:
            found = picked_scores(input, linear_weight, ids, rows)
        return found if linear_bias is None else found + lookup(linear_bias, ids)

    return scores


def _scores(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, pairs: Pairs, draw: Draw, sparse: bool
) -> tuple[Tensor, Tensor]:
    """Scores of the positives (M,) and of the negatives (M, k)."""
    rows, target = pairs.rows, pairs.classes
    if draw.shared:
        positive = PickedScores.apply(input, linear_weight, rows, target.unsqueeze(1), sparse).squeeze(1)
        negative = input[rows] @ SharedRows.apply(linear_weight, draw.ids, sparse).T
    else:
        both = PickedScores.apply(input, linear_weight, rows, torch.cat([target.unsqueeze(1), draw.ids], 1), sparse)
        positive, negative = both[:, 0], both[:, 1:]
    if linear_bias is not None:
        positive, negative = positive + linear_bias[target], negative + linear_bias[draw.ids]
    copies = draw.copies(len(rows))
    if copies is not None:  # in-batch: a query's own positives are no draws for it
        negative = torch.where(copies, -torch.inf, negative)
    return positive, negative


def read_log_q(draw: Draw, num_classes: int, batch: int) -> tuple[Tensor | float, Tensor | float]:
    """log q of the positives and the negatives; that of a uniform proposal where the sampler knows none.

    The losses take log(k q) for the number k of columns. In-batch a query's own positives are columns but no draws:
    the k' others have log(k q) = log(k' q) if log(k' / k) is added to log q.
    """
    uniform = -math.log(num_classes)
    positive = uniform if draw.log_q_target is None else draw.log_q_target
    negative = uniform if draw.log_q is None else draw.log_q
    copies = draw.copies(batch)
    if copies is None:
        return positive, negative
    share = 1 - copies.to(torch.float64).mean(1)
    shift = torch.where(share > 0, share, 1).log()
    return positive + shift, negative + shift.unsqueeze(1)


def linear_drawn_loss(
    loss: Callable[..., Tensor],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    sampler: Sampler,
    num_negatives: int | None,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    multilabel: str,
    shared: bool,
    sparse: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Any loss of drawn scores, `loss(positive (M,), negative (M, k), draw, classes (M,))` -> (M,), as a head.

    The other arguments are those of `linear_sampled_softmax_loss`.
    """
    check_linear(input, linear_weight, linear_bias)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("multilabel", multilabel, MULTILABEL)
    check_sampler(sampler, linear_weight.shape[0], target)
    queries, dtype = working(input)
    vectors = in_dtype(linear_weight, queries.dtype)
    read = read_head_target(queries, target, weight, ignore_index, multilabel, linear_weight.shape[0])
    bias = None if linear_bias is None else linear_bias.to(queries.dtype)
    pairs = read_pairs(read)
    flat = queries.reshape(-1, queries.shape[-1])
    losses = flat.new_zeros(flat.shape[0])
    with full_precision(input):
        if len(pairs.rows):
            draw = sampler(
                num_negatives,
                target=pairs.classes,
                owner=pairs.owner,
                input=flat[pairs.rows].detach(),
                linear_weight=vectors.detach(),
                linear_bias=None if linear_bias is None else linear_bias.detach(),
                scores=_scores_of(flat, vectors, bias, pairs.rows),
                shared=shared,
                generator=generator,
            )
            positive, negative = _scores(flat, vectors, bias, pairs, draw, sparse)
            losses = losses.index_add(0, pairs.rows, pairs.weights * loss(positive, negative, draw, pairs.classes))
        else:  # nothing to learn from: sums of nothing have zero gradients, sparse if asked for
            none = pairs.rows.new_empty(0, 1)
            nothing = PickedScores.apply(flat[:0], vectors, pairs.rows, none, sparse).sum()
            losses = losses + (nothing if bias is None else nothing + bias[:0].sum())
    if multilabel == "normalized":
        total = read.weights.sum(1)
        losses = losses / torch.where(total > 0, total, 1)
    value = reduce(losses, read.divisor, reduction)
    return (value.reshape(input.shape[:-1]) if reduction == "none" else value).to(dtype)


def check_sampler(sampler: object, num_classes: int, target: object) -> None:
    """Refuse what draws from other classes, and targets without ids to draw for."""
    if not isinstance(sampler, Sampler):
        raise ArgumentTypeError(f"`sampler` must be one of manymax.samplers; got {type(sampler).__name__}.")
    if sampler.num_classes != num_classes:
        raise ArgumentError(f"`sampler` draws from {sampler.num_classes} classes, `linear_weight` has {num_classes}.")
    if isinstance(target, Tensor) and target.is_floating_point():
        raise ArgumentTypeError("`target` of a sampled head must be ids or bool rows: it needs one draw per positive.")


def linear_sampled_softmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    sampler: Sampler,
    num_negatives: int | None = 100,
    *,
    correction: str = "logq",
    hit_policy: str | None = None,
    debias: str | None = None,
    shared: bool = False,
    sparse: bool = False,
    generator: torch.Generator | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    multilabel: str = "sum",
) -> Tensor:
    """`sampled_softmax_loss` of queries and class vectors, with negatives from a sampler.

    Args:
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        target: ids, padded ids, bool rows or a grouped target; every positive draws its own negatives.
        sampler: one of `manymax.samplers`. Where it knows no log q (dns) a uniform one stands in, which cancels for
            `correction="logq"`.
        num_negatives: k.
        correction, hit_policy, debias: as in `sampled_softmax_loss`.
        shared: one draw of k negatives for all rows: a matmul instead of a gather.
        sparse: give `linear_weight` a gradient of the touched rows only.
        generator: of the draws.
        linear_bias, weight, reduction, ignore_index, multilabel: as in `linear_softmax_loss`.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_sampled_softmax_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(2.3026)
    """

    def loss(positive: Tensor, negative: Tensor, draw: Draw, classes: Tensor) -> Tensor:
        if correction == "partition" and draw.log_q is None:
            raise ArgumentError(f"`correction='partition'` needs log q, which this sampler does not know: {draw.note}.")
        log_q_positive, log_q_negative = read_log_q(draw, linear_weight.shape[0], len(classes))
        return sampled_softmax_loss(
            positive,
            negative,
            log_q_positive=log_q_positive,
            log_q_negative=log_q_negative,
            hits=draw.hits(classes),
            correction=correction,
            hit_policy=hit_policy,
            debias=debias,
            reduction="none",
        )

    return linear_drawn_loss(
        loss,
        input,
        linear_weight,
        target,
        sampler,
        num_negatives,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        multilabel=multilabel,
        shared=shared,
        sparse=sparse,
        generator=generator,
    )


def linear_nce_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    sampler: Sampler,
    num_negatives: int | None = 100,
    *,
    log_z: float | Tensor = 0.0,
    hit_policy: str = "keep",
    shared: bool = False,
    sparse: bool = False,
    generator: torch.Generator | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    multilabel: str = "sum",
) -> Tensor:
    """`nce_loss` of queries and class vectors, with noise from a sampler.

    `log_z` and `hit_policy` as in `nce_loss`, other arguments as in `linear_sampled_softmax_loss`.
    """

    def loss(positive: Tensor, negative: Tensor, draw: Draw, classes: Tensor) -> Tensor:
        log_q_positive, log_q_negative = read_log_q(draw, linear_weight.shape[0], len(classes))
        return nce_loss(
            positive,
            negative,
            log_q_positive=log_q_positive,
            log_q_negative=log_q_negative,
            hits=draw.hits(classes),
            hit_policy=hit_policy,
            log_z=log_z,
            reduction="none",
        )

    return linear_drawn_loss(
        loss,
        input,
        linear_weight,
        target,
        sampler,
        num_negatives,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        multilabel=multilabel,
        shared=shared,
        sparse=sparse,
        generator=generator,
    )
