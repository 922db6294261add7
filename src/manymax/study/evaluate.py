"""Full ranking: every item that a user does not have yet is ranked, and the lists are measured."""

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

USERS_AT_A_TIME = 1024  # users at a time


class ItemLaw(Protocol):
    """The law that data was drawn from, where it is known."""

    def probs(self, users: Tensor) -> Tensor:
        """(B, C) p(item | user) for users (B,)."""


@dataclass(frozen=True)
class Evaluation:
    """What the lists are worth.

    Args:
        mean: {"ndcg@20": the mean over users, ...}.
        per_user: {"ndcg@20": (U',), ...} for metrics that have a value for each user.
        users: (U',) the users that were asked for, those with something to find.
    """

    mean: dict[str, float]
    per_user: dict[str, Tensor]
    users: Tensor


def known_lists(split: Split, part: str) -> Lists:
    """What is known of each user when `part` is asked for: train for "valid", train and then valid for "test"."""
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
    """Rank all items for each user, without those that are known of them, and compare with a held-out part.

    Known are the items of train at validation, those of train and validation at the test. Relevant are the distinct
    items of the part that are not known: a repeated interaction cannot be found where known items are left out.

    Args:
        backbone, head: ranked by `head.topk`; a backbone that reads histories gets the latest known items.
        split: its `part` holds what is to be found.
        part: "valid" or "test".
        cutoffs: lengths of the lists.
        metrics: names from `METRICS`; all that can be computed if None.
        truth: adds "regret".
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
    """The same for the ranking by the number of interactions in training, the baseline of every table."""
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
    chosen = _chosen(cutoffs, metrics, truth)
    wanted = _pairs_to_find(split, part, known)
    users, relevant = (wanted // split.num_items).unique_consecutive(return_counts=True)
    if not users.numel():
        raise ArgumentError(f"`split` has nothing to find in its {part} part: no user has a new item there.")
    depth = max(cutoffs)
    lists, gains, best = [], [], []
    for block in users.split(USERS_AT_A_TIME):
        ids = rank(block, min(depth, split.num_items))
        lists.append(nn.functional.pad(ids, (0, depth - ids.shape[1]), value=PADDING))
        if truth is not None:
            found, possible = _true_gains(truth, block, lists[-1], known)
            gains.append(found)
            best.append(possible)
    ranked = torch.cat(lists)
    hits = _contains(wanted, users.unsqueeze(1) * split.num_items + ranked) & (ranked != PADDING)
    sources: dict[str, tuple[Tensor, Tensor | int]] = {"hits": (hits, relevant), "lists": (ranked, split.num_items)}
    if truth is not None:
        sources["truth"] = (torch.cat(gains), torch.cat(best))
    return _evaluation(chosen, cutoffs, sources, users)


def _chosen(cutoffs: tuple[int, ...], metrics: Iterable[str] | None, truth: ItemLaw | None) -> list[Metric]:
    if not cutoffs or min(cutoffs) < 1:
        raise ArgumentError(f"`cutoffs` must hold numbers of at least 1; got {cutoffs}.")
    if metrics is None:
        return [metric for metric in METRICS.values() if metric.of != "truth" or truth is not None]
    chosen = [METRICS[name] for name in metrics]
    if truth is None and any(metric.of == "truth" for metric in chosen):
        raise ArgumentError("`metrics` asks for regret, which needs `truth`: only planted data has it.")
    return chosen


def _pairs_to_find(split: Split, part: str, known: Lists) -> Tensor:
    """user x C + item of every pair of the part that is not known, once and in order."""
    lists: Lists = getattr(split, part)
    pairs = (lists.users() * split.num_items + lists.items).unique()
    seen = (known.users() * split.num_items + known.items).sort().values
    return pairs[~_contains(seen, pairs)]


def _contains(ordered: Tensor, values: Tensor) -> Tensor:
    """Which values are in a sorted tensor (n,)."""
    if not ordered.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    place = torch.searchsorted(ordered, values).clamp(max=ordered.numel() - 1)
    return ordered[place] == values


def _true_gains(truth: ItemLaw, users: Tensor, lists: Tensor, known: Lists) -> tuple[Tensor, Tensor]:
    """True p of the listed items, and the largest p of items that are not known, (B, depth) each."""
    probs = truth.probs(users)
    seen = known.padded(users)
    row, column = (seen != PADDING).nonzero(as_tuple=True)
    probs[row, seen[row, column]] = 0
    gains = probs.gather(1, lists.clamp(min=0)).where(lists != PADDING, 0)
    best = probs.topk(min(lists.shape[1], probs.shape[1])).values
    return gains, nn.functional.pad(best, (0, lists.shape[1] - best.shape[1]))


def _evaluation(
    chosen: list[Metric],
    cutoffs: tuple[int, ...],
    sources: dict[str, tuple[Tensor, Tensor | int]],
    users: Tensor,
) -> Evaluation:
    mean, per_user = {}, {}
    for cutoff in cutoffs:
        for metric in chosen:
            ranked, other = sources[metric.of]
            if metric.of == "truth":
                assert isinstance(other, Tensor)
                other = other[:, :cutoff]
            name, value = f"{metric.name}@{cutoff}", metric.function(ranked[:, :cutoff], other)
            mean[name] = float(value.mean())
            if metric.of != "lists":
                per_user[name] = value
    return Evaluation(mean, per_user, users)
