"""Evaluation by full ranking: rank all items that are new to a user, and compute metrics of the top of the list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from manymax.engine.head import LinearHead
from manymax.engine.ranking import linear_topk
from manymax.errors import ArgumentError, check_choice
from manymax.study.backbones.base import Backbone
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import PADDING, Lists, Split
from manymax.study.metrics import METRICS, Metric

USERS_AT_A_TIME = 1024  # users that are ranked or served at a time; it bounds the memory for padded lists of items


class ItemLaw(Protocol):
    """The distribution p(item | user) that the data was drawn from, if it is known."""

    def probs(self, users: Tensor) -> Tensor:
        """(B, C) p(item | user) for users (B,)."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of the ranked lists of U' users.

    Args:
        mean: {"ndcg@20": the mean over users, ...}.
        per_user: {"ndcg@20": (U',), ...} for metrics that have a value for each user.
        users: (U',) the users that were evaluated: those with at least one relevant item.
    """

    mean: dict[str, float]
    per_user: dict[str, Tensor]
    users: Tensor


def known_lists(split: Split, part: str) -> Lists:
    """The items that are known of each user when `part` is evaluated, in time order.

    These are the items of "train" for part "valid", and those of "train" followed by those of "valid" for part "test".
    """
    check_choice("part", part, ("valid", "test"))
    if part == "valid":
        return split.train
    users = torch.cat([split.train.users(), split.valid.users()])
    return Lists.from_pairs(users, torch.cat([split.train.items, split.valid.items]), split.num_users)


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    head: LinearHead,
    split: Split,
    part: str = "valid",
    *,
    cutoffs: Iterable[int] = (20,),
    metrics: Iterable[str] | None = None,
    truth: ItemLaw | None = None,
) -> Evaluation:
    """Rank all items for each user, without the known ones, and compare the lists with a held-out part.

    Known items of a user are those of the training part, at the test also those of the validation part. Relevant items
    are the distinct items of the evaluated part that are not known: known items are not listed, so a repeated
    interaction could never be found.

    Args:
        backbone, head: items are ranked by `head.topk`; a backbone that reads histories gets the latest known items.
        split: the data; users without a relevant item are left out.
        part: "valid" or "test".
        cutoffs: lengths of the lists.
        metrics: names from `METRICS`; all that can be computed if None.
        truth: the true p(item | user); makes "regret" computable.
    """
    known, training = known_lists(split, part), backbone.training
    backbone.eval()
    vectors = backbone.vectors()
    items = vectors.for_head(head)

    def rank(users: Tensor, depth: int) -> Tensor:
        history = known.padded(users, backbone.max_length) if backbone.needs_history else None
        queries = backbone.queries(Batch(users, history), vectors)
        return head.topk(queries, depth, linear_weight=items, exclude=known.padded(users))[1]

    try:
        return _measure(rank, split, part, known, tuple(cutoffs), metrics, truth)
    finally:
        backbone.train(training)


@torch.no_grad()
def popularity(
    split: Split,
    part: str = "valid",
    *,
    cutoffs: Iterable[int] = (20,),
    metrics: Iterable[str] | None = None,
    truth: ItemLaw | None = None,
) -> Evaluation:
    """Like `evaluate`, for the ranking by the number of interactions in training: the baseline of every table."""
    # As a linear head: query 1, and the count of an item as its class vector of length 1.
    known, counts = known_lists(split, part), split.counts().double().unsqueeze(1)

    def rank(users: Tensor, depth: int) -> Tensor:
        return linear_topk(counts.new_ones(len(users), 1), counts, depth, exclude=known.padded(users))[1]

    return _measure(rank, split, part, known, tuple(cutoffs), metrics, truth)


def _measure(
    rank: Callable[[Tensor, int], Tensor],
    split: Split,
    part: str,
    known: Lists,
    cutoffs: tuple[int, ...],
    metrics: Iterable[str] | None,
    truth: ItemLaw | None,
) -> Evaluation:
    """Evaluate a ranking.

    Args:
        rank: (users (B,), depth) -> (B, depth) the best new items of each user, best first, padded with -100.
    """
    chosen = _chosen(cutoffs, metrics, truth)
    relevant_pairs = _relevant_pairs(split, part, known)
    users, relevant = (relevant_pairs // split.num_items).unique_consecutive(return_counts=True)
    if not users.numel():
        raise ArgumentError(f"`split` has nothing to find in its {part} part: no user has a new item there.")
    depth = max(cutoffs)
    lists, gains, best = [], [], []
    for block in users.split(USERS_AT_A_TIME):
        ids = rank(block, min(depth, split.num_items))
        # A cutoff may exceed the number of items; places without an item count as misses.
        lists.append(nn.functional.pad(ids, (0, depth - ids.shape[1]), value=PADDING))
        if truth is not None:
            found, possible = _true_gains(truth, block, lists[-1], known)
            gains.append(found)
            best.append(possible)
    ranked = torch.cat(lists)
    # The second condition is needed: user u with item -100 has the number of another pair of a user before u.
    hits = _contains(relevant_pairs, users.unsqueeze(1) * split.num_items + ranked) & (ranked != PADDING)
    sources: dict[str, tuple[Tensor, Tensor | int]] = {"hits": (hits, relevant), "lists": (ranked, split.num_items)}
    if truth is not None:
        sources["truth"] = (torch.cat(gains), torch.cat(best))
    return _evaluation(chosen, cutoffs, sources, users)


def _chosen(cutoffs: tuple[int, ...], metrics: Iterable[str] | None, truth: ItemLaw | None) -> list[Metric]:
    """The metrics to compute."""
    if not cutoffs or min(cutoffs) < 1:
        raise ArgumentError(f"`cutoffs` must hold numbers of at least 1; got {cutoffs}.")
    if metrics is None:
        return [metric for metric in METRICS.values() if metric.of != "truth" or truth is not None]
    chosen = [METRICS[name] for name in metrics]
    if truth is None and any(metric.of == "truth" for metric in chosen):
        raise ArgumentError("`metrics` asks for regret, which needs `truth`, and only planted data has it.")
    return chosen


def _relevant_pairs(split: Split, part: str, known: Lists) -> Tensor:
    """The distinct relevant (user, item) pairs, each as the number user * C + item, sorted."""
    lists: Lists = getattr(split, part)
    pairs = (lists.users() * split.num_items + lists.items).unique()
    known_pairs = (known.users() * split.num_items + known.items).sort().values
    return pairs[~_contains(known_pairs, pairs)]


def _contains(sorted_values: Tensor, values: Tensor) -> Tensor:
    """Whether each of `values`, of any shape, is in the sorted tensor (n,); a bool tensor of the shape of `values`."""
    if not sorted_values.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    place = torch.searchsorted(sorted_values, values).clamp(max=sorted_values.numel() - 1)
    return sorted_values[place] == values


def _true_gains(truth: ItemLaw, users: Tensor, lists: Tensor, known: Lists) -> tuple[Tensor, Tensor]:
    """The true p of the listed items, and the largest p among the items that are not known; both (B, depth)."""
    probs = truth.probs(users)
    known_items = known.padded(users)
    row, column = (known_items != PADDING).nonzero(as_tuple=True)
    probs[row, known_items[row, column]] = 0
    # `gather` needs valid ids: padding reads item 0 and is then set to 0.
    gains = probs.gather(1, lists.clamp(min=0)).where(lists != PADDING, 0)
    best = probs.topk(min(lists.shape[1], probs.shape[1])).values
    return gains, nn.functional.pad(best, (0, lists.shape[1] - best.shape[1]))


def _evaluation(
    chosen: list[Metric],
    cutoffs: tuple[int, ...],
    sources: dict[str, tuple[Tensor, Tensor | int]],
    users: Tensor,
) -> Evaluation:
    """Compute the chosen metrics at all cutoffs.

    Args:
        sources: for each value of `Metric.of` the two arguments of the metric's function, of the largest depth.
        users: (U',) the evaluated users.
    """
    mean, per_user = {}, {}
    for cutoff in cutoffs:
        for metric in chosen:
            ranked, other = sources[metric.of]
            if metric.of == "truth":  # here both arguments are lists; of the others the second is a number per user
                assert isinstance(other, Tensor)
                other = other[:, :cutoff]
            name, value = f"{metric.name}@{cutoff}", metric.function(ranked[:, :cutoff], other)
            mean[name] = float(value.mean())
            if metric.of != "lists":
                per_user[name] = value
    return Evaluation(mean, per_user, users)
