"""What the keywords of scores and sums mean where negatives are drawn: norms, soft cap, exclusions, given negatives."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine.drawn_pairs import PositivePairs
from manymax.engine.exclude import on_lists, read_listed_ids
from manymax.engine.linear import HeadCall
from manymax.engine.sampled_scores import SampledScores
from manymax.engine.selected_scores import SharedRows, class_bias, class_scores
from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def plain(call: HeadCall) -> bool:
    """Whether a score is a product and a bias, and a sum one over the positive and the draws, with nothing else."""
    keywords = call.keywords
    special = keywords.normalize, keywords.softcap, keywords.exclude, keywords.negatives
    return not any(value is not None and value is not False for value in special) and not sums_differ(call)


def sums_differ(call: HeadCall) -> bool:
    """Whether the sum of a loss is not over its positive and its negatives, or is in the loss in another way."""
    return call.keywords.decoupled or call.keywords.z_loss > 0


def finished(call: HeadCall, products: Tensor, ids: Tensor) -> Tensor:
    """Scores from the products of queries and class vectors: norms, bias and soft cap.

    Args:
        call: of the head.
        products: of any shape.
        ids: of a shape that broadcasts to it, classes as this rank numbers them.
    """
    keywords, scores = call.keywords, products
    if keywords.normalize:
        scores = scores * _inverse_norms(call, ids)
    if call.bias is not None:
        scores = scores + class_bias(call.bias, ids, keywords)
    if keywords.softcap is not None:
        masked = scores == -torch.inf
        capped = keywords.softcap * torch.tanh(torch.where(masked, 0, scores) / keywords.softcap)
        scores = torch.where(masked, -torch.inf, capped)
    return scores


def _inverse_norms(call: HeadCall, ids: Tensor) -> Tensor:
    """1 / |w| of the class vectors `ids`, in the shape of these, with gradients; 0 for a zero vector."""
    # Each class once, however often it was drawn; never the whole table.
    distinct, place = ids.unique(return_inverse=True)
    vectors = SharedRows.apply(call.vectors, distinct, call.keywords.sparse_grad, call.queries.dtype)
    square = vectors.square().sum(1)
    live = square > 0  # the derivative of a norm at zero is nan, chosen or not
    return torch.where(live, 1 / torch.where(live, square, 1).sqrt(), 0)[place]


def with_given_negatives(
    call: HeadCall, sample: SampledScores, rows: Tensor, target: Tensor, ids: Tensor, given: Tensor
) -> SampledScores:
    """A sample with the given negatives of each row as further columns, beside its draws.

    They are in the sum once, for sure: like a draw with k q = 1. Draws of the same class are masked, so that no class
    counts twice, and a given negative that is the positive is none.

    Args:
        call: of the head. sample: of M positives.
        rows, target: (M,) the query and the class of each positive.
        ids: (M, K) or (K,), the classes of the sample's negatives; -1 where a column is none.
        given: (N, H) ids, -100 where there is none.
    """
    shards, lists = call.shards, given[rows]
    use = (lists >= 0) & (lists != target.unsqueeze(1)) & shards.inside(lists)
    local = torch.where(use, lists - shards.start, 0)
    scores = finished(call, class_scores(call.queries, call.vectors, rows, local, call.keywords), local)
    scores = torch.where(use, scores, -torch.inf)
    drawn_again = _drawn_on_lists(ids, given, rows, shards.num_classes)
    own = torch.ones_like(sample.negative, dtype=torch.bool) if sample.own is None else sample.own
    log_q = torch.full_like(scores, -1.0).mul_(torch.tensor(float(sample.num_negatives)).log().item())
    return replace(
        sample,
        negative=torch.cat([torch.where(drawn_again, -torch.inf, sample.negative), scores], 1),
        log_q_negative=torch.cat([sample.log_q_negative, log_q], 1),
        own=torch.cat([own, torch.zeros_like(use)], 1),
    )


def check_sums(losses: Tensor, decoupled: bool) -> None:
    """Raise if a positive that is left out of its own sum has nothing left in it."""
    if decoupled and visible(losses) and (losses == -torch.inf).any():
        raise ArgumentError("`decoupled` needs a negative: every one of a row is masked.")


def without_excluded(call: HeadCall, pairs: PositivePairs, ids: Tensor, negative: Tensor) -> Tensor:
    """The scores (M, K) of negatives `ids`, -inf for those that their row excludes."""
    if call.excluded is None:
        return negative
    listed = _drawn_on_lists(ids, call.excluded, pairs.rows, call.shards.num_classes)
    return torch.where(listed, -torch.inf, negative)


def _drawn_on_lists(ids: Tensor, lists: Tensor, rows: Tensor, num_classes: int) -> Tensor:
    """(M, K) which of the drawn classes, (M, K) or (K,) for all rows, are on the list lists[rows_m] of their row."""
    if ids.dim() == 1:
        return on_lists(ids.expand(len(lists), -1), lists, num_classes)[rows]
    return on_lists(ids, lists, num_classes, rows)


def with_negatives(call: HeadCall, sample: SampledScores, pairs: PositivePairs, ids: Tensor) -> SampledScores:
    """A sample with the negatives that the caller gives, beside those that were drawn."""
    given = read_listed_ids("negatives", call.keywords.negatives, call.batch, call.shards.num_classes)
    return sample if given is None else with_given_negatives(call, sample, pairs.rows, pairs.classes, ids, given)
