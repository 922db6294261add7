"""Metrics of ranked lists, one value per user; `METRICS` is the table of them.

    y_i       1 if the item at rank i is relevant, i = 1 .. cutoff
    |T|       the number of relevant items of the user
    w_i       1 / log2(i + 1), the discount of rank i

Users without a relevant item are not evaluated, so |T| >= 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from manymax.ops.discounts import discounts
from manymax.table import Table


def dcg(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i w_i.

    Args:
        hits: (B, cutoff) bool, y.
        relevant: (B,) |T|.

    Returns:
        (B,) float64, as all metrics here.

    >>> dcg(torch.tensor([[False, True]]), torch.tensor([1]))
    tensor([0.6309], dtype=torch.float64)
    """
    return hits.double() @ discounts(hits.shape[1])


def ndcg(hits: Tensor, relevant: Tensor) -> Tensor:
    """DCG / (w_1 + ... + w_m) with m = min(|T|, cutoff): DCG divided by its largest possible value.

    >>> ndcg(torch.tensor([[False, True]]), torch.tensor([5]))
    tensor([0.3869], dtype=torch.float64)
    """
    cutoff = hits.shape[1]
    return dcg(hits, relevant) / discounts(cutoff).cumsum(0)[relevant.clamp(1, cutoff) - 1]


def precision(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i / cutoff, also if fewer than `cutoff` items could be listed."""
    return hits.double().mean(1)


def recall(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i / |T|; it cannot reach 1 if |T| > cutoff."""
    return hits.sum(1).double() / relevant


def hit_rate(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 if at least one y_i is 1, else 0."""
    return hits.any(1).double()


def topk_error(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 - recall, the share of relevant items that are not listed; with one relevant item, 1 if it is not listed."""
    return 1 - recall(hits, relevant)


def mrr(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 / rank of the first hit; 0 if there is none."""
    ranks = torch.arange(1, hits.shape[1] + 1, dtype=torch.float64)
    return (hits.double() / ranks).amax(1)


def mean_average_precision(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i (y_1 + ... + y_i) / i, divided by |T|, as trec_eval does, and not by min(|T|, cutoff)."""
    ranks = torch.arange(1, hits.shape[1] + 1, dtype=torch.float64)
    return (hits * hits.cumsum(1) / ranks).sum(1) / relevant


def regret(gains: Tensor, best: Tensor) -> Tensor:
    """1 - E[DCG] / E[DCG of the best ranking], under the true p(item | user).

    Args:
        gains: (B, cutoff) p of the listed items.
        best: (B, cutoff) the largest p among the items that could be listed, in descending order.

    >>> regret(torch.tensor([[0.2, 0.5]]), torch.tensor([[0.5, 0.2]]))
    tensor([0.1768], dtype=torch.float64)
    """
    weights = discounts(gains.shape[1])
    return 1 - (gains.double() @ weights) / (best.double() @ weights)


def coverage(lists: Tensor, num_items: int) -> Tensor:
    """The share of all items that are in the list of at least one user, ().

    Args:
        lists: (U, cutoff) ids, padded with -100.
        num_items: C.
    """
    listed = torch.zeros(num_items, dtype=torch.bool)
    listed[lists[lists >= 0]] = True
    return listed.double().mean()


@dataclass(frozen=True)
class Metric:
    """One row of `METRICS`; the value at a cutoff is named "name@cutoff".

    name: what settings and records call it.
    title: what reports call it.
    function: computes it from the two arguments that `of` says.
    formula: one line for tables.
    of: the arguments of the function: "hits" (hits, relevant); "truth" (gains, best), for data whose true p is known;
        "lists" (lists, num_items), which gives one value for all users together.
    higher_is_better: the direction for early stopping and for bold print.
    short: a short title for the headers of tables; if it is empty, tables use `name`.
    """

    name: str
    title: str
    function: Callable[[Any, Any], Tensor]
    formula: str
    of: Literal["hits", "truth", "lists"] = "hits"
    higher_is_better: bool = True
    short: str = ""
    aliases: tuple[str, ...] = ()


METRICS: Table[Metric] = Table(
    "metric",
    Metric("ndcg", "NDCG", ndcg, "DCG / (w_1 + ... + w_min(|T|, cutoff))", short="N"),
    Metric("precision", "Precision", precision, "sum_i y_i / cutoff", short="P"),
    Metric("recall", "Recall", recall, "sum_i y_i / |T|", short="R"),
    Metric("dcg", "DCG", dcg, "sum_i y_i w_i, w_i = 1 / log2(i + 1)"),
    Metric("hit_rate", "HR", hit_rate, "1 if at least one y_i is 1, else 0", aliases=("hr",)),
    Metric("mrr", "MRR", mrr, "1 / rank of the first hit"),
    Metric("map", "MAP", mean_average_precision, "sum_i y_i (y_1 + ... + y_i) / i / |T|"),
    Metric("topk_error", "Top-k error", topk_error, "1 - sum_i y_i / |T|", higher_is_better=False),
    Metric("coverage", "Coverage", coverage, "share of the items in at least one user's list", of="lists"),
    Metric("regret", "Regret", regret, "1 - E[DCG] / E[DCG of the best ranking]", of="truth", higher_is_better=False),
)
