"""How far the gradients of sampled losses are from that of the softmax loss: predicted, computed and measured.

For scores with P = softmax(s), a label y, and an estimate g of the gradient P - e_y that depends on k draws,

    bias       |E[g] - (P - e_y)|
    noise      sqrt(E |g - E[g]|^2)
    deviation  sqrt(bias^2 + noise^2)

each divided by the length of the exact gradient. Every estimate here is a ratio A_j / B at the classes j other than y,
where A_j is a sum over the draws of j and B one over the positive and all draws, and minus the sum of these at y. The
Delta method expands it about the means of A and B: with R = E[A] / E[B],

    E[A / B]      ~  R - Cov(A, B) / E[B]^2 + R Var(B) / E[B]^2
    Var(A_j / B)  ~  Var(A_j - R_j B) / E[B]^2

Where B is a moving average over steps, to which each step adds the share gamma, Cov(A, B) is multiplied by gamma and
Var(B) by gamma / (2 - gamma), once the first steps are forgotten. That is for scores that stand still. While the score
of the positive rises by d per step, the sums of earlier draws were larger relative to it, by exp(d) for each step: E[B]
is too large, by a factor of up to gamma / (1 - (1 - gamma) exp(d)), about 1 + d / gamma, and the gradient too small.

The rows of a table are `GradientEstimator`s, which a member lists in `Theory.gradients`. A new one needs a name, a
function from drawn ids to gradients (best the gradient of the loss itself, by autograd), and the ratio of sums that the
Delta method expands and whose moments are computed; one that is made from several steps says from how many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.approximation import GradientCase, GradientEstimator
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores
from manymax.ops.ratio_sums import ratio_moments
from manymax.theory.inputs import check_count
from manymax.theory.risk import all_samples, uniform_log_q

DRAW_GROUPS = 20  # of draws, whose means give a square without bias and its standard error
MOST_SAMPLES = 50_000  # that are enumerated
NUMBERS_AT_ONCE = 2**22  # in a table of draws and classes


@dataclass(frozen=True)
class GradientDeviation:
    """Squares of bias and noise of an estimate, and of the length of the exact gradient, one number per row, (N,) each.

    bias_error: standard error of the squared bias; 0 where nothing was drawn.
    """

    squared_bias: Tensor
    squared_noise: Tensor
    squared_norm: Tensor
    bias_error: Tensor

    def bias(self, weights: Tensor | None = None) -> float:
        """Bias relative to the exact gradient, the root of the mean square over rows, with weights (N,) if given."""
        return self._relative(self.squared_bias, weights)

    def standard_error(self, weights: Tensor | None = None) -> float:
        """The standard error of `bias`; where that is 0, the bias that could be hidden."""
        weights = torch.ones_like(self.squared_bias) if weights is None else weights
        square = float((weights * self.bias_error).norm() / (weights * self.squared_norm).sum())
        bias = self.bias(weights)
        return min(square / (2 * bias) if bias else math.inf, math.sqrt(square))

    def noise(self, weights: Tensor | None = None) -> float:
        """Noise relative to the exact gradient, likewise."""
        return self._relative(self.squared_noise, weights)

    def deviation(self, weights: Tensor | None = None) -> float:
        """sqrt(bias^2 + noise^2), likewise."""
        return math.hypot(self.bias(weights), self.noise(weights))

    def _relative(self, squares: Tensor, weights: Tensor | None) -> float:
        weights = torch.ones_like(squares) if weights is None else weights
        # Drawn squares have no bias of their own, and their sum may come out below 0.
        return math.sqrt(max(0.0, float((weights * squares).sum() / (weights * self.squared_norm).sum())))


def gradient_estimators() -> dict[str, GradientEstimator]:
    """The estimates of the exact gradient that the members of the family state, by name."""
    return {row.name: row for member in FAMILY.values() for row in member.theory.gradients}


@checked(least={"num_negatives": 1})
def predicted_gradient(
    estimator: GradientEstimator,
    scores: Tensor,
    target: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
) -> GradientDeviation:
    """Bias and noise of an estimate of the gradient by the Delta method.

    Args:
        estimator: one of `gradient_estimators()`, or your own.
        scores: (N, C).
        target: (N,) labels.
        log_q: (C,) the proposal; uniform if None.
        num_negatives: k.

    Returns:
        The squares, (N,) each.

    Example: the gradient of the first is wrong by a tenth of its length, and that of the second by far less.
        >>> scores, target = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0])
        >>> rows = gradient_estimators()
        >>> [round(predicted_gradient(rows[name], scores, target, num_negatives=10).bias(), 3)
        ...  for name in ("logq", "corrected_logq")]
        [0.105, 0.009]
    """
    squares = [_delta(estimator, case) for case in _cases(scores, target, log_q, num_negatives)]
    bias, noise, norm = (torch.tensor(column, dtype=torch.float64) for column in zip(*squares, strict=True))
    return GradientDeviation(bias, noise, norm, torch.zeros_like(bias))


@checked(least={"num_negatives": 1})
def exact_gradient(
    estimator: GradientEstimator,
    scores: Tensor,
    target: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
) -> GradientDeviation:
    """Bias and noise of an estimate of the gradient from the exact moments of its ratio of sums, for any k and C.

    Arguments and result are those of `predicted_gradient`.

    >>> scores, target = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0])
    >>> round(exact_gradient(gradient_estimators()["logq"], scores, target, num_negatives=10).bias(), 3)
    0.105
    """
    squares = [_moments(estimator, case) for case in _cases(scores, target, log_q, num_negatives)]
    bias, noise, norm = (torch.tensor(column, dtype=torch.float64) for column in zip(*squares, strict=True))
    return GradientDeviation(bias, noise, norm, torch.zeros_like(bias))


@checked(least={"num_negatives": 1, "draws": 2})
def measured_gradient(
    estimator: GradientEstimator,
    scores: Tensor,
    target: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
    draws: int | None = None,
    generator: torch.Generator | None = None,
) -> GradientDeviation:
    """Bias and noise of an estimate of the gradient, from the gradients of all samples or of drawn ones.

    Args:
        estimator, scores, target, log_q, num_negatives: as in `predicted_gradient`.
        draws: how many estimates are drawn for each row; None to enumerate all samples, which few classes allow.
        generator: of the draws; torch's default if None.

    Returns:
        The squares, (N,) each. The squared bias of drawn samples is without bias itself, and so may be negative.

    Example: with q = P the second is exact, unless all draws are the label.
        >>> scores, target = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0])
        >>> rows, log_q = gradient_estimators(), scores[0].double()
        >>> [round(measured_gradient(rows[name], scores, target, log_q=log_q, num_negatives=10).bias(), 3)
        ...  for name in ("logq", "corrected_logq")]
        [0.091, 0.001]
    """
    measure = _enumerated if draws is None else _drawn
    found = []
    for case in _cases(scores, target, log_q, num_negatives):
        found.append((*measure(estimator, case, draws or 0, generator), float(case.exact.square().sum())))
    bias, error, noise, norm = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    return GradientDeviation(bias, noise, norm, error)


def _cases(scores: Tensor, target: Tensor, log_q: Tensor | None, num_negatives: int) -> Iterator[GradientCase]:
    """The rows, checked, in float64."""
    check_scores(scores)
    check_finite(scores)
    check_count("num_negatives", num_negatives)
    if scores.ndim != 2 or not isinstance(target, Tensor) or target.shape != scores.shape[:1]:
        raise ArgumentError("`scores` must be (N, C), and `target` must name a label for every row, (N,).")
    log_q = uniform_log_q(scores.shape[-1]) if log_q is None else log_q.double()
    if log_q.shape != scores.shape[-1:] or not log_q.isfinite().all():
        raise ArgumentError(f"`log_q` must be finite, with one number for each of {scores.shape[-1]} classes.")
    for row, label in zip(scores.double(), target.tolist(), strict=True):
        yield GradientCase(row, log_q, label, num_negatives)


def _delta(estimator: GradientEstimator, case: GradientCase) -> tuple[float, float, float]:
    """Squared bias, squared noise and squared length of the exact gradient."""
    ratio, label = estimator.ratio(case), case.label
    k, x, q, past = ratio.draws, ratio.weights, ratio.q, ratio.past(estimator.steps)
    mean, square, wanted = q * x, q * x.square(), case.probs
    mean_of_all = mean.sum()
    below = ratio.first + past.sum() * k * mean_of_all  # E[B]
    variance_below = past.square().sum() * k * (square.sum() - mean_of_all.square())
    for values in (mean, square, wanted):  # the gradient of the label is minus the sum of the others
        values[label] = values.sum() - values[label]
    shares, covariance = k * mean / below, past[0] * k * (square - mean * mean_of_all)  # R, and that of A_j and B
    bias = shares - wanted - covariance / below.square() + shares * variance_below / below.square()
    noise = k * (square - mean.square()) - 2 * shares * covariance + shares.square() * variance_below
    return float(bias.square().sum()), float(noise.sum() / below.square()), float(case.exact.square().sum())


def _moments(estimator: GradientEstimator, case: GradientCase) -> tuple[float, float, float]:
    """Exactly the numbers that `_delta` predicts."""
    others = torch.arange(len(case.scores)) != case.label
    mean, square, exact = torch.zeros_like(case.scores), 0.0, case.exact
    for chance, ratio in [(1.0, estimator.ratio(case))] if estimator.mixture is None else estimator.mixture(case):
        terms, past = ratio.weights.expand(estimator.steps, -1), ratio.past(estimator.steps)
        found = ratio_moments(ratio.first, terms, ratio.q, ratio.draws, past, others)
        at_label = -found.mean[others].sum()
        mean += chance * torch.where(others, found.mean, at_label)
        square += chance * float(found.square[others].sum() + found.square_of_sum)
    bias, norm = (mean - exact).square().sum(), exact.square().sum()
    return float(bias), square - float(mean.square().sum()), float(norm)


def _enumerated(estimator: GradientEstimator, case: GradientCase, *_: object) -> tuple[float, float, float]:
    """Squared bias, its error 0, and squared noise."""
    samples = math.comb(len(case.scores) + case.num_negatives - 1, case.num_negatives)
    if estimator.steps > 1 or samples > MOST_SAMPLES:
        raise ArgumentError(
            f"`draws` must be a number for {estimator.name!r} with {len(case.scores)} classes and {case.num_negatives}"
            " negatives: there are too many samples to go through. Pass draws=2000, for example."
        )
    ids, chances = all_samples(case.log_q, case.num_negatives)
    gradients = estimator.gradients(case, ids.unsqueeze(1))
    mean = chances @ gradients
    noise = chances @ (gradients - mean).square().sum(1)
    return float((mean - case.exact).square().sum()), 0.0, float(noise)


def _drawn(
    estimator: GradientEstimator, case: GradientCase, draws: int, generator: torch.Generator | None
) -> tuple[float, float, float]:
    """Squared bias without bias, its standard error, and squared noise, from at least `draws` estimates."""
    check_count("draws", draws, least=2 * DRAW_GROUPS)
    size, q = -(-draws // DRAW_GROUPS), case.log_q.exp()
    shape, total = (estimator.steps, case.num_negatives), size * DRAW_GROUPS
    at_once = max(1, NUMBERS_AT_ONCE // max(len(q), math.prod(shape)))
    sums, squares = q.new_zeros(DRAW_GROUPS, len(q)), 0.0
    for start in range(0, total, at_once):
        place = torch.arange(start, min(start + at_once, total))
        ids = torch.multinomial(q, len(place) * math.prod(shape), replacement=True, generator=generator)
        gaps = estimator.gradients(case, ids.view(-1, *shape)) - case.exact
        sums.index_add_(0, place % DRAW_GROUPS, gaps)
        squares += float(gaps.square().sum())
    means = sums / size  # independent, each with the bias as its mean
    # Products of different groups only: the square of one mean would have its noise in it.
    products = means @ means.T
    off = products.sum() - products.trace()
    bias = float(off / (DRAW_GROUPS * (DRAW_GROUPS - 1)))
    # Leave one group out at a time, for the standard error.
    without = (off - 2 * (products.sum(1) - products.diagonal())) / ((DRAW_GROUPS - 1) * (DRAW_GROUPS - 2))
    error = math.sqrt((DRAW_GROUPS - 1) / DRAW_GROUPS * float((without - without.mean()).square().sum()))
    return bias, error, squares / total - bias
