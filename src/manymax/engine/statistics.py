"""What a head tells about each row beside its loss, from the same pass over the scores: `LossResult`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.native import GROUP
from manymax.engine.ranks import Shards, columns
from manymax.engine.row_target import RowTarget

# Statistics that follow from the scores and the target of any member; its kernel computes the others.
OF_SCORES = ("argmax", "correct")


@dataclass(frozen=True)
class LossResult:
    """The loss of a call with `stats`, and what was asked for of each row, (...) each, without gradients.

    With p the probabilities of a row and t its target weights (before label smoothing):

    loss: as without `stats`.
    nll: sum_i t_i (-log p_i) / sum_i t_i; infinite where a sparse map gives a positive the probability 0.
    log_z: the log of the partition function.
    entropy: -sum_c p_c log p_c.
    argmax: the class with the largest score, or with the largest p where a map does not keep the order.
    correct: whether that class is a positive.
    target_prob: sum_i t_i p_i / sum_i t_i.
    support: the number of classes with p > 0.

    A statistic that was not asked for is None. Rows that are not computed (no positive, or weight 0) hold nan, -100 as
    argmax, and 0 as support.
    """

    loss: Tensor
    nll: Tensor | None = None
    log_z: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    correct: Tensor | None = None
    target_prob: Tensor | None = None
    support: Tensor | None = None


def missing_value(values: Tensor) -> float:
    """What stands for a row that is not computed, by the dtype of a statistic."""
    return float("nan") if values.is_floating_point() else 0


def of_scores(
    wanted: tuple[str, ...],
    scores: Tensor,
    tops: Tensor | None,
    target: RowTarget,
    shards: Shards,
    key: Callable[[Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    """The statistics of `OF_SCORES` that are wanted, of a block whose scores have not been overwritten yet.

    Args:
        wanted: names of statistics.
        scores: (n, C'), padded with -inf.
        tops: (n, groups), the maxima of groups of classes, where they are known.
        target: of the rows.
        shards: which classes this rank holds.
        key: from scores to the numbers that classes are ranked by; None where those are the scores.
    """
    if not any(name in wanted for name in OF_SCORES):
        return {}
    best, own = _best_class(scores, tops, shards, key)
    found = {"argmax": best}
    if "correct" in wanted:
        found["correct"] = shards.ranks.maximum(_is_positive(target, own).to(scores.dtype)) > 0
    return {name: found[name] for name in wanted if name in found}


def _best_class(
    scores: Tensor, tops: Tensor | None, shards: Shards, key: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The best class of each row among all classes, (n,), and as this rank numbers it: -1 if another rank holds it."""
    if key is not None:
        top, at = key(scores[:, : shards.size]).max(1)
    elif tops is None:
        top, at = scores.max(1)
    else:
        # The best group first: a look at one number of 64.
        top, group = tops.max(1)
        inside = group.unsqueeze(1) * GROUP + torch.arange(GROUP, device=scores.device)
        inside.clamp_(max=scores.shape[1] - 1)  # the last group may not be full
        at = inside.gather(1, scores.gather(1, inside).argmax(1, keepdim=True)).squeeze(1)
    if shards.ranks.alone:
        return at, at
    # Among equals the first class of the first rank: the largest of the negative numbers.
    first = torch.where(top == shards.ranks.maximum(top), -(at + shards.start).double(), -torch.inf)
    best = -shards.ranks.maximum(first)
    best = torch.where(best.isfinite(), best, -1).long()
    return best, torch.where(shards.inside(best), best - shards.start, -1)


def _is_positive(target: RowTarget, own: Tensor) -> Tensor:
    """(n,) whether a class of this rank (n,), -1 for none, is a positive of its row."""
    if target.ids is not None:
        return ((target.ids == own.unsqueeze(1)) & (target.weights != 0)).any(1)
    return (target.weights.gather(1, own.clamp(min=0).unsqueeze(1)).squeeze(1) != 0) & (own >= 0)


def target_statistics(
    wanted: tuple[str, ...], target: RowTarget, log_probs: Tensor, shards_sum: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """`nll` and `target_prob` of the rows, from the log p (n, P) of their listed classes on this rank.

    Args:
        wanted: names of statistics.
        target: of the rows.
        log_probs: (n, P) or (n, C), -inf where p is 0.
        shards_sum: completes sums over the ranks.
    """
    if "nll" not in wanted and "target_prob" not in wanted:
        return {}
    weights = target.weights.double()
    counts = weights != 0
    nll = (weights * torch.where(counts, -log_probs, 0)).sum(1)
    prob = (weights * torch.where(counts, log_probs.exp(), 0)).sum(1)
    total, nll, prob = shards_sum(columns(weights.sum(1), nll, prob)).unbind(1)
    found = {"nll": nll / total, "target_prob": prob / total}
    return {name: value for name, value in found.items() if name in wanted}
