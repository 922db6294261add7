"""The sampled losses from queries and the class vectors of one rank.

All ranks draw the same negatives; each computes the scores of those that it holds. What travels per positive are its
score, the largest logit and sums over the negatives, never the scores of the negatives. A sampler that looks at scores
(dns, two_pass) has those of its pool of candidates added up over the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from manymax.distributed.collectives import Ranks
from manymax.distributed.sharding import Shards
from manymax.engine.blocks import bags, first_order, in_dtype
from manymax.engine.linear import check_linear, read_head_target
from manymax.engine.target import Target
from manymax.errors import ArgumentError
from manymax.heads.modules import LinearNCELoss, LinearSampledSoftmaxLoss
from manymax.heads.sampled import Pairs, SharedRows, check_sampler, read_log_q, read_pairs, sum_by_class
from manymax.members.nce.loss import nce_loss
from manymax.members.sampled_softmax.loss import sampled_softmax_loss
from manymax.ops.checks import visible, working
from manymax.ops.picked import entry_scores
from manymax.ops.reduction import reduce
from manymax.samplers.base import Draw

SampledHead = LinearSampledSoftmaxLoss | LinearNCELoss


class EntryScores(torch.autograd.Function):
    """`entry_scores`, (E,), with gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(input, linear_weight, rows, ids)
        ctx.sparse = sparse
        return entry_scores(input, linear_weight, rows, ids)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, rows, ids = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = bags(rows, ids, grad, linear_weight, len(input))
        if ctx.needs_input_grad[1]:
            order = ids.int().argsort(stable=True)
            shape = linear_weight.shape
            grad_weight = sum_by_class(ids[order], rows[order], grad[order], input, shape, ctx.sparse)
        return grad_input, grad_weight, None, None, None


@dataclass(frozen=True)
class Call:
    """One call that has been read and checked on this rank; fields as in exact.Call."""

    queries: Tensor
    vectors: Tensor
    bias: Tensor | None
    read: Target
    pairs: Pairs
    batch: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Sample:
    """Positives (M,) of all ranks, and the negatives of this rank, (M, K) each.

    negative: their scores, -inf where masked or not of this rank; log_q: of these; own: which of them are this rank's,
    masked ones included. num_negatives: k, over all ranks.
    """

    positive: Tensor
    log_q_positive: Tensor
    negative: Tensor
    log_q: Tensor
    own: Tensor
    num_negatives: int


def read_call(
    head: SampledHead,
    input: Tensor,
    linear_weight: Tensor,
    bias: Tensor | None,
    target: Tensor | Target,
    shards: Shards,
) -> Call:
    """Check the arguments of a call and bring them into one form."""
    check_linear(input, linear_weight, bias)
    check_sampler(head.sampler, shards.num_classes, target)
    queries, dtype = working(input)
    read = read_head_target(queries, target, head.weight, head.ignore_index, head.multilabel, shards.num_classes)
    flat = queries.reshape(-1, queries.shape[-1])
    own_bias = None if bias is None else bias.to(queries.dtype)
    return Call(flat, in_dtype(linear_weight, queries.dtype), own_bias, read, read_pairs(read), input.shape[:-1], dtype)


def sampled_loss(head: SampledHead, call: Call, shards: Shards) -> Tensor:
    """The loss of a call with fresh negatives, the same on every rank."""
    call = replace(call, queries=shards.ranks.spread(call.queries))
    losses = call.queries.new_zeros(len(call.queries))
    if len(call.pairs.rows):
        draw = _draw(head, call, shards)
        rows = _rows(head, _sample(head, call, draw, shards), draw, shards.ranks)
        losses = losses.index_add(0, call.pairs.rows, call.pairs.weights * rows)
    else:  # nothing to learn from: sums of nothing have zero gradients, sparse if asked for
        losses = losses + _scores(head, call, call.pairs.rows, call.pairs.rows, shards).sum()
    if head.multilabel == "normalized":
        total = call.read.weights.sum(1)
        losses = losses / torch.where(total > 0, total, 1)
    value = reduce(losses, call.read.divisor, head.reduction)
    return (value.reshape(call.batch) if head.reduction == "none" else value).to(call.dtype)


def _draw(head: SampledHead, call: Call, shards: Shards) -> Draw:
    """The draw of the first rank's generator, made by every rank for itself."""

    def scores(ids: Tensor) -> Tensor:
        everyone = ids.expand(len(call.pairs.rows), -1) if ids.ndim == 1 else ids
        row, column = shards.inside(everyone).nonzero(as_tuple=True)
        own = queries.new_zeros(everyone.shape)
        own[row, column] = _scores(head, call, call.pairs.rows[row], everyone[row, column], shards).detach()
        return shards.ranks.sum(own)

    queries = call.queries.detach()
    draw: Draw = head.sampler(
        head.num_negatives,
        target=call.pairs.classes,
        owner=call.pairs.owner,
        input=queries[call.pairs.rows],
        scores=scores,
        shared=head.shared,
        generator=_same_generator(head.generator, shards.ranks, queries.device),
    )
    return draw


def _same_generator(generator: torch.Generator | None, ranks: Ranks, device: torch.device) -> torch.Generator | None:
    """A generator in the state of the first rank's; without one, seeded by a number that the first rank draws."""
    if ranks.size == 1:
        return generator
    if generator is None:
        seed = ranks.first(torch.randint(2**62, (), device=device))
        return torch.Generator(device).manual_seed(int(seed))
    generator.set_state(ranks.first(generator.get_state().to(device)).cpu())
    return generator


def _scores(head: SampledHead, call: Call, rows: Tensor, ids: Tensor, shards: Shards) -> Tensor:
    """The scores of entries (row, class of this rank), (E,) each, sorted by row."""
    own = ids - shards.start
    scores = EntryScores.apply(call.queries, call.vectors, rows, own, head.sparse)
    return scores if call.bias is None else scores + call.bias[own]


def _sample(head: SampledHead, call: Call, draw: Draw, shards: Shards) -> Sample:
    classes = call.pairs.classes
    positive = _positive(head, call, shards)
    negative, column, own = (_shared if draw.shared else _per_row)(head, call, draw, shards)
    # in-batch: a query's own positives are no draws for it
    for masked in (draw.copies(len(classes)), draw.hits(classes) if _masks_hits(head) else None):
        if masked is not None:
            negative = torch.where(_at(masked, column, negative), -torch.inf, negative)
    log_q_positive, log_q = (
        torch.as_tensor(log_q, dtype=negative.dtype, device=negative.device)
        for log_q in read_log_q(draw, shards.num_classes, len(classes))
    )
    _check_log_q(log_q_positive, log_q)
    log_q = torch.where(own, _at(log_q, column, negative), 0)
    return Sample(positive, log_q_positive.expand(len(classes)), negative, log_q, own, draw.ids.shape[-1])


def _positive(head: SampledHead, call: Call, shards: Shards) -> Tensor:
    """The scores of the positives, (M,), each from the rank that has it."""
    mine = shards.inside(call.pairs.classes).nonzero().squeeze(1)
    scores = _scores(head, call, call.pairs.rows[mine], call.pairs.classes[mine], shards)
    positive = shards.ranks.total(call.queries.new_zeros(len(call.pairs.rows)).index_put((mine,), scores))
    if visible(positive) and not positive.isfinite().all():
        raise ArgumentError(
            "`positive` must hold finite scores: a masked class cannot be a positive; got"
            f" {positive[~positive.isfinite()][0].item()}."
        )
    return positive


def _shared(head: SampledHead, call: Call, draw: Draw, shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the shared negatives of this rank and one at -inf, their columns in the draw, and which are its own."""
    column = shards.inside(draw.ids).nonzero().squeeze(1)
    ids = draw.ids[column] - shards.start
    scores = call.queries[call.pairs.rows] @ SharedRows.apply(call.vectors, ids, head.sparse).T
    if call.bias is not None:
        scores = scores + call.bias[ids]
    own = torch.ones_like(scores, dtype=torch.bool)
    return pad(scores, (0, 1), value=-torch.inf), pad(column, (0, 1)).expand(len(scores), -1), pad(own, (0, 1))


def _per_row(head: SampledHead, call: Call, draw: Draw, shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """The same for draws of each row: those of this rank are moved to the left."""
    inside = shards.inside(draw.ids)
    row, column = inside.nonzero(as_tuple=True)
    place = (inside.cumsum(1) - 1)[row, column]
    shape = (len(inside), max(1, int(inside.sum(1).max())))
    flat = _scores(head, call, call.pairs.rows[row], draw.ids[row, column], shards)
    scores = call.queries.new_full(shape, -torch.inf).index_put((row, place), flat)
    columns = column.new_zeros(shape).index_put((row, place), column)
    own = torch.zeros(shape, dtype=torch.bool, device=row.device)
    own[row, place] = True
    return scores, columns, own


def _at(values: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """What values (), (k,) or (M, k) have in the columns (M, K)."""
    if values.ndim == 0:
        return values.expand(like.shape)
    return values.expand(len(like), -1).gather(1, column)


def _masks_hits(head: SampledHead) -> bool:
    default = "mask" if isinstance(head, LinearSampledSoftmaxLoss) and head.correction == "partition" else "keep"
    return (head.hit_policy or default) == "mask"


def _check_log_q(*log_q: Tensor) -> None:
    for values in log_q:
        if visible(values) and not values.isfinite().all():
            raise ArgumentError(
                "log q must be finite: a class with q = 0 cannot be drawn, nor be a positive of a sampled loss. Smooth"
                " the proposal so that every class can be drawn."
            )


def _rows(head: SampledHead, sample: Sample, draw: Draw, ranks: Ranks) -> Tensor:
    if isinstance(head, LinearNCELoss):
        return _nce(head, sample, ranks)
    if head.correction == "partition" and draw.log_q is None:
        raise ArgumentError(f"`correction='partition'` needs log q, which this sampler does not know: {draw.note}.")
    return _softmax(head, sample, ranks)


def check_settings(head: SampledHead) -> None:
    """Raise where the plain loss would, whatever the scores are."""
    k = head.num_negatives or 2
    sample: dict[str, Any] = {"log_q_positive": 0.0, "log_q_negative": 0.0, "hits": torch.zeros(k, dtype=torch.bool)}
    loss = nce_loss if isinstance(head, LinearNCELoss) else sampled_softmax_loss
    loss(torch.zeros(1), torch.zeros(1, k), **sample, **head.settings())


def _nce(head: LinearNCELoss, sample: Sample, ranks: Ranks) -> Tensor:
    """softplus(-d_y) + sum_j softplus(d_j), d = s - log(k q) - log Z0."""
    log_z = torch.as_tensor(head.log_z, dtype=sample.positive.dtype, device=sample.positive.device)
    shift = log_z + math.log(sample.num_negatives)
    positive = sample.positive - sample.log_q_positive - shift
    noise = -logsigmoid(-(sample.negative - sample.log_q - ranks.spread(shift)))
    return -logsigmoid(positive) + ranks.total(noise.sum(1))


def _softmax(head: LinearSampledSoftmaxLoss, sample: Sample, ranks: Ranks) -> Tensor:
    """log(exp(c_y) + sum_j exp(c_j)) - c_y."""
    offset = sample.positive.detach()  # goes first: it would cost the digits of log q
    positive, negative = sample.positive - offset, sample.negative - offset.unsqueeze(1)
    if head.correction == "logq":
        positive, negative = positive - sample.log_q_positive, negative - sample.log_q
    elif head.correction == "partition":
        negative = negative - sample.log_q - math.log(sample.num_negatives)
    top = _top(positive, negative, ranks)
    if not head.debias:
        return _log_sum(positive, negative, top, ranks) - positive
    positive, negative, top = positive.double(), negative.double(), top.double()  # small differences of large sums
    log_sum = _log_sum(positive, negative, top, ranks)
    extra = _delta if head.debias == "delta" else _jackknife
    added = extra(positive, negative, log_sum, top, sample, ranks)
    return (log_sum - positive + added).to(sample.positive.dtype)


def _top(positive: Tensor, negative: Tensor, ranks: Ranks) -> Tensor:
    """The largest logit of all ranks, (M,), a constant."""
    top = ranks.maximum(torch.maximum(positive.detach(), negative.detach().amax(1)))
    if visible(top) and not top.isfinite().all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {top[~top.isfinite()][0].item()}."
        )
    return top


def _log_sum(positive: Tensor, negative: Tensor, top: Tensor, ranks: Ranks) -> Tensor:
    """log(exp(c_y) + sum_j exp(c_j)) over all ranks, (M,)."""
    total = ranks.total((negative - top.unsqueeze(1)).exp().sum(1))
    return ((positive - top).exp() + total).log() + top


def _delta(positive: Tensor, negative: Tensor, log_sum: Tensor, top: Tensor, sample: Sample, ranks: Ranks) -> Tensor:
    """Var(X) / (2 k Z^2) from the k terms X_j / Z = k softmax(c)_j, as in losses.sampled_softmax."""
    k = sample.num_negatives
    ratios = k * (negative - ranks.spread(log_sum).unsqueeze(1)).exp()
    mean = ranks.total(ratios.sum(1)) / k
    difference = torch.where(sample.own, ratios - ranks.spread(mean).unsqueeze(1), 0)
    return ranks.total(difference.square().sum(1)) / (k - 1) / (2 * k)


def _jackknife(
    positive: Tensor, negative: Tensor, log_sum: Tensor, top: Tensor, sample: Sample, ranks: Ranks
) -> Tensor:
    """(k - 1) / k sum_j (log Z - log Z without j), as in losses.sampled_softmax.

    The largest term j is not subtracted from the sum but left out of it. It is marked on one rank alone.
    """
    k = sample.num_negatives
    without = negative + math.log(k / (k - 1))  # weight 1 / (k - 1) each
    best, column = negative.detach().max(1)
    owner = -ranks.maximum(torch.where(best == ranks.maximum(best), -float(ranks.rank), -float(ranks.size)))
    largest = torch.zeros_like(negative, dtype=torch.bool).scatter_(1, column.unsqueeze(1), True)
    largest &= (owner == ranks.rank).unsqueeze(1)
    scaled_top = torch.maximum(top, top + math.log(k / (k - 1)))
    everything = _log_sum(positive, without, scaled_top, ranks)
    others = _log_sum(positive, torch.where(largest, -torch.inf, without), scaled_top, ranks)
    shares = torch.where(largest, 0, (without - ranks.spread(everything).unsqueeze(1)).exp())
    rest = ranks.total(torch.log1p(-shares).sum(1))
    return (k - 1) / k * (k * log_sum - (k - 1) * everything - rest - others)
