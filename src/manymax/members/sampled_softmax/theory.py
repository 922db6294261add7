"""Sampled softmax compared with softmax: the minimiser of its expected loss, and its bias and variance.

With weights w_j = P_j / q_j, whose mean under q is 1, the loss of a sample is the softmax loss, plus an offset that
does not depend on the scores, plus log S, where S is a sum over the k draws j:

    "logq"        S = (w_y + sum_j w_j) / (k + 1)             offset log((k+1) q_y)
    "none"        S = (P_y + sum_j P_j) C / (k + 1)           offset log((k+1) / C)
    "partition"   S = (1/k) sum_j (P_y + [j != y] w_j)        offset 0
    "importance"  S = (1/k) sum_j w_j                         offset 0; the paper's estimate of Z, no loss to train on

Bias and variance are the mean and the variance of log S.
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
from manymax.members.sampled_softmax.gradients import GRADIENTS
from manymax.members.sampled_softmax.loss import CORRECTIONS, sampled_softmax_loss
from manymax.ops.log_sums import grid, in_bins, moments, second_moment, transform

# The corrections with which it estimates the softmax loss, and "importance", the estimate of the partition function
# that the paper analyses. "corrected_logq" estimates the gradient alone.
ESTIMATES = (*(each for each in CORRECTIONS if each != "corrected_logq"), "importance")


def _minimisers(
    probs: Tensor,
    log_q: Tensor | None,
    correction: str = "logq",
    hit_policy: str | None = None,
    debias: str | None = None,
) -> Tensor | None:
    """log p with log q correction, log(p / q) without, (1, C), if hits are kept; there is no other closed form."""
    if correction == "corrected_logq":
        raise ArgumentError(
            "`correction='corrected_logq'` has no risk to minimise: its value is not that of the loss whose gradient it"
            " has."
        )
    if hit_policy == "mask" or correction == "partition":
        return None
    return (probs.log() if correction == "logq" or log_q is None else probs.log() - log_q).unsqueeze(0)


@dataclass(frozen=True)
class SumOfDraws:
    """The sum S = scale (fixed + sum of k draws of (shift + w)), where w has mean 1 under q.

    fixed, shift: (N, L).
    masked_label: (w_y, q_y), (N, L) each, if a draw of the label counts as w = 0; None if it counts like any other.
    log_scale: (N, 1), the part of the scale's logarithm that does not depend on k.
    points: weights and probabilities, (N, J) each, which stand for those of all classes, put into J bins.
    transformed: (N, 1 or L, T), E[exp(-t w)] - 1 of one draw, without the shift, at t = exp(log_points), (T,).
    """

    fixed: Tensor
    shift: Tensor
    masked_label: tuple[Tensor, Tensor] | None
    log_scale: Tensor
    points: tuple[Tensor, Tensor]
    transformed: Tensor
    log_points: Tensor

    @staticmethod
    def from_case(case: ApproximationInput, largest: int) -> SumOfDraws:
        """The sum S for the correction of a case, prepared for numbers of draws from the case's k up to `largest`."""
        zero = torch.zeros_like(case.shares)
        weights, q, correction = case.weights, case.log_q.exp(), case.settings["correction"]
        fixed, shift, masked_label, log_scale = case.at_labels(weights), zero, None, zero[:, :1]
        if correction == "none":
            mean = (q * case.probs).sum(-1, keepdim=True)
            weights, log_scale = case.probs / mean, (mean * case.probs.shape[-1]).log()
            fixed = case.at_labels(weights)
        elif correction == "partition":
            masked_label = (fixed, case.at_labels(q))
            fixed, shift = zero, case.at_labels(case.probs)
        elif correction == "importance":
            fixed = zero
        points = in_bins(weights, q)
        # The grid of the transform depends on the smallest sum that can occur and on the largest mean of a sum.
        lightest = torch.where(q > 0, weights, torch.inf).amin(-1, keepdim=True) if masked_label is None else 0
        smallest = fixed + case.num_negatives * (shift + lightest)
        if not (smallest > 0).all():
            raise ArgumentError(
                '`log_q` must not draw a masked class for "importance": the logarithm of an empty sum is -inf.'
            )
        log_points = grid(smallest, fixed + largest, second_moment(*points))
        transformed = transform(*points, log_points).unsqueeze(-2)
        if masked_label is not None:  # a draw of the label has w = 0: its term q_y (exp(-t w_y) - 1) becomes 0
            weight, prob = (part.unsqueeze(-1) for part in masked_label)
            transformed = transformed - prob * torch.expm1(-log_points.exp() * weight)
        return SumOfDraws(fixed, shift, masked_label, log_scale, points, transformed, log_points)

    def with_draws(self, num_negatives: int, correction: str) -> tuple[Tensor, Tensor, Tensor]:
        """Fixed part, mean, and logarithm of the scale of the sum of k draws, (N, L) each."""
        k = num_negatives
        fixed = self.fixed + k * self.shift
        divisor = k if correction in ("partition", "importance") else k + 1
        return fixed, self.fixed + k, self.log_scale - math.log(divisor)  # shift + w has mean 1

    @property
    def drawn_mean(self) -> Tensor:
        """E[w], (N, L): 1, minus the part of the label where its draws count as 0."""
        return (
            torch.ones_like(self.fixed)
            if self.masked_label is None
            else 1 - self.masked_label[0] * self.masked_label[1]
        )

    @property
    def drawn_variance(self) -> Tensor:
        """Var[w], (N, L)."""
        weights, q = self.points
        variance = (q * (weights - 1).square()).sum(-1, keepdim=True).expand_as(self.fixed)  # chi2(P || q)
        if self.masked_label is None:
            return variance
        # Var[w] = E[(w - 1)^2] - (E[w] - 1)^2 with w = 0 for the label. Rounding can leave it below 0.
        weight, prob = self.masked_label
        return (variance - prob * (weight - 1).square() + prob - (weight * prob).square()).clamp(min=0)

    def large_share(self, mean: Tensor) -> Tensor:
        """Part of the variance that comes from draws large beside the sum, (N, L).

        E[c^2 min(1, |c| / m)] / E[c^2] with c = w - E[w] and m the mean of the sum.
        """
        centre, size = self.drawn_mean.unsqueeze(-1), mean.unsqueeze(-1)

        def curtailed(weights: Tensor) -> Tensor:
            distance = (weights - centre).abs()
            return distance.square() * (distance / size).clamp(max=1)

        weights, q = (part.unsqueeze(-2) for part in self.points)
        large = (q * curtailed(weights)).sum(-1)
        if self.masked_label is not None:
            weight, prob = (part.unsqueeze(-1) for part in self.masked_label)
            large = large + (prob * (curtailed(torch.zeros_like(weight)) - curtailed(weight))).squeeze(-1)
        return large.clamp(min=0) / torch.where(self.drawn_variance > 0, self.drawn_variance, 1)


def _exact(case: ApproximationInput, draws: SumOfDraws) -> tuple[Tensor, Tensor]:
    """Mean and variance of log S, (N, L) each."""
    fixed, mean, log_scale = draws.with_draws(case.num_negatives, case.settings["correction"])
    log_mean, variance = moments(fixed, mean, draws.transformed, draws.log_points, case.num_negatives)
    return log_mean + log_scale, variance.clamp(min=0)


def _parts(case: ApproximationInput) -> Parts:
    """Predictions of the Delta method, which replaces the logarithm by a parabola, and the exact moments.

    The predictions are taken to hold where two numbers are small together: the part of the variance that comes from
    draws large beside the whole sum, at which the logarithm is no parabola, and the next term of the series. The rule
    of thumb "chi2/k <= 0.2, and k q_j >= 20 for the likeliest class j" looks at the wrong class: what counts is the
    class where P_j^2/q_j is large.
    """
    draws = SumOfDraws.from_case(case, case.num_negatives)
    bias, variance = _exact(case, draws)
    _, mean, log_scale = draws.with_draws(case.num_negatives, case.settings["correction"])
    relative = case.num_negatives * draws.drawn_variance / mean.square()
    return Parts(
        asymptotic=mean.log() + log_scale,
        curvature=-relative / 2,
        variance=relative,
        exact_bias=bias,
        exact_variance=variance,
        in_range=draws.large_share(mean) + 2.5 * relative <= TOLERANCE,
        offset=_offset(case),
    )


def _offset(case: ApproximationInput) -> Tensor:
    """The difference to the softmax loss that does not depend on the scores, (N, L)."""
    k, num_classes, correction = case.num_negatives, case.scores.shape[-1], case.settings["correction"]
    if correction == "logq":
        return math.log(k + 1) + case.label_log_q
    constant = math.log((k + 1) / num_classes) if correction == "none" else 0.0
    return torch.full_like(case.shares, constant)


def _deviations(case: ApproximationInput, ids: Tensor) -> Tensor:
    """Loss on drawn negatives `ids` (D, k) minus the softmax loss and the offset, (N, D)."""
    sample, log_prob = case.sample(ids), case.at_labels(case.log_probs)
    if case.settings["correction"] == "importance":
        estimate = (sample["negative"] - sample["log_q_negative"]).logsumexp(-1) - math.log(case.num_negatives)
        return estimate - sample["positive"] + log_prob
    loss = sampled_softmax_loss(**sample, correction=case.settings["correction"], reduction="none")
    return loss + log_prob - _offset(case)


def _by_probability(settings: Mapping[str, Any]) -> bool:
    """Whether labels of the same probability have the same bias, whatever their log q."""
    return settings["correction"] in ("none", "partition")


THEORY = Theory(
    minimisers=_minimisers,
    gradients=GRADIENTS,
    approximation=Approximation(
        _parts,
        settings=(
            Setting("correction", str, "logq", "How scores are corrected for the proposal q.", choices=ESTIMATES),
        ),
        draws=DrawTheory(SumOfDraws.from_case, _exact, _deviations),
        by_probability=_by_probability,
        variants=(
            Variant({"correction": "none"}, uniform=False),  # under a uniform proposal it is the same as "logq"
            Variant({"correction": "logq"}),
            Variant({"correction": "partition"}),
            Variant({"correction": "importance"}, trained=False, masked=False),
        ),
    ),
)
