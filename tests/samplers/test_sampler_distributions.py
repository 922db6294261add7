"""Draws of every sampler follow the distribution that the sampler states.

That is `log_probs` where it is exact. Where it depends on a pool of candidates, `POOL_DISTRIBUTIONS` has a slow
reference, which goes through all pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from manymax.samplers import Sampler, SamplerEntry
from tests.samplers.sampler_cases import BATCH, CASES, EXACT, FIXED, NEGATIVES, C, make, positives, vectors

FOUR_SIGMA = 6.3e-5  # the two-sided p-value of a deviation of four standard errors


def best_of_pool(scores: np.ndarray, num_negatives: int) -> np.ndarray:
    """The share of each candidate among the k that are kept, the best ones: (rows, M) for scores (rows, M)."""
    kept = np.zeros_like(scores)
    for row, sorted_positions in zip(kept, np.argsort(-scores, axis=1, kind="stable"), strict=True):
        row[sorted_positions[:num_negatives]] = 1 / num_negatives
    return kept


def resampled(scores: np.ndarray, num_negatives: int) -> np.ndarray:
    """The probability of each candidate in the second draw; candidates are uniform, so that weights are exp(s)."""
    weights = np.exp(scores)
    return weights / weights.sum(1, keepdims=True)


def distribution_over_all_pools(
    choose: Callable[[np.ndarray, int], np.ndarray], scores: np.ndarray, num_candidates: int, num_negatives: int
) -> np.ndarray:
    """The marginal distribution over the classes, (rows, C): the mean over all C^M pools of the choice from each."""
    distribution = np.zeros_like(scores)
    pools = list(itertools.product(range(scores.shape[1]), repeat=num_candidates))
    for pool in pools:
        share = choose(scores[:, list(pool)], num_negatives)
        for position, class_id in enumerate(pool):
            distribution[:, class_id] += share[:, position] / len(pools)
    return distribution


# How candidates are chosen from a pool, and what shared draws do: choose once by the mean scores of the rows, or draw
# from the mean of the distributions of the rows.
POOL_DISTRIBUTIONS = {"dns": (best_of_pool, "mean score"), "two_pass": (resampled, "mean distribution")}


def stated_distribution(entry: SamplerEntry, sampler: Sampler, shared: bool) -> np.ndarray:
    """The distribution that the sampler states, (rows, C); one row if draws are shared."""
    if entry.exact_log_q:
        log_probs = sampler.log_probs(input=vectors()["input"], shared=shared, dtype=torch.float64)
        return log_probs.exp().expand(1 if shared else BATCH, C).numpy()
    assert entry.name in POOL_DISTRIBUTIONS, f"add {entry.name} to POOL_DISTRIBUTIONS"
    choose, sharing = POOL_DISTRIBUTIONS[entry.name]
    scores = (vectors()["input"] @ vectors()["linear_weight"].T).numpy()
    if shared and sharing == "mean score":
        scores = scores.mean(0, keepdims=True)
    distribution = distribution_over_all_pools(choose, scores, sampler.num_candidates, NEGATIVES)  # type: ignore[arg-type]
    return distribution.mean(0, keepdims=True) if shared else distribution


def p_value_of_mean(samples: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square test (Hotelling's) that independent rows have the mean `expected`, whatever their covariance.

    Along a direction in which they do not vary, as the sum of all shares, the mean must be met to the last digits.
    """
    variances, directions = np.linalg.eigh(np.cov(samples, rowvar=False))
    gap, varies = (samples.mean(0) - expected) @ directions, variances > 1e-10 * variances[-1]
    assert np.abs(gap[~varies]).max(initial=0) < 1e-10
    num, dof = len(samples), int(varies.sum())
    statistic = num * (gap[varies] ** 2 / variances[varies]).sum()
    return float(stats.f.sf(statistic * (num - dof) / (dof * (num - 1)), dof, num - dof))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), CASES)
def test_drawn_frequencies_follow_the_stated_distribution(
    entry: SamplerEntry, options: Mapping[str, Any], shared: bool
) -> None:
    # One call is one observation: the draws of a call may depend on each other (best of a pool, in-batch).
    sampler, generator, calls = make(entry, options), torch.Generator().manual_seed(11), 600
    distribution = stated_distribution(entry, sampler, shared)
    arguments = {**vectors(), "shared": shared, "generator": generator}
    ids = torch.stack([sampler(NEGATIVES, target=positives(generator), **arguments).ids for _ in range(calls)])
    drawn = torch.nn.functional.one_hot(ids.view(calls, -1, NEGATIVES), C).double().mean(2).numpy()  # (calls, rows, C)
    possible = distribution > 0
    assert (drawn[:, ~possible] == 0).all()
    assert p_value_of_mean(drawn[:, possible], distribution[possible]) > FOUR_SIGMA


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), FIXED)
def test_many_draws_pass_a_chi_square_test(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
    sampler = make(entry, options)
    generator = torch.Generator().manual_seed(2)
    ids = sampler(200_000 if shared else 20, batch=10_000, shared=shared, generator=generator).ids
    probs = sampler.log_probs(dtype=torch.float64).exp().numpy()
    drawn = ids.reshape(-1).bincount(minlength=C).numpy()
    assert (drawn[probs == 0] == 0).all()
    assert stats.chisquare(drawn[probs > 0], probs[probs > 0] * ids.numel()).pvalue > FOUR_SIGMA


@pytest.mark.parametrize(("entry", "options"), EXACT)
def test_probabilities_sum_to_one(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = make(entry, options)
    for shared in (False, True):
        total = sampler.log_probs(input=vectors()["input"], shared=shared, dtype=torch.float64).exp().sum(-1)
        assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-12)
