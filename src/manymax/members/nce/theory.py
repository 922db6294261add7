"""NCE compared with softmax: the minimiser of its expected loss, its curvature, and its bias and variance.

The loss of NCE is a plain sum over its draws, with no logarithm of the sum around it. Its bias therefore has no part
that comes from the curvature of a logarithm. With weights w = exp(s) / (Z0 q) and the offset log(k q_y) + 1 taken off,

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
    """log p + log Z0, (1, C), if hits are kept; otherwise there is no closed form."""
    return (probs.log() + log_z).unsqueeze(0) if hit_policy == "keep" else None


def expected_nce_curvature(log_q: Tensor, target: int, num_negatives: int) -> float:
    """Largest curvature of NCE's expected loss at one label, max_j (1{j = y} + k q_j) / 4.

    Args:
        log_q: (C,) log-probabilities of the proposal.
        target: y.
        num_negatives: k.

    >>> round(expected_nce_curvature(torch.tensor([0.6, 0.3, 0.1]).log(), target=2, num_negatives=100), 3)
    15.0
    """
    weights = num_negatives * log_q.double().exp()
    weights[target] += 1
    return float(weights.max()) / 4


def _log_z(case: ApproximationInput) -> Tensor:
    """log Z0, (N, 1): the given one, or the log partition of the scores if none is given."""
    normaliser, given = case.scores.logsumexp(-1, keepdim=True), case.settings["log_z"]
    return normaliser if given is None else torch.full_like(normaliser, given)


def _offset(case: ApproximationInput) -> Tensor:
    """log(k q_y) + 1, (N, L): the part of the loss that depends on the label and on no score."""
    return math.log(case.num_negatives) + case.label_log_q + 1


def _points(case: ApproximationInput, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """w = exp(s)/(Z0 q) at the labels, (N, L); and weights with probabilities, (N, J) each, for all classes in J bins.

    The points do not depend on k, so `largest`, the largest k of interest, is not needed.
    """
    weights = case.weights * (case.scores.logsumexp(-1, keepdim=True) - _log_z(case)).exp()
    return case.at_labels(weights), *in_bins(weights, case.log_q.exp())


def _exact(case: ApproximationInput, points: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bias, (N, L), and variance, (N, 1), exactly.

    As k grows the bias tends to Z/Z0 - 1 - log(Z/Z0), which is 0 for normalised scores (Z = Z0) and for no others.
    """
    k, (label_weights, weights, q) = case.num_negatives, points
    # log(1 + w/k) with w/k often far below 1: log1p keeps the digits that 1 + w/k would round away.
    logs, ratio = torch.log1p(weights / k), (q * weights).sum(-1, keepdim=True)  # ratio: Z/Z0
    mean = (q * logs).sum(-1, keepdim=True)
    variance = k * (q * (logs - mean).square()).sum(-1, keepdim=True)
    return torch.log1p(label_weights / k) + k * mean - 1 - ratio.log(), variance


def _parts(case: ApproximationInput) -> Parts:
    """Exact bias and variance, and the paper's variance k chi2/(k+1)^2, which replaces the logarithm by its tangent."""
    k, points = case.num_negatives, _points(case, case.num_negatives)
    bias, variance = _exact(case, points)
    _, weights, q = points
    mean = (q * weights).sum(-1, keepdim=True)
    predicted = k * (q * (weights - mean).square()).sum(-1, keepdim=True) / (k + mean).square()
    in_range = (predicted - variance).abs() <= TOLERANCE * variance
    return Parts(bias, bias, in_range, variance=predicted, exact_variance=variance, offset=_offset(case))


def _deviations(case: ApproximationInput, ids: Tensor) -> Tensor:
    """Loss on drawn negatives `ids` (D, k) minus the softmax loss and the offset, (N, D)."""
    loss = nce_loss(**case.sample(ids), log_z=_log_z(case).expand(-1, len(ids)), reduction="none")
    return loss + case.at_labels(case.log_probs) - _offset(case)


THEORY = Theory(
    minimisers=_minimisers,
    approximation=Approximation(
        _parts,
        settings=(Setting("log_z", float, None, "Assumed log partition; that of the scores if it is not given."),),
        draws=DrawTheory(_points, _exact, _deviations),
    ),
)
