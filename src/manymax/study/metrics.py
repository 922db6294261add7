"""The table `METRICS` of what a study measures of ranked lists, one value per user.

Those that look at the hits of a list are defined in `manymax.metrics.hits`. Users without a relevant item are not
evaluated, so that |T| >= 1 there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from manymax.metrics.hits import (
    dcg,
    hit_rate,
    mean_average_precision,
    ndcg,
    precision,
    recall,
    reciprocal_rank,
    topk_error,
)
from manymax.ops.discounts import discounts
from manymax.table import Table


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
    Metric("mrr", "MRR", reciprocal_rank, "1 / rank of the first hit"),
    Metric("map", "MAP", mean_average_precision, "sum_i y_i (y_1 + ... + y_i) / i / |T|"),
    Metric("topk_error", "Top-k error", topk_error, "1 - sum_i y_i / |T|", higher_is_better=False),
    Metric("coverage", "Coverage", coverage, "share of the items in at least one user's list", of="lists"),
    Metric("regret", "Regret", regret, "1 - E[DCG] / E[DCG of the best ranking]", of="truth", higher_is_better=False),
)
