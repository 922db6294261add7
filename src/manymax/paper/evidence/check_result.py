"""The result of a check of a claim, and helpers that all checks use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CheckResult:
    """Whether a statement holds, and what was measured, in words."""

    holds: bool
    measured: str


Check = Callable[[], CheckResult]


def double(values: tuple[float, ...]) -> Tensor:
    """The values in float64."""
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal draws in float64 from a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(values: Tensor, digits: int = 3) -> str:
    """The values as text, for what was measured.

    >>> row(double((0.5, 0.25)))
    '(0.5, 0.25)'
    """
    return "(" + ", ".join(f"{value:.{digits}g}" for value in values.tolist()) + ")"


def denied(check: Check) -> CheckResult:
    """A check that holds if `check` does not: what the paper states and a counter-example contradicts must fail."""
    found = check()
    return CheckResult(not found.holds, found.measured)
