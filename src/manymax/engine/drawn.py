"""The losses of sampled heads, from queries and class vectors: one step touches only the drawn class vectors.

On several ranks all ranks draw the same negatives, and each computes the scores of those that it holds. What travels
for each positive is its score and sums over its negatives, never the scores of the negatives. There is one exception: a
sampler that chooses by scores (dns, two_pass) gets those of its pool of candidates summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine.drawn_blocks import SharedDraw, SharedLosses, SharedTotal
from manymax.engine.drawn_keywords import check_sums, finished, plain, sums_differ, with_negatives, without_excluded
from manymax.engine.drawn_pairs import PositivePairs, log_q_of, read_positive_pairs, shift_of
from manymax.engine.drawn_ranks import scores_on_many_ranks, scores_over_ranks
from manymax.engine.linear import HeadCall
from manymax.engine.member import Member
from manymax.engine.pair_averages import averaged, check_averages
from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import DrawnKernel, SampledScores, check_values, read_log_q
from manymax.engine.selected_scores import class_bias, class_scores
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import refuse_transforms
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


def sampled_loss(member: Member, call: HeadCall, settings: Mapping[str, Any], draws: DrawSettings) -> Tensor:
    """The loss of a call with fresh negatives, the same on every rank.

    Args:
        member: the sampled member.
        call: the arguments, read and checked.
        settings: the member's own.
        draws: what to draw.
    """
    refuse_transforms(call.queries, call.vectors, call.bias)
    kernel: DrawnKernel = member.needed("kernel")(**settings)
    keywords = call.keywords
    check_averages(kernel.gamma is not None, keywords.pair_ids, keywords.pair_averages, keywords.z_loss)
    pairs = read_positive_pairs(call.target, call.row_weight, call.pair_ids)
    if call.keywords.multilabel == "normalized":  # here the mean over the positives: sampled losses have no Omega
        total = call.target.weights.sum(1)
        pairs = pairs._replace(weights=pairs.weights / torch.where(total > 0, total, 1)[pairs.rows])
    if call.row_weight is not None:
        pairs = pairs._replace(weights=pairs.weights * call.row_weight[pairs.rows])
    # All ranks have the queries and use them with their own classes: the gradients of these uses are summed.
    call = replace(call, queries=call.shards.ranks.spread(call.queries))
    if not len(pairs.rows):
        return call.reduced(_no_losses(call, pairs, kernel.setting))
    draw = _draw(call, pairs, draws)
    if kernel.needs_log_q is not None and draw.log_q is None:
        raise ArgumentError(f"`{kernel.needs_log_q}` needs log q, which this sampler does not know: {draw.note}.")
    alone = call.shards.ranks.alone
    if draw.shared and alone and plain(call):
        return call.reduced(_shared_losses(call, pairs, draw, kernel))
    # What many ranks do with shared draws, one does where scores or sums are not the plain ones.
    read_scores = _scores_on_one_rank if alone and not draw.shared else scores_on_many_ranks
    sample = read_scores(call, pairs, draw, kernel)
    if sums_differ(call):
        sample = replace(sample, decoupled=call.keywords.decoupled, z_loss=call.keywords.z_loss)
    losses = kernel.rows(sample)
    check_sums(losses, call.keywords.decoupled)
    return call.reduced(_sum_by_row(call, pairs, kernel, losses))


def _sum_by_row(call: HeadCall, pairs: PositivePairs, kernel: DrawnKernel, losses: Tensor) -> Tensor:
    """The losses of the rows (N,), weighted sums over their positives as in an exact head, from those of the pairs."""
    if kernel.gamma is not None and pairs.ids is not None and call.keywords.pair_averages is not None:
        losses = averaged(losses, pairs.ids, call.keywords.pair_averages, kernel.gamma)
    return losses.new_zeros(len(call.queries)).index_add(0, pairs.rows, pairs.weights * losses)


def _no_losses(call: HeadCall, pairs: PositivePairs, setting: Tensor | None) -> Tensor:
    """The losses (N,) of a batch without positives: zeros.

    They must still depend on queries, class vectors, bias and a learned setting, so that `backward` works and gives
    them zeros (a sparse tensor without entries if asked for): sums of nothing do that.
    """
    none = pairs.rows.new_empty(0, 1)
    nothing = class_scores(call.queries[:0], call.vectors, pairs.rows, none, call.keywords).sum()
    if call.bias is not None:
        nothing = nothing + class_bias(call.bias, pairs.rows, call.keywords).sum()
    if setting is not None:
        nothing = nothing + setting.reshape(1)[:0].sum()
    return call.queries.new_zeros(len(call.queries)) + nothing


def _draw(call: HeadCall, pairs: PositivePairs, draws: DrawSettings) -> Draw:
    """Draw the negatives; on several ranks each rank for itself, from a generator in the state of the first one's.

    That costs a few kilobytes of state where sending ids would cost k numbers for each positive.
    """
    queries, ranks = call.queries.detach(), call.shards.ranks
    # What a sampler that follows the model may look at. No rank of several has all class vectors: such a sampler asks
    # for scores, which the ranks compute together.
    model: dict[str, Any] = {"scores": scores_over_ranks(call, pairs)}
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


# One rank ----------------------------------------------------------------------------------------


def _shared_losses(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> Tensor:
    """The losses of the rows (N,), or their sum, where all rows share the draws and one process holds all classes."""
    like, keywords, count = call.queries, call.keywords, len(pairs.rows)
    log_q_target, log_q = log_q_of(draw, call.shards.num_classes)
    shift = shift_of(draw, pairs.classes, call.shards.num_classes, kernel.misses)
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
        num_classes=call.shards.num_classes,
    )
    tensors = call.queries, call.vectors, call.bias, kernel.setting
    how = shared, kernel, keywords.options, keywords.sparse_grad
    # The factor of a pair's gradient in an average follows from its loss, and so comes with the backward.
    if keywords.reduction == "none" or kernel.gamma is not None:
        return _sum_by_row(call, pairs, kernel, SharedLosses.apply(*tensors, *how))
    # Asked here, because autograd switches gradients off inside of its functions.
    return SharedTotal.apply(*tensors, pairs.weights.to(like.dtype), *how, torch.is_grad_enabled())


def _scores_on_one_rank(call: HeadCall, pairs: PositivePairs, draw: Draw, kernel: DrawnKernel) -> SampledScores:
    """Scores of the positives (M,) and of the negatives (M, k), with log q, where every row has its own draws."""
    target = pairs.classes
    # Positive and negatives in one call: their gradients are sorted and summed by class once.
    ids = torch.cat([target.unsqueeze(1), draw.ids], 1)
    both = finished(call, class_scores(call.queries, call.vectors, pairs.rows, ids, call.keywords), ids)
    positive, negative = both[:, 0], both[:, 1:]
    negative = without_excluded(call, pairs, draw.ids, negative)
    copies = draw.copies(len(target))
    if copies is not None:  # in-batch: the positives of a query are no negatives of its own
        negative = torch.where(copies, -torch.inf, negative)
    check_values(positive, negative)
    # A negative that happens to be the positive. Some losses mask it; others count it as a draw like any other.
    if kernel.masks_hits:
        negative = torch.where(draw.hits(target), -torch.inf, negative)
    log_q_positive, log_q = log_q_of(draw, call.shards.num_classes)
    shift = shift_of(draw, target, call.shards.num_classes, kernel.misses)
    if shift is not None:
        log_q_positive, log_q = log_q_positive + shift, log_q + shift.unsqueeze(1)
    sample = SampledScores(
        positive,
        negative,
        read_log_q("log_q_positive", log_q_positive, positive, tuple(positive.shape)),
        read_log_q("log_q_negative", log_q, positive, tuple(negative.shape)),
        negative.shape[-1],
        call.shards.num_classes,
        call.shards.ranks,
    )
    return with_negatives(call, sample, pairs, draw.ids)
