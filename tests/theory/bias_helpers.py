"""Scores, a proposal and helpers that the tests of bias and variance share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax import nce_loss, sampled_softmax_loss
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.theory.bias_variance import Estimate
from tests.exact import normal

SCORES = torch.tensor([[1.0, -0.5, 2.0, 0.0], [0.0, 0.1, -3.0, 1.0]], dtype=torch.float64)
Q = torch.tensor([0.1, 0.25, 0.25, 0.4], dtype=torch.float64)
TARGET = torch.tensor([1, 3])
# (member, correction) of everything that draws negatives.
DRAWN = [*(("sampled_softmax", correction) for correction in ESTIMATES), ("nce", None)]


def log_q(num_classes: int, seed: int = 0) -> Tensor:
    """log q (C,) of a random proposal."""
    return normal(num_classes, seed=seed).log_softmax(-1)


def corrected(correction: str | None) -> dict[str, Any]:
    """The setting `correction` of sampled softmax; none for NCE, whose correction is None."""
    return {} if correction is None else {"correction": correction}


def losses(name: str, correction: str | None, scores: Tensor, target: int, ids: Tensor, proposal: Tensor) -> Tensor:
    """The loss of one row of scores (C,) on samples ids (n, k), (n,); the scores of NCE are normalised first."""
    row = scores.log_softmax(-1)
    positive, negative = row[target].expand(len(ids)), row[ids]
    if correction == "importance":
        return (negative - proposal[ids]).logsumexp(-1) - math.log(ids.shape[-1]) - positive
    given: dict[str, Any] = {"log_q_positive": proposal[target], "log_q_negative": proposal[ids], "reduction": "none"}
    if correction is None:
        return nce_loss(positive, negative, **given)
    return sampled_softmax_loss(positive, negative, correction=correction, hits=ids == target, **given)


def relative_error(result: Estimate) -> Tensor:
    """The larger of two errors of the predictions: bias relative to its curvature part, variance relative to itself."""
    bias = (result.bias - result.exact_bias).abs() / (-result.curvature)
    return torch.maximum(bias, (result.variance - result.exact_variance).abs() / result.variance)
