"""Bias and variance of approximations of the softmax loss: predicted by formulas, computed exactly, and drawn.

For a row of scores s with P = softmax(s), a label y and a proposal q,

    bias       E[loss] - softmax loss - offset
    variance   Var[loss]
    deviation  bias^2 + variance

The offset does not depend on the scores, so no gradient sees it: log((k+1) q_y) for sampled softmax with the correction
"logq", log((k+1)/C) for "none", log(k q_y) + 1 for NCE, 0 for all others. With weights w_j = P_j / q_j, whose mean
under q is 1, the loss of sampled softmax minus softmax loss and offset is log S, where S is a sum over the k draws:

    "logq"        S = (w_y + sum_j w_j) / (k + 1)
    "none"        S = (P_y + sum_j P_j) C / (k + 1)
    "partition"   S = (1/k) sum_j (P_y + [j != y] w_j)
    "importance"  S = (1/k) sum_j w_j              the estimate that the paper analyses; it cannot be trained on

The Delta method predicts its bias, asymptotic + curvature, and its variance, with r = Var(S) / E[S]^2:

    asymptotic  log E[S]          curvature  -r / 2          variance  r

The NCE loss is a sum over its draws without a logarithm around it, so its bias has no curvature part. Hierarchical
softmax, RG and Taylor-softmax draw nothing: they have a bias and no variance.
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
from manymax.ops import divergences as formulas
from manymax.ops.arguments import checked
from manymax.ops.log_sums import NUMBERS_PER_BLOCK
from manymax.ops.tree import ClassTree
from manymax.theory.approximations import approximating
from manymax.theory.inputs import check_count, read_inputs


@dataclass(frozen=True)
class Estimate:
    """Bias and variance of an approximation, one number per row, (N,) each; the module's docstring defines them.

    asymptotic, curvature: the two parts of the predicted bias.
    variance: the predicted variance.
    exact_bias, exact_variance: the true values.
    deviation: bias^2 + variance, from the true values.
    in_range: whether the predictions are right to about a tenth, for all labels.
    offset: the part of the loss that was subtracted because no gradient sees it.

    Without given labels all are means over y ~ P; the deviation is then the mean of bias^2 + variance, which is more
    than the square of the mean bias plus the mean variance. For a sampled member with more than 128 classes a few
    labels stand for all in this mean, which changes it by at most about a third of a percent.
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
    """Bias and variance found by drawing negatives, with their standard errors, (N,) each."""

    bias: Tensor
    bias_error: Tensor
    variance: Tensor
    variance_error: Tensor


@checked
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
        member: name of a member whose entry in `FAMILY` has `theory.approximation`.
        scores: (N, C) or (C,); -inf masks a class.
        target: (N,) labels; None for the mean over y ~ P.
        log_q: (C,) or (N, C), the proposal of a sampled member; None for a uniform one.
        num_negatives: k.
        tree: for a member on a tree, the log P of its leaves, (N, C), as `tree_log_probs` estimates them; or a tree
            whose node scores are free: that can have any P, so its bias is 0.
        settings: settings of the approximation. `correction` of sampled softmax, which may also be "importance", the
            estimate that the paper analyses; `order` of Taylor-softmax; `log_z` of NCE, the assumed log Z, or None
            for normalised scores, as the paper has them.

    Returns:
        The parts of bias and variance, (N,) each.

    Example: half of the probability is on a class that is drawn once in a hundred times, so the prediction is off.

        >>> scores, log_q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.01, 0.5, 0.49]).log()
        >>> result = estimate("ssm", scores, torch.tensor([2]), log_q=log_q, num_negatives=50, correction="partition")
        >>> print(f"{result.bias.item():.3f} {result.exact_bias.item():.3f} {result.in_range.item()}")
        -0.245 -0.208 False
    """
    known, approximation = approximating(member)
    blocks = read_inputs(known, scores, target, log_q, tree, num_negatives=num_negatives, settings=settings)
    return _concatenated([_mean_over_labels(approximation.parts(block), block.shares) for block in blocks])


def _mean_over_labels(parts: Parts, shares: Tensor) -> Estimate:
    """The mean over the labels of each row; shares (N, L) are the weights of the labels."""

    def mean(values: Tensor | float) -> Tensor:
        return (shares * values).sum(-1)

    return Estimate(
        mean(parts.asymptotic),
        mean(parts.curvature),
        mean(parts.variance),
        mean(parts.exact_bias),
        mean(parts.exact_variance),
        mean(parts.exact_bias**2 + parts.exact_variance),
        parts.in_range.all(-1),
        mean(parts.offset),
    )


@checked
def deviation(member: str, scores: Tensor, target: Tensor | None = None, **settings: Any) -> Tensor:
    """Exact bias^2 + variance of an approximation, (N,); arguments as in `estimate`.

    >>> scores = torch.tensor([[2.0, 1.0, 0.0]])
    >>> [round(deviation("ssm", scores, num_negatives=k).item(), 4) for k in (1, 10, 100)]
    [0.2513, 0.0477, 0.0053]
    """
    return estimate(member, scores, target, **settings).deviation


@checked
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
    """The smallest number of negatives k whose deviation, averaged over the rows, is at most `goal`.

    Args:
        member, scores, target, log_q, settings: as in `estimate`, for a member that draws negatives.
        goal: the deviation to reach.
        maximum: the largest k to try.

    Returns:
        k; None where `maximum` negatives do not reach the goal, for example because an asymptotic bias remains. The
        search assumes that more negatives deviate less. Where that fails, as for NCE with an assumed Z that is far
        off, a smaller k than the returned one may reach the goal.

    Example:
        >>> negatives_needed("ssm", torch.tensor([[2.0, 1.0, 0.0]]), goal=0.01)
        53
    """
    known, draws = _draw_theory(member)
    if not goal > 0:
        raise ArgumentError(f"`goal` must be a positive deviation; got {goal}. No number of negatives reaches 0.")
    check_count("maximum", maximum)
    blocks = read_inputs(known, scores, target, log_q, settings=settings)
    prepared = [(block, draws.prepare(block, maximum)) for block in blocks]  # what all k have in common

    def reached(k: int) -> bool:
        moments = [(block.shares, draws.exact(replace(block, num_negatives=k), common)) for block, common in prepared]
        rows = [(shares * (bias**2 + variance)).sum(-1) for shares, (bias, variance) in moments]
        return float(torch.cat(rows).mean()) <= goal

    # Double k until it is enough, then bisect: every k costs an exact evaluation. `low` is never enough, `high` is.
    low, high = 0, 1
    while not reached(high):
        if high == maximum:
            return None
        low, high = high, min(2 * high, maximum)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@checked
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
    """Bias and variance of a sampled member by Monte Carlo: its loss is evaluated on drawn negatives.

    Args:
        member, scores, target, log_q, num_negatives, settings: as in `estimate`; but log q must be (C,), because all
            rows get the same draws, and labels must be given.
        draws: how many times k negatives are drawn.
        generator: of the draws; torch's default if None.

    Returns:
        Bias and variance with their standard errors, (N,) each.

    Example:
        >>> scores, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> result = drawn("ssm", scores, target, num_negatives=10, generator=torch.Generator().manual_seed(0))
        >>> exact = estimate("ssm", scores, target, num_negatives=10)
        >>> bool((result.bias - exact.exact_bias).abs() < 4 * result.bias_error)
        True
    """
    known, draw_theory = _draw_theory(member)
    check_count("draws", draws, least=2)
    if isinstance(log_q, Tensor) and log_q.ndim != 1:
        raise ArgumentError(f"`log_q` must be (C,): all rows get the same draws; got shape {tuple(log_q.shape)}.")
    if target is None:
        raise ArgumentError("`target` must name a label for every row: a mean over labels is not drawn.")
    results = []
    for block in read_inputs(known, scores, target, log_q, num_negatives=num_negatives, settings=settings):
        q = block.log_q[0].exp()
        ids = torch.multinomial(q, draws * num_negatives, replacement=True, generator=generator)
        # The loss gathers a score per row, draw and negative: the draws go in pieces that bound this table.
        draws_at_once = max(1, NUMBERS_PER_BLOCK // (num_negatives * len(block.scores)))
        pieces = ids.view(draws, num_negatives).split(draws_at_once)
        results.append(_moments(torch.cat([draw_theory.deviations(block, piece) for piece in pieces], -1)))
    return _concatenated(results)


def _moments(values: Tensor) -> Drawn:
    """Mean and variance of the rows of values (N, D), with standard errors."""
    count = values.shape[-1]
    squares = (values - values.mean(-1, keepdim=True)).square()
    variance = squares.sum(-1) / (count - 1)
    return Drawn(values.mean(-1), (variance / count).sqrt(), variance, squares.std(-1) / math.sqrt(count))


@checked
def divergences(scores: Tensor, log_q: Tensor | None = None, num_negatives: int = 1) -> dict[str, Tensor]:
    """The divergences that bias and variance depend on.

    Args:
        scores: (N, C) or (C,), with P = softmax(scores).
        log_q: (C,) or (N, C), the proposal; None for a uniform one.
        num_negatives: k.

    Returns:
        "chi_square", chi2(P || q); "kl", KL(P || q); "jensen_shannon", JS(P || q) with weight 1/(k+1) on P; (N,) each.

    >>> divergences(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.25, 0.75]).log())["chi_square"]
    tensor([0.3333], dtype=torch.float64)
    """
    blocks = read_inputs(None, scores, None, log_q, num_negatives=num_negatives)
    probs, q = torch.cat([block.probs for block in blocks]), torch.cat([block.log_q for block in blocks]).exp()
    return {
        "chi_square": formulas.chi_square(probs, q),
        "kl": formulas.kl(probs, q),
        "jensen_shannon": formulas.jensen_shannon(probs, q, 1 / (1 + num_negatives)),
    }


def _draw_theory(member: str) -> tuple[Member, DrawTheory]:
    """A member by name, and the formulas for its draws; an error if it draws no negatives."""
    known, approximation = approximating(member, drawing=True)
    assert approximation.draws is not None
    return known, approximation.draws


ResultT = TypeVar("ResultT", Estimate, Drawn)


def _concatenated(results: list[ResultT]) -> ResultT:
    """One result for all rows from the results of blocks of rows."""
    columns = (torch.cat([getattr(result, f.name) for result in results]) for f in fields(results[0]))
    return type(results[0])(*columns)
