"""Scores for the tests of entmax, and their probabilities in 50 digits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tests import high_precision
from tests.exact import INF, normal

ALPHAS = [1.0, 1.0001, 1.01, 1.05, 1.2, 1.25, 1.5, 1.75, 1.9999, 2.0]
TARGET = torch.tensor([0, 2, 1, 3, 1])  # one label for each of the short rows


def short_rows() -> Tensor:
    """Rows of 5 classes: nearly equal, ordinary, spread out, with a large offset, with a masked class."""
    rows = torch.stack([normal(5, scale=s) for s in (1e-3, 1.0, 20.0)] + [normal(5, seed=1) + 1e4, normal(5, seed=2)])
    rows[4, 3] = -INF
    return rows


def long_rows() -> Tensor:
    """Rows of 530 classes, more than are searched whole: one with every class in the support, one with few."""
    return torch.stack([normal(530, scale=1e-3), normal(530, scale=4.0)])


@cache
def expected_probs(alpha: float, kind: str, dtype: torch.dtype) -> Tensor:
    """Probabilities of the "short" or "long" rows, rounded to a dtype first, in 50 digits."""
    rows = {"short": short_rows, "long": long_rows}[kind]().to(dtype)
    return high_precision.as_tensor([high_precision.entmax(row, alpha) for row in rows.tolist()])
