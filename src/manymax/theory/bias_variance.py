"""How far an approximation of the softmax loss is from it: bias and variance, predicted, exact and drawn.

For a row of scores s with P = softmax(s), a label y and a proposal q,

    bias       E[loss] - softmax loss - offset
    variance   Var[loss]
    deviation  bias^2 + variance

The offset is free of the scores, so no gradient sees it: log((k+1) q_y) for "logq", log((k+1)/C) for "none",
log(k q_y) + 1 for NCE, 0 for all others. With weights w_j = P_j / q_j, whose mean under q is 1, sampled softmax has
the deviation log S of a sum of k draws,

    "logq"        S = (w_y + sum_j w_j) / (k + 1)
    "none"        S = (P_y + sum_j P_j) C / (k + 1)
    "partition"   S = (1/k) sum_j (P_y + [j != y] w_j)
    "importance"  S = (1/k) sum_j w_j              the estimate that the paper analyses; it cannot be trained on

and the Delta method says of it, with the relative variance r = Var(S) / E[S]^2,

    asymptotic  log E[S]          curvature  -r / 2          variance  r

NCE adds its draws up, so nothing bends its bias, and `asymptotic` is all of it. Hierarchical softmax, RG and
Taylor-softmax draw nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.losses import FAMILY
from manymax.losses.nce import nce_loss
from manymax.losses.rg import rg_log_partition
from manymax.losses.sampled_softmax import CORRECTIONS, sampled_softmax_loss
from manymax.losses.taylor_softmax import check_order, taylor_exp
from manymax.ops import divergences as between
from manymax.ops.checks import check_finite, check_scores
from manymax.ops.tree import ClassTree
from manymax.ops.tree_model import TreeModel
from manymax.theory.log_sums import BLOCK, grid, in_bins, moments, second_moment, transform

ESTIMATES = (*CORRECTIONS, "importance")
TOLERANCE = 0.1  # the expected relative error beyond which a prediction is out of range
TABLE = 2**18  # scores at once, so that they stay in the cache
MASKED = math.log(torch.finfo(torch.float64).tiny)  # a class with a smaller log P counts as masked
LABELS = 64  # that stand for y ~ P, where there are more classes,
LABEL_WIDTH = 0.5  # each for those within so much of log(P/q)


@dataclass(frozen=True)
class Estimate:
    """Bias and variance of an approximation, one number a row, (N,) each; definitions in the module's docstring.

    asymptotic, curvature: the two parts of the predicted bias.
    variance: the predicted variance.
    exact_bias, exact_variance: what they truly are.
    deviation: bias^2 + variance, exact.
    in_range: whether the predictions hold to about a tenth, for all labels.
    offset: what was taken off the loss because no gradient sees it.

    For y ~ P all are means over the label; that of bias^2 is more than the square of the mean bias.
    """

    asymptotic: Tensor
    curvature: Tensor
    variance: Tensor
    exact_bias: Tensor
    exact_variance: Tensor
    deviation: Tensor
    in_range: Tensor
    offset: Tensor

    @property
    def bias(self) -> Tensor:
        """The predicted bias, asymptotic + curvature, (N,)."""
        return self.asymptotic + self.curvature


@dataclass(frozen=True)
class Drawn:
    """Bias and variance as draws have them, with standard errors, (N,) each."""

    bias: Tensor
    bias_error: Tensor
    variance: Tensor
    variance_error: Tensor


@dataclass(frozen=True)
class _Case:
    """Arguments that have been read, a block of rows.

    scores, log_probs, probs, log_q: (N, C). labels: (N, L) classes; shares: (N, L) their weights in the mean.
    tree_log_probs: (N, C), of hierarchical softmax.
    """

    scores: Tensor
    log_probs: Tensor
    probs: Tensor
    log_q: Tensor
    labels: Tensor
    shares: Tensor
    tree_log_probs: Tensor | None
    num_negatives: int
    correction: str
    order: int
    log_z: float | None

    @property
    def weights(self) -> Tensor:
        """P / q, (N, C); 0 for a masked class, which may have q = 0."""
        return torch.where(self.log_probs > -torch.inf, (self.log_probs - self.log_q).exp(), 0)

    def at_labels(self, values: Tensor) -> Tensor:
        """values (N, C) at the labels, (N, L)."""
        return values.gather(-1, self.labels)


@dataclass(frozen=True)
class _Parts:
    """What `Estimate` says, for each label, (N, L); numbers where all labels have the same."""

    asymptotic: Tensor
    exact_bias: Tensor
    in_range: Tensor
    curvature: Tensor | float = 0.0
    variance: Tensor | float = 0.0
    exact_variance: Tensor | float = 0.0
    offset: Tensor | float = 0.0

    def mean(self, shares: Tensor) -> Estimate:
        """The mean over the labels."""

        def over_labels(values: Tensor | float) -> Tensor:
            return (shares * values).sum(-1)

        return Estimate(
            over_labels(self.asymptotic),
            over_labels(self.curvature),
            over_labels(self.variance),
            over_labels(self.exact_bias),
            over_labels(self.exact_variance),
            over_labels(self.exact_bias**2 + self.exact_variance),
            self.in_range.all(-1),
            over_labels(self.offset),
        )


def estimate(
    member: str,
    scores: Tensor,
    target: Tensor | None = None,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
    correction: str = "logq",
    order: int = 2,
    log_z: float | None = None,
    tree: ClassTree | Tensor | None = None,
) -> Estimate:
    """Bias and variance of an approximation on given scores.

    Args:
        member: a name in `APPROXIMATIONS`, or another name for it.
        scores: (N, C) or (C,); -inf masks a class.
        target: (N,) labels; None for y ~ P, the mean over the label.
        log_q: (C,) or (N, C), the proposal of a sampled member; None if it is uniform.
        num_negatives: k.
        correction: of sampled softmax, or "importance".
        order: of Taylor-softmax.
        log_z: log Z0 of NCE; None for normalised scores, as the paper has them.
        tree: of hierarchical softmax: its log P, (N, C), as `tree_log_probs` estimates them; or a tree whose node
            scores are free, which can have any P, so that nothing is lost.

    Returns:
        Estimate: (N,) numbers.

    Example: half of the probability is on a class that is drawn once in a hundred times.

        >>> scores, log_q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.01, 0.5, 0.49]).log()
        >>> result = estimate("ssm", scores, torch.tensor([2]), log_q=log_q, num_negatives=50, correction="partition")
        >>> print(f"{result.bias.item():.3f} {result.exact_bias.item():.3f} {result.in_range.item()}")
        -0.245 -0.208 False
    """
    name = _approximation(member)
    settings = {"num_negatives": num_negatives, "correction": correction, "order": order, "log_z": log_z}
    cases = _read(name, scores, target, log_q, tree, **settings)
    return _joined([APPROXIMATIONS[name](case).mean(case.shares) for case in cases])


def deviation(member: str, scores: Tensor, target: Tensor | None = None, **settings: Any) -> Tensor:
    """bias^2 + variance of an approximation, exact, (N,); arguments as in `estimate`.

    >>> scores = torch.tensor([[2.0, 1.0, 0.0]])
    >>> [round(deviation("ssm", scores, num_negatives=k).item(), 4) for k in (1, 10, 100)]
    [0.2513, 0.0477, 0.0053]
    """
    return estimate(member, scores, target, **settings).deviation


def negatives_needed(
    member: str,
    scores: Tensor,
    goal: float,
    target: Tensor | None = None,
    *,
    log_q: Tensor | None = None,
    correction: str = "logq",
    log_z: float | None = None,
    maximum: int = 2**20,
) -> int | None:
    """The smallest k at which the deviation, in the mean over the rows, is at most `goal`.

    Args:
        member, scores, target, log_q, correction, log_z: as in `estimate`, for a member that draws negatives.
        goal: the deviation to reach.
        maximum: the largest k to try.

    Returns:
        k; None where `maximum` negatives do not reach the goal, as where an asymptotic bias stays.

    Example:
        >>> negatives_needed("ssm", torch.tensor([[2.0, 1.0, 0.0]]), goal=0.01)
        53
    """
    name = _approximation(member, DRAWING)
    if not goal > 0:
        raise ArgumentError(f"`goal` must be a positive deviation; got {goal}. No number of negatives reaches 0.")
    _check_count("maximum", maximum)
    cases = _read(name, scores, target, log_q, None, num_negatives=1, correction=correction, order=2, log_z=log_z)
    prepare, exact = DRAWING[name]
    prepared = [(case, prepare(case, maximum)) for case in cases]

    def reached(k: int) -> bool:
        moments_at = [(case.shares, exact(replace(case, num_negatives=k), form)) for case, form in prepared]
        rows = [(shares * (bias**2 + variance)).sum(-1) for shares, (bias, variance) in moments_at]
        return float(torch.cat(rows).mean()) <= goal

    low, high = 0, 1
    while not reached(high):
        if high == maximum:
            return None
        low, high = high, min(2 * high, maximum)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def drawn(
    member: str,
    scores: Tensor,
    target: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
    correction: str = "logq",
    log_z: float | None = None,
    draws: int = 10_000,
    generator: torch.Generator | None = None,
) -> Drawn:
    """Bias and variance of a sampled member by Monte Carlo: its loss on negatives that are drawn.

    Args:
        member, scores, target, log_q, num_negatives, correction, log_z: as in `estimate`; log q is (C,), because all
            rows get the same draws.
        draws: how often k negatives are drawn.
        generator: of the draws.

    Returns:
        Drawn: (N,) numbers with their standard errors.

    Example:
        >>> scores, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> result = drawn("ssm", scores, target, num_negatives=10, generator=torch.Generator().manual_seed(0))
        >>> exact = estimate("ssm", scores, target, num_negatives=10)
        >>> bool((result.bias - exact.exact_bias).abs() < 4 * result.bias_error)
        True
    """
    name = _approximation(member, DRAWING)
    _check_count("draws", draws, least=2)
    if isinstance(log_q, Tensor) and log_q.ndim != 1:
        raise ArgumentError(f"`log_q` must be (C,): all rows get the same draws; got shape {tuple(log_q.shape)}.")
    if target is None:
        raise ArgumentError("`target` must name a label for every row: a mean over labels is not drawn.")
    settings = {"num_negatives": num_negatives, "correction": correction, "order": 2, "log_z": log_z}
    parts = []
    for case in _read(name, scores, target, log_q, None, **settings):
        q = case.log_q[0].exp()
        ids = torch.multinomial(q, draws * num_negatives, replacement=True, generator=generator)
        size = max(1, BLOCK // (num_negatives * len(case.scores)))
        values = [_drawn_deviations(name, case, block) for block in ids.view(draws, num_negatives).split(size)]
        parts.append(_with_errors(torch.cat(values, -1)))
    return _joined(parts)


def _drawn_deviations(name: str, case: _Case, ids: Tensor) -> Tensor:
    """Loss minus softmax loss and offset on the negatives `ids` (D, k), (N, D)."""
    positive = case.at_labels(case.scores).expand(-1, len(ids))
    negative, log_q = case.scores[:, ids], case.log_q[:, ids]  # (N, D, k)
    full = -case.at_labels(case.log_probs)
    if case.correction == "importance" and name == "sampled_softmax":
        return (negative - log_q).logsumexp(-1) - math.log(case.num_negatives) - positive - full
    log_q_positive = case.at_labels(case.log_q).expand(-1, len(ids))
    given: dict[str, Any] = {"log_q_positive": log_q_positive, "log_q_negative": log_q, "reduction": "none"}
    if name == "nce":
        loss = nce_loss(positive, negative, log_z=_log_z(case).expand(-1, len(ids)), **given)
        return loss - full - _nce_offset(case)
    hits = ids == case.labels.unsqueeze(-1)
    loss = sampled_softmax_loss(positive, negative, hits=hits, correction=case.correction, **given)
    return loss - full - _offset(case)


def _with_errors(values: Tensor) -> Drawn:
    """Mean and variance of values (N, D), with standard errors."""
    count = values.shape[-1]
    squares = (values - values.mean(-1, keepdim=True)).square()
    variance = squares.sum(-1) / (count - 1)
    return Drawn(values.mean(-1), (variance / count).sqrt(), variance, squares.std(-1) / math.sqrt(count))


def divergences(scores: Tensor, log_q: Tensor | None = None, num_negatives: int = 1) -> dict[str, Tensor]:
    """What bias and variance depend on: chi2(P || q), KL(P || q) and JS(P || q) of weight 1/(k+1), (N,) each.

    >>> divergences(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.25, 0.75]).log())["chi_square"]
    tensor([0.3333], dtype=torch.float64)
    """
    settings = {"num_negatives": num_negatives, "correction": "logq", "order": 2, "log_z": None}
    cases = _read("sampled_softmax", scores, None, log_q, None, **settings)
    probs, q = torch.cat([case.probs for case in cases]), torch.cat([case.log_q for case in cases]).exp()
    return {
        "chi_square": between.chi_square(probs, q),
        "kl": between.kl(probs, q),
        "jensen_shannon": between.jensen_shannon(probs, q, 1 / (1 + num_negatives)),
    }


# --- the members ---


@dataclass(frozen=True)
class _SumOfDraws:
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
    def of(case: _Case, largest: int) -> _SumOfDraws:
        """The sum that the case's correction takes the logarithm of, to be used from its k to the largest."""
        zero = torch.zeros_like(case.shares)
        weights, q = case.weights, case.log_q.exp()
        fixed, shift, own, log_scale = case.at_labels(weights), zero, None, zero[:, :1]
        if case.correction == "none":
            mean = (q * case.probs).sum(-1, keepdim=True)
            weights, log_scale = case.probs / mean, (mean * case.probs.shape[-1]).log()
            fixed = case.at_labels(weights)
        elif case.correction == "partition":
            own = (fixed, case.at_labels(q))
            fixed, shift = zero, case.at_labels(case.probs)
        elif case.correction == "importance":
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
        return _SumOfDraws(fixed, shift, own, log_scale, points, transformed, log_points)

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


def _sampled_softmax_exact(case: _Case, form: _SumOfDraws) -> tuple[Tensor, Tensor]:
    """Mean and variance of log S, (N, L) each."""
    fixed, mean, log_scale = form.at(case.num_negatives, case.correction)
    log_mean, variance = moments(fixed, mean, form.transformed, form.log_points, case.num_negatives)
    return log_mean + log_scale, variance.clamp(min=0)


def _sampled_softmax(case: _Case) -> _Parts:
    """The Delta method beside the exact moments.

    It is in range where both of these together are small: the part of the variance that comes from draws large beside
    the whole sum, for which the logarithm is no parabola, and the next term of the series. The rule of thumb chi2/k <=
    0.2 with k q_j >= 20 at the likeliest class j looks at the wrong class: what counts is where P_j^2/q_j is large.
    """
    form = _SumOfDraws.of(case, case.num_negatives)
    bias, variance = _sampled_softmax_exact(case, form)
    _, mean, log_scale = form.at(case.num_negatives, case.correction)
    relative = case.num_negatives * form.drawn_variance / mean.square()
    return _Parts(
        asymptotic=mean.log() + log_scale,
        curvature=-relative / 2,
        variance=relative,
        exact_bias=bias,
        exact_variance=variance,
        in_range=form.large_share(mean) + 2.5 * relative <= TOLERANCE,
        offset=_offset(case),
    )


def _offset(case: _Case) -> Tensor:
    """What sampled softmax has on top of the softmax loss, whatever the scores are, (N, L)."""
    k, num_classes = case.num_negatives, case.scores.shape[-1]
    if case.correction == "logq":
        return math.log(k + 1) + case.at_labels(case.log_q)
    constant = math.log((k + 1) / num_classes) if case.correction == "none" else 0.0
    return torch.full_like(case.shares, constant)


def _log_z(case: _Case) -> Tensor:
    """log Z0, (N, 1): the given one, or that of the scores, which normalises them."""
    normaliser = case.scores.logsumexp(-1, keepdim=True)
    return normaliser if case.log_z is None else torch.full_like(normaliser, case.log_z)


def _nce_offset(case: _Case) -> Tensor:
    """log(k q_y) + 1, (N, L)."""
    return math.log(case.num_negatives) + case.at_labels(case.log_q) + 1


def _nce_points(case: _Case, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """w = exp(s)/(Z0 q) at the labels (N, L), and weights with probabilities (N, J) for those of all classes."""
    weights = case.weights * (case.scores.logsumexp(-1, keepdim=True) - _log_z(case)).exp()
    return case.at_labels(weights), *in_bins(weights, case.log_q.exp())


def _nce_exact(case: _Case, points: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """log(1 + w_y/k) + k E_q[log(1 + w/k)] - 1 - log(Z/Z0), (N, L), and k Var_q(log(1 + w/k)), (N, 1).

    As k grows the first tends to Z/Z0 - 1 - log(Z/Z0): 0 for normalised scores, and for no others.
    """
    k, (own, weights, q) = case.num_negatives, points
    logs, ratio = torch.log1p(weights / k), (q * weights).sum(-1, keepdim=True)
    mean = (q * logs).sum(-1, keepdim=True)
    variance = k * (q * (logs - mean).square()).sum(-1, keepdim=True)
    return torch.log1p(own / k) + k * mean - 1 - ratio.log(), variance


def _nce(case: _Case) -> _Parts:
    """The paper's variance k chi2/(k+1)^2, which makes the logarithm linear, beside the exact one."""
    k, points = case.num_negatives, _nce_points(case, case.num_negatives)
    bias, variance = _nce_exact(case, points)
    _, weights, q = points
    mean = (q * weights).sum(-1, keepdim=True)
    predicted = k * (q * (weights - mean).square()).sum(-1, keepdim=True) / (k + mean).square()
    in_range = (predicted - variance).abs() <= TOLERANCE * variance
    return _Parts(bias, bias, in_range, variance=predicted, exact_variance=variance, offset=_nce_offset(case))


def _hierarchical_softmax(case: _Case) -> _Parts:
    """log P(y) - log P_tree(y): its mean over y ~ P is KL(P || P_tree)."""
    assert case.tree_log_probs is not None
    bias = case.at_labels(case.log_probs - case.tree_log_probs)
    return _Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


def _rg(case: _Case) -> _Parts:
    """log C + mean(s) + var(s)/2 - log Z, of which -mu_3/6 - kappa_4/24 are the first two terms."""
    bias = (rg_log_partition(case.scores) - case.scores.logsumexp(-1)).unsqueeze(-1)
    series = sum(rg_series(case.scores)).unsqueeze(-1)  # type: ignore[union-attr]
    return _Parts(series, bias, (series - bias).abs() <= TOLERANCE * bias.abs())


def rg_series(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first two terms of RG's error: -mu_3/6 and -kappa_4/24 in the centred scores, (...) each.

    mu_n is the mean of (s - mean(s))^n over the live classes, kappa_4 = mu_4 - 3 mu_2^2.

    >>> third, fourth = rg_series(torch.tensor([0.4, 0.0, 0.0], dtype=torch.float64))
    >>> print(f"{third.item():.6f} {fourth.item():.6f}")
    -0.000790 0.000079
    """
    live = scores > -torch.inf
    count = live.sum(-1, keepdim=True)
    centred = torch.where(live, scores - torch.where(live, scores, 0).sum(-1, keepdim=True) / count, 0)
    square = centred.square()
    second, third, fourth = (x.sum(-1) / count.squeeze(-1) for x in (square, square * centred, square.square()))
    return -third / 6, -(fourth - 3 * second.square()) / 24


def _taylor_softmax(case: _Case) -> _Parts:
    """log F - log f(s_y) - (log Z - s_y), f the exponential cut off after an even order."""
    terms = taylor_exp(case.scores, case.order)
    log_probs = torch.where(terms > 0, terms, 1).log() - terms.sum(-1, keepdim=True).log()
    bias = case.at_labels(case.log_probs - log_probs)
    return _Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


def _softmax(case: _Case) -> _Parts:
    zero = torch.zeros_like(case.shares)
    return _Parts(zero, zero, torch.ones_like(zero, dtype=torch.bool))


APPROXIMATIONS: dict[str, Callable[[_Case], _Parts]] = {
    "softmax": _softmax,
    "sampled_softmax": _sampled_softmax,
    "nce": _nce,
    "hierarchical_softmax": _hierarchical_softmax,
    "rg": _rg,
    "taylor_softmax": _taylor_softmax,
}
# Members that draw: what serves every k up to the largest, and exact bias and variance from it.
DRAWING: dict[str, tuple[Callable[[_Case, int], Any], Callable[[_Case, Any], tuple[Tensor, Tensor]]]] = {
    "sampled_softmax": (_SumOfDraws.of, _sampled_softmax_exact),
    "nce": (_nce_points, _nce_exact),
}


def tree_log_probs(scores: Tensor, tree: ClassTree, dim: int) -> Tensor:
    """log P of a tree whose node scores come as near to softmax(scores) as vectors of `dim` let them.

    Free node scores, the log-odds of the branches under P, make P itself. Of inner products <x, v_n> of vectors in d
    dimensions their table, rows by nodes, can have rank d only: it is cut to that rank by its largest singular values.

    Args:
        scores: (N, C), more than `dim` rows of them, or nothing is lost.
        tree: over the C classes.
        dim: d.

    Returns:
        (N, C) log-probabilities, in float64.

    Example:
        >>> from manymax import HuffmanTree
        >>> scores = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [-1.0, 0.5, 0.0]])
        >>> tree_log_probs(scores, HuffmanTree([1, 1, 2]), dim=1)[0].exp()
        tensor([0.6698, 0.2391, 0.0911], dtype=torch.float64)
    """
    _check_count("dim", dim)
    probs = _read("softmax", scores, None, None, None, num_negatives=1, correction="logq", order=2, log_z=None)
    table = _log_odds(torch.cat([case.probs for case in probs]), tree)  # (N, V)
    left, sizes, right = torch.linalg.svd(table, full_matrices=False)
    return TreeModel(tree, right[:dim].T.contiguous()).log_probs(left[:, :dim] * sizes[:dim])


def _log_odds(probs: Tensor, tree: ClassTree) -> Tensor:
    """The node scores, of a binary tree, or edge scores that make P of the tree's leaves, (N, V)."""
    if probs.shape[-1] != tree.num_classes:
        raise ArgumentError(f"`tree` must be over the {probs.shape[-1]} classes of `scores`; got {tree.num_classes}.")
    mass = probs.new_zeros(tree.num_classes + tree.num_nodes, len(probs))
    mass[: tree.num_classes] = probs.T.clamp(min=torch.finfo(probs.dtype).tiny)
    for start, stop in reversed(list(zip(tree.edge_levels, tree.edge_levels[1:], strict=False))):
        nodes, below = tree.edge_node[start:stop], tree.leads_to[start:stop]
        mass.index_add_(0, tree.num_classes + nodes, mass[below])
    edges = mass[tree.leads_to].log().T  # (N, E)
    return edges[:, 1::2] - edges[:, ::2] if tree.arity == 2 else edges


# --- arguments ---


def _approximation(member: str, known: Iterable[str] | None = None) -> str:
    """The member's name in `FAMILY`; an error if it is not one of those that are asked for."""
    name, names = FAMILY[member].name, tuple(APPROXIMATIONS if known is None else known)
    if name not in names:
        what = "draws no negatives" if name in APPROXIMATIONS else "is a loss of its own, no approximation of softmax"
        raise ArgumentError(f"`member` must be one of {', '.join(names)}; got {name!r}, which {what}.")
    return name


def _check_count(argument: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"`{argument}` must be an integer of at least {least}; got {value!r}.")


def _read(
    name: str,
    scores: Tensor,
    target: Tensor | None,
    log_q: Tensor | None,
    tree: ClassTree | Tensor | None = None,
    **settings: Any,
) -> list[_Case]:
    """The arguments, checked, in float64 and in blocks of rows."""
    check_scores(scores)
    if scores.ndim > 2 or not len(scores):
        raise ArgumentError(f"`scores` must be (rows, classes) with at least 1 row; got shape {tuple(scores.shape)}.")
    _check_count("num_negatives", settings["num_negatives"])
    check_choice("correction", settings["correction"], ESTIMATES)
    check_order(settings["order"])
    rows = scores.detach().double().reshape(-1, scores.shape[-1])
    check_finite(rows.amax(-1))
    proposal = _read_log_q(log_q, rows)
    labels = None if target is None else _read_target(target, rows)
    leaves = _read_tree(tree, rows) if name == "hierarchical_softmax" else None
    cases = []
    size = min(64, max(1, TABLE // rows.shape[-1]))
    for at in (slice(start, start + size) for start in range(0, len(rows), size)):
        log_probs = rows[at].log_softmax(-1)
        if labels is None:
            ids, shares = _labels_of(log_probs, _label_key(name, settings["correction"], log_probs, proposal[at]))
        else:
            ids, shares = labels[at], torch.ones_like(labels[at], dtype=rows.dtype)
        block = (
            rows[at],
            log_probs,
            log_probs.exp(),
            proposal[at],
            ids,
            shares,
            leaves if leaves is None else leaves[at],
        )
        cases.append(_Case(*block, **settings))
    return cases


def _read_log_q(log_q: Tensor | None, scores: Tensor) -> Tensor:
    """log q, (N, C), normalised."""
    if log_q is None:
        return scores.new_tensor(-math.log(scores.shape[-1])).expand_as(scores)
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        kind = log_q.dtype if isinstance(log_q, Tensor) else type(log_q).__name__
        raise ArgumentTypeError(f"`log_q` must be a float tensor of log-probabilities; got {kind}.")
    if log_q.shape not in (scores.shape, scores.shape[-1:]):
        raise ArgumentError(
            f"`log_q` must have shape ({scores.shape[-1]},) or {tuple(scores.shape)}; got {tuple(log_q.shape)}."
        )
    rows = log_q.detach().double()
    total = rows.logsumexp(-1, keepdim=True)
    if not (total.abs() < 1e-3).all():
        raise ArgumentError(
            f"`log_q` must be the log of probabilities that sum to 1; got a row that sums to"
            f" {total.exp().flatten()[(total.flatten().abs() - 1e-3).argmax()].item():.4g}."
        )
    if ((rows == -torch.inf) & (scores > -torch.inf)).any():
        raise ArgumentError(
            "`log_q` must be finite wherever `scores` are: a class that is never drawn leaves bias and variance without"
            " bound. Smooth the proposal."
        )
    return (rows - total).expand_as(scores)


def _read_target(target: Tensor, scores: Tensor) -> Tensor:
    """(N, 1) labels."""
    if (
        not isinstance(target, Tensor)
        or target.is_floating_point()
        or target.is_complex()
        or target.dtype == torch.bool
    ):
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentTypeError(f"`target` must hold integer ids; got {kind}.")
    if target.numel() != len(scores) or target.ndim > 1:
        raise ArgumentError(f"`target` must have shape ({len(scores)},), one label a row; got {tuple(target.shape)}.")
    labels = target.long().reshape(-1, 1)
    if (labels < 0).any() or (labels >= scores.shape[-1]).any():
        raise ArgumentError(
            f"`target` ids must be in [0, {scores.shape[-1]}); got {int(labels.min())} to {int(labels.max())}."
        )
    if not (scores.log_softmax(-1).gather(-1, labels) > MASKED).all():
        raise ArgumentError("`target` names a class that is masked, or whose probability is 0 in float64.")
    return labels


def _read_tree(tree: ClassTree | Tensor | None, scores: Tensor) -> Tensor:
    """log P of the tree's classes, (N, C)."""
    if isinstance(tree, ClassTree):
        if tree.num_classes != scores.shape[-1]:
            raise ArgumentError(f"`tree` must be over the {scores.shape[-1]} classes; got {tree.num_classes}.")
        return scores.log_softmax(-1)
    if not isinstance(tree, Tensor):
        raise ArgumentTypeError(
            f"`tree` must hold the log-probabilities {tuple(scores.shape)} of hierarchical softmax, or be a tree whose"
            f" node scores are free; got {type(tree).__name__}."
        )
    if tree.shape != scores.shape:
        raise ArgumentError(f"`tree` log-probabilities must have shape {tuple(scores.shape)}; got {tuple(tree.shape)}.")
    return tree.detach().double()


def _label_key(name: str, correction: str, log_probs: Tensor, log_q: Tensor) -> Tensor | None:
    """What of the label the deviation depends on: log(P_y/q_y) or log P_y, (N, C); None if all labels must be seen."""
    if name not in DRAWING or log_probs.shape[-1] <= LABELS:
        return None
    by_probability = name == "sampled_softmax" and correction in ("none", "partition")
    return log_probs if by_probability else torch.where(log_probs > MASKED, log_probs - log_q, -torch.inf)


def _labels_of(log_probs: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Labels and shares, (N, L) each, that stand for y ~ P.

    All classes, or one for all whose keys are within a bin: the one nearest to their mean, with their probability.
    """
    probs, live = log_probs.exp(), log_probs > MASKED
    top = probs.argmax(-1, keepdim=True)
    if key is None:
        return torch.where(live, torch.arange(probs.shape[-1], device=probs.device), top), torch.where(live, probs, 0)
    bins = ((key.amax(-1, keepdim=True) - key) / LABEL_WIDTH).clamp(max=LABELS - 1).long()
    shares = probs.new_zeros(len(probs), LABELS).scatter_add(-1, bins, probs)
    centre = probs.new_zeros(len(probs), LABELS).scatter_add(-1, bins, torch.where(live, probs * key, 0))
    distance = (key - (centre / torch.where(shares > 0, shares, 1)).gather(-1, bins)).abs()
    nearest = torch.full_like(shares, torch.inf).scatter_reduce(-1, bins, distance, "amin")
    rows, classes = (live & (distance == nearest.gather(-1, bins))).nonzero(as_tuple=True)
    ids = top.repeat(1, LABELS)  # for empty bins, whose share is 0
    ids[rows, bins[rows, classes]] = classes
    return ids, shares


ResultT = TypeVar("ResultT", Estimate, Drawn)


def _joined(parts: list[ResultT]) -> ResultT:
    """One result for all rows."""
    columns = (torch.cat([getattr(part, f.name) for part in parts]) for f in fields(parts[0]))
    return type(parts[0])(*columns)
