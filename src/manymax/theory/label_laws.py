"""Distributions of label sets, and ranking metrics in expectation over them.

For label sets Y with 0/1 vectors y, every metric is linear in a gain per class, g, once the classes are ranked:

    metric@k = sum_{i <= k} w_i g_(class at position i)

    precision   g = E[y],            w = 1 / k
    recall      g = E[y / |y|],      w = 1           (with one label per example: Top-k accuracy)
    dcg         g = E[y],            w = 1 / log2(i + 1)
    ndcg        g = E[y / IDCG(y)],  w = 1 / log2(i + 1)

So the best ranking sorts the classes by g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.target import MULTILABEL
from manymax.errors import ArgumentError, check_choice
from manymax.ops.arguments import checked
from manymax.ops.discounts import discounts

CONSISTENCY_METRICS = ("precision", "recall", "dcg", "ndcg")
TIED = 1e-5  # scores that differ by less count as tied: a numerical search does not find minimisers more precisely


@checked
@dataclass(frozen=True)
class LabelLaw:
    """A distribution of label sets: labels (n, C) bool, and the probability of each set, probs (n,).

    >>> law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), torch.tensor([0.45, 0.55]))
    >>> law.class_weights("sum"), law.class_weights("normalized")
    (tensor([0.4500, 0.5500, 0.5500]), tensor([0.4500, 0.2750, 0.2750]))
    """

    labels: Tensor
    probs: Tensor

    @staticmethod
    def single(probs: Tensor) -> LabelLaw:
        """The law of one label per example, drawn from probs (C,)."""
        return LabelLaw(torch.eye(len(probs), dtype=torch.bool), probs)

    def class_weights(self, multilabel: str = "sum") -> Tensor:
        """The weights t of the conditional risk, (C,): E[y] for "sum", E[y / |y|] for "normalized"."""
        check_choice("multilabel", multilabel, MULTILABEL)
        return self.gains("dcg" if multilabel == "sum" else "recall")

    def gains(self, metric: str, cutoff: int | None = None) -> Tensor:
        """The gains g by which the best ranking sorts, (C,).

        Args:
            metric: "precision", "recall", "dcg" or "ndcg".
            cutoff: k of the metric, at which the ideal DCG ends; None for all classes.

        Returns:
            (C,) gains; an empty label set adds nothing.
        """
        check_choice("metric", metric, CONSISTENCY_METRICS)
        sizes = self.labels.sum(-1)
        per_label = torch.ones_like(self.probs)
        if metric == "recall":
            per_label = 1 / sizes.clamp_min(1).to(self.probs.dtype)
        elif metric == "ndcg":
            ideal = discounts(self.labels.shape[-1], cutoff).to(self.probs).cumsum(-1)
            per_label = 1 / ideal[sizes.clamp_min(1) - 1]
        return (self.probs * per_label) @ self.labels.to(self.probs.dtype)


@checked(least={"num_classes": 1, "cutoff": 1})
def position_weights(metric: str, num_classes: int, cutoff: int | None = None) -> Tensor:
    """The weight w of each position of a ranking, (C,) float64; 0 beyond the cutoff.

    >>> position_weights("precision", 4, cutoff=2)
    tensor([0.5000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """
    check_choice("metric", metric, CONSISTENCY_METRICS)
    cutoff = num_classes if cutoff is None else cutoff
    if not 1 <= cutoff <= num_classes:
        raise ArgumentError(f"`cutoff` must be between 1 and the number of classes, {num_classes}; got {cutoff}.")
    if metric in ("dcg", "ndcg"):
        return discounts(num_classes, cutoff)
    weights = torch.ones(num_classes, dtype=torch.float64) / (cutoff if metric == "precision" else 1)
    return torch.where(torch.arange(num_classes) < cutoff, weights, 0)


@checked(scores="scores C", least={"cutoff": 1})
def expected_metric(scores: Tensor, law: LabelLaw, metric: str, cutoff: int | None = None) -> float:
    """The metric of a ranking by scores (C,), in expectation over the law, with ties broken in the worst way.

    Args:
        scores: (C,).
        law: the distribution of label sets.
        metric: "precision", "recall", "dcg" or "ndcg".
        cutoff: k of the metric; None for all classes.

    Example: rankings by the minimisers of the sum and of the normalized form, see `LabelLaw`.
        >>> law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), torch.tensor([0.45, 0.55]))
        >>> for multilabel in ("sum", "normalized"):
        ...     scores = law.class_weights(multilabel).log()
        ...     print([round(expected_metric(scores, law, metric), 3) for metric in ("dcg", "ndcg")])
        [1.122, 0.775]
        [1.072, 0.831]
    """
    gains = law.gains(metric, cutoff).double()
    # Two stable sorts, by gain and then by score: among tied classes the one with the smallest gain comes first.
    by_gain = gains.argsort(stable=True)
    worst_ranking = by_gain[_levels(scores)[by_gain].argsort(stable=True)]
    return float(position_weights(metric, len(gains), cutoff) @ gains[worst_ranking])


@checked(scores="scores C", least={"cutoff": 1})
def regret(scores: Tensor, law: LabelLaw, metric: str, cutoff: int | None = None) -> float:
    """Expected metric of the best ranking minus that of the ranking by scores (C,); arguments as `expected_metric`."""
    gains = law.gains(metric, cutoff).double().sort(descending=True).values
    return float(position_weights(metric, len(gains), cutoff) @ gains) - expected_metric(scores, law, metric, cutoff)


def _levels(scores: Tensor) -> Tensor:
    """The level of each class, (C,): 0 for the highest score and those tied with it, 1 for the next, and so on."""
    ranked, permutation = scores.double().sort(descending=True)
    # Between two scores of -inf the difference is nan, which is not above TIED: they share a level, as they should.
    begins_level = torch.cat([ranked.new_zeros(1), (ranked[:-1] - ranked[1:] > TIED).double()])
    return torch.empty_like(begins_level).scatter(0, permutation, begins_level.cumsum(0))


# Random laws -------------------------------------------------------------------------------------


@checked(least={"num_classes": 1})
def random_law(
    num_classes: int,
    generator: torch.Generator,
    *,
    labels: str = "single",
    ties: bool = False,
    zeros: bool = False,
) -> LabelLaw:
    """A random law to try a claim on.

    Args:
        num_classes: C.
        generator: of the random numbers.
        labels: "single" for one label per example, "multi" for sets of labels.
        ties: probabilities are multiples of one unit, so that some are equal; otherwise uniform on the simplex.
        zeros: whether classes may be impossible.
    """
    if labels == "single":
        return LabelLaw.single(random_probs(num_classes, generator, ties, zeros))
    sets = torch.rand(num_classes + 1, num_classes, generator=generator) < 0.5
    # Set c < C gets class c if it is empty, so that no set is; without zeros always, so that every class is in a set.
    sets[torch.arange(num_classes), torch.arange(num_classes)] |= ~sets.any(-1)[:-1] | (not zeros)
    sets[-1, 0] |= ~sets[-1].any()
    return LabelLaw(sets, random_probs(num_classes + 1, generator, ties, zeros))


@checked(least={"size": 1})
def random_probs(size: int, generator: torch.Generator, ties: bool = False, zeros: bool = False) -> Tensor:
    """Random probabilities, (size,) float64.

    They are uniform on the simplex; with `ties` they are proportional to the counts of eight draws, each count plus 1
    unless `zeros` are allowed.
    """
    if ties:
        drawn = torch.randint(size, (8,), generator=generator).bincount(minlength=size).double()
        drawn = drawn if zeros else drawn + 1
        return drawn / drawn.sum()
    # Normalised exponential variables are uniform on the simplex.
    drawn = -torch.rand(size, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    return drawn / drawn.sum()
