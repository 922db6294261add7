"""In-batch negatives, and the frequencies of classes that are estimated from the batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manymax.errors import ArgumentError
from manymax.samplers import InBatchSampler, StreamingFrequency

TARGET = torch.tensor([4, 2, 4, 0])


def slow_frequencies(batches: list[list[int]], num_classes: int, rate: float) -> list[float]:
    """q of every class by the formulas of `StreamingFrequency`, one class and one batch at a time."""
    gap, last, seen, time = [float(num_classes)] * num_classes, [0] * num_classes, [0] * num_classes, 0
    for batch in batches:
        time += len(batch)
        for c in set(batch):
            m = batch.count(c)
            weight = max(1 - (1 - rate) ** m, m / (seen[c] + 1 + m))
            gap[c] = (1 - weight) * gap[c] + weight * (time - last[c]) / m
            last[c], seen[c] = time, seen[c] + m
    rates = [1 / gap[c] if seen[c] else 1 / (num_classes + time) for c in range(num_classes)]
    return [r / sum(rates) for r in rates]


@given(
    batches=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=8), max_size=12),
    rate=st.sampled_from([0.01, 0.3, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_streaming_equals_a_slow_reference(batches: list[list[int]], rate: float) -> None:
    frequency = StreamingFrequency(7, rate)
    for batch in batches:
        frequency.update(torch.tensor(batch))
    probs = frequency.log_prob_of(torch.arange(7)).exp()
    assert torch.allclose(probs, torch.tensor(slow_frequencies(batches, 7, rate)).double(), rtol=1e-6)
    assert probs.sum().item() == pytest.approx(1, rel=1e-9)


def test_streaming_finds_the_frequencies() -> None:
    random = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.01])  # the first is many times in every batch
    frequency, rate = StreamingFrequency(5, rate=0.01), 0.01
    for _ in range(2000):
        size = int(torch.randint(10, 60, (), generator=random))
        frequency.update(probs.multinomial(size, replacement=True, generator=random))
    estimate = frequency.log_prob_of(torch.arange(5)).exp().float()
    # A moving average of geometric gaps has relative variance at most rate / (2 - rate); 1 / B adds a bias of that
    # size.
    error = 4 * math.sqrt(rate / (2 - rate)) + rate
    assert ((estimate - probs).abs() / probs < error).all()


def test_streaming_follows_a_drift() -> None:
    frequency = StreamingFrequency(2, rate=0.05)
    for share in (0.9, 0.2):
        random = torch.Generator().manual_seed(1)
        for _ in range(300):
            frequency.update((torch.rand(50, generator=random) > share).long())
        assert frequency.log_prob_of(torch.tensor([0])).exp().item() == pytest.approx(share, rel=0.5)


def test_only_calls_in_training_mode_update_the_frequency() -> None:
    sampler = InBatchSampler(6)
    sampler.eval()
    before = {name: buffer.clone() for name, buffer in sampler.named_buffers()}
    sampler(None, target=TARGET)
    assert all(torch.equal(before[name], buffer) for name, buffer in sampler.named_buffers())
    sampler.train()
    draw = sampler(None, target=TARGET)
    assert sampler.frequency.time == len(TARGET)
    assert draw.log_q_target[0] > draw.log_q_target[1]  # class 4 came twice
    assert torch.equal(draw.log_q, draw.log_q_target)


def test_streaming_state_survives_a_checkpoint() -> None:
    sampler, other = InBatchSampler(6), InBatchSampler(6)
    for _ in range(3):
        sampler(None, target=TARGET)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(sampler.log_probs(), other.log_probs())
    sampler(None, target=TARGET)
    other(None, target=TARGET)
    assert torch.equal(sampler.log_probs(), other.log_probs())


def test_the_whole_batch_is_shared_and_marks_own_positives() -> None:
    draw = InBatchSampler(6)(None, target=TARGET)
    assert torch.equal(draw.ids, TARGET)
    assert torch.equal(draw.copies(4), torch.eye(4, dtype=torch.bool))
    assert draw.hits(TARGET)[0].tolist() == [True, False, True, False]  # another row's 4 is a hit, not a copy


@pytest.mark.parametrize("num_positives", [1, 3])
@pytest.mark.parametrize("num_negatives", [1, 2, 4])
def test_per_row_never_takes_the_rows_own_positives(num_positives: int, num_negatives: int) -> None:
    target = torch.arange(5 * num_positives).view(5, num_positives)  # positives of row r are r P, r P + 1, ...
    sampler = InBatchSampler(15)
    for seed in range(50):
        positive = target if num_positives > 1 else target[:, 0]
        ids = sampler(num_negatives, target=positive, generator=torch.Generator().manual_seed(seed)).ids
        assert ids.shape == (5, num_negatives)
        assert (ids // num_positives != torch.arange(5).unsqueeze(1)).all()
        assert all(len(set(row)) == num_negatives for row in ids.tolist())  # each position once


def test_shared_draws_of_several_positives_name_their_row() -> None:
    target = torch.arange(8).view(4, 2)
    draw = InBatchSampler(8)(5, target=target, shared=True)
    assert torch.equal(draw.source_row, draw.ids // 2)
    assert draw.log_q_target.shape == (4, 2)


@pytest.mark.parametrize(("num_negatives", "shared"), [(None, False), (4, True), (4, False)])
def test_rows_of_one_query_are_no_negatives_of_each_other(num_negatives: int | None, shared: bool) -> None:
    """The tens digit of every positive is its query: marked are exactly the draws from the own query."""
    owner = torch.tensor([0, 0, 3, 1, 1, 1])
    target = owner * 10 + torch.arange(6)
    draw = InBatchSampler(40)(num_negatives, target=target, owner=owner, shared=shared)
    assert torch.equal(draw.copies(6), draw.ids // 10 == owner.unsqueeze(1))


@pytest.mark.parametrize("owner", [torch.zeros(3, dtype=torch.int64), torch.zeros(4)], ids=["too few", "no ids"])
def test_owners_that_do_not_fit(owner: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="`owner` must be an int64 id for each row"):
        InBatchSampler(6)(None, target=TARGET, owner=owner)


@pytest.mark.parametrize(("num_negatives", "shared"), [(4, False), (5, True)])
def test_more_negatives_than_the_batch_has(num_negatives: int, shared: bool) -> None:
    with pytest.raises(ArgumentError, match="at most"):
        InBatchSampler(6)(num_negatives, target=TARGET, shared=shared)


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="one entry for each of 3 classes"):
        InBatchSampler(3, counts=[1, 2])
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ArgumentError, match="rate"):
            StreamingFrequency(3, rate=rate)
    with pytest.raises(ArgumentError, match="q = 0"):
        InBatchSampler(6, counts=[1, 1, 0, 1, 1, 1])(None, target=TARGET)


@pytest.mark.parametrize("wrong", [-100, 6])
def test_a_frequency_counts_only_classes(wrong: int) -> None:
    with pytest.raises(ArgumentError, match="ids from 0 to 5"):
        InBatchSampler(6).update(torch.tensor([0, wrong]))
