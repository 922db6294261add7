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
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from manymax.engine.approximation import DrawTheory, Parts
from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.ops import divergences as between
from manymax.ops.log_sums import NUMBERS_PER_BLOCK
from manymax.ops.tree import ClassTree
from manymax.theory.approximations import approximating
from manymax.theory.cases import check_count, read_cases


@dataclass(frozen=True)
class Estimate:
    """Bias and variance of an approximation, one number a row, (N,) each; definitions in the module's docstring.

    asymptotic, curvature: the two parts of the predicted bias.
    variance: the predicted variance.
    exact_bias, exact_variance: what they truly are.
    deviation: bias^2 + variance, exact.
    in_range: whether the predictions hold to about a tenth, for all labels.
    offset: what was taken off the loss because no gradient sees it.

    For y ~ P all are means over the label; that of bias^2 is more than the square of the mean bias. Of a sampled member
    with more than 128 classes a few labels stand for all there, to a third of a percent.
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


def estimate(
    member: str,
    scores: Tensor,
    target: Tensor | None = None,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 1,
    tree: ClassTree | Tensor | None = None,
    **settings: Any,
) -> Estimate:
    """Bias and variance of an approximation on given scores.

    Args:
        member: a name of a member whose record gives `theory.approximation`.
        scores: (N, C) or (C,); -inf masks a class.
        target: (N,) labels; None for y ~ P, the mean over the label.
        log_q: (C,) or (N, C), the proposal of a sampled member; None if it is uniform.
        num_negatives: k.
        tree: of a member on a tree: its log P, (N, C), as `tree_log_probs` estimates them; or a tree whose node
            scores are free, which can have any P, so that nothing is lost.
        settings: the approximation's own: `correction` of sampled softmax, or "importance"; `order` of Taylor-softmax;
            `log_z` of NCE, log Z0, None for normalised scores, as the paper has them.

    Returns:
        Estimate: (N,) numbers.

    Example: half of the probability is on a class that is drawn once in a hundred times.

        >>> scores, log_q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.01, 0.5, 0.49]).log()
        >>> result = estimate("ssm", scores, torch.tensor([2]), log_q=log_q, num_negatives=50, correction="partition")
        >>> print(f"{result.bias.item():.3f} {result.exact_bias.item():.3f} {result.in_range.item()}")
        -0.245 -0.208 False
    """
    known, approximation = approximating(member)
    cases = read_cases(known, scores, target, log_q, tree, num_negatives=num_negatives, settings=settings)
    return _joined([_mean(approximation.parts(case), case.shares) for case in cases])


def _mean(parts: Parts, shares: Tensor) -> Estimate:
    """The mean over the labels, whose shares are (N, L)."""

    def over_labels(values: Tensor | float) -> Tensor:
        return (shares * values).sum(-1)

    return Estimate(
        over_labels(parts.asymptotic),
        over_labels(parts.curvature),
        over_labels(parts.variance),
        over_labels(parts.exact_bias),
        over_labels(parts.exact_variance),
        over_labels(parts.exact_bias**2 + parts.exact_variance),
        parts.in_range.all(-1),
        over_labels(parts.offset),
    )


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
    maximum: int = 2**20,
    **settings: Any,
) -> int | None:
    """The smallest k at which the deviation, in the mean over the rows, is at most `goal`.

    Args:
        member, scores, target, log_q, settings: as in `estimate`, for a member that draws negatives.
        goal: the deviation to reach.
        maximum: the largest k to try.

    Returns:
        k; None where `maximum` negatives do not reach the goal, as where an asymptotic bias stays. The search takes it
        that more negatives deviate less; where NCE's Z0 is far off, a k between two that were tried may be missed.

    Example:
        >>> negatives_needed("ssm", torch.tensor([[2.0, 1.0, 0.0]]), goal=0.01)
        53
    """
    known, draws = _drawing(member)
    if not goal > 0:
        raise ArgumentError(f"`goal` must be a positive deviation; got {goal}. No number of negatives reaches 0.")
    check_count("maximum", maximum)
    cases = read_cases(known, scores, target, log_q, settings=settings)
    prepared = [(case, draws.prepare(case, maximum)) for case in cases]

    def reached(k: int) -> bool:
        moments_at = [(case.shares, draws.exact(replace(case, num_negatives=k), form)) for case, form in prepared]
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
    draws: int = 10_000,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> Drawn:
    """Bias and variance of a sampled member by Monte Carlo: its loss on negatives that are drawn.

    Args:
        member, scores, target, log_q, num_negatives, settings: as in `estimate`; log q is (C,), because all rows get
            the same draws.
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
    known, drawing = _drawing(member)
    check_count("draws", draws, least=2)
    if isinstance(log_q, Tensor) and log_q.ndim != 1:
        raise ArgumentError(f"`log_q` must be (C,): all rows get the same draws; got shape {tuple(log_q.shape)}.")
    if target is None:
        raise ArgumentError("`target` must name a label for every row: a mean over labels is not drawn.")
    parts = []
    for case in read_cases(known, scores, target, log_q, num_negatives=num_negatives, settings=settings):
        q = case.log_q[0].exp()
        ids = torch.multinomial(q, draws * num_negatives, replacement=True, generator=generator)
        size = max(1, NUMBERS_PER_BLOCK // (num_negatives * len(case.scores)))
        values = [drawing.deviations(case, block) for block in ids.view(draws, num_negatives).split(size)]
        parts.append(_with_errors(torch.cat(values, -1)))
    return _joined(parts)


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
    cases = read_cases(None, scores, None, log_q, num_negatives=num_negatives)
    probs, q = torch.cat([case.probs for case in cases]), torch.cat([case.log_q for case in cases]).exp()
    return {
        "chi_square": between.chi_square(probs, q),
        "kl": between.kl(probs, q),
        "jensen_shannon": between.jensen_shannon(probs, q, 1 / (1 + num_negatives)),
    }


def _drawing(member: str) -> tuple[Member, DrawTheory]:
    """A member that draws negatives, and how."""
    known, approximation = approximating(member, drawing=True)
    assert approximation.draws is not None
    return known, approximation.draws


ResultT = TypeVar("ResultT", Estimate, Drawn)


def _joined(parts: list[ResultT]) -> ResultT:
    """One result for all rows."""
    columns = (torch.cat([getattr(part, f.name) for part in parts]) for f in fields(parts[0]))
    return type(parts[0])(*columns)
