"""Samplers that choose from a pool of candidates: dns and two_pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.samplers import DNSSampler, Draw, MIDXSampler, PopularitySampler, TwoPassSampler
from manymax.samplers.base import Request
from manymax.samplers.candidates import candidate_scores


def random_problem(num_classes: int, batch: int, dim: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(9)
    queries = torch.randn(batch, dim, generator=random, dtype=torch.float64) * scale
    return queries, torch.randn(num_classes, dim, generator=random, dtype=torch.float64)


def request(queries: Tensor, weight: Tensor, bias: Tensor | None = None) -> Request:
    return Request(1, (len(queries),), None, queries, weight, bias, None, False, None, queries.device, queries.dtype)


def marginal_by_the_formula(num_classes: int, num_candidates: int, num_negatives: int) -> np.ndarray:
    """(1 / k) sum_i [F(i - 1; M, r / C) - F(i - 1; M, (r + 1) / C)] with scipy's binomial cdf."""
    rank, i = np.arange(num_classes)[:, None], np.arange(1, num_negatives + 1)
    cdf = lambda r: stats.binom.cdf(i - 1, num_candidates, r / num_classes)  # noqa: E731
    return (cdf(rank) - cdf(rank + 1)).mean(1)


@pytest.mark.parametrize(
    ("num_classes", "num_candidates", "num_negatives"),
    [
        (1, 1, 1),
        (1, 5, 2),
        (4, 2, 1),
        (7, 5, 5),
        (7, 60, 3),
        (50, 20, 4),
        (300, 130, 30),
        (3000, 500, 100),
        (5, 200, 9),
        (1, 500, 100),
        (2, 500, 100),
    ],
)
def test_marginal_distribution_of_dns(num_classes: int, num_candidates: int, num_negatives: int) -> None:
    sampler = DNSSampler(num_classes, num_candidates)
    log_q = sampler.marginal_log_q(torch.arange(num_classes), num_negatives)
    assert log_q.exp().sum().item() == pytest.approx(1, rel=1e-9)
    formula = marginal_by_the_formula(num_classes, num_candidates, num_negatives)
    # The formula's differences are good to rounding of numbers near 1; the quadrature has no such limit.
    assert np.allclose(log_q.exp().numpy(), formula, rtol=1e-9, atol=1e-14)


def test_marginal_probability_of_a_class_far_below_one_kept_candidate() -> None:
    rank, num_classes, num_candidates = 9_900, 10_000, 60
    log_q = DNSSampler(num_classes, num_candidates).marginal_log_q(torch.tensor([rank]), 1).item()
    above, own = math.log1p(-rank / num_classes), math.log1p(-1 / (num_classes - rank))
    exact = num_candidates * above + math.log(-math.expm1(num_candidates * own))
    assert log_q == pytest.approx(exact, rel=1e-12)


def test_most_classes_have_almost_no_probability_under_dns() -> None:
    log_q = DNSSampler(3000, 500).marginal_log_q(torch.arange(3000), 100)
    assert (log_q < math.log(1e-6)).double().mean().item() == pytest.approx(0.74, abs=0.005)
    assert log_q.isfinite().all()


def test_dns_keeps_the_best_of_its_candidates() -> None:
    queries, weight = random_problem(40, 6)
    seen = []

    def scores(ids: Tensor) -> Tensor:
        seen.append(ids)
        return torch.einsum("nd,nmd->nm", queries, weight[ids])

    draw = DNSSampler(40, 12)(3, input=queries, scores=scores)
    for row, pool in enumerate(seen[0].tolist()):
        best = sorted(((weight[c] @ queries[row]).item() for c in pool), reverse=True)[:3]
        assert [(weight[c] @ queries[row]).item() for c in draw.ids[row].tolist()] == pytest.approx(best)


@pytest.mark.parametrize("shared", [False, True])
def test_dns_correction_states_the_marginal_at_the_estimated_rank(shared: bool) -> None:
    num_classes, num_negatives = 1000, 200
    queries, weight = random_problem(num_classes, 2)
    sampler, target = DNSSampler(num_classes, 2000, correction=True), torch.tensor([3, 500])
    generator = torch.Generator().manual_seed(0)
    draw = sampler(
        num_negatives, input=queries, linear_weight=weight, target=target, shared=shared, generator=generator
    )
    scores = (queries.mean(0, keepdim=True) if shared else queries) @ weight.T
    rank = (scores.unsqueeze(-1) < scores.unsqueeze(-2)).sum(-1)  # (rows or 1, C): classes above
    ids = draw.ids.unsqueeze(0) if shared else draw.ids
    # 2000 candidates know a rank with a standard error of at most 1000 * 0.5 / sqrt(2000) = 11 classes.
    for true_rank, stated in (
        (rank.expand(2, -1).gather(1, target.unsqueeze(1)).squeeze(1), draw.log_q_target),
        (rank.gather(1, ids).squeeze(0), draw.log_q),
    ):
        low, high = (sampler.marginal_log_q((true_rank + gap).clamp(0, 999), num_negatives) for gap in (45, -45))
        assert ((low - 1e-6 <= stated) & (stated <= high + 1e-6)).all()
    assert "rank" in draw.note


@pytest.mark.parametrize("sampler", [DNSSampler(10, 4), TwoPassSampler(10, 4)])
def test_more_negatives_than_candidates(sampler: DNSSampler | TwoPassSampler) -> None:
    queries, weight = random_problem(10, 2)
    with pytest.raises(ArgumentError, match="num_candidates"):
        sampler(5, input=queries, linear_weight=weight)


@pytest.mark.parametrize("make", [DNSSampler, TwoPassSampler])
def test_scores_that_cannot_be_compared(make: type[DNSSampler] | type[TwoPassSampler]) -> None:
    queries, weight = random_problem(10, 2)
    with pytest.raises(ArgumentError, match=r"nan|weights"):
        make(10, 6)(2, input=queries * math.nan, linear_weight=weight)
    with pytest.raises(ArgumentError, match="scores"):
        make(10, 6)(2, input=queries, scores=lambda ids: torch.zeros(2, 5))
    with pytest.raises(ArgumentError, match="num_candidates"):
        make(10, 0)


def test_candidate_scores_in_blocks_and_with_a_bias() -> None:
    queries, weight = random_problem(100, 5, dim=256)
    bias, ids = torch.randn(100).double(), torch.randint(100, (5, 2000))  # 4 MB of class vectors per row
    expected = (queries @ weight.T + bias).gather(1, ids)
    assert torch.allclose(candidate_scores(request(queries, weight, bias), ids), expected)
    shared = (queries @ weight.T + bias)[:, ids[0]]
    assert torch.allclose(candidate_scores(request(queries, weight, bias), ids[0]), shared)
    half = candidate_scores(request(queries.bfloat16(), weight.bfloat16()), ids)
    assert half.dtype == torch.float32


def repeated_draws(
    sampler: TwoPassSampler, queries: Tensor, num_negatives: int, shared: bool, **arguments: Any
) -> list[Draw]:
    """Many draws with independent pools: 800 calls."""
    generator = torch.Generator().manual_seed(4)
    return [sampler(num_negatives, input=queries, shared=shared, generator=generator, **arguments) for _ in range(800)]


def mean_is_zero(values: Tensor) -> bool:
    """Whether the mean of independent rows is zero within 4 standard errors."""
    return bool((values.mean(0).abs() < 4 * values.std(0) / math.sqrt(len(values))).all())


@pytest.mark.parametrize(("shared", "shared_candidates"), [(False, False), (False, True), (True, False)])
def test_two_pass_estimates_the_partition_function_without_bias(shared: bool, shared_candidates: bool) -> None:
    # E[exp(s - log q)] = Z for each row if log q is right, for any pool size and any base.
    queries, weight = random_problem(30, 2, scale=0.7)
    base = PopularitySampler(torch.arange(1, 31))
    sampler, scores = TwoPassSampler(30, 5, base=base, shared_candidates=shared_candidates), queries @ weight.T
    estimates = [
        ((scores[:, draw.ids] if shared else scores.gather(1, draw.ids)) - draw.log_q).exp().mean(-1)
        for draw in repeated_draws(sampler, queries, 2, shared, linear_weight=weight)
    ]
    assert mean_is_zero(torch.stack(estimates) - scores.exp().sum(-1))


@pytest.mark.parametrize("shared", [False, True])
def test_two_pass_estimates_the_marginal_of_the_target_without_bias(shared: bool) -> None:
    queries, weight = random_problem(8, 2)
    target = torch.tensor([1, 6])
    draws = repeated_draws(TwoPassSampler(8, 3), queries, 1, shared, linear_weight=weight, target=target)
    stated = torch.stack([draw.log_q_target.exp() for draw in draws])
    drawn = torch.stack([draw.hits(target).double().mean(-1) for draw in draws])
    assert mean_is_zero(stated - drawn)


def test_two_pass_from_one_candidate_is_its_base() -> None:
    base = PopularitySampler([1, 2, 3, 4, 5, 6, 7, 8])
    queries, weight = random_problem(8, 3)
    draw = TwoPassSampler(8, 1, base=base)(1, input=queries, linear_weight=weight, target=torch.tensor([1, 4, 7]))
    assert torch.allclose(draw.log_q, base.log_q(draw.ids, dtype=torch.float64))
    assert torch.allclose(draw.log_q_target, base.log_q(torch.tensor([1, 4, 7]), dtype=torch.float64))


def test_two_pass_from_many_candidates_is_the_softmax() -> None:
    queries, weight = random_problem(8, 3)
    draw = TwoPassSampler(8, 40_000)(50, input=queries, linear_weight=weight, target=torch.tensor([1, 4, 7]))
    log_probs = (queries @ weight.T).log_softmax(-1)
    assert torch.allclose(draw.log_q, log_probs.gather(1, draw.ids), atol=0.05)
    assert torch.allclose(draw.log_q_target, log_probs[range(3), [1, 4, 7]], atol=0.05)


def test_two_pass_needs_a_fixed_base() -> None:
    with pytest.raises(ArgumentTypeError, match="base"):
        TwoPassSampler(8, 3, base=MIDXSampler(8))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="base"):
        TwoPassSampler(8, 3, base=PopularitySampler([1, 2]))
    queries, weight = random_problem(3, 2)
    sampler = TwoPassSampler(3, 3, base=PopularitySampler([1, 0, 1]))
    with pytest.raises(ArgumentError, match="q = 0"):
        sampler(2, input=queries, linear_weight=weight, target=torch.tensor([0, 1]))
