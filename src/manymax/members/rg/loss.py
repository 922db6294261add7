"""RG: the softmax loss with its log partition expanded to second order around equal scores.

    Z(s)      log C + mean(s) + var(s) / 2           (var: population variance over the classes)
    map       p_i = (1 + s_i - mean(s)) / C          sums to 1, may be negative
    omega     Omega(p) = (C ||p||^2 - 1) / 2 - log C   on the hyperplane sum p = 1
    loss      l(y, s) = Z(s) - s_y
    gradient  p - e_y

It is a squared loss: l = ||s - mean(s) - (C e_y - 1)||^2 / (2 C) + log C - (C - 1)/2, which can be negative. The scores
that minimise its expectation are affine in p: they rank the classes like p, but they are no logits, and at them the
expansion is far from log sum_j exp(s_j). Mean and variance of the scores follow from the mean and the covariance of the
class vectors, so a linear head needs no table of scores. `manymax.RGFactorization` minimises the loss by alternating
least squares.

Citation: Pu et al., ICML 2024 (RG2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, SoftTarget, Target, check_options, normalized_weights, read_target, row_losses
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, classes_last, full_precision, visible, working
from manymax.ops.reduction import check_losses, reduce


def _centred(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scores minus their mean, 0 at masked classes; the mean in two parts; and the number of live classes.

    Returns:
        Centred scores (..., C); the rounded mean and the remainder that rounding left, (..., 1) each, whose sum is the
        mean; and the number of classes that are not masked, (..., 1).
    """
    # The mean of large scores is rounded, and the loss, a difference to a score, needs the digits that it loses. So the
    # rounded mean is taken off first, as a constant without gradient. The mean of what is left is small, has all of its
    # digits, and carries the gradient.
    live = scores != -torch.inf  # nan counts as live, so that it reaches the mean and is found there
    count = live.sum(-1, keepdim=True)
    rounded_mean = (torch.where(live, scores, 0).sum(-1, keepdim=True) / count).detach()
    d = torch.where(live, scores - rounded_mean, 0)
    remainder = d.sum(-1, keepdim=True) / count
    return torch.where(live, d - remainder, 0), rounded_mean, remainder, count


@checked
def rg(scores: Tensor, dim: int = -1) -> Tensor:
    """RG's map, p_i = (1 + s_i - mean(s)) / C, whose values sum to 1 but may be negative.

    Args:
        scores: (..., C) scores; -inf masks a class, and C counts the classes that are not masked.
        dim: the dimension of the classes.

    Returns:
        p, with the shape and dtype of `scores` (float32 under autocast); 0 for masked classes.

    Example:
        >>> import torch, manymax
        >>> manymax.rg(torch.tensor([2.0, 1.0, -1.5]))
        tensor([ 0.8333,  0.5000, -0.3333])
    """
    work, dtype = working(classes_last(scores, dim))
    d, rounded_mean, _, count = _centred(work)
    _check(work, rounded_mean)
    probs = torch.where(work > -torch.inf, (1 + d) / count, 0)
    return probs.to(dtype).movedim(-1, dim)


def _check(scores: Tensor, mean: Tensor) -> None:
    """Raise if a row has nan or +inf, which reach its mean, no live class, whose mean is 0/0, or a mean of inf."""
    if visible(mean) and not mean.isfinite().all():
        check_finite(scores.amax(-1))
        raise ArgumentError(f"`scores` are so large that their sum is infinite in {scores.dtype}: scale them down.")


@checked
def rg_log_partition(scores: Tensor) -> Tensor:
    """RG's log partition, log C + mean(s) + var(s) / 2: the second-order expansion of log sum_j exp(s_j).

    Args:
        scores: (..., C) scores; -inf masks a class.

    Returns:
        (...), in the dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.rg_log_partition(torch.tensor([0.3, 0.0, -0.3])), torch.tensor([0.3, 0.0, -0.3]).logsumexp(-1)
        (tensor(1.1286), tensor(1.1284))
    """
    check_scores(scores)
    work, dtype = working(scores)
    value, rounded_mean = _relative_log_partition(work)
    check_losses(value)
    return (value + rounded_mean).to(dtype)


def _relative_log_partition(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Z(s) minus the rounded mean of the scores, and that mean, (...) each; the first has all of the gradient.

    Losses subtract scores relative to the same mean, so that a large offset of the scores costs them no digits.
    """
    d, rounded_mean, remainder, count = _centred(scores)
    _check(scores, rounded_mean)
    value = count.to(d.dtype).log() + remainder + d.square().sum(-1, keepdim=True) / (2 * count)
    return value.squeeze(-1), rounded_mean.squeeze(-1)


def potential(
    scores: Tensor, total: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The potential that `FenchelYoung` asks for, relative to the rounded mean of the scores, not to their maximum."""
    value, rounded_mean = _relative_log_partition(scores)
    value = total * value
    if ids is not None and weights is not None:
        # Padding has weight 0 and may point at a masked class: 0 x -inf would be nan.
        relative = scores.gather(-1, ids) - rounded_mean.unsqueeze(-1)
        value = value - (weights * torch.where(weights != 0, relative, 0)).sum(-1)
    return value, rounded_mean


class Moments(NamedTuple):
    """What RG needs to know about the class vectors: their mean (d,), covariance (d, d) and number.

    A bias is one more feature of the class vectors: with `has_bias` the mean is (d + 1,), the covariance
    (d + 1, d + 1), and a 1 is appended to the queries.
    """

    mean: Tensor
    covariance: Tensor
    num_classes: int
    has_bias: bool = False


@checked
def class_moments(linear_weight: Tensor, linear_bias: Tensor | None = None) -> Moments:
    """Mean and covariance of the class vectors, differentiable, at a cost of O(C d^2), once per step.

    Args:
        linear_weight: (C, d) class vectors.
        linear_bias: (C,) or None; it must be finite, because moments cannot mask a class.

    Returns:
        The moments, for `rg_log_partition_from_moments`.
    """
    _check_float("linear_weight", linear_weight)
    if linear_weight.ndim != 2 or linear_weight.shape[0] == 0:
        raise ArgumentError(f"`linear_weight` must be (classes, dim); got shape {tuple(linear_weight.shape)}.")
    if visible(linear_weight) and not linear_weight.isfinite().all():
        raise ArgumentError("`linear_weight` must be finite: one nan or inf would be in every moment.")
    vectors, _ = working(linear_weight)
    if linear_bias is not None:
        _check_float("linear_bias", linear_bias)
        if linear_bias.shape != linear_weight.shape[:1]:
            raise ArgumentError(
                f"`linear_bias` must have shape ({linear_weight.shape[0]},); got {tuple(linear_bias.shape)}."
            )
        if visible(linear_bias) and not linear_bias.isfinite().all():
            raise ArgumentError(
                "`linear_bias` must be finite: moments cannot mask a class. Leave masked classes out, or use"
                " `linear_rg_loss`."
            )
        vectors = torch.cat([vectors, linear_bias.to(vectors.dtype).unsqueeze(-1)], -1)
    # Centred first: mean(w w^T) - mean(w) mean(w)^T would cancel where the mean is large.
    mean = vectors.mean(0)
    d = vectors - mean
    with full_precision(d):
        return Moments(mean, d.T @ d / vectors.shape[0], vectors.shape[0], linear_bias is not None)


def _check_float(name: str, value: Tensor) -> None:
    """Raise unless `value` is a float tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentTypeError(f"`{name}` must be a float tensor; got {kind}.")


@checked
def rg_log_partition_from_moments(input: Tensor, moments: Moments) -> Tensor:
    """RG's log partition of queries x, log C + <x, mean> + <x, covariance x> / 2, without computing any score.

    Args:
        input: (..., d) queries.
        moments: of the class vectors, from `class_moments`.

    Returns:
        (...).

    Example:
        >>> import torch, manymax
        >>> input, weight = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.3, 0.0], [0.1, 0.1], [0.0, 0.3]])
        >>> manymax.rg_log_partition_from_moments(input, manymax.class_moments(weight))
        tensor([1.1286])
    """
    _check_float("input", input)
    dim = moments.mean.shape[0] - moments.has_bias
    if input.shape[-1:] != (dim,):
        raise ArgumentError(f"`input` must be (..., {dim}); got shape {tuple(input.shape)}.")
    if visible(input) and not input.isfinite().all():
        raise ArgumentError("`input` must be finite; got a query with nan or inf.")
    x, dtype = working(input)
    if moments.has_bias:
        x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    with full_precision(x):
        quadratic = (x @ moments.covariance.to(x.dtype) * x).sum(-1)
        value = math.log(moments.num_classes) + x @ moments.mean.to(x.dtype) + quadratic / 2
    check_losses(value)
    return value.to(dtype)


def omega(probs: Tensor) -> Tensor:
    """The regulariser Omega(p) = (C sum p^2 - 1) / 2 - log C, (...), of probs (..., C) on the hyperplane sum p = 1."""
    count = probs.shape[-1]
    return (count * probs.square().sum(-1) - 1) / 2 - math.log(count)


def foundation() -> FenchelYoung:
    """The map and the regulariser of RG as a Fenchel-Young loss, on the hyperplane sum p = 1 instead of the simplex."""
    return FenchelYoung(rg, omega, slope=lambda probs: probs.shape[-1] * probs, potential=potential)


@checked
def rg_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The RG loss log C + mean(s) + var(s)/2 - s_y, with gradient (1 + s - mean(s))/C - e_y.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: as in `softmax_loss`.
        weight, ignore_index, reduction, label_smoothing: as in `softmax_loss`.
        multilabel: "sum" adds up the losses of the positives; "normalized" is (C/2) ||p - t/|t|||^2, Omega included.

    Returns:
        A scalar, or (...) for `reduction="none"`; with `multilabel="sum"` it can be negative.

    Example:
        >>> import torch, manymax
        >>> manymax.rg_loss(torch.tensor([[0.3, 0.0, -0.3]]), torch.tensor([0]))
        tensor(0.8286)
    """
    check_options(reduction, label_smoothing, multilabel)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    # Scores of the positives are taken relative to the same mean as the log partition, before they are subtracted.
    value, rounded_mean = _relative_log_partition(work)
    rows, total = row_losses(value, work, read, weight, label_smoothing, rounded_mean.unsqueeze(-1))
    if multilabel == "normalized":
        mixed = normalized_weights(work, read, weight, label_smoothing)
        live = (work > -torch.inf).sum(-1)
        regulariser = (live * mixed.square().sum(-1) - 1) / 2 - live.to(mixed.dtype).log()
        rows = torch.where(total > 0, rows / torch.where(total > 0, total, 1) + regulariser, 0)
    return reduce(rows, read.divisor, reduction).to(dtype)


class RGLoss(ExactLoss):
    """Module form of `rg_loss`."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        """The loss of scores (..., C) for `target`; see `rg_loss`."""
        return rg_loss(scores, target, **self.options())


def error_bound(scores: Tensor) -> Tensor:
    """Largest possible error of RG's log partition, (max s - min s)^3 / (36 sqrt 3), (...), over the live classes."""
    smallest = torch.where(scores > -torch.inf, scores, torch.inf).amin(-1)
    return (scores.amax(-1) - smallest) ** 3 / (36 * math.sqrt(3))


FORMULAS = Formulas(
    map="p_i = (1 + s_i - mean(s)) / C",
    loss="log C + mean(s) + var(s)/2 - s_y",
    gradient="p - e_y",
    omega="(C sum_i p_i^2 - 1)/2 - log C, on the hyperplane sum p = 1",
)

FACTS = Facts(
    order_preservation=Fact("strict", "p is an affine function of s", "derived", "derived"),
    fenchel_young=Fact(
        True, "it is one on the hyperplane sum p = 1, not on the simplex: p may be negative", "derived", "derived"
    ),
    convex=Fact(True, "it is a squared loss", "derived", "derived"),
    calibrated=Fact(True, "the minimiser is C E[y]/E|Y| + const: affine in p", "section 3.1.1", "confirmed"),
    shift_invariant=Fact(True, "a constant added to all scores changes nothing", "derived", "derived"),
    smoothness=Fact(
        None,
        "1/C, everywhere",
        "derived; the paper leaves it out",
        "derived",
        fn=lambda num_classes: 1 / num_classes if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "linear",
        "batch x classes on scores; from moments batch x d^2 + classes x d^2, without a table",
        "derived; Table 4 leaves it out",
        "derived",
        fn=lambda batch, num_classes: float(batch * num_classes),
    ),
    bias=Fact(
        None,
        "-mu3/6 - kappa4/24 + ... in the centred scores, at most (max s - min s)^3/(36 sqrt 3); not small at its"
        " own optimum: -3380 for C = 40,981 and a Zipf p",
        "Table 3",
        "contradicted",
        printed="O(||s||^3), negligible",
        fn=lambda scores: float(error_bound(scores)),
    ),
    variance=Fact(0.0, "deterministic", "Table 3", "confirmed"),
)
