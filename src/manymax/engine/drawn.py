"""The losses of sampled heads, from queries and class vectors: one step touches only the drawn class vectors.

On several ranks all ranks draw the same negatives, and each computes the scores of those that it holds. What travels
for each positive is its score and sums over its negatives, never the scores of the negatives. There is one exception: a
sampler that chooses by scores (dns, two_pass) gets those of its pool of candidates summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from manymax.engine.drawn_blocks import SharedDraw, SharedLosses, SharedTotal
from manymax.engine.drawn_keywords import check_sums, finished, listed_in, plain, sums_differ, with_given_negatives
from manymax.engine.exclude import read_listed_ids
from manymax.engine.linear import HeadCall
from manymax.engine.member import Member
from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import DrawnKernel, SampledScores, check_values, read_log_q
from manymax.engine.selected_scores import SharedRows, class_scores
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.matches import Matches
from manymax.samplers.base import Draw, Sampler


@dataclass(frozen=True)
class DrawSettings:
    """How a sampled head draws: from which sampler, and k negatives; None where the sampler has a number of its own."""

    sampler: Sampler
    num_negatives: int | None


def check_sampler(sampler: object, num_classes: int) -> None:
    """Raise unless `sampler` is a sampler over as many classes as the head has."""
    if not isinstance(sampler, Sampler):
        raise ArgumentTypeError(f"`sampler` must be one of manymax.samplers; got {type(sampler).__name__}.")
    if sampler.num_classes != num_classes:
        raise ArgumentError(f"`sampler` draws from {sampler.num_classes} classes, `linear_weight` has {num_classes}.")


class PositivePairs(NamedTuple):
    """One row per positive: the row of its query, its class and its weight, (M,) each.

    The losses on drawn scores are losses of one positive, so that a query with P positives becomes P rows.
    """

    rows: Tensor
    classes: Tensor
    weights: Tensor

    @property
    def owner(self) -> Tensor | None:
        """`rows` if some query has more than one positive; None if every pair has a query of its own."""
        # Pairs come row after row, so that two positives of one query are neighbours.
        return self.rows if (self.rows[1:] == self.rows[:-1]).any() else None


def read_positive_pairs(read: Target, row_weight: Tensor | None = None) -> PositivePairs:
    """The positives of a target, row after row, without the rows of weight 0."""
    # A weight of 0 stands for padding, or for a class with a class weight of 0: neither needs a draw.
    counts = read.weights != 0
    if row_weight is not None:
        counts &= (row_weight != 0).unsqueeze(1)
    rows, column = counts.nonzero(as_tuple=True)
    classes = column if read.ids is None else read.ids[rows, column]
    return PositivePairs(rows, classes, read.weights[rows, column])


def sampled_loss(member: Member, call: HeadCall, settings: Mapping[str, Any], draws: DrawSettings) -> Tensor:
    """The loss of a call with fresh negatives, the same on every rank.

    Args:
        member: the sampled member.
        call: the arguments, read and checked.
        settings: the member's own.
        draws: what to draw.
    """
    kernel: DrawnKernel = member.needed("kernel")(**settings)
    pairs = read_positive_pairs(call.target, call.row_weight)
    if call.keywords.multilabel == "normalized":  # here the mean over the positives: sampled losses have no Omega
        total = call.target.weights.sum(1)
        pairs = pairs._replace(weights=pairs.weights / torch.where(total > 0, total, 1)[pairs.rows])
    if call.row_weight is not None:
        pairs = pairs._replace(weights=pairs.weights * call.row_weight[pairs.rows])
    # All ranks have the queries and use them with their own classes: the gradients of these uses are summed.
    call = replace(call, queries=call.shards.ranks.spread(call.queries))
    if not len(pairs.rows):
        return call.reduced(_no_losses(call, pairs))
    draw = _draw(call, pairs, draws)
    if kernel.needs_log_q is not None and draw.log_q is None:
        raise ArgumentError(f"`{kernel.needs_log_q}` needs log q, which this sampler does not know: {draw.note}.")
    alone = call.shards.ranks.alone
    if draw.shared and alone and plain(call):
        return call.reduced(_shared_losses(call, pairs, draw, kernel))
    # What many ranks do with shared draws, one does where scores or sums are not the plain ones.
    read_scores = _scores_on_one_rank if alone and not draw.shared else _scores_on_many_ranks
    sample = read_scores(call, pairs, draw, kernel)
    if sums_differ(call):
        sample = replace(sample, decoupled=call.keywords.decoupled, z_loss=call.keywords.z_loss)
    losses = kernel.rows(sample)
    check_sums(losses, call.keywords.decoupled)
    return call.reduced(_sum_by_row(call, pairs, losses))


def _sum_by_row(call: HeadCall, pairs: PositivePairs, losses: Tensor) -> Tensor:
    """The losses of the rows (N,), weighted sums over their positives as in an exact head, from those of the pairs."""
    return losses.new_zeros(len(call.queries)).index_add(0, pairs.rows, pairs.weights * losses)


def _no_losses(call: HeadCall, pairs: PositivePairs) -> Tensor:
    """The losses (N,) of a batch without positives: zeros.

    They must still depend on queries, class vectors and bias, so that `backward` works and gives them zeros (a sparse
    tensor without entries if asked for): sums of nothing do that.
    """
    none = pairs.rows.new_empty(0, 1)
    nothing = class_scores(call.queries[:0], call.vectors, pairs.rows, none, call.keywords).sum()
    if call.bias is not None:
        nothing = nothing + call.bias[:0].sum()
    return call.queries.new_zeros(len(call.queries)) + nothing


def _draw(call: HeadCall, pairs: PositivePairs, draws: DrawSettings) -> Draw:
    """Draw the negatives; on several ranks each rank for itself, from a generator in the state of the first one's.

    That costs a few kilobytes of state where sending ids would cost k numbers for each positive.
    """
    queries, ranks = call.queries.detach(), call.shards.ranks
    # What a sampler that follows the model may look at. No rank of several has all class vectors: such a sampler asks
    # for scores, which the ranks compute together.
    model: dict[str, Any] = {"scores": _scores_over_ranks(call, pairs)}
    if ranks.alone:
        model = {
            "linear_weight": call.vectors.detach(),
            "linear_bias": None if call.bias is None else call.bias.detach(),
            "scores": _local_scores(call, pairs.rows),
        }
    model |= {"batch_rows": pairs.rows} if draws.sampler.takes_batch_rows else {}
    draw: Draw = draws.sampler(
        draws.num_negatives,
        target=pairs.classes,
        owner=pairs.owner,
        input=queries[pairs.rows],  # one row per positive
        shared=call.keywords.shared,
        generator=_same_generator(call.keywords.generator, ranks, queries.device),
        **model,
    )
    return draw


def _local_scores(call: HeadCall, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from ids, (m,) for all pairs or (M, m), to their scores (M, m), without gradients.

    Negatives are chosen by these scores and then scored again with gradients: the choice itself is not differentiated.
    """

    @torch.no_grad()
    def scores(ids: Tensor) -> Tensor:
        queries = call.queries
        if ids.dim() == 1:  # one pool for all rows: a matmul
            found = queries[rows] @ lookup(call.vectors, ids).to(queries.dtype).T
        else:
            found = class_scores(queries, call.vectors, rows, ids, call.keywords)
        return finished(call, found, ids)

    return scores


def _scores_over_ranks(call: HeadCall, pairs: PositivePairs) -> Callable[[Tensor], Tensor]:
    """`_local_scores` where ranks share the classes: each fills in the scores of its classes, and the sum has all."""
    shards = call.shards

    def scores(ids: Tensor) -> Tensor:
        everyone = ids.expand(len(pairs.rows), -1) if ids.ndim == 1 else ids
        row, column = shards.inside(everyone).nonzero(as_tuple=True)
        own = call.queries.detach().new_zeros(everyone.shape)  # 0 for the classes of other ranks
        own[row, column] = _entry_scores(call, pairs.rows[row], everyone[row, column]).detach()
        return shards.ranks.sum(own)

    return scores


def _same_generator(generator: torch.Generator | None, ranks: Ranks, device: torch.device) -> torch.Generator | None:
    """A generator in the same state on every rank, so that all of them draw the same negatives.

    The given generator, set to the state of the first rank's; without one, a new generator with a seed that the first
    rank draws.
    """
    if ranks.alone:
        return generator
    if generator is None:
        # Every rank draws a number, so that the default generators of all ranks advance alike; the first one's counts.
        seed = ranks.first(torch.randint(2**62, (), device=device))
        return torch.Generator(device).manual_seed(int(seed))
    # A state is a tensor on the CPU; it travels on the device that the ranks exchange on.
    generator.set_state(ranks.first(generator.get_state().to(device)).cpu())
    return generator


def log_q_of(draw: Draw, num_classes: int) -> tuple[Tensor | float, Tensor | float]:
    """log q of the positives and of the negatives; that of a uniform proposal where the sampler knows none."""
    uniform = -math.log(num_classes)
    return uniform if draw.log_q_target is None else draw.log_q_target, uniform if draw.log_q is None else draw.log_q


def shift_of(draw: Draw, batch: int) -> Tensor | None:
    """log(k' / k), (M,), to be added to log q of the M = `batch` positives and of their negatives; None for 0.

    The losses subtract log(k q), with k the number of columns. Among in-batch negatives the positives of a query itself
    are columns but no draws, so that only k' < k columns are. This makes the losses subtract log(k' q), as they should.
    """
    if draw.source_row is None:
        return None
    if draw.shared:
        own = Matches(draw.source_row).count(draw.owners(batch))
    else:
        own = (draw.source_row == draw.owners(batch).unsqueeze(-1)).sum(-1)
    share = 1 - own.double() / draw.ids.shape[-1]
    # A query to which all columns belong has no draws: no shift.
    shift = torch.where(share > 0, share, 1).log()
    return shift if draw.log_q is None else shift.to(draw.log_q.dtype)


# One rank ----------------------------------------------------------------------------------------


def _shared_losses(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> Tensor:
    """The losses of the rows (N,), or their sum, where all rows share the draws and one process holds all classes."""
    like, keywords, count = call.queries, call.keywords, len(pairs.rows)
    log_q_target, log_q = log_q_of(draw, call.shards.num_classes)
    shift = shift_of(draw, count)
    shared = SharedDraw(
        rows=pairs.rows,
        target=pairs.classes,
        every=count == len(call.queries) and pairs.owner is None,
        ids=draw.ids,
        log_q=read_log_q("log_q_negative", log_q, like, (len(draw.ids),)),
        log_q_target=read_log_q("log_q_positive", log_q_target, like, (count,)),
        shift=None if shift is None else shift.to(like.dtype),
        copies=None if draw.source_row is None else Matches(draw.source_row),
        owner=draw.owners(count),
        hits=Matches(draw.ids) if kernel.masks_hits else None,
    )
    tensors = call.queries, call.vectors, call.bias, kernel.setting
    how = shared, kernel, keywords.options, keywords.sparse_grad
    if keywords.reduction == "none":
        return _sum_by_row(call, pairs, SharedLosses.apply(*tensors, *how))
    # Asked here, because autograd switches gradients off inside of its functions.
    return SharedTotal.apply(*tensors, pairs.weights.to(like.dtype), *how, torch.is_grad_enabled())


def _scores_on_one_rank(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
    """Scores of the positives (M,) and of the negatives (M, k), with log q, where every row has its own draws."""
    target = pairs.classes
    # Positive and negatives in one call: their gradients are sorted and summed by class once.
    ids = torch.cat([target.unsqueeze(1), draw.ids], 1)
    both = finished(call, class_scores(call.queries, call.vectors, pairs.rows, ids, call.keywords), ids)
    positive, negative = both[:, 0], both[:, 1:]
    negative = _without_excluded(call, pairs, draw.ids, negative)
    copies = draw.copies(len(target))
    if copies is not None:  # in-batch: the positives of a query are no negatives of its own
        negative = torch.where(copies, -torch.inf, negative)
    check_values(positive, negative)
    # A negative that happens to be the positive. Some losses mask it; others count it as a draw like any other.
    if kernel.masks_hits:
        negative = torch.where(draw.hits(target), -torch.inf, negative)
    log_q_positive, log_q = log_q_of(draw, call.shards.num_classes)
    shift = shift_of(draw, len(target))
    if shift is not None:
        log_q_positive, log_q = log_q_positive + shift, log_q + shift.unsqueeze(1)
    sample = SampledScores(
        positive,
        negative,
        read_log_q("log_q_positive", log_q_positive, positive, tuple(positive.shape)),
        read_log_q("log_q_negative", log_q, positive, tuple(negative.shape)),
        negative.shape[-1],
        call.shards.ranks,
    )
    return _with_negatives(call, sample, pairs, draw.ids)


def _without_excluded(call: HeadCall, pairs: PositivePairs, ids: Tensor, negative: Tensor) -> Tensor:
    """The scores (M, K) of negatives `ids`, -inf for those that their row excludes."""
    if call.excluded is None:
        return negative
    return torch.where(listed_in(call.excluded, pairs.rows, ids, call.shards.num_classes), -torch.inf, negative)


def _with_negatives(call: HeadCall, sample: SampledScores, pairs: PositivePairs, ids: Tensor) -> SampledScores:
    """A sample with the negatives that the caller gives, beside those that were drawn."""
    given = read_listed_ids("negatives", call.keywords.negatives, call.batch, call.shards.num_classes)
    return sample if given is None else with_given_negatives(call, sample, pairs.rows, pairs.classes, ids, given)


# Several ranks -----------------------------------------------------------------------------------


class _RankNegatives(NamedTuple):
    """The negatives that this rank holds, moved together into K columns; K differs between ranks.

    scores: (M, K), -inf in columns that are there only to fill up a row.
    column: (M, K) the column of the draw that each stands for; 0 in columns that fill up.
    own: (M, K) True where a column is a negative of this rank and does not fill up.
    """

    scores: Tensor
    column: Tensor
    own: Tensor


def _entry_scores(call: HeadCall, rows: Tensor, ids: Tensor) -> Tensor:
    """The scores (E,) of pairs of a row and a class that this rank holds, (E,) each, sorted by row."""
    local = ids - call.shards.start
    return finished(call, class_scores(call.queries, call.vectors, rows, local, call.keywords), local)


def _scores_on_many_ranks(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
    """Scores of all positives (M,), and of the negatives that this rank holds (M, K), with log q.

    Positives are summed over the ranks, one number per pair, because every rank needs them. Negatives stay where they
    are: the kernel completes its sums over them through `ranks`.
    """
    classes = pairs.classes
    positive = _positive_scores(call, pairs)
    negative, column, own = (_shared_negatives if draw.shared else _negatives_per_row)(call, pairs, draw)
    # The same two masks as on one rank, of which this rank needs the columns that it holds.
    for masked in (draw.copies(len(classes)), draw.hits(classes) if kernel.masks_hits else None):
        if masked is not None:
            negative = torch.where(_take_columns(masked, column, negative), -torch.inf, negative)
    log_q_positive, log_q = (
        torch.as_tensor(log_q, dtype=negative.dtype, device=negative.device)
        for log_q in log_q_of(draw, call.shards.num_classes)
    )
    # All of log q, also that of other ranks' negatives: every rank then refuses alike, and none waits for the others.
    _check_log_q(log_q_positive, log_q)
    log_q_positive, log_q = log_q_positive.expand(len(classes)), _take_columns(log_q, column, negative)
    shift = shift_of(draw, len(classes))
    if shift is not None:
        shift = shift.to(negative.dtype)
        log_q_positive, log_q = log_q_positive + shift, log_q + shift.unsqueeze(1)
    # The classes of the columns; -1 in those that fill up.
    ids = torch.where(own, _take_columns(draw.ids, column, negative), -1)
    sample = SampledScores(
        positive,
        _without_excluded(call, pairs, ids, negative),
        log_q_positive,
        torch.where(own, log_q, 0),  # columns that fill up would get that of draw 0
        draw.ids.shape[-1],
        call.shards.ranks,
        own,
    )
    return _with_negatives(call, sample, pairs, ids)


def _positive_scores(call: HeadCall, pairs: PositivePairs) -> Tensor:
    """The scores of all positives (M,), each computed by the rank that holds its class."""
    shards = call.shards
    mine = shards.inside(pairs.classes).nonzero().squeeze(1)
    scores = _entry_scores(call, pairs.rows[mine], pairs.classes[mine])
    # `index_put` keeps the graph, `total` sums the zeros of the other ranks onto the score and sends its gradient back.
    positive = shards.ranks.total(call.queries.new_zeros(len(pairs.rows)).index_put((mine,), scores))
    # After the sum, so that all ranks see the same numbers and all of them raise.
    if visible(positive) and not positive.isfinite().all():
        raise ArgumentError(
            "`positive` must hold finite scores: a masked class cannot be a positive; got"
            f" {positive[~positive.isfinite()][0].item()}."
        )
    return positive


def _shared_negatives(call: HeadCall, pairs: PositivePairs, draw: Draw) -> _RankNegatives:
    """The negatives of this rank where all rows share the draws, and one column at -inf."""
    shards = call.shards
    column = shards.inside(draw.ids).nonzero().squeeze(1)
    ids = draw.ids[column] - shards.start
    vectors = SharedRows.apply(call.vectors, ids, call.keywords.sparse_grad, call.queries.dtype)
    scores = finished(call, call.queries[pairs.rows] @ vectors.T, ids)
    own = torch.ones_like(scores, dtype=torch.bool)
    # A rank may hold none of the negatives: one column at -inf gives maxima and sums over the columns something to
    # stand on, without any effect.
    padded, columns = pad(scores, (0, 1), value=-torch.inf), pad(column, (0, 1)).expand(len(scores), -1)
    return _RankNegatives(padded, columns, pad(own, (0, 1)))


def _negatives_per_row(call: HeadCall, pairs: PositivePairs, draw: Draw) -> _RankNegatives:
    """The negatives of this rank where each row has draws of its own, moved to the left of their rows.

    About k / ranks of a row's k negatives are here: an (M, k) table on every rank would be mostly empty.
    """
    inside = call.shards.inside(draw.ids)
    row, column = inside.nonzero(as_tuple=True)
    place = (inside.cumsum(1) - 1)[row, column]  # how many of its row come before it
    shape = (len(inside), max(1, int(inside.sum(1).max())))
    flat = _entry_scores(call, pairs.rows[row], draw.ids[row, column])
    # `index_put` and not an assignment: the scores have a gradient.
    scores = call.queries.new_full(shape, -torch.inf).index_put((row, place), flat)
    columns = column.new_zeros(shape).index_put((row, place), column)
    own = torch.zeros(shape, dtype=torch.bool, device=row.device)
    own[row, place] = True
    return _RankNegatives(scores, columns, own)


def _take_columns(values: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """The values, (), (k,) or (M, k), of the columns (M, K) of the draw, (M, K); `like` has that shape."""
    if values.ndim == 0:
        return values.expand(like.shape)
    return values.expand(len(like), -1).gather(1, column)


def _check_log_q(*log_q: Tensor) -> None:
    """Raise where a log q is not finite."""
    for values in log_q:
        if visible(values) and not values.isfinite().all():
            raise ArgumentError(
                "log q must be finite: a class with q = 0 cannot be drawn, nor be a positive of a sampled loss. Smooth"
                " the proposal so that every class can be drawn."
            )
