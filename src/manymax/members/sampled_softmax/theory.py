"""Sampled softmax against softmax: the minimiser of its risk, and its bias and variance.

With weights w_j = P_j / q_j, whose mean under q is 1, the loss deviates by log S of a sum of k draws,

    "logq"        S = (w_y + sum_j w_j) / (k + 1)             offset log((k+1) q_y)
    "none"        S = (P_y + sum_j P_j) C / (k + 1)           offset log((k+1) / C)
    "partition"   S = (1/k) sum_j (P_y + [j != y] w_j)        offset 0
    "importance"  S = (1/k) sum_j w_j                         offset 0; it cannot be trained on
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.approximation import TOLERANCE, ApproximationInput, DrawTheory, Parts, Variant
from manymax.engine.member import Approximation, Setting, Theory
from manymax.errors import ArgumentError
from manymax.members.sampled_softmax.loss import CORRECTIONS, sampled_softmax_loss
from manymax.ops.log_sums import grid, in_bins, moments, second_moment, transform

# The corrections of the loss, and the estimate of the partition function that the paper analyses.
ESTIMATES = (*CORRECTIONS, "importance")


def _minimisers(
    probs: Tensor,
    log_q: Tensor | None,
    correction: str = "logq",
    hit_policy: str | None = None,
    debias: str | None = None,
) -> Tensor | None:
    """log p with log q correction, log(p / q) without, hits kept; "partition" has no formula."""
    if hit_policy == "mask" or correction == "partition":
        return None
    return (probs.log() if correction == "logq" or log_q is None else probs.log() - log_q).unsqueeze(0)


@dataclass(frozen=True)
class SumOfDraws:
    """S = scale (fixed + sum of k draws of (shift + w)), with w of mean 1 under q.

    fixed, shift: (N, L). own: (w_y, q_y), (N, L) each, where the label's own weight counts as 0, or None.
    log_scale: (N, 1), free of k. points: weights and probabilities, (N, J) each, that stand for those of all classes.
    transformed: (N, 1 or L, T) the transform of one draw less 1, without the shift, at log_points (T,).
    """

    fixed: Tensor
    shift: Tensor
    own: tuple[Tensor, Tensor] | None
    log_scale: Tensor
    points: tuple[Tensor, Tensor]
    transformed: Tensor
    log_points: Tensor

    @staticmethod
    def of(case: ApproximationInput, largest: int) -> SumOfDraws:
        """The sum that the case's correction takes the logarithm of, to be used from its k to the largest."""
        zero = torch.zeros_like(case.shares)
        weights, q, correction = case.weights, case.log_q.exp(), case.settings["correction"]
        fixed, shift, own, log_scale = case.at_labels(weights), zero, None, zero[:, :1]
        if correction == "none":
            mean = (q * case.probs).sum(-1, keepdim=True)
            weights, log_scale = case.probs / mean, (mean * case.probs.shape[-1]).log()
            fixed = case.at_labels(weights)
        elif correction == "partition":
            own = (fixed, case.at_labels(q))
            fixed, shift = zero, case.at_labels(case.probs)
        elif correction == "importance":
            fixed = zero
        points = in_bins(weights, q)
        lightest = torch.where(q > 0, weights, torch.inf).amin(-1, keepdim=True) if own is None else 0
        smallest = fixed + case.num_negatives * (shift + lightest)
        if not (smallest > 0).all():
            raise ArgumentError(
                '`log_q` must not draw a masked class for "importance": the logarithm of an empty sum is -inf.'
            )
        log_points = grid(smallest, fixed + largest, second_moment(*points))
        transformed = transform(*points, log_points).unsqueeze(-2)
        if own is not None:
            transformed = transformed - own[1].unsqueeze(-1) * torch.expm1(-log_points.exp() * own[0].unsqueeze(-1))
        return SumOfDraws(fixed, shift, own, log_scale, points, transformed, log_points)

    def at(self, num_negatives: int, correction: str) -> tuple[Tensor, Tensor, Tensor]:
        """(fixed part, mean, log of the scale) of the sum of k draws, (N, L) each."""
        k = num_negatives
        fixed = self.fixed + k * self.shift
        divisor = k if correction in ("partition", "importance") else k + 1
        return fixed, self.fixed + k, self.log_scale - math.log(divisor)  # shift + w has mean 1

    @property
    def drawn_mean(self) -> Tensor:
        """E[w], (N, L): 1, less the label's own part where that does not count."""
        return torch.ones_like(self.fixed) if self.own is None else 1 - self.own[0] * self.own[1]

    @property
    def drawn_variance(self) -> Tensor:
        """Var[w], (N, L)."""
        weights, q = self.points
        variance = (q * (weights - 1).square()).sum(-1, keepdim=True).expand_as(self.fixed)  # chi2(P || q)
        if self.own is None:
            return variance
        weight, prob = self.own
        return (variance - prob * (weight - 1).square() + prob - (weight * prob).square()).clamp(min=0)

    def large_share(self, mean: Tensor) -> Tensor:
        """E[c^2 min(1, |c| / E[S])] / E[c^2], c = w - E[w], (N, L): the part of the variance in large draws."""
        centre, size = self.drawn_mean.unsqueeze(-1), mean.unsqueeze(-1)

        def curtailed(weights: Tensor) -> Tensor:
            distance = (weights - centre).abs()
            return distance.square() * (distance / size).clamp(max=1)

        weights, q = (part.unsqueeze(-2) for part in self.points)
        large = (q * curtailed(weights)).sum(-1)
        if self.own is not None:
            weight, prob = (part.unsqueeze(-1) for part in self.own)
            large = large + (prob * (curtailed(torch.zeros_like(weight)) - curtailed(weight))).squeeze(-1)
        return large.clamp(min=0) / torch.where(self.drawn_variance > 0, self.drawn_variance, 1)


def _exact(case: ApproximationInput, form: SumOfDraws) -> tuple[Tensor, Tensor]:
    """Mean and variance of log S, (N, L) each."""
    fixed, mean, log_scale = form.at(case.num_negatives, case.settings["correction"])
    log_mean, variance = moments(fixed, mean, form.transformed, form.log_points, case.num_negatives)
    return log_mean + log_scale, variance.clamp(min=0)


def _parts(case: ApproximationInput) -> Parts:
    """The Delta method beside the exact moments.

    It is in range where both of these together are small: the part of the variance that comes from draws large beside
    the whole sum, for which the logarithm is no parabola, and the next term of the series. The rule of thumb chi2/k <=
    0.2 with k q_j >= 20 at the likeliest class j looks at the wrong class: what counts is where P_j^2/q_j is large.
    """
    form = SumOfDraws.of(case, case.num_negatives)
    bias, variance = _exact(case, form)
    _, mean, log_scale = form.at(case.num_negatives, case.settings["correction"])
    relative = case.num_negatives * form.drawn_variance / mean.square()
    return Parts(
        asymptotic=mean.log() + log_scale,
        curvature=-relative / 2,
        variance=relative,
        exact_bias=bias,
        exact_variance=variance,
        in_range=form.large_share(mean) + 2.5 * relative <= TOLERANCE,
        offset=_offset(case),
    )


def _offset(case: ApproximationInput) -> Tensor:
    """What sampled softmax has on top of the softmax loss, whatever the scores are, (N, L)."""
    k, num_classes, correction = case.num_negatives, case.scores.shape[-1], case.settings["correction"]
    if correction == "logq":
        return math.log(k + 1) + case.label_log_q
    constant = math.log((k + 1) / num_classes) if correction == "none" else 0.0
    return torch.full_like(case.shares, constant)


def _deviations(case: ApproximationInput, ids: Tensor) -> Tensor:
    sample, log_prob = case.sample(ids), case.at_labels(case.log_probs)
    if case.settings["correction"] == "importance":
        estimate = (sample["negative"] - sample["log_q_negative"]).logsumexp(-1) - math.log(case.num_negatives)
        return estimate - sample["positive"] + log_prob
    loss = sampled_softmax_loss(**sample, correction=case.settings["correction"], reduction="none")
    return loss + log_prob - _offset(case)


def _by_probability(settings: Mapping[str, Any]) -> bool:
    return settings["correction"] in ("none", "partition")


THEORY = Theory(
    minimisers=_minimisers,
    approximation=Approximation(
        _parts,
        settings=(Setting("correction", str, "logq", "How log q is used.", choices=ESTIMATES),),
        draws=DrawTheory(SumOfDraws.of, _exact, _deviations),
        by_probability=_by_probability,
        variants=(
            Variant({"correction": "none"}, uniform=False),  # "logq", where log q is the same for all classes
            Variant({"correction": "logq"}),
            Variant({"correction": "partition"}),
            Variant({"correction": "importance"}, trained=False, masked=False),
        ),
    ),
)
