"""What a check of a claim says, and what all checks are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CheckResult:
    """Whether a statement stood up when it was run again, and what was measured."""

    holds: bool
    measured: str


Check = Callable[[], CheckResult]


def double(values: tuple[float, ...]) -> Tensor:
    """The values in float64."""
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal draws in float64, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row(values: Tensor, digits: int = 3) -> str:
    """The values as text."""
    return "(" + ", ".join(f"{value:.{digits}g}" for value in values.tolist()) + ")"


def denied(check: Check) -> CheckResult:
    """The opposite of a finding: what is contradicted must fail."""
    found = check()
    return CheckResult(not found.holds, found.measured)
