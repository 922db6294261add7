"""Each approximation of the softmax loss: its bias and variance, predicted and exact, for every label.

Definitions in `manymax.theory.bias_variance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.members.rg.loss import rg_log_partition
from manymax.members.taylor_softmax.loss import taylor_exp
from manymax.ops.tree import ClassTree
from manymax.ops.tree_model import TreeModel
from manymax.theory.cases import Case, check_count, read_cases
from manymax.theory.log_sums import grid, in_bins, moments, second_moment, transform

TOLERANCE = 0.1  # the expected relative error beyond which a prediction is out of range


@dataclass(frozen=True)
class Parts:
    """What `Estimate` says, for each label, (N, L); numbers where all labels have the same."""

    asymptotic: Tensor
    exact_bias: Tensor
    in_range: Tensor
    curvature: Tensor | float = 0.0
    variance: Tensor | float = 0.0
    exact_variance: Tensor | float = 0.0
    offset: Tensor | float = 0.0


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
    def of(case: Case, largest: int) -> SumOfDraws:
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


def _sampled_softmax_exact(case: Case, form: SumOfDraws) -> tuple[Tensor, Tensor]:
    """Mean and variance of log S, (N, L) each."""
    fixed, mean, log_scale = form.at(case.num_negatives, case.correction)
    log_mean, variance = moments(fixed, mean, form.transformed, form.log_points, case.num_negatives)
    return log_mean + log_scale, variance.clamp(min=0)


def _sampled_softmax(case: Case) -> Parts:
    """The Delta method beside the exact moments.

    It is in range where both of these together are small: the part of the variance that comes from draws large beside
    the whole sum, for which the logarithm is no parabola, and the next term of the series. The rule of thumb chi2/k <=
    0.2 with k q_j >= 20 at the likeliest class j looks at the wrong class: what counts is where P_j^2/q_j is large.
    """
    form = SumOfDraws.of(case, case.num_negatives)
    bias, variance = _sampled_softmax_exact(case, form)
    _, mean, log_scale = form.at(case.num_negatives, case.correction)
    relative = case.num_negatives * form.drawn_variance / mean.square()
    return Parts(
        asymptotic=mean.log() + log_scale,
        curvature=-relative / 2,
        variance=relative,
        exact_bias=bias,
        exact_variance=variance,
        in_range=form.large_share(mean) + 2.5 * relative <= TOLERANCE,
        offset=offset(case),
    )


def offset(case: Case) -> Tensor:
    """What sampled softmax has on top of the softmax loss, whatever the scores are, (N, L)."""
    k, num_classes = case.num_negatives, case.scores.shape[-1]
    if case.correction == "logq":
        return math.log(k + 1) + case.label_log_q
    constant = math.log((k + 1) / num_classes) if case.correction == "none" else 0.0
    return torch.full_like(case.shares, constant)


def log_z_of(case: Case) -> Tensor:
    """log Z0, (N, 1): the given one, or that of the scores, which normalises them."""
    normaliser = case.scores.logsumexp(-1, keepdim=True)
    return normaliser if case.log_z is None else torch.full_like(normaliser, case.log_z)


def nce_offset(case: Case) -> Tensor:
    """log(k q_y) + 1, (N, L)."""
    return math.log(case.num_negatives) + case.label_log_q + 1


def _nce_points(case: Case, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """w = exp(s)/(Z0 q) at the labels (N, L), and weights with probabilities (N, J) for those of all classes."""
    weights = case.weights * (case.scores.logsumexp(-1, keepdim=True) - log_z_of(case)).exp()
    return case.at_labels(weights), *in_bins(weights, case.log_q.exp())


def _nce_exact(case: Case, points: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """log(1 + w_y/k) + k E_q[log(1 + w/k)] - 1 - log(Z/Z0), (N, L), and k Var_q(log(1 + w/k)), (N, 1).

    As k grows the first tends to Z/Z0 - 1 - log(Z/Z0): 0 for normalised scores, and for no others.
    """
    k, (own, weights, q) = case.num_negatives, points
    logs, ratio = torch.log1p(weights / k), (q * weights).sum(-1, keepdim=True)
    mean = (q * logs).sum(-1, keepdim=True)
    variance = k * (q * (logs - mean).square()).sum(-1, keepdim=True)
    return torch.log1p(own / k) + k * mean - 1 - ratio.log(), variance


def _nce(case: Case) -> Parts:
    """The paper's variance k chi2/(k+1)^2, which makes the logarithm linear, beside the exact one."""
    k, points = case.num_negatives, _nce_points(case, case.num_negatives)
    bias, variance = _nce_exact(case, points)
    _, weights, q = points
    mean = (q * weights).sum(-1, keepdim=True)
    predicted = k * (q * (weights - mean).square()).sum(-1, keepdim=True) / (k + mean).square()
    in_range = (predicted - variance).abs() <= TOLERANCE * variance
    return Parts(bias, bias, in_range, variance=predicted, exact_variance=variance, offset=nce_offset(case))


def _hierarchical_softmax(case: Case) -> Parts:
    """log P(y) - log P_tree(y): its mean over y ~ P is KL(P || P_tree)."""
    assert case.tree_log_probs is not None
    bias = case.at_labels(case.log_probs - case.tree_log_probs)
    return Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


def _rg(case: Case) -> Parts:
    """log C + mean(s) + var(s)/2 - log Z, of which -mu_3/6 - kappa_4/24 are the first two terms."""
    bias = (rg_log_partition(case.scores) - case.scores.logsumexp(-1)).unsqueeze(-1)
    series = sum(rg_series(case.scores)).unsqueeze(-1)  # type: ignore[union-attr]
    return Parts(series, bias, (series - bias).abs() <= TOLERANCE * bias.abs())


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


def _taylor_softmax(case: Case) -> Parts:
    """log F - log f(s_y) - (log Z - s_y), f the exponential cut off after an even order."""
    terms = taylor_exp(case.scores, case.order)
    log_probs = torch.where(terms > 0, terms, 1).log() - terms.sum(-1, keepdim=True).log()
    bias = case.at_labels(case.log_probs - log_probs)
    return Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


def _softmax(case: Case) -> Parts:
    zero = torch.zeros_like(case.shares)
    return Parts(zero, zero, torch.ones_like(zero, dtype=torch.bool))


APPROXIMATIONS: dict[str, Callable[[Case], Parts]] = {
    "softmax": _softmax,
    "sampled_softmax": _sampled_softmax,
    "nce": _nce,
    "hierarchical_softmax": _hierarchical_softmax,
    "rg": _rg,
    "taylor_softmax": _taylor_softmax,
}
# Members that draw: what serves every k up to the largest, and exact bias and variance from it.
DRAWING: dict[str, tuple[Callable[[Case, int], Any], Callable[[Case, Any], tuple[Tensor, Tensor]]]] = {
    "sampled_softmax": (SumOfDraws.of, _sampled_softmax_exact),
    "nce": (_nce_points, _nce_exact),
}


def tree_log_probs(scores: Tensor, tree: ClassTree, dim: int) -> Tensor:
    """log P of a tree whose node scores come near to softmax(scores), as far as vectors of `dim` let them.

    Free node scores, the log-odds of the branches under P, make P itself. Of inner products <x, v_n> of vectors in d
    dimensions their table, rows by nodes, can have rank d only: it is cut to that rank by its largest singular values.
    That is nearest in the squares of log-odds; a training, which lowers KL, can come nearer in P.

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
    check_count("dim", dim)
    cases = read_cases("softmax", scores, None, None)
    table = _log_odds(torch.cat([case.probs for case in cases]), tree)  # (N, V)
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
