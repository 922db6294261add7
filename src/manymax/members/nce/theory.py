"""NCE against softmax: the minimiser of its risk, its curvature, and its bias and variance.

NCE adds its draws up, so nothing bends its bias. With weights w = exp(s) / (Z0 q) and the offset log(k q_y) + 1,

    bias      log(1 + w_y/k) + k E_q[log(1 + w/k)] - 1 - log(Z/Z0)
    variance  k Var_q(log(1 + w/k))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.engine.approximation import TOLERANCE, ApproximationInput, DrawTheory, Parts
from manymax.engine.member import Approximation, Setting, Theory
from manymax.members.nce.loss import nce_loss
from manymax.ops.log_sums import in_bins


def _minimisers(
    probs: Tensor, _: Tensor | None, hit_policy: str = "keep", log_z: float | Tensor = 0.0
) -> Tensor | None:
    """log p + log Z0, if hits are kept."""
    return (probs.log() + log_z).unsqueeze(0) if hit_policy == "keep" else None


def expected_nce_curvature(log_q: Tensor, target: int, num_negatives: int) -> float:
    """The largest curvature of NCE's expected loss, max_j (1{j = y} + k q_j) / 4.

    >>> round(expected_nce_curvature(torch.tensor([0.6, 0.3, 0.1]).log(), target=2, num_negatives=100), 3)
    15.0
    """
    weights = num_negatives * log_q.double().exp()
    weights[target] += 1
    return float(weights.max()) / 4


def _log_z(case: ApproximationInput) -> Tensor:
    """log Z0, (N, 1): the given one, or that of the scores, which normalises them."""
    normaliser, given = case.scores.logsumexp(-1, keepdim=True), case.settings["log_z"]
    return normaliser if given is None else torch.full_like(normaliser, given)


def _offset(case: ApproximationInput) -> Tensor:
    """log(k q_y) + 1, (N, L)."""
    return math.log(case.num_negatives) + case.label_log_q + 1


def _points(case: ApproximationInput, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """w = exp(s)/(Z0 q) at the labels (N, L), and weights with probabilities (N, J) for those of all classes."""
    weights = case.weights * (case.scores.logsumexp(-1, keepdim=True) - _log_z(case)).exp()
    return case.at_labels(weights), *in_bins(weights, case.log_q.exp())


def _exact(case: ApproximationInput, points: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bias, (N, L), and variance, (N, 1).

    As k grows the first tends to Z/Z0 - 1 - log(Z/Z0): 0 for normalised scores, and for no others.
    """
    k, (own, weights, q) = case.num_negatives, points
    logs, ratio = torch.log1p(weights / k), (q * weights).sum(-1, keepdim=True)
    mean = (q * logs).sum(-1, keepdim=True)
    variance = k * (q * (logs - mean).square()).sum(-1, keepdim=True)
    return torch.log1p(own / k) + k * mean - 1 - ratio.log(), variance


def _parts(case: ApproximationInput) -> Parts:
    """The paper's variance k chi2/(k+1)^2, which makes the logarithm linear, beside the exact one."""
    k, points = case.num_negatives, _points(case, case.num_negatives)
    bias, variance = _exact(case, points)
    _, weights, q = points
    mean = (q * weights).sum(-1, keepdim=True)
    predicted = k * (q * (weights - mean).square()).sum(-1, keepdim=True) / (k + mean).square()
    in_range = (predicted - variance).abs() <= TOLERANCE * variance
    return Parts(bias, bias, in_range, variance=predicted, exact_variance=variance, offset=_offset(case))


def _deviations(case: ApproximationInput, ids: Tensor) -> Tensor:
    loss = nce_loss(**case.sample(ids), log_z=_log_z(case).expand(-1, len(ids)), reduction="none")
    return loss + case.at_labels(case.log_probs) - _offset(case)


THEORY = Theory(
    minimisers=_minimisers,
    approximation=Approximation(
        _parts,
        settings=(Setting("log_z", float, None, "Assumed log partition; that of the scores unless it is given."),),
        draws=DrawTheory(_points, _exact, _deviations),
    ),
)
