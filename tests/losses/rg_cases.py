"""RG by its definition in 50 digits, and scores, targets and class vectors to try it on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from manymax import (
    FAMILY,
    class_moments,
    rg_log_partition_from_moments,
    rg_loss,
)

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types
MEMBER = FAMILY["rg"]
FACTS = MEMBER.facts
INF = math.inf
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


def hessian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The Hessian, by reverse mode twice: torch.func.hessian uses forward mode, which warns about torch's internals."""
    return torch.func.jacrev(torch.func.grad(function))


# --- values and gradients, against the definition in 50 digits ---


def high_precision_partition(scores: list[float]) -> Number:
    """log C + mean + variance / 2 over the live classes."""
    live = [mp.mpf(score) for score in scores if score != -INF]
    mean = mp.fsum(live) / len(live)
    return mp.log(len(live)) + mean + mp.fsum((score - mean) ** 2 for score in live) / (2 * len(live))


def high_precision_loss(scores: list[float], weights: list[Number]) -> Number:
    """sum_i t_i (Z(s) - s_i) for target weights t."""
    partition = high_precision_partition(scores)
    return mp.fsum(t * (partition - mp.mpf(score)) for t, score in zip(weights, scores, strict=True) if t)


def high_precision_gradient(scores: list[float], weights: list[Number]) -> list[Number]:
    """|t| (1 + s - mean) / C - t, and 0 at masked classes."""
    live = [mp.mpf(score) for score in scores if score != -INF]
    mean, total = mp.fsum(live) / len(live), mp.fsum(weights)
    return [
        total * (1 + mp.mpf(score) - mean) / len(live) - t if score != -INF else mp.mpf(0)
        for t, score in zip(weights, scores, strict=True)
    ]


SCORES = torch.tensor(
    [[0.3, -1.2, 2.5, 0.0, -0.7], [40.0, 1.0, -3.0, 2.0, 0.1], [-2.0, -INF, 1.0, -INF, -1.0], [0.1] * 5]
)
POSITIVES = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])


# --- from moments ---


def queries_and_classes(bias: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    sizes = [(6, 3), (9, 3)] + ([(9,)] if bias else [])
    return tuple(torch.randn(size, generator=generator).double().requires_grad_() for size in sizes)


def direct_loss(target: Tensor, input: Tensor, *linear: Tensor) -> Tensor:
    return rg_loss(torch.nn.functional.linear(input, *linear), target, reduction="none")


def loss_from_moments(target: Tensor, input: Tensor, *linear: Tensor) -> Tensor:
    positive = (input * linear[0][target]).sum(-1)
    if len(linear) == 2:
        positive = positive + linear[1][target]
    return rg_log_partition_from_moments(input, class_moments(*linear)) - positive
