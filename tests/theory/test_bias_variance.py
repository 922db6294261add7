"""Exact bias and variance against enumeration and draws, predictions against formulas, and the k that a goal needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import bias as enumeration
from manymax.engine.approximation import TOLERANCE
from manymax.errors import ArgumentError
from manymax.members.nce.loss import expected_loss
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.theory.bias_variance import deviation, divergences, drawn, estimate, negatives_needed
from tests.exact import labels, normal
from tests.theory.bias_helpers import DRAWN, SCORES, TARGET, Q, corrected, log_q, losses


@pytest.mark.parametrize(("name", "correction"), DRAWN)
@pytest.mark.parametrize("k", [1, 2, 6])
def test_exact_moments_by_enumeration(name: str, correction: str | None, k: int) -> None:
    ids, weights = enumeration.all_samples(Q, k)
    result = estimate(name, SCORES, TARGET, log_q=Q.log(), num_negatives=k, **corrected(correction))
    for row, target in enumerate(TARGET.tolist()):
        values = losses(name, correction, SCORES[row], target, ids, Q.log())
        mean = (weights * values).sum()
        full = -SCORES[row].log_softmax(-1)[target]
        torch.testing.assert_close(result.exact_bias[row] + result.offset[row], mean - full)
        torch.testing.assert_close(result.exact_variance[row], (weights * (values - mean) ** 2).sum())
        torch.testing.assert_close(result.deviation, result.exact_bias**2 + result.exact_variance)


@pytest.mark.parametrize(("name", "correction"), DRAWN)
def test_exact_moments_by_draws(name: str, correction: str | None, seed: int) -> None:
    scores, target, proposal = 2 * normal(5, 50), labels(5, num_classes=50), log_q(50)
    options: dict[str, Any] = {"log_q": proposal, "num_negatives": 12, **corrected(correction)}
    exact = estimate(name, scores, target, **options)
    found = drawn(name, scores, target, **options, draws=8000, generator=torch.Generator().manual_seed(seed))
    assert ((found.bias - exact.exact_bias).abs() <= 4 * found.bias_error).all()
    assert ((found.variance - exact.exact_variance).abs() <= 4.5 * found.variance_error).all()


def test_standard_errors_match_the_spread_of_repetitions(seed: int) -> None:
    """The spread of many repeated measurements is the standard error that each of them states."""
    generator = torch.Generator().manual_seed(seed)
    scores, target = SCORES[:1], TARGET[:1]
    repeated = [
        drawn("ssm", scores, target, log_q=Q.log(), num_negatives=3, draws=400, generator=generator) for _ in range(200)
    ]
    for name in ("bias", "variance"):
        values = torch.cat([getattr(result, name) for result in repeated])
        claimed = torch.cat([getattr(result, f"{name}_error") for result in repeated])
        assert values.std().item() == pytest.approx(claimed.mean().item(), rel=0.25)


@pytest.mark.parametrize("name", ["sampled_softmax", "nce", "rg", "taylor_softmax", "hierarchical_softmax"])
def test_without_labels_results_are_means_over_labels(name: str) -> None:
    tree = (2 * SCORES).log_softmax(-1)
    options: dict[str, Any] = {"log_q": Q.log(), "num_negatives": 3, "tree": tree}
    mean = estimate(name, SCORES, **options)
    probs = SCORES.softmax(-1)
    by_label = [estimate(name, SCORES, torch.full((2,), y), **options) for y in range(4)]
    for part in ("bias", "variance", "exact_bias", "exact_variance", "deviation", "offset"):
        expected = sum(probs[:, y] * getattr(by_label[y], part) for y in range(4))
        torch.testing.assert_close(getattr(mean, part), expected)
    assert torch.equal(mean.in_range, torch.stack([result.in_range for result in by_label]).all(0))


def test_the_delta_formulas() -> None:
    """Asymptotic part, curvature part and variance of each correction, written out."""
    k, probs, q = 40, SCORES.softmax(-1)[0], Q
    ratio, y = probs / q, 1
    chi2 = (q * (ratio - 1) ** 2).sum()
    others = torch.arange(4) != y
    v = (others * probs**2 / q).sum() - (1 - probs[y]) ** 2
    mean = (q * probs).sum()
    total = probs[y] + k * mean
    spread = k * (q * (probs - mean) ** 2).sum() / total**2
    expected = {
        "importance": (0.0, -chi2 / (2 * k), chi2 / k),
        "partition": (0.0, -v / (2 * k), v / k),
        "none": (total.log() - math.log((k + 1) / 4), -spread / 2, spread),
        "logq": (
            ((ratio[y] + k) / (k + 1)).log(),
            -k * chi2 / (2 * (ratio[y] + k) ** 2),
            k * chi2 / (ratio[y] + k) ** 2,
        ),
    }
    for correction, row in expected.items():
        found = estimate("ssm", SCORES[0], torch.tensor(y), log_q=q.log(), num_negatives=k, correction=correction)
        values = [found.asymptotic.item(), found.curvature.item(), found.variance.item()]
        assert values == pytest.approx([float(value) for value in row], rel=1e-9, abs=1e-14)


def test_the_bias_of_logq_is_positive_and_that_of_partition_negative() -> None:
    """Over y ~ P the bias of "logq" is +chi2/(2k), while estimates of Z itself have a negative bias."""
    chi2 = divergences(SCORES, Q.log())["chi_square"]
    k = 4000
    found = {c: estimate("ssm", SCORES, log_q=Q.log(), num_negatives=k, correction=c) for c in ESTIMATES}
    torch.testing.assert_close(found["logq"].exact_bias, chi2 / (2 * k), rtol=0.01, atol=0)
    torch.testing.assert_close(found["importance"].exact_bias, -chi2 / (2 * k), rtol=0.01, atol=0)
    assert (found["partition"].exact_bias < 0).all()
    assert all(result.in_range.all() for result in found.values())


def test_under_a_uniform_proposal_logq_and_none_are_the_same() -> None:
    one, other = (estimate("ssm", SCORES, TARGET, num_negatives=7, correction=c) for c in ("logq", "none"))
    for part in ("bias", "variance", "exact_bias", "exact_variance", "offset"):
        torch.testing.assert_close(getattr(one, part), getattr(other, part))


def test_importance_with_one_negative_has_a_kl_divergence_as_its_bias() -> None:
    found = estimate("ssm", SCORES, TARGET, log_q=Q.log(), num_negatives=1, correction="importance")
    probs = SCORES.softmax(-1)
    torch.testing.assert_close(found.exact_bias, (Q * (probs / Q).log()).sum(-1))


# --- NCE ---


@pytest.mark.parametrize("k", [1, 9, 200])
def test_the_mean_nce_loss_is_an_entropy_minus_a_divergence(k: int) -> None:
    found = estimate("nce", SCORES, log_q=Q.log(), num_negatives=k)
    probs = SCORES.softmax(-1)
    gap = expected_loss(probs, Q, k) + (probs * probs.log()).sum(-1)
    torch.testing.assert_close(found.exact_bias + found.offset, gap)
    jensen_shannon = divergences(SCORES, Q.log(), k)["jensen_shannon"]
    entropy = math.log(1 + k) - k / (1 + k) * math.log(k)
    torch.testing.assert_close(expected_loss(probs, Q, k), (1 + k) * (entropy - jensen_shannon))


def test_the_predicted_nce_variance_is_the_printed_one_and_the_exact_one_differs() -> None:
    probs, k = SCORES.softmax(-1), 5
    found = estimate("nce", SCORES, TARGET, log_q=Q.log(), num_negatives=k)
    chi2 = divergences(SCORES, Q.log())["chi_square"]
    torch.testing.assert_close(found.variance, k * chi2 / (1 + k) ** 2)
    logs = (k + probs / Q).log()
    torch.testing.assert_close(found.exact_variance, k * ((Q * logs**2).sum(-1) - (Q * logs).sum(-1) ** 2))
    assert torch.equal(found.in_range, (found.variance / found.exact_variance - 1).abs() <= TOLERANCE)


def test_nce_of_unnormalised_scores_keeps_a_bias_however_many_negatives() -> None:
    """As k grows the bias tends to Z - 1 - log Z, which is 0 only at Z = 1."""
    scores = SCORES.log_softmax(-1)
    for shift in (-0.5, 0.0, 0.7):
        found = estimate("nce", scores + shift, TARGET, log_q=Q.log(), num_negatives=10**6, log_z=0.0)
        limit = torch.full_like(found.exact_bias, math.exp(shift) - 1 - shift)
        torch.testing.assert_close(found.exact_bias, limit, rtol=0, atol=1e-4)
    normalised = estimate("nce", SCORES + 5, TARGET, log_q=Q.log(), num_negatives=6)
    torch.testing.assert_close(
        normalised.exact_bias, estimate("nce", scores, TARGET, log_q=Q.log(), num_negatives=6, log_z=0.0).exact_bias
    )
    found = drawn("nce", scores + 0.7, TARGET, log_q=Q.log(), num_negatives=9, log_z=0.2, draws=4000)
    exact = estimate("nce", scores + 0.7, TARGET, log_q=Q.log(), num_negatives=9, log_z=0.2)
    assert ((found.bias - exact.exact_bias).abs() <= 4 * found.bias_error).all()


# --- how many negatives ---


@pytest.mark.parametrize(
    ("name", "correction"), [("sampled_softmax", "logq"), ("sampled_softmax", "partition"), ("nce", None)]
)
@pytest.mark.parametrize("goal", [0.3, 0.05])
def test_negatives_needed_finds_what_trying_all_k_finds(name: str, correction: str | None, goal: float) -> None:
    options: dict[str, Any] = {"log_q": Q.log(), **corrected(correction)}
    sizes = [k for k in range(1, 90) if deviation(name, SCORES, num_negatives=k, **options).mean() <= goal]
    assert negatives_needed(name, SCORES, goal, **options) == sizes[0]
    assert sizes == list(range(sizes[0], 90))


def test_goals_that_cannot_be_reached() -> None:
    assert negatives_needed("ssm", SCORES, 1e-3, log_q=Q.log(), correction="none") is None
    assert negatives_needed("nce", SCORES, 1e-3, log_q=Q.log(), log_z=0.0) is None
    assert negatives_needed("ssm", SCORES, 1e-3, log_q=Q.log(), maximum=10) is None
    with pytest.raises(ArgumentError, match="`goal`"):
        negatives_needed("ssm", SCORES, 0.0)
