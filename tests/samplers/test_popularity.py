"""The popularity, uniform and log-uniform samplers: probabilities, bad counts, and more classes than 2^24."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manymax.errors import ArgumentError
from manymax.samplers import LogUniformSampler, PopularitySampler, UniformSampler

MANY = 2**24 + 1001


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any),
    power=st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0]),
    smoothing=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=200, deadline=None)
def test_probabilities_from_counts(counts: list[int], power: float, smoothing: float) -> None:
    sampler = PopularitySampler(counts, power=power, smoothing=smoothing)
    weights = [(count + smoothing) ** power for count in counts]
    expected = torch.tensor(weights, dtype=torch.float64) / math.fsum(weights)
    assert torch.allclose(sampler.log_probs(dtype=torch.float64).exp(), expected, rtol=1e-13)
    drawn = set(sampler(500, shared=True).ids.tolist())
    assert drawn <= {c for c, weight in enumerate(weights) if weight > 0}


def test_a_power_that_would_overflow() -> None:
    sampler = PopularitySampler([1e200, 1e200, 1.0], power=5.0)
    assert sampler.log_probs().tolist()[:2] == pytest.approx([-math.log(2)] * 2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([],), "counts"),
        (([[1.0, 2.0]],), "counts"),
        (([1.0, -1.0],), "negative"),
        (([1.0, math.nan],), "nan"),
        (([1.0, math.inf],), "infinite"),
        (([0, 0],), "only zeros"),
    ],
)
def test_bad_counts(arguments: tuple[object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        PopularitySampler(*arguments)


@pytest.mark.parametrize("options", [{"power": -1.0}, {"power": math.nan}, {"smoothing": -0.1}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        PopularitySampler([1, 2], **options)


def test_a_positive_that_cannot_be_drawn() -> None:
    target = torch.tensor([0, 1, 1])
    with pytest.raises(ArgumentError, match=r"2 positives with q = 0.*smoothing"):
        PopularitySampler([3, 0, 1])(4, target=target)
    assert PopularitySampler([3, 0, 1], smoothing=1.0)(4, target=target).log_q_target.isfinite().all()
    assert PopularitySampler([3, 0, 1]).log_q(torch.tensor([1])).item() == -math.inf


@pytest.mark.slow
def test_more_classes_than_float32_can_count() -> None:
    # Half of the mass on the last 1000 classes, of which odd ids are no float32 numbers, weighted 1 : 3 by parity.
    counts = torch.ones(MANY, dtype=torch.float64)
    tail = torch.arange(MANY - 1000, MANY)
    counts[tail] = torch.where(tail % 2 == 1, 3.0, 1.0).double() * (MANY - 1000) / 2000
    ids = PopularitySampler(counts)(100_000, shared=True, generator=torch.Generator().manual_seed(0)).ids
    in_tail = ids[ids >= MANY - 1000]
    for drawn, total, probability in (
        (len(in_tail), 100_000, 0.5),
        (int((in_tail % 2 == 1).sum()), len(in_tail), 0.75),
        (int((ids < MANY // 2).sum()), 100_000, 0.25),
    ):
        assert abs(drawn - total * probability) < 4 * math.sqrt(total * probability * (1 - probability)) + MANY % 2


@pytest.mark.parametrize("num_classes", [MANY, 2**40 + 1])
def test_stateless_samplers_with_very_many_classes(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = UniformSampler(num_classes)(50_000, shared=True, generator=generator).ids
    odd = int((uniform % 2).sum())
    assert abs(odd - 25_000) < 4 * math.sqrt(12_500)
    log_uniform = LogUniformSampler(num_classes)(50_000, shared=True, generator=generator).ids
    assert log_uniform.min() == 0
    assert log_uniform.max() < num_classes
    far = log_uniform[log_uniform > num_classes // 2**8]  # float32 heights would reach few of these
    assert abs(int((far % 2).sum()) - len(far) / 2) < 4 * math.sqrt(len(far) / 4)
    assert len(far.unique()) > 0.99 * len(far) or num_classes == MANY
    half = math.log(2**20 + 1) / math.log(num_classes + 1)  # the cdf at 2^20 - 1
    assert abs(int((log_uniform < 2**20).sum()) - 50_000 * half) < 4 * math.sqrt(50_000 * half * (1 - half))
    last = LogUniformSampler(num_classes).log_q(torch.tensor([num_classes - 1]), dtype=torch.float64).item()
    assert last == pytest.approx(-math.log(num_classes) - math.log(math.log(num_classes + 1)), rel=1e-7)


def test_log_uniform_values() -> None:
    probs = LogUniformSampler(4).log_probs(dtype=torch.float64).exp()
    expected = [math.log((c + 2) / (c + 1)) / math.log(5) for c in range(4)]
    assert probs.tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("option", ["power", "smoothing"])
def test_options_are_finite(option: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{option}` must be a number"):
        PopularitySampler([1, 2], **{option: float("inf")})
