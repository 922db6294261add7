"""The scores of sampled heads whose classes are split over ranks: each rank computes those that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from manymax.engine.drawn_keywords import finished, with_negatives, without_excluded
from manymax.engine.drawn_pairs import PositivePairs, log_q_of, shift_of
from manymax.engine.linear import HeadCall
from manymax.engine.sampled_scores import DrawnKernel, SampledScores
from manymax.engine.selected_scores import SharedRows, class_scores
from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.samplers.base import Draw


def scores_over_ranks(call: HeadCall, pairs: PositivePairs) -> Callable[[Tensor], Tensor]:
    """A function from ids to scores, where ranks share the classes: each fills in those of its own, the sum has all."""
    shards = call.shards

    def scores(ids: Tensor) -> Tensor:
        everyone = ids.expand(len(pairs.rows), -1) if ids.ndim == 1 else ids
        row, column = shards.inside(everyone).nonzero(as_tuple=True)
        own = call.queries.detach().new_zeros(everyone.shape)  # 0 for the classes of other ranks
        own[row, column] = _entry_scores(call, pairs.rows[row], everyone[row, column]).detach()
        return shards.ranks.sum(own)

    return scores


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


def scores_on_many_ranks(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
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
    shift = shift_of(draw, classes, call.shards.num_classes, kernel.misses)
    if shift is not None:
        shift = shift.to(negative.dtype)
        log_q_positive, log_q = log_q_positive + shift, log_q + shift.unsqueeze(1)
    # The classes of the columns; -1 in those that fill up.
    ids = torch.where(own, _take_columns(draw.ids, column, negative), -1)
    sample = SampledScores(
        positive,
        without_excluded(call, pairs, ids, negative),
        log_q_positive,
        torch.where(own, log_q, 0),  # columns that fill up would get that of draw 0
        draw.ids.shape[-1],
        call.shards.num_classes,
        call.shards.ranks,
        own,
    )
    return with_negatives(call, sample, pairs, ids)


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
