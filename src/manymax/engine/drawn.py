"""The sampled losses from queries and class vectors: one step touches only the drawn rows.

On several ranks all of them draw the same negatives, and each computes the scores of those that it holds. What travels
per positive are its score and sums over the negatives, never the scores of the negatives. A sampler that looks at
scores (dns, two_pass) has those of its pool of candidates added up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from manymax.engine.linear import HeadCall
from manymax.engine.member import Member
from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import DrawnKernel, SampledScores, check_values, read_log_q
from manymax.engine.selected_scores import EntryScores, SelectedScores, SharedRows
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.selected_scores import selected_scores
from manymax.samplers.base import Draw, Sampler


@dataclass(frozen=True)
class DrawSettings:
    """What a sampled head draws: `sampler` and `num_negatives`, k."""

    sampler: Sampler
    num_negatives: int | None


def check_sampler(sampler: object, num_classes: int) -> None:
    """Refuse what is no sampler, or draws from other classes."""
    if not isinstance(sampler, Sampler):
        raise ArgumentTypeError(f"`sampler` must be one of manymax.samplers; got {type(sampler).__name__}.")
    if sampler.num_classes != num_classes:
        raise ArgumentError(f"`sampler` draws from {sampler.num_classes} classes, `linear_weight` has {num_classes}.")


class PositivePairs(NamedTuple):
    """One row per positive: its query's row, its class and its weight."""

    rows: Tensor
    classes: Tensor
    weights: Tensor

    @property
    def owner(self) -> Tensor | None:
        """`rows`, where a query has more than one positive."""
        return self.rows if (self.rows[1:] == self.rows[:-1]).any() else None


def read_positive_pairs(read: Target) -> PositivePairs:
    """The positives of a target, row after row."""
    rows, column = (read.weights != 0).nonzero(as_tuple=True)
    classes = column if read.ids is None else read.ids[rows, column]
    return PositivePairs(rows, classes, read.weights[rows, column])


def sampled_loss(member: Member, call: HeadCall, settings: Mapping[str, Any], draws: DrawSettings) -> Tensor:
    """The loss of a call with fresh negatives, the same on every rank."""
    kernel: DrawnKernel = member.needed("kernel")(**settings)
    pairs = read_positive_pairs(call.target)
    call = replace(call, queries=call.shards.ranks.spread(call.queries))
    losses = call.queries.new_zeros(len(call.queries))
    if len(pairs.rows):
        draw = _draw(call, pairs, draws)
        if kernel.needs_log_q is not None and draw.log_q is None:
            raise ArgumentError(f"`{kernel.needs_log_q}` needs log q, which this sampler does not know: {draw.note}.")
        sample = (_here if call.shards.ranks.alone else _of_all_ranks)(call, pairs, draw, kernel)
        losses = losses.index_add(0, pairs.rows, pairs.weights * kernel.rows(sample))
    else:  # nothing to learn from: sums of nothing have zero gradients, sparse if asked for
        none = pairs.rows.new_empty(0, 1)
        nothing = SelectedScores.apply(
            call.queries[:0], call.vectors, pairs.rows, none, call.keywords.sparse_grad
        ).sum()
        losses = losses + (nothing if call.bias is None else nothing + call.bias[:0].sum())
    if call.keywords.multilabel == "normalized":
        total = call.target.weights.sum(1)
        losses = losses / torch.where(total > 0, total, 1)
    return call.reduced(losses)


def _draw(call: HeadCall, pairs: PositivePairs, draws: DrawSettings) -> Draw:
    """The negatives; on several ranks the draw of the first one's generator, made by every rank for itself."""
    queries, ranks = call.queries.detach(), call.shards.ranks
    known: dict[str, Any] = {"scores": _shared_scores(call, pairs)}
    if ranks.alone:
        known = {
            "linear_weight": call.vectors.detach(),
            "linear_bias": None if call.bias is None else call.bias.detach(),
            "scores": _own_scores(queries, call.vectors, call.bias, pairs.rows),
        }
    draw: Draw = draws.sampler(
        draws.num_negatives,
        target=pairs.classes,
        owner=pairs.owner,
        input=queries[pairs.rows],
        shared=call.keywords.shared,
        generator=_same_generator(call.keywords.generator, ranks, queries.device),
        **known,
    )
    return draw


def _own_scores(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, rows: Tensor
) -> Callable[[Tensor], Tensor]:
    """What a sampler that follows the model asks: the scores of ids (m,) or (M, m), without gradients."""

    @torch.no_grad()
    def scores(ids: Tensor) -> Tensor:
        if ids.dim() == 1:
            found = input[rows] @ lookup(linear_weight, ids).T
        else:
            found = selected_scores(input, linear_weight, ids, rows)
        return found if linear_bias is None else found + lookup(linear_bias, ids)

    return scores


def _shared_scores(call: HeadCall, pairs: PositivePairs) -> Callable[[Tensor], Tensor]:
    """The same where ranks share the classes: each adds the scores of its own."""
    shards = call.shards

    def scores(ids: Tensor) -> Tensor:
        everyone = ids.expand(len(pairs.rows), -1) if ids.ndim == 1 else ids
        row, column = shards.inside(everyone).nonzero(as_tuple=True)
        own = call.queries.detach().new_zeros(everyone.shape)
        own[row, column] = _entry_scores(call, pairs.rows[row], everyone[row, column]).detach()
        return shards.ranks.sum(own)

    return scores


def _same_generator(generator: torch.Generator | None, ranks: Ranks, device: torch.device) -> torch.Generator | None:
    """A generator in the state of the first rank's; without one, seeded by a number that the first rank draws."""
    if ranks.alone:
        return generator
    if generator is None:
        seed = ranks.first(torch.randint(2**62, (), device=device))
        return torch.Generator(device).manual_seed(int(seed))
    generator.set_state(ranks.first(generator.get_state().to(device)).cpu())
    return generator


def proposal_of(draw: Draw, num_classes: int, batch: int) -> tuple[Tensor | float, Tensor | float]:
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


# One rank ----------------------------------------------------------------------------------------


def _here(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
    """Scores of the positives (M,) and of the negatives (M, k), with log q."""
    rows, target, sparse_grad = pairs.rows, pairs.classes, call.keywords.sparse_grad
    if draw.shared:
        scores = SelectedScores.apply(call.queries, call.vectors, rows, target.unsqueeze(1), sparse_grad)
        positive = scores.squeeze(1)
        negative = call.queries[rows] @ SharedRows.apply(call.vectors, draw.ids, sparse_grad).T
    else:
        ids = torch.cat([target.unsqueeze(1), draw.ids], 1)
        both = SelectedScores.apply(call.queries, call.vectors, rows, ids, sparse_grad)
        positive, negative = both[:, 0], both[:, 1:]
    if call.bias is not None:
        positive, negative = positive + call.bias[target], negative + call.bias[draw.ids]
    copies = draw.copies(len(rows))
    if copies is not None:  # in-batch: a query's own positives are no draws for it
        negative = torch.where(copies, -torch.inf, negative)
    check_values(positive, negative)
    if kernel.masks_hits:
        negative = torch.where(draw.hits(target).expand(negative.shape), -torch.inf, negative)
    log_q_positive, log_q = proposal_of(draw, call.shards.num_classes, len(target))
    return SampledScores(
        positive,
        negative,
        read_log_q("log_q_positive", log_q_positive, positive, tuple(positive.shape)),
        read_log_q("log_q_negative", log_q, positive, tuple(negative.shape)),
        negative.shape[-1],
        call.shards.ranks,
    )


# Several ranks -----------------------------------------------------------------------------------


class _Own(NamedTuple):
    """The negatives of this rank: scores (M, K), their columns in the draw (M, K), and which are its own (M, K)."""

    scores: Tensor
    column: Tensor
    own: Tensor


def _entry_scores(call: HeadCall, rows: Tensor, ids: Tensor) -> Tensor:
    """The scores of entries (row, class of this rank), (E,) each, sorted by row."""
    own = ids - call.shards.start
    scores = EntryScores.apply(call.queries, call.vectors, rows, own, call.keywords.sparse_grad)
    return scores if call.bias is None else scores + call.bias[own]


def _of_all_ranks(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
    """Scores of all positives (M,), and of the negatives of this rank (M, K), with log q."""
    classes = pairs.classes
    positive = _positive(call, pairs)
    negative, column, own = (_shared if draw.shared else _per_row)(call, pairs, draw)
    # in-batch: a query's own positives are no draws for it
    for masked in (draw.copies(len(classes)), draw.hits(classes) if kernel.masks_hits else None):
        if masked is not None:
            negative = torch.where(_at(masked, column, negative), -torch.inf, negative)
    log_q_positive, log_q = (
        torch.as_tensor(log_q, dtype=negative.dtype, device=negative.device)
        for log_q in proposal_of(draw, call.shards.num_classes, len(classes))
    )
    _check_log_q(log_q_positive, log_q)
    return SampledScores(
        positive,
        negative,
        log_q_positive.expand(len(classes)),
        torch.where(own, _at(log_q, column, negative), 0),
        draw.ids.shape[-1],
        call.shards.ranks,
        own,
    )


def _positive(call: HeadCall, pairs: PositivePairs) -> Tensor:
    """The scores of the positives, (M,), each from the rank that has it."""
    shards = call.shards
    mine = shards.inside(pairs.classes).nonzero().squeeze(1)
    scores = _entry_scores(call, pairs.rows[mine], pairs.classes[mine])
    positive = shards.ranks.total(call.queries.new_zeros(len(pairs.rows)).index_put((mine,), scores))
    if visible(positive) and not positive.isfinite().all():
        raise ArgumentError(
            "`positive` must hold finite scores: a masked class cannot be a positive; got"
            f" {positive[~positive.isfinite()][0].item()}."
        )
    return positive


def _shared(call: HeadCall, pairs: PositivePairs, draw: Draw) -> _Own:
    """The shared negatives of this rank and one at -inf."""
    shards = call.shards
    column = shards.inside(draw.ids).nonzero().squeeze(1)
    ids = draw.ids[column] - shards.start
    vectors = SharedRows.apply(call.vectors, ids, call.keywords.sparse_grad)
    scores = call.queries[pairs.rows] @ vectors.T
    if call.bias is not None:
        scores = scores + call.bias[ids]
    own = torch.ones_like(scores, dtype=torch.bool)
    return _Own(pad(scores, (0, 1), value=-torch.inf), pad(column, (0, 1)).expand(len(scores), -1), pad(own, (0, 1)))


def _per_row(call: HeadCall, pairs: PositivePairs, draw: Draw) -> _Own:
    """The same for draws of each row: those of this rank are moved to the left."""
    inside = call.shards.inside(draw.ids)
    row, column = inside.nonzero(as_tuple=True)
    place = (inside.cumsum(1) - 1)[row, column]
    shape = (len(inside), max(1, int(inside.sum(1).max())))
    flat = _entry_scores(call, pairs.rows[row], draw.ids[row, column])
    scores = call.queries.new_full(shape, -torch.inf).index_put((row, place), flat)
    columns = column.new_zeros(shape).index_put((row, place), column)
    own = torch.zeros(shape, dtype=torch.bool, device=row.device)
    own[row, place] = True
    return _Own(scores, columns, own)


def _at(values: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """What values (), (k,) or (M, k) have in the columns (M, K)."""
    if values.ndim == 0:
        return values.expand(like.shape)
    return values.expand(len(like), -1).gather(1, column)


def _check_log_q(*log_q: Tensor) -> None:
    for values in log_q:
        if visible(values) and not values.isfinite().all():
            raise ArgumentError(
                "log q must be finite: a class with q = 0 cannot be drawn, nor be a positive of a sampled loss. Smooth"
                " the proposal so that every class can be drawn."
            )
