"""Noise contrastive estimation over all samples: what minimises its mean, its mean and variance, its facts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.members.nce.loss import expected_loss, variance
from manymax.ops.divergences import chi_square, jensen_shannon, kl
from tests.losses.nce_cases import FACTS, IDS, TARGET, Q, hessian, loss_of_classes

# --- what the population minimises ---


def exactly(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


POPULATIONS = [
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 1),
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 2),
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 4),
    (exactly(0.45, 0.25, 0.2, 0.1), exactly(0.15, 0.4, 0.05, 0.4), 3),
    (exactly(0.8, 0.2), exactly(0.3, 0.7), 10),
]
each_population = pytest.mark.parametrize(("probs", "q", "num_negatives"), POPULATIONS)


def losses_of_all_samples(
    scores: Tensor, probs: Tensor, q: Tensor, num_negatives: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Losses (C, C^k), for every y and every sequence of draws, and the probabilities (C^k,) of the draws."""
    num_classes = len(q)
    ids = torch.tensor(list(itertools.product(range(num_classes), repeat=num_negatives)))
    targets = torch.arange(num_classes).unsqueeze(-1).expand(num_classes, len(ids))
    every = ids.expand(num_classes, *ids.shape)
    return loss_of_classes(scores, targets, every, q.log(), **options), q[ids].prod(-1)


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """The minimiser of a strictly convex risk, by Newton steps that never raise the risk."""
    scores = torch.zeros(num_classes, dtype=torch.float64)
    for _ in range(100):
        slope = torch.func.grad(risk)(scores)
        if slope.norm() < 1e-12:
            break
        step = torch.linalg.solve(hessian(risk)(scores), slope)
        length = 1.0
        while risk(scores - length * step) > risk(scores) + 1e-15:
            length /= 2
        scores = scores - length * step
    assert slope.norm() < 1e-9
    return scores


def minimises(probs: Tensor, q: Tensor, num_negatives: int, **options: Any) -> Tensor:
    def risk(scores: Tensor) -> Tensor:
        losses, weights = losses_of_all_samples(scores, probs, q, num_negatives, **options)
        return (probs * (losses * weights).sum(-1)).sum()

    return minimiser(risk, len(probs))


@each_population
def test_minimiser_is_log_p(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    torch.testing.assert_close(minimises(probs, q, num_negatives), probs.log(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("log_z", [0.7, torch.tensor(-1.3)])
def test_minimiser_moves_with_log_z(log_z: float | Tensor) -> None:
    probs, q, num_negatives = POPULATIONS[1]
    best = minimises(probs, q, num_negatives, log_z=log_z)
    torch.testing.assert_close(best, probs.log() + float(log_z), rtol=0, atol=1e-6)


def test_masking_hits_moves_the_minimiser() -> None:
    probs, q, num_negatives = POPULATIONS[1]
    best = minimises(probs, q, num_negatives, policy="mask")
    assert (best - probs.log()).abs().max() > 0.05


# --- mean and variance ---


@each_population
def test_exact_mean(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    mean = (probs * (losses * weights).sum(-1)).sum()
    torch.testing.assert_close(expected_loss(probs, q, num_negatives), mean, rtol=1e-13, atol=1e-13)


@each_population
def test_exact_variance_for_every_positive(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    means = (losses * weights).sum(-1, keepdim=True)
    spread = ((losses - means) ** 2 * weights).sum(-1)
    torch.testing.assert_close(variance(probs, q, num_negatives).expand(len(q)), spread, rtol=1e-11, atol=1e-13)


def zipf(power: float, num_classes: int) -> Tensor:
    weights = torch.arange(1, num_classes + 1, dtype=torch.float64) ** -power
    return weights / weights.sum()


@pytest.mark.parametrize("num_classes", [5, 60])
@pytest.mark.parametrize("power", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("num_negatives", [1, 6, 40])
def test_mean_and_variance_agree_with_draws(num_classes: int, power: float, num_negatives: int, seed: int) -> None:
    draws = 20_000
    probs, q = zipf(1.5, num_classes), zipf(power, num_classes)
    target = torch.multinomial(probs, draws, replacement=True)
    ids = torch.multinomial(q, draws * num_negatives, replacement=True).view(draws, num_negatives)
    losses = loss_of_classes(probs.log(), target, ids, q.log())
    mean = expected_loss(probs, q, num_negatives).item()
    assert abs(losses.mean().item() - mean) <= 4 * losses.std().item() / math.sqrt(draws)
    fixed = loss_of_classes(probs.log(), torch.zeros_like(target), ids, q.log())
    squares = (fixed - fixed.mean()) ** 2
    spread = variance(probs, q, num_negatives).item()
    assert abs(squares.mean().item() - spread) <= 4 * squares.std().item() / math.sqrt(draws) + 1e-9


def printed_variance(probs: Tensor, q: Tensor, num_negatives: int) -> float:
    return (num_negatives * chi_square(probs, q) / (1 + num_negatives) ** 2).item()


def test_the_printed_variance_holds_only_near_the_noise() -> None:
    """k chi2 / (1 + k)^2 replaces log(k + t) by its tangent at t = 1: right for small chi2, else far too large."""
    q = torch.full((50,), 1 / 50, dtype=torch.float64)
    near, far = q * torch.tensor([1.3, 0.7]).repeat(25), zipf(3.0, 50)
    assert chi_square(near, q) == pytest.approx(0.09)
    for k in (1, 5):
        assert printed_variance(near, q, k) / variance(near, q, k).item() == pytest.approx(1, abs=0.12)
        assert printed_variance(far, q, k) / variance(far, q, k).item() > 8
    assert printed_variance(far, q, 100_000) / variance(far, q, 100_000).item() == pytest.approx(1, abs=0.01)


def test_the_divergence_lowers_the_mean_and_tends_to_kl() -> None:
    probs, q = zipf(1.0, 20), zipf(0.0, 20)
    weighted = [(1 + k) * jensen_shannon(probs, q, 1 / (1 + k)).item() for k in (1, 10, 100, 10_000)]
    assert weighted == sorted(weighted)
    assert weighted[-1] == pytest.approx(kl(probs, q).item(), rel=1e-3)
    assert expected_loss(probs, q, 10) < expected_loss(q, q, 10)


def test_the_gap_to_the_full_loss_grows_like_log_k() -> None:
    probs, q = zipf(1.0, 20), zipf(0.0, 20)
    gaps = [expected_loss(probs, q, k).item() for k in (1000, 10_000)]
    assert gaps[1] - gaps[0] == pytest.approx(math.log(10), rel=1e-2)


def test_the_gradient_tends_to_that_of_unnormalised_scores() -> None:
    """It tends to exp(s) - e_y, which differs from softmax(s) - e_y unless the scores are normalised."""
    scores, q, k = exactly(0.5, -1.0, 0.2), exactly(0.3, 0.3, 0.4), 200_000
    target = torch.tensor([1])
    ids = torch.repeat_interleave(torch.arange(3), (k * q).round().long()).unsqueeze(0)  # as often as expected
    gradient = torch.func.grad(lambda s: loss_of_classes(s, target, ids, q.log()).sum())(scores)
    expected = scores.exp() - torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-4)
    assert (gradient - (scores.softmax(-1) - torch.tensor([0.0, 1.0, 0.0]))).norm() > 0.5
    assert FACTS.fenchel_young.value is False


# --- facts ---


def class_hessian(scores: Tensor, target: int, ids: list[int], q: Tensor) -> Tensor:
    """The Hessian in the scores of the classes, duplicates and hits added up."""
    drawn = torch.tensor([ids])
    return hessian(lambda s: loss_of_classes(s, torch.tensor([target]), drawn, q.log()).sum())(scores)


def test_fact_convex_and_smoothness(seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    q = exactly(0.1, 0.2, 0.3, 0.4)
    for _ in range(50):
        ids = torch.randint(4, (5,)).tolist()
        eigenvalues = torch.linalg.eigvalsh(class_hessian(3 * torch.randn(4).double(), 0, ids, q))
        multiplicity = max([*ids, 0].count(j) for j in range(4))
        assert (eigenvalues[0].item() >= -1e-12) is FACTS.convex.value
        assert eigenvalues[-1] <= multiplicity / 4 + 1e-12
        assert eigenvalues[-1] <= FACTS.smoothness.fn(num_classes=4, num_negatives=5)
    balanced = (5 * q).log()  # every logit 0
    worst = torch.linalg.eigvalsh(class_hessian(balanced, 0, [0] * 5, q))[-1].item()
    assert worst == pytest.approx(FACTS.smoothness.fn(num_classes=4, num_negatives=5))
    distinct = torch.linalg.eigvalsh(class_hessian((3 * q).log(), 0, [1, 2, 3], q))[-1].item()
    assert distinct == pytest.approx(1 / 4)  # what the paper prints for all samples
    assert FACTS.smoothness.printed == "1/4"


def test_fact_shift_invariant(seed: int) -> None:
    scores = torch.randn(4, 5).double()
    moved, still = (loss_of_classes(s, TARGET, IDS, Q.log()) for s in (scores + 0.1, scores))
    assert torch.allclose(moved, still, rtol=0, atol=1e-12) is FACTS.shift_invariant.value


def test_fact_calibrated() -> None:
    ranked = [torch.equal(minimises(*population).argsort(), population[0].argsort()) for population in POPULATIONS]
    assert all(ranked) is FACTS.calibrated.value
    assert FACTS.calibrated.status == "contradicted"


def test_fact_cost_is_the_number_of_scores() -> None:
    assert FACTS.cost.fn is not None
    positive, negative = torch.randn(8), torch.randn(8, 20)
    for num_classes in (10, 10**6):
        cost = FACTS.cost.fn(batch=8, num_classes=num_classes, num_negatives=20)
        assert cost == positive.numel() + negative.numel()
    assert FACTS.cost.value == "constant"


@each_population
def test_fact_bias_and_variance(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    """The bias is the mean loss minus H(P), the mean loss of the full softmax."""
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    mean = (losses * weights).sum(-1)
    gap = (probs * (mean + probs.log())).sum().item()
    spread = ((losses[0] - mean[0]) ** 2 * weights).sum().item()
    assert FACTS.bias.fn(probs=probs, q=q, num_negatives=num_negatives) == pytest.approx(gap, abs=1e-12)
    assert FACTS.variance.fn(probs=probs, q=q, num_negatives=num_negatives) == pytest.approx(spread, rel=1e-10)
    printed = (1 + num_negatives) * jensen_shannon(probs, q, 1 / (1 + num_negatives)).item()
    assert gap != pytest.approx(printed, rel=0.1)


def test_facts_at_classes_without_probability() -> None:
    """A class that P never takes adds nothing to its entropy, and one that q never draws nothing to the variance."""
    probs, q = exactly(0.6, 0.4, 0.0), exactly(0.5, 0.5, 0.0)
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    for fn in (FACTS.bias.fn, FACTS.variance.fn):
        whole = fn(probs=probs, q=q, num_negatives=3)
        assert whole == pytest.approx(fn(probs=probs[:2], q=q[:2], num_negatives=3), abs=1e-14)
