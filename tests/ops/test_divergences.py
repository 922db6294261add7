"""Divergences between distributions, against their definitions in 50 digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax.ops.divergences import chi_square, jensen_shannon, kl

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types


def exact_chi_square(probs: list[Number], q: list[Number]) -> Number:
    if any(a == 0 < p for p, a in zip(probs, q, strict=True)):
        return mp.inf
    return mp.fsum((p - a) ** 2 / mp.mpf(a) for p, a in zip(probs, q, strict=True) if a > 0)


def exact_kl(probs: list[Number], q: list[Number]) -> Number:
    if any(a == 0 < p for p, a in zip(probs, q, strict=True)):
        return mp.inf
    return mp.fsum(p * mp.log(mp.mpf(p) / a) for p, a in zip(probs, q, strict=True) if p > 0)


def exact_jensen_shannon(probs: list[Number], q: list[Number], weight: float) -> Number:
    mixture = [weight * mp.mpf(p) + (1 - mp.mpf(weight)) * mp.mpf(a) for p, a in zip(probs, q, strict=True)]
    return weight * exact_kl(probs, mixture) + (1 - mp.mpf(weight)) * exact_kl(q, mixture)


def near(value: float, expected: Number, tolerance: float = 1e-12) -> bool:
    return value == math.inf if expected == mp.inf else abs(value - expected) <= tolerance * max(1, abs(expected))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions over the same classes, some of them without probability."""
    size = draw(st.integers(1, 6))
    weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=size, max_size=size)
    rows = [torch.tensor(draw(weights.filter(any)), dtype=torch.float64) for _ in range(2)]
    return rows[0] / rows[0].sum(), rows[1] / rows[1].sum()


@given(pairs(), st.sampled_from([0.5, 0.1, 1 / 101]))
def test_definitions(pair: tuple[Tensor, Tensor], weight: float) -> None:
    probs, q = pair
    assert near(chi_square(probs, q).item(), exact_chi_square(probs.tolist(), q.tolist()))
    assert near(kl(probs, q).item(), exact_kl(probs.tolist(), q.tolist()))
    assert near(jensen_shannon(probs, q, weight).item(), exact_jensen_shannon(probs.tolist(), q.tolist(), weight))


@given(pairs())
def test_inequalities(pair: tuple[Tensor, Tensor]) -> None:
    probs, q = pair
    assert kl(probs, q) >= -1e-15
    assert kl(probs, q) <= torch.log1p(chi_square(probs, q)) + 1e-12
    shared = jensen_shannon(probs, q)
    assert -1e-15 <= shared <= math.log(2) + 1e-15
    torch.testing.assert_close(shared, jensen_shannon(q, probs))


@pytest.mark.parametrize("divergence", [chi_square, kl, jensen_shannon])
def test_zero_exactly_for_equal_distributions(divergence: Callable[..., Tensor]) -> None:
    for size in (1, 3, 1000):
        probs = torch.full((size,), 1 / size)
        assert divergence(probs, probs).item() == 0


def test_chi_square_of_neighbours_is_not_lost_in_rounding() -> None:
    """sum p^2/q - 1 would be 0 or negative here."""
    q = torch.full((4,), 0.25, dtype=torch.float64)
    probs = q + 1e-9 * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    assert chi_square(probs, q).item() == pytest.approx(1.6e-17, rel=1e-6, abs=0)


def test_a_class_that_cannot_be_drawn() -> None:
    probs, q = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    assert chi_square(probs, q) == kl(probs, q) == math.inf
    assert chi_square(q, probs).isfinite()
    assert jensen_shannon(probs, q).isfinite()
    assert chi_square(torch.tensor([1.0, 0.0]), q) == 0  # its probability is 0 as well


def test_batches_broadcast_over_the_last_dimension() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2, 3, 4, generator=generator).softmax(-1)
    q = torch.rand(4, generator=generator).softmax(-1)
    for divergence in (chi_square, kl, jensen_shannon):
        rows = divergence(probs, q)
        assert rows.shape == (2, 3)
        torch.testing.assert_close(rows[1, 2], divergence(probs[1, 2], q))


def test_weights_of_jensen_shannon() -> None:
    """It is the entropy of the mixture minus the mean entropy: for disjoint distributions, that of a coin."""
    probs, q = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()
    for weight in (0.5, 0.2, 1 / 11):
        entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
        assert jensen_shannon(probs, q, weight).item() == pytest.approx(entropy, rel=1e-14)
