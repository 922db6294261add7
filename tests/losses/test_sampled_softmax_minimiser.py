"""Sampled softmax over all samples: what minimises its mean, its mean gradient, its facts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.sampled_softmax_cases import (
    FACTS,
    IDS,
    P3,
    P4,
    Q3,
    Q4,
    TARGET,
    Q,
    bias,
    distribution,
    estimates,
    hessian,
    loss_of_classes,
    slope,
)


def expected_loss(scores: Tensor, probs: Tensor, q: Tensor, num_negatives: int, variant: Any) -> Tensor:
    """The risk: the mean of the loss over all labels y and all samples, which are enumerated."""
    ids, weights = bias.all_samples(q, num_negatives)
    risks = []
    for y in range(len(probs)):
        target = torch.full((len(ids),), y)
        risks.append((weights * loss_of_classes(scores, target, ids, q.log(), variant)).sum())
    return (probs * torch.stack(risks)).sum()


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """Log-probabilities of the minimiser of a convex, shift invariant risk, by Newton steps that never raise it."""
    scores = torch.zeros(num_classes, dtype=torch.float64)
    for _ in range(100):
        slope = torch.func.grad(risk)(scores)
        if slope.norm() < 1e-12:
            break
        step = torch.linalg.pinv(hessian(risk)(scores), rtol=1e-12) @ slope
        length = 1.0
        while risk(scores - length * step) > risk(scores) + 1e-15:
            length /= 2
        scores = scores - length * step
    assert slope.norm() < 1e-9
    return scores.log_softmax(-1)


def minimises(probs: Tensor, q: Tensor, num_negatives: int, variant: Any) -> Tensor:
    return minimiser(lambda scores: expected_loss(scores, probs, q, num_negatives, variant), len(probs))


def test_samples_are_all_that_can_be_drawn() -> None:
    ids, weights = bias.all_samples(Q3, 3)
    ordered = list(itertools.product(range(3), repeat=3))
    for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        same = [draw for draw in ordered if sorted(draw) == sorted(row)]
        assert weight == pytest.approx(sum(math.prod(Q3[j].item() for j in draw) for draw in same), rel=1e-13)
    assert len(ids) == len({tuple(sorted(draw)) for draw in ordered})
    assert weights.sum().item() == pytest.approx(1, abs=1e-13)


each_population = pytest.mark.parametrize(("probs", "q"), [(P3, Q3), (P4, Q4)], ids=["C=3", "C=4"])
each_size = pytest.mark.parametrize("num_negatives", [1, 2, 4])


@each_population
@each_size
def test_corrected_with_hits_kept_reaches_log_p(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    best = minimises(probs, q, num_negatives, ("logq", "keep", None))
    torch.testing.assert_close(best, probs.log(), rtol=0, atol=1e-7)


@each_population
@each_size
def test_simple_reaches_log_p_over_q(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    best = minimises(probs, q, num_negatives, ("none", "keep", None))
    torch.testing.assert_close(best, (probs / q).log().log_softmax(-1), rtol=0, atol=1e-7)


@each_size
def test_masking_hits_moves_corrected_off_log_p(num_negatives: int) -> None:
    best = minimises(P3, Q3, num_negatives, ("logq", "mask", None))
    gap = (best - P3.log()).abs().max().item()
    assert gap < 1e-7 if num_negatives == 1 else gap > 1e-3


def test_partition_reaches_log_p_only_as_k_grows() -> None:
    gaps = [(minimises(P3, Q3, k, ("partition", "mask", None)) - P3.log()).abs().max().item() for k in (1, 4, 16, 64)]
    assert gaps[0] > 0.3
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.25 * gaps[1]
    assert gaps[-1] == pytest.approx(gaps[-2] / 4, rel=0.25)  # O(1/k)


def test_partition_with_hits_kept_tends_elsewhere() -> None:
    """In the limit P (1 + P) is proportional to p: classes are ranked like p, but the values are not those of p."""
    limits = []
    for k in (32, 64):
        limits.append(minimises(P3, Q3, k, ("partition", "keep", None)).exp())
    probs = 2 * limits[1] - limits[0]  # without its 1/k
    torch.testing.assert_close(probs * (1 + probs) / (probs * (1 + probs)).sum(), P3, rtol=0, atol=3e-3)
    assert (probs - P3).abs().max() > 0.01


@pytest.mark.slow
def test_which_variants_keep_the_order_of_p(seed: int) -> None:
    """ "logq" with hits kept always does, and under a uniform proposal all variants do; "none" ranks by p / q."""
    variants = [("logq", "keep", None), ("none", "keep", None), ("partition", "mask", None)]
    wrong = dict.fromkeys(variants, 0)
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    for _ in range(8):
        probs, q = torch.distributions.Dirichlet(torch.ones(2, 4).double()).sample()
        q = 0.9 * q + 0.1 * uniform  # so that the Newton steps stay well conditioned
        for variant in variants:
            wrong[variant] += not torch.equal(minimises(probs, q, 2, variant).argsort(), probs.argsort())
            assert torch.equal(minimises(probs, uniform, 2, variant).argsort(), probs.argsort())
    assert wrong["logq", "keep", None] == 0
    assert wrong["none", "keep", None] > 0


# --- gradients ---


def mean_gradient(scores: Tensor, q: Tensor, target: int, num_negatives: int, variant: Any) -> Tensor:
    ids, weights = bias.all_samples(q, num_negatives)
    targets = torch.full((len(ids),), target)
    return torch.func.grad(lambda s: (weights * loss_of_classes(s, targets, ids, q.log(), variant)).sum())(scores)


def test_gradients_of_the_model_s_own_proposal() -> None:
    """With q = P the mean gradient is k / (k + 1) of the full one, so it is biased, contrary to the paper."""
    scores = P4.log()
    full = P4 - torch.eye(4, dtype=torch.float64)[1]
    for k in (1, 2, 5):
        torch.testing.assert_close(mean_gradient(scores, P4, 1, k, ("logq", "keep", None)), k / (k + 1) * full)
    assert FACTS.fenchel_young.value is False
    assert FACTS.fenchel_young.status == "contradicted"


@pytest.mark.parametrize(("correction", "policy"), [("logq", "keep"), ("partition", "mask")])
def test_bias_of_the_gradient_falls_like_one_over_k(correction: str, policy: str) -> None:
    scores, full = P3.log(), P3 - torch.eye(3, dtype=torch.float64)[0]
    sizes = [16, 32, 64]
    gaps = [(mean_gradient(scores, Q3, 0, k, (correction, policy, None)) - full).norm().item() for k in [1, *sizes]]
    assert gaps[0] > 0.15
    assert slope(gaps[1:], sizes) == pytest.approx(-1, abs=0.15)


# --- facts ---


def merged_hessian(scores: Tensor, target: int, ids: Tensor, correction: str) -> Tensor:
    """The Hessian in the scores of the classes, duplicates and hits added up."""
    q = torch.full((len(scores),), 1 / len(scores), dtype=torch.float64)
    variant = (correction, "mask" if correction == "partition" else "keep", None)
    loss = lambda s: loss_of_classes(s, torch.tensor([target]), ids, q.log(), variant).sum()  # noqa: E731
    return hessian(loss)(scores)


def test_fact_convex_and_smoothness(seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    claimed = FACTS.smoothness.fn(num_classes=4)
    lowest, highest = 0.0, 0.0
    for _ in range(100):
        correction = ("none", "logq", "partition")[torch.randint(3, ()).item()]
        scores, ids = 3 * torch.randn(4).double(), torch.randint(4, (1, 6))
        eigenvalues = torch.linalg.eigvalsh(merged_hessian(scores, 0, ids, correction))
        lowest, highest = min(lowest, eigenvalues[0].item()), max(highest, eigenvalues[-1].item())
    two = torch.linalg.eigvalsh(merged_hessian(torch.zeros(4).double(), 0, torch.tensor([[1, 1, 0, 0, 1]]), "none"))
    assert (lowest >= -1e-12) is FACTS.convex.value
    assert max(highest, two[-1].item()) <= claimed + 1e-12
    assert two[-1].item() == pytest.approx(claimed)  # three ones and three zeros: a fair coin, reached
    assert FACTS.smoothness.value == claimed
    assert FACTS.smoothness.fn(num_classes=1) == merged_hessian(torch.zeros(1).double(), 0, torch.tensor([[0]]), "none")


@pytest.mark.parametrize("correction", ["none", "logq", "partition"])
def test_fact_shift_invariant(correction: str, seed: int) -> None:
    variant = (correction, "mask", None)
    scores = torch.randn(4, 5).double()
    moved, still = (loss_of_classes(s, TARGET, IDS, Q.log(), variant) for s in (scores + 3.7, scores))
    assert torch.allclose(moved, still, rtol=0, atol=1e-12) is FACTS.shift_invariant.value


def test_fact_calibrated() -> None:
    """The default ranks like p for every k; the paper says so only for growing k."""
    best = [minimises(P4, Q4, k, ("logq", "keep", None)) for k in (1, 3)]
    assert all(torch.equal(s.argsort(), P4.argsort()) for s in best) is FACTS.calibrated.value
    simple = minimises(P4, Q4, 3, ("none", "keep", None))
    assert not torch.equal(simple.argsort(), P4.argsort())
    assert FACTS.calibrated.printed == "asymptotic"


def test_fact_cost_is_the_number_of_scores() -> None:
    assert FACTS.cost.fn is not None
    positive, negative = torch.randn(8), torch.randn(8, 20)
    for num_classes in (10, 10**6):
        cost = FACTS.cost.fn(batch=8, num_classes=num_classes, num_negatives=20)
        assert cost == positive.numel() + negative.numel()
    assert FACTS.cost.value == "constant"


def test_fact_bias_and_variance() -> None:
    """Bias and variance of "logq", minus the offset log((k + 1) q_y), for y ~ P, to leading order."""
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    probs, q, k = distribution("zipf", 12), distribution("reversed", 12), 2000
    moments = [bias.log_sum_moments(*estimates(probs.log(), q, y, k)["logq"], q, k) for y in range(12)]
    mean = sum(p * (m - math.log(k + 1)) for p, (m, _) in zip(probs.tolist(), moments, strict=True))
    variance = sum(p * v for p, (_, v) in zip(probs.tolist(), moments, strict=True))
    assert FACTS.bias.fn(probs=probs, q=q, num_negatives=k) == pytest.approx(mean, rel=0.02)
    assert FACTS.variance.fn(probs=probs, q=q, num_negatives=k) == pytest.approx(variance, rel=0.02)
    assert mean > 0  # the printed bias is negative
    assert FACTS.bias.status == "contradicted"
