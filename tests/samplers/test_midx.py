"""The adaptive sampler: its distribution by brute force, its codewords, its state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.samplers import MIDXSampler


def problem(num_classes: int, batch: int, dim: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    queries = torch.randn(batch, dim, generator=random, dtype=torch.float64)
    return queries, torch.randn(num_classes, dim, generator=random, dtype=torch.float64)


def distribution_by_brute_force(sampler: MIDXSampler, queries: Tensor, weight: Tensor) -> Tensor:
    """Each class vector replaced by its nearest codewords, then the softmax over all classes, one class at a time."""
    half = weight.shape[1] // 2
    quantised = torch.empty_like(weight)
    for c, vector in enumerate(weight):
        for part in (slice(0, half), slice(half, None)):
            distance = (sampler.codewords[:, part] - vector[part]).square().sum(1)
            quantised[c, part] = sampler.codewords[distance.argmin(), part]
    return (queries @ quantised.T).softmax(-1)


@pytest.mark.parametrize(
    ("num_classes", "dim", "num_codewords"), [(50, 6, 4), (50, 5, 7), (9, 1, 3), (3, 2, 32), (200, 8, 1)]
)
def test_q_is_the_softmax_of_quantised_scores(num_classes: int, dim: int, num_codewords: int) -> None:
    queries, weight = problem(num_classes, 4, dim)
    sampler = MIDXSampler(num_classes, num_codewords)
    sampler.refresh(weight, torch.Generator().manual_seed(0))
    expected = distribution_by_brute_force(sampler, queries, weight)
    probs = sampler.log_probs(input=queries, dtype=torch.float64).exp()
    assert torch.allclose(probs, expected, rtol=1e-9)
    shared = sampler.log_probs(input=queries, shared=True, dtype=torch.float64).exp()
    assert torch.allclose(shared, expected.mean(0), rtol=1e-9)


def test_with_a_codeword_for_every_class_q_is_the_softmax() -> None:
    queries, weight = problem(12, 4, 6)
    sampler = MIDXSampler(12, num_codewords=12)
    sampler.refresh(weight)
    assert torch.allclose(sampler.log_probs(input=queries, dtype=torch.float64), (queries @ weight.T).log_softmax(-1))


def test_more_codewords_follow_the_model_more_closely() -> None:
    queries, weight = problem(2000, 16, 8)
    log_probs = (queries @ weight.T).log_softmax(-1)
    divergence = []
    for num_codewords in (1, 4, 16, 64):
        sampler = MIDXSampler(2000, num_codewords)
        sampler.refresh(weight, torch.Generator().manual_seed(0))
        log_q = sampler.log_probs(input=queries, dtype=torch.float64)
        divergence.append((log_probs.exp() * (log_probs - log_q)).sum(-1).mean().item())
    assert divergence == sorted(divergence, reverse=True)
    assert divergence[-1] < divergence[0] / 3


def test_refresh_follows_the_class_vectors() -> None:
    queries, weight = problem(100, 3, 4)
    sampler = MIDXSampler(100, 8)
    sampler.refresh(weight, torch.Generator().manual_seed(0))
    before = sampler.log_probs(input=queries)
    sampler.refresh(-weight)
    assert torch.allclose(
        sampler.log_probs(input=queries).exp(), distribution_by_brute_force(sampler, queries, -weight).float()
    )
    assert not torch.allclose(sampler.log_probs(input=queries), before)
    sampler.refresh(torch.cat([weight, weight], 1))  # another width: new codewords
    assert sampler.codewords.shape == (8, 8)


def test_equal_class_vectors_share_one_cell() -> None:
    queries, _ = problem(20, 3, 4)
    sampler = MIDXSampler(20, 5)
    sampler.refresh(torch.ones(20, 4))
    assert len(sampler.cell_codes) == 1
    assert torch.allclose(sampler.log_probs(input=queries), torch.tensor(-math.log(20)))


def test_the_first_call_refreshes() -> None:
    queries, weight = problem(20, 3, 4)
    sampler = MIDXSampler(20, 5)
    with pytest.raises(ArgumentError, match="no codewords yet"):
        sampler(2, input=queries)
    with pytest.raises(ArgumentError, match="no codewords yet"):
        sampler.log_probs(input=queries)
    assert sampler(2, input=queries, linear_weight=weight).ids.shape == (3, 2)
    assert sampler(2, input=queries).log_q.isfinite().all()


def test_many_rows_are_drawn_in_blocks() -> None:
    # 40 x 40 codewords and 1000 rows need several blocks; rows must not mix.
    queries, weight = problem(5000, 1000, 4)
    sampler = MIDXSampler(5000, 40)
    sampler.refresh(weight)
    assert len(list(sampler._blocks(queries, 5))) > 2
    target = torch.arange(1000)
    draw = sampler(5, input=queries * 30, target=target, generator=torch.Generator().manual_seed(0))
    rows = [0, 499, 999]
    log_q = sampler.log_q(draw.ids[rows], input=queries[rows] * 30, dtype=torch.float64)
    assert torch.allclose(draw.log_q[rows], log_q)
    assert draw.log_q.mean() > -5  # sharp queries draw their own likely classes; log(1 / 5000) = -8.5
    of_target = sampler.log_q(target[rows].unsqueeze(1), input=queries[rows] * 30, dtype=torch.float64)
    assert torch.allclose(draw.log_q_target[rows], of_target.squeeze(1))


def test_extreme_scores_stay_finite() -> None:
    queries, weight = problem(50, 3, 4)
    sampler = MIDXSampler(50, 4)
    sampler.refresh(weight)
    draw = sampler(4, input=(queries * 1e4).float(), target=torch.tensor([0, 1, 2]))
    assert draw.log_q.isfinite().all()
    assert draw.log_q_target.isfinite().all()


def test_a_checkpoint_restores_an_unrefreshed_sampler() -> None:
    queries, weight = problem(20, 3, 4)
    sampler = MIDXSampler(20, 5)
    sampler.refresh(weight)
    model = torch.nn.ModuleDict({"sampler": MIDXSampler(20, 3)})
    model.load_state_dict({f"sampler.{name}": value for name, value in sampler.state_dict().items()})
    assert torch.equal(model["sampler"].log_probs(input=queries), sampler.log_probs(input=queries))
    with pytest.raises(RuntimeError, match="20 classes, this one 21"):
        MIDXSampler(21, 5).load_state_dict(sampler.state_dict())
    MIDXSampler(20).load_state_dict(MIDXSampler(20).state_dict())


def test_bad_arguments() -> None:
    queries, weight = problem(20, 3, 4)
    sampler = MIDXSampler(20, 5)
    for bad in (weight[:-1], weight[0], weight * math.nan):
        with pytest.raises(ArgumentError, match="linear_weight"):
            sampler.refresh(bad)
    sampler.refresh(weight)
    with pytest.raises(ArgumentError, match="as wide as"):
        sampler(2, input=queries[:, :3])
    with pytest.raises(ArgumentError, match="input"):
        sampler.log_probs()
    with pytest.raises(ArgumentError, match="num_codewords"):
        MIDXSampler(20, 0)
