"""Metrics of ranked lists from their hits, one value per list.

    y_i       1 if the item at rank i is relevant, i = 1 .. cutoff
    |T|       the number of relevant items of the list's row, at least 1
    w_i       1 / log2(i + 1), the discount of rank i

Every function takes the hits y (..., cutoff) as bools and |T| (...), and returns (...) in float64. Those that do not
need |T| take it all the same, so that a table of metrics can call any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops.discounts import discounts


def dcg(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i w_i.

    >>> dcg(torch.tensor([[False, True]]), torch.tensor([1]))
    tensor([0.6309], dtype=torch.float64)
    """
    return hits.double() @ discounts(hits.shape[-1]).to(hits.device)


def ndcg(hits: Tensor, relevant: Tensor) -> Tensor:
    """DCG / (w_1 + ... + w_m) with m = min(|T|, cutoff): DCG divided by its largest possible value.

    >>> ndcg(torch.tensor([[False, True]]), torch.tensor([5]))
    tensor([0.3869], dtype=torch.float64)
    """
    cutoff = hits.shape[-1]
    best = discounts(cutoff).cumsum(0).to(hits.device)
    return dcg(hits, relevant) / best[relevant.clamp(1, cutoff) - 1]


def precision(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i / cutoff, also if fewer than `cutoff` items could be listed."""
    return hits.double().mean(-1)


def recall(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i / |T|; it cannot reach 1 if |T| > cutoff."""
    return hits.sum(-1).double() / relevant


def hit_rate(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 if at least one y_i is 1, else 0."""
    return hits.any(-1).double()


def topk_error(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 - recall, the share of relevant items that are not listed; with one relevant item, 1 if it is not listed."""
    return 1 - recall(hits, relevant)


def reciprocal_rank(hits: Tensor, relevant: Tensor) -> Tensor:
    """1 / rank of the first hit; 0 if there is none. Its mean is the MRR."""
    return (hits.double() / _ranks(hits)).amax(-1)


def mean_average_precision(hits: Tensor, relevant: Tensor) -> Tensor:
    """sum_i y_i (y_1 + ... + y_i) / i, divided by |T|, as trec_eval does, and not by min(|T|, cutoff)."""
    return (hits * hits.cumsum(-1) / _ranks(hits)).sum(-1) / relevant


def _ranks(hits: Tensor) -> Tensor:
    """The ranks 1 .. cutoff, (cutoff,) float64."""
    return torch.arange(1, hits.shape[-1] + 1, dtype=torch.float64, device=hits.device)
