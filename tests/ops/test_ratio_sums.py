"""The moments of a ratio of sums of draws against a sum over all samples, and against its limit for many draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from manymax.ops.ratio_sums import ratio_moments

Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TERMS = torch.tensor([[0.4, 3.0, 0.0], [0.1, 5.0, 1.0], [2.0, 0.0, 0.3]], dtype=torch.float64)


def by_enumeration(first: float, terms: Tensor, k: int, shares: Tensor, counted: Tensor) -> tuple[Tensor, ...]:
    """Sums over all sequences of draws of all steps."""
    mean, square, whole = torch.zeros(3).double(), torch.zeros(3).double(), torch.zeros(()).double()
    for ids in itertools.product(range(3), repeat=k * len(terms)):
        chance = torch.stack([Q[i] for i in ids]).prod()
        steps = [ids[t * k : (t + 1) * k] for t in range(len(terms))]
        below = first + sum(shares[t] * sum(terms[t, i] for i in step) for t, step in enumerate(steps))
        parts = torch.stack([terms[0, j] * steps[0].count(j) for j in range(3)]) / below
        mean, square = mean + chance * parts, square + chance * parts.square()
        whole = whole + chance * (parts * counted).sum().square()
    return mean, square, whole


@pytest.mark.parametrize(("steps", "k"), [(1, 1), (1, 5), (2, 3), (3, 2), (3, 1)])
@pytest.mark.parametrize("first", [0.01, 1.0, 50.0])
def test_moments_are_those_of_all_samples(steps: int, k: int, first: float) -> None:
    shares = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)[:steps]
    counted = torch.tensor([True, False, True])
    found = ratio_moments(first, TERMS[:steps], Q, k, shares, counted)
    for ours, expected in zip(found, by_enumeration(first, TERMS[:steps], k, shares, counted), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_many_draws_have_the_ratio_of_the_means() -> None:
    k = 10**9
    found = ratio_moments(2.0, TERMS[0] / k, Q, k)
    expected = Q * TERMS[0] / (2 + (Q * TERMS[0]).sum())
    torch.testing.assert_close(found.mean, expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(found.square, expected.square(), rtol=1e-8, atol=1e-9)
