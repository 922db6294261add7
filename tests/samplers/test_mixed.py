"""Mixed negatives: how many come from where, their log q, and batches that are too small."""

from __future__ import annotations

import math

import pytest
import torch

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.samplers import DNSSampler, LogUniformSampler, MixedSampler
from tests.samplers.sampler_cases import COUNTS, C
from tests.samplers.test_sampler_distributions import FOUR_SIGMA, p_value_of_mean

FREQUENCY = COUNTS.double() / COUNTS.sum()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_draws_of_an_uneven_mixture_follow_its_log_q(shared: bool) -> None:
    """Three of seven are in-batch; classes that are no positives come from the second sampler alone."""
    other = LogUniformSampler(C)
    sampler = MixedSampler(C, in_batch_share=0.4, other=other, counts=COUNTS)
    generator, found = torch.Generator().manual_seed(3), []
    q = (3 * FREQUENCY + 4 * other.log_probs(dtype=torch.float64).exp()) / 7
    for _ in range(600):
        target = COUNTS.multinomial(5, replacement=True, generator=generator)
        draw = sampler(7, target=target, shared=shared, generator=generator)
        torch.testing.assert_close(draw.log_q.exp(), q[draw.ids].float())
        torch.testing.assert_close(draw.log_q_target.exp(), q[target].float())
        found.append(torch.nn.functional.one_hot(draw.ids.reshape(-1, 7)[0], C).double().mean(0))
    assert p_value_of_mean(torch.stack(found).numpy(), q.numpy()) > FOUR_SIGMA


def test_the_whole_batch_and_as_many_others_as_the_share_says() -> None:
    target = torch.tensor([3, 0, 3, 5])
    draw = MixedSampler(C, in_batch_share=0.4, counts=COUNTS)(None, target=target)
    assert draw.ids.shape == (10,)
    assert torch.equal(draw.ids[:4], target)
    assert draw.source_row is not None
    assert draw.source_row.tolist() == [0, 1, 2, 3, *[-1] * 6]
    copies = draw.copies(4)
    assert copies is not None
    assert torch.equal(copies, torch.eye(4, 10, dtype=torch.bool))


def test_rows_take_positives_of_other_rows() -> None:
    target = torch.arange(5)
    sampler = MixedSampler(100, in_batch_share=0.5, counts=torch.ones(100))
    for seed in range(20):
        ids = sampler(4, target=target, generator=torch.Generator().manual_seed(seed)).ids[:, :2]
        assert ((ids < 5) & (ids != target.unsqueeze(1))).all()


@pytest.mark.parametrize(("shared", "offered"), [(False, 2), (True, 3)])
def test_a_small_batch_is_filled_up(shared: bool, offered: int) -> None:
    target, generator = torch.tensor([3, 3, 3]), torch.Generator().manual_seed(0)
    draw = MixedSampler(C, in_batch_share=0.9, counts=COUNTS)(10, target=target, shared=shared, generator=generator)
    q = (offered * FREQUENCY + (10 - offered) / C) / 10
    torch.testing.assert_close(draw.log_q.exp(), q[draw.ids].float())
    assert (draw.ids[..., :offered] == 3).all()
    assert not (draw.ids[..., offered:] == 3).all()


def test_frequencies_are_learned_whatever_the_share() -> None:
    for share in (0.0, 0.5, 1.0):
        sampler = MixedSampler(C, in_batch_share=share)
        for _ in range(2):
            sampler(2, target=torch.tensor([4, 2, 4]))
        assert sampler.in_batch.frequency.time == 6
        sampler.eval()(2, target=torch.tensor([4, 2, 4]))
        assert sampler.in_batch.frequency.time == 6


def test_bad_arguments() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ArgumentError, match="`in_batch_share` must be a number"):
            MixedSampler(C, in_batch_share=share)
    with pytest.raises(ArgumentTypeError, match="`other` must be a sampler whose q is the same for every query"):
        MixedSampler(C, other=DNSSampler(C))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="`other` must have 6 classes; got one with 7"):
        MixedSampler(C, other=LogUniformSampler(7))
    with pytest.raises(ArgumentError, match="`target` must be given"):
        MixedSampler(C)(2, batch=3)
    with pytest.raises(ArgumentError, match="`num_negatives` must be an integer >= 1 where `in_batch_share` is 0"):
        MixedSampler(C, in_batch_share=0.0)(None, target=torch.tensor([1, 2]))
