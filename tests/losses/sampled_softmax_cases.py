"""Variants, samples, distributions and helpers for the tests of sampled softmax."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from manymax import FAMILY, sampled_softmax_loss

FACTS = FAMILY["sampled_softmax"].facts
PLAIN = [(correction, policy, None) for correction in ("none", "logq", "partition") for policy in ("keep", "mask")]
DEBIASED = [("partition", policy, debias) for policy in ("keep", "mask") for debias in ("delta", "jackknife")]
DERIVED = PLAIN + DEBIASED  # whose gradient is the derivative of the loss
WEIGHTED = ("corrected_logq", "mask", None)  # whose gradient holds a weight constant
VARIANTS = [*DERIVED, WEIGHTED]
each_variant = pytest.mark.parametrize(("correction", "policy", "debias"), VARIANTS)
each_derived = pytest.mark.parametrize(("correction", "policy", "debias"), DERIVED)


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bias = load_benchmark("bias")


def loss_of_classes(
    scores: Tensor, target: Tensor, ids: Tensor, log_q: Tensor, variant: tuple[str, str, str | None]
) -> Tensor:
    """The loss of each row, (...), from scores (..., C) of all classes, with positives (...) and negatives (..., k)."""
    correction, policy, debias = variant
    rows = scores.expand(*target.shape, scores.shape[-1])
    return sampled_softmax_loss(
        rows.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        rows.gather(-1, ids),
        log_q_positive=log_q[target],
        log_q_negative=log_q[ids],
        hits=ids == target.unsqueeze(-1),
        correction=correction,
        hit_policy=policy,
        debias=debias,
        reduction="none",
    )


def hessian(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Tensor]:
    """The Hessian, by reverse mode twice: torch.func.hessian uses forward mode, which warns about torch's internals."""
    return torch.func.jacrev(torch.func.grad(function, argnums), argnums)


# classes drawn twice, a hit, two hits, no hit, nothing but hits
TARGET = torch.tensor([0, 2, 4, 1])
IDS = torch.tensor([[1, 1, 3, 0], [2, 0, 2, 4], [1, 3, 0, 1], [1, 1, 1, 1]])
Q = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)


# --- what the population minimises ---

P3 = torch.tensor([0.4, 0.32, 0.28], dtype=torch.float64)
Q3 = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
P4 = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
Q4 = torch.tensor([0.15, 0.4, 0.05, 0.4], dtype=torch.float64)


# --- bias and variance of the estimates of log Z ---


def distribution(name: str, num_classes: int) -> Tensor:
    ranks = torch.arange(1, num_classes + 1, dtype=torch.float64)
    weights = {"uniform": ranks**0, "zipf": 1 / ranks, "reversed": ranks}[name]
    return weights / weights.sum()


def estimates(scores: Tensor, q: Tensor, target: int, num_negatives: int) -> dict[str, tuple[Tensor, Tensor]]:
    """{estimate: (first, terms)}: what is inside of the logarithm, first + the sum of k terms that are drawn."""
    weights = scores.exp()
    others = torch.arange(len(q)) != target
    return {
        "importance": (torch.zeros(()).double(), weights / (num_negatives * q)),
        "partition": (weights[target], others * weights / (num_negatives * q)),
        "logq": (weights[target] / q[target], weights / q),
        "none": (weights[target], weights),
    }


# --- bias against k, with and without debias ---


def slope(values: list[float], sizes: list[int]) -> float:
    """The exponent a of |value| ~ k^a, by least squares in the logarithms."""
    x = torch.tensor([[math.log(k), 1.0] for k in sizes], dtype=torch.float64)
    y = torch.tensor([[math.log(abs(value))] for value in values], dtype=torch.float64)
    return torch.linalg.lstsq(x, y).solution[0].item()
