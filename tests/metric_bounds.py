"""The bounds of ranking metrics that facts state, tried on every set of positives among a few classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from manymax.engine.member import Fact
from tests.exact import Case, normal


def dcg(ranks: list[int], k: int) -> float:
    return sum(1 / math.log2(1 + r) for r in ranks if r <= k)


# The metric of a row from the ranks of its positives, which begin at 1; and the form of the loss that bounds it.
METRICS = {
    "DCG@K": (dcg, "sum"),
    "NDCG@K": (lambda ranks, k: dcg(ranks, k) / dcg([*range(1, len(ranks) + 1)], k), "sum"),
    "Recall@K": (lambda ranks, k: sum(r <= k for r in ranks) / len(ranks), "normalized"),
}


def rows(num_classes: int) -> Tensor:
    """Scores without ties, (rows, C): of several scales, nearly tied, and with gaps."""
    order = torch.stack([torch.randperm(num_classes, generator=torch.Generator().manual_seed(i)) for i in range(4)])
    steps = [scale * order.double() for scale in (1e-7, 0.3, 3.0)]
    return torch.cat([*(normal(8, num_classes, seed=1, scale=scale) for scale in (0.1, 0.5, 2.0, 10.0)), *steps])


def cases(num_classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of scores with every set of positives but the empty one, (n, C) each; and one with a single, long row."""
    sets = torch.tensor(list(itertools.product([False, True], repeat=num_classes))[1:])
    scores = rows(num_classes)
    yield scores.repeat_interleave(len(sets), 0), sets.repeat(len(scores), 1)
    leader = torch.cat([torch.tensor([8.0]), -1e-7 * torch.arange(59.0)]).double().unsqueeze(0)
    yield leader, torch.arange(60).unsqueeze(0) == 0


def check_bound(case: Case, fact: Fact) -> None:
    """Whether no row with a hit has a metric below what the fact computes from its loss, and some row comes close."""
    assert fact.fn is not None
    metric, multilabel = METRICS[fact.value]
    closest = math.inf
    for num_classes in (1, 2, 4, 5):
        for scores, positives in cases(num_classes):
            ranks = scores.argsort(1, descending=True).argsort(1) + 1
            for k in sorted({k for k in (1, 2, 3, 4, scores.shape[1]) if k <= scores.shape[1]}):
                aims = {"k": k} if any(setting.name == "k" for setting in case.member.settings) else {}
                setting = {**case.setting, **aims}
                losses = case.member.loss(scores, positives, multilabel=multilabel, reduction="none", **setting)
                for row, own, loss in zip(ranks, positives, losses.tolist(), strict=True):
                    found = row[own].tolist()
                    if hits := sum(r <= k for r in found):
                        least = fact.fn(loss=loss, hits=hits, positives=len(found), **setting)
                        assert metric(found, k) >= least - 1e-9
                        closest = min(closest, 1 - least / metric(found, k))
    assert closest < 0.1, "a larger bound would hold too"
