"""The gradients of sampled softmax as estimates of the exact one, for the table of `manymax.theory.gradient_deviation`.

Of a draw of class c the sum below the line gets, with t = P / q and the positive's own weight a,

    "logq"            t_c, a = t_y
    "partition"       [c != y] t_c / k, a = P_y
    "corrected_logq"  t_c / k for each of about k (1 - q_y) draws from q / (1 - q_y), a = P_y
    compositional     as "partition", and the sum below the line is a moving average over the steps
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manymax.engine.approximation import GradientCase, GradientEstimator, RatioOfSums
from manymax.members.sampled_softmax.loss import sampled_softmax_loss

GAMMAS = (0.1, 0.5)  # of the moving averages that the table shows
DRIFT = 0.02  # in the rows of moving scores: by how much the positive's rises between two visits to its pair

SMALL_CHANCE = 1e-13  # below which a number of misses is left out


def _gradients(case: GradientCase, ids: Tensor, drift: float = 0.0, **settings: Any) -> Tensor:
    """The gradient of the loss, as it is, for each of D samples `ids` (D, steps, k), (D, C).

    With `drift` the score of the positive was lower in earlier steps, by so much for each; the last has the case's.
    """
    settings = dict(settings)
    if "compositional" in settings:  # D pairs whose averages begin with the first step
        settings["pair_ids"] = torch.arange(len(ids))
        settings["pair_averages"] = torch.full((len(ids),), -torch.inf, dtype=torch.float64)
    leaf = case.scores.expand(len(ids), -1).clone().requires_grad_()

    def loss(step: Tensor, back: int = 0) -> Tensor:
        return sampled_softmax_loss(
            leaf[:, case.label] - back * drift,
            leaf.gather(1, step),
            log_q_positive=case.log_q[case.label],
            log_q_negative=case.log_q[step],
            hits=step == case.label,
            reduction="sum",
            **settings,
        )

    with torch.no_grad():
        for number, step in enumerate(ids[:, :-1].unbind(1)):
            loss(step, ids.shape[1] - 1 - number)
    return torch.autograd.grad(loss(ids[:, -1]), leaf)[0]


def _logq(case: GradientCase) -> RatioOfSums:
    weights = case.probs / case.log_q.exp()
    return RatioOfSums(float(weights[case.label]), weights, case.log_q.exp(), case.num_negatives)


def _partition(case: GradientCase, gamma: float = 1.0, drift: float = 0.0) -> RatioOfSums:
    weights = case.probs / case.log_q.exp() / case.num_negatives
    weights[case.label] = 0
    return RatioOfSums(float(case.probs[case.label]), weights, case.log_q.exp(), case.num_negatives, gamma, drift)


def _corrected(case: GradientCase) -> RatioOfSums:
    ratio, others = _partition(case), case.log_q.exp()
    others[case.label] = 0
    share = float(others.sum())  # 1 - q_y
    return RatioOfSums(ratio.first, ratio.weights, others / share, case.num_negatives * share)


def _by_misses(case: GradientCase) -> list[tuple[float, RatioOfSums]]:
    """One ratio for each number n >= 1 of draws that are no hits, with its binomial chance; no draw, no gradient."""
    expected, k = _corrected(case), case.num_negatives
    share = expected.draws / k  # 1 - q_y
    found = []
    for n in range(1, k + 1):
        chance = math.comb(k, n) * share**n * (1 - share) ** (k - n)
        if chance > SMALL_CHANCE:
            found.append((chance, replace(expected, weights=expected.weights * (k * share / n), draws=n)))
    return found


GRADIENTS = (
    GradientEstimator("logq", partial(_gradients, correction="logq"), _logq),
    GradientEstimator("partition", partial(_gradients, correction="partition"), _partition),
    GradientEstimator("corrected_logq", partial(_gradients, correction="corrected_logq"), _corrected, _by_misses),
    *(
        GradientEstimator(
            f"partition, compositional {gamma:g}{', moving' if drift else ''}",
            partial(_gradients, correction="partition", compositional=gamma, drift=drift),
            partial(_partition, gamma=gamma, drift=drift),
            steps=math.ceil(4 / gamma),  # after which the first step has a few percent of the average
        )
        for drift in (0.0, DRIFT)
        for gamma in GAMMAS
    ),
)
