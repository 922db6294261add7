"""The exact losses and RG from queries and the class vectors of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from manymax.distributed import kernels
from manymax.distributed.sharding import Shards, check_positives, local_target
from manymax.engine.blocks import Kernel, in_dtype
from manymax.engine.linear import apply_kernel, check_linear, omega_rows, read_head_target
from manymax.engine.row_target import RowTarget, live_classes
from manymax.engine.target import Target
from manymax.errors import ArgumentError
from manymax.heads.modules import (
    LinearEntmaxLoss,
    LinearRankmaxLoss,
    LinearRGLoss,
    LinearSoftmaxLoss,
    LinearSparsemaxLoss,
    LinearTaylorSoftmaxLoss,
)
from manymax.members.entmax import loss as entmax
from manymax.members.rankmax import loss as rankmax
from manymax.members.rg.kernel import square_norm
from manymax.members.softmax import loss as softmax
from manymax.members.sparsemax import loss as sparsemax
from manymax.ops.checks import check_finite, working
from manymax.ops.reduction import reduce

ExactHead = (
    LinearSoftmaxLoss
    | LinearSparsemaxLoss
    | LinearEntmaxLoss
    | LinearRankmaxLoss
    | LinearTaylorSoftmaxLoss
    | LinearRGLoss
)


@dataclass(frozen=True)
class Call:
    """One call of a head that has been read and checked on this rank, without any exchange.

    queries: (N, d); vectors and bias: (classes of this rank, d) and (classes of this rank,), in the dtype of the
    arithmetic; live: which classes of this rank are not masked. read: the target over all classes. batch: the shape of
    the rows. dtype: of the result.
    """

    queries: Tensor
    vectors: Tensor
    bias: Tensor | None
    live: Tensor | None
    read: Target
    batch: torch.Size
    dtype: torch.dtype


def read_call(
    head: ExactHead, input: Tensor, linear_weight: Tensor, bias: Tensor | None, target: Tensor | Target, shards: Shards
) -> Call:
    """Check the arguments of a call and bring them into one form."""
    check_linear(input, linear_weight, bias)
    if isinstance(head, LinearRankmaxLoss):
        rankmax.check_target(target if isinstance(target, Tensor) else target.weights.long(), head.label_smoothing)
    queries, dtype = working(input)
    read = read_head_target(queries, target, head.weight, head.ignore_index, head.multilabel, shards.num_classes)
    live = live_classes(bias)
    check_positives(read, live, shards)
    own_bias = None if bias is None else bias.to(queries.dtype)
    flat = queries.reshape(-1, queries.shape[-1])
    return Call(flat, in_dtype(linear_weight, queries.dtype), own_bias, live, read, input.shape[:-1], dtype)


def exact_loss(head: ExactHead, call: Call, shards: Shards) -> Tensor:
    """The loss of a call, the same on every rank."""
    if isinstance(head, LinearRankmaxLoss):
        call = replace(call, read=_listed(call.read))
    rows = local_target(call.read, head.weight, call.live, shards, head.label_smoothing)
    if isinstance(head, LinearRGLoss):
        value = reduce(_rg_rows(head, call, rows, shards), call.read.divisor, head.reduction)
    else:
        value = _blocked(head, call, rows, shards)
    return (value.reshape(call.batch) if head.reduction == "none" else value).to(call.dtype)


def _listed(read: Target) -> Target:
    """Bool rows as padded ids: rankmax needs to know which positive it is about."""
    if read.ids is not None:
        return read
    present = read.weights != 0
    width = max(1, int(present.sum(1).max())) if len(present) else 1
    ids = present.to(torch.uint8).topk(width, dim=1).indices
    return replace(read, ids=ids, weights=read.weights.gather(1, ids))


def _blocked(head: ExactHead, call: Call, rows: RowTarget, shards: Shards) -> Tensor:
    """As in heads.linear: the kernel completes its sums over the ranks, autograd those of the shared tensors."""
    ranks, options = shards.ranks, shards.in_blocks(head.options)
    kernel, setting, omega = _member(head, call.queries, shards)
    queries = ranks.spread(call.queries)
    value = apply_kernel(
        kernel, queries, call.vectors, call.bias, setting, rows, call.read, head.reduction, head.multilabel, options
    )
    if head.multilabel == "normalized" and omega is not None:
        extra = ranks.total(omega_rows(rows, omega, options.rows(shards.size)))
        value = value + (extra if head.reduction == "none" else reduce(extra, call.read.divisor, head.reduction))
    return value


def _member(
    head: ExactHead, like: Tensor, shards: Shards
) -> tuple[Kernel, Tensor | None, Callable[[Tensor], Tensor] | None]:
    """The kernel of a head, the tensor that it is also differentiated in, and Omega."""
    ranks = shards.ranks
    if isinstance(head, LinearSoftmaxLoss):
        return kernels.softmax_kernel(ranks), None, softmax.omega
    if isinstance(head, LinearSparsemaxLoss):
        return kernels.entmax_kernel(ranks, 2.0), None, sparsemax.omega
    if isinstance(head, LinearRankmaxLoss):
        return kernels.rankmax_kernel(ranks), None, None
    if isinstance(head, LinearTaylorSoftmaxLoss):
        return kernels.taylor_kernel(ranks, head.order), None, None
    if not isinstance(head, LinearEntmaxLoss):
        raise ArgumentError(f"`head` must be an exact head; got {type(head).__name__}.")
    alpha = ranks.spread(entmax.read_alpha(head.alpha, like))
    number, learned = float(alpha.detach()), alpha.requires_grad
    if number == 1 and learned:
        raise ArgumentError("a head has no gradient in `alpha` at alpha = 1; use `entmax_loss` or start above 1.")
    kernel = kernels.softmax_kernel(ranks) if number == 1 else kernels.entmax_kernel(ranks, number, learned)
    return kernel, alpha if learned else None, lambda probs: entmax.omega(probs, alpha)


def _rg_rows(head: LinearRGLoss, call: Call, rows: RowTarget, shards: Shards) -> Tensor:
    """total (log C + var(s) / 2) - sum_i t_i (s_i - mean(s)), (N,), from moments over all ranks.

    As in heads.moments: what is exchanged are the mean and the covariance of the class vectors, once, and one number
    per row.
    """
    ranks, queries, vectors = shards.ranks, call.queries, call.vectors
    if call.bias is not None:  # a bias is one more feature of the class vectors
        check_finite(ranks.maximum(call.bias.amax()))
        bias = call.bias if call.live is None else torch.where(call.live, call.bias, 0)
        vectors = torch.cat([vectors, bias.unsqueeze(1)], 1)
        queries = torch.cat([queries, torch.ones_like(queries[:, :1])], 1)
    alive = vectors.new_ones(len(vectors)) if call.live is None else call.live.to(vectors.dtype)
    count = ranks.sum(alive.sum())
    for _ in range(2):  # the second mean is of what rounding left
        vectors = vectors - ranks.spread(ranks.total(alive @ vectors) / count)
    centred = vectors * alive.unsqueeze(1)
    covariance = ranks.total(centred.T @ centred) / count
    partition = count.log() + ((queries @ covariance) * queries).sum(1) / 2
    value = rows.total * partition - ranks.total(_rg_inner(ranks.spread(queries), centred, rows))
    check_finite(value)
    if head.multilabel != "normalized":
        return value
    scale = 1 / torch.where(rows.total > 0, rows.total, 1)
    omega = (count * ranks.sum(square_norm(rows)) * scale.square() - 1) / 2 - count.log()
    return torch.where(rows.total > 0, value * scale + omega, 0)


def _rg_inner(queries: Tensor, centred: Tensor, rows: RowTarget) -> Tensor:
    """sum_i t_i (s_i - mean(s)) over the classes of this rank, (N,)."""
    if rows.ids is None:
        inner = ((rows.weights @ centred) * queries).sum(1)
    else:
        inner = (rows.weights * (embedding(rows.ids, centred) @ queries.unsqueeze(2)).squeeze(2)).sum(1)
    if rows.share is not None and rows.class_weight is not None:
        inner = inner + rows.share * (queries @ (rows.class_weight @ centred))
    return inner
