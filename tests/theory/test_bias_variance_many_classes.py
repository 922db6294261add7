"""Bias and variance for many classes, where bins of weights and a few labels stand for all; and extreme weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.ops import log_sums
from manymax.theory import inputs
from manymax.theory.bias_variance import deviation, estimate
from tests.exact import labels, normal
from tests.theory.bias_helpers import DRAWN, corrected, log_q, relative_error


@pytest.mark.parametrize("correction", ESTIMATES)
def test_bins_of_many_weights_change_nothing(correction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target, proposal = 2.5 * normal(2, 3000), labels(2, num_classes=3000), log_q(3000)
    if correction != "importance":  # "importance" refuses a proposal that draws masked classes
        scores[:, 7] = -torch.inf
    options: dict[str, Any] = {"log_q": proposal, "num_negatives": 20, "correction": correction}
    in_bins = estimate("ssm", scores, target, **options)
    monkeypatch.setattr(log_sums, "BINS", 10**6)
    one_by_one = estimate("ssm", scores, target, **options)
    for part in ("exact_bias", "exact_variance", "bias", "variance"):
        torch.testing.assert_close(getattr(in_bins, part), getattr(one_by_one, part), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "correction"), DRAWN)
@pytest.mark.parametrize("k", [2, 300])
def test_a_few_labels_stand_for_all(name: str, correction: str | None, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, proposal = 2 * normal(1, 600), 0.7 * log_q(600)
    options: dict[str, Any] = {"log_q": proposal.log_softmax(-1), "num_negatives": k, **corrected(correction)}
    few = estimate(name, scores, **options)
    monkeypatch.setattr(inputs, "LABELS_PER_ROW", 600)
    every = estimate(name, scores, **options)
    torch.testing.assert_close(few.deviation, every.deviation, rtol=0.004, atol=0)
    torch.testing.assert_close(few.exact_bias, every.exact_bias, rtol=0.004, atol=1e-4)
    torch.testing.assert_close(few.offset, every.offset)


def test_labels_of_equal_probability_with_different_proposals_are_kept_apart() -> None:
    """Two classes have the same probability, but one is drawn often and the other almost never."""
    probs, q = (torch.full((200,), rest / 198, dtype=torch.float64) for rest in (0.2, 0.499))
    probs[:2], q[0], q[1] = 0.4, 0.5, 0.001
    scores, options = probs.log().unsqueeze(0), {"log_q": q.log(), "num_negatives": 1, "correction": "partition"}
    each = [estimate("ssm", scores, torch.tensor([y]), **options) for y in (0, 1, 2)]
    expected = sum(share * one.exact_bias for share, one in zip((0.4, 0.4, 0.2), each, strict=True))
    torch.testing.assert_close(estimate("ssm", scores, **options).exact_bias, expected)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target = normal(5, 8), labels(5, num_classes=8)
    whole = estimate("ssm", scores, target, num_negatives=4)
    monkeypatch.setattr(inputs, "SCORES_PER_INPUT", 16)
    for part in ("exact_bias", "exact_variance", "bias", "variance", "deviation", "offset"):
        torch.testing.assert_close(
            getattr(estimate("ssm", scores, target, num_negatives=4), part), getattr(whole, part)
        )
    tables = normal(70, 8).log_softmax(-1)
    alone = torch.cat([deviation("hsm", row, tree=2 * row) for row in tables.split(1)])
    torch.testing.assert_close(deviation("hsm", tables, tree=2 * tables), alone)


@pytest.mark.parametrize("k", [1, 100, 10**6])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 100.0])
def test_extreme_weights_stay_finite_and_within_bounds(k: int, spread: float) -> None:
    scores = spread * normal(3, 20)
    found = estimate("ssm", scores, scores.argmin(-1), num_negatives=k, correction="partition")
    assert found.exact_bias.isfinite().all()
    assert (found.exact_bias <= 1e-12).all()  # by Jensen's inequality
    assert (found.exact_bias >= scores.min(-1).values - scores.logsumexp(-1) - 1e-9).all()  # Z >= exp(s_y)
    assert (found.exact_variance >= 0).all()
    fewer = estimate("ssm", scores, scores.argmin(-1), num_negatives=max(1, k // 10), correction="partition")
    assert (fewer.exact_bias <= found.exact_bias + 1e-12).all()


def test_tiny_variances_keep_their_digits() -> None:
    """At k = 10^6 and with P close to q the Delta method is right to many digits; the quadrature must agree with it."""
    scores = 0.01 * normal(1, 30)
    found = estimate("ssm", scores, torch.tensor([3]), num_negatives=10**6, correction="partition")
    assert relative_error(found) < 1e-5
    assert found.variance < 1e-7


@pytest.mark.parametrize("heads", [0.5, 1e-3, 1e-8])
@pytest.mark.parametrize("x", [1e-6, 1.0, 1e9, 1e18])
def test_the_log_sum_of_one_draw_of_two_values(heads: float, x: float) -> None:
    """1 plus one draw of 0 or x: the logarithm is 0 or log(1 + x)."""
    values, q = torch.tensor([0.0, x], dtype=torch.float64), torch.tensor([1 - heads, heads], dtype=torch.float64)
    mean, variance = log_sums.log_sum_moments(torch.ones(()).double(), values, q, 1)
    assert mean.item() == pytest.approx(heads * math.log1p(x), rel=1e-6, abs=1e-14)
    assert variance.item() == pytest.approx(heads * (1 - heads) * math.log1p(x) ** 2, rel=1e-6, abs=1e-13)


def test_a_sum_that_can_be_zero_has_an_infinite_mean_logarithm() -> None:
    values, q = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    mean, variance = log_sums.log_sum_moments(torch.zeros(()).double(), values, q, 1)
    assert mean == -math.inf
    assert variance.isnan()
