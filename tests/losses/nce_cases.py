"""Samples and helpers for the tests of noise contrastive estimation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import FAMILY, nce_loss

FACTS = FAMILY["nce"].facts
each_policy = pytest.mark.parametrize("policy", ["keep", "mask"])


def loss_of_classes(
    scores: Tensor, target: Tensor, ids: Tensor, log_q: Tensor, policy: str = "keep", log_z: Any = 0.0
) -> Tensor:
    """The loss of each row, (...), from scores (..., C) of all classes, with positives (...) and negatives (..., k)."""
    rows = scores.expand(*target.shape, scores.shape[-1])
    return nce_loss(
        rows.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        rows.gather(-1, ids),
        log_q_positive=log_q[target],
        log_q_negative=log_q[ids],
        hits=ids == target.unsqueeze(-1),
        hit_policy=policy,
        log_z=log_z,
        reduction="none",
    )


def hessian(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Tensor]:
    """The Hessian, by reverse mode twice: torch.func.hessian uses forward mode, which warns about torch's internals."""
    return torch.func.jacrev(torch.func.grad(function, argnums), argnums)


# classes drawn twice, a hit, two hits, no hit, nothing but hits
TARGET = torch.tensor([0, 2, 4, 1])
IDS = torch.tensor([[1, 1, 3, 0], [2, 0, 2, 4], [1, 3, 0, 1], [1, 1, 1, 1]])
Q = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)


def sample() -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Positive scores, negative scores and log Z0 that require gradients; and log q and hits of the draws."""
    generator = torch.Generator().manual_seed(3)
    positive = torch.randn(3, generator=generator).double().requires_grad_()
    negative = torch.randn(3, 4, generator=generator).double().requires_grad_()
    log_z = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    hits = torch.rand(3, 4, generator=generator) < 0.3
    hits[0] = True
    log_q = torch.rand(3, 4, generator=generator).double().log()
    return positive, negative, log_z, {"log_q_positive": log_q[:, 0], "log_q_negative": log_q, "hits": hits}


def loss_on_draws(policy: str, draws: dict[str, Any]) -> Callable[..., Tensor]:
    """The loss as a function of the scores and log Z0, for given log q and hits."""

    def loss(positive: Tensor, negative: Tensor, log_z: float | Tensor = 0.0) -> Tensor:
        return nce_loss(positive, negative, **draws, hit_policy=policy, log_z=log_z, reduction="none")

    return loss
