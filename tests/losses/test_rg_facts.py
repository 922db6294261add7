"""What RG states about itself: error of the expansion, minimiser, order, curvature and cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax import (
    rg,
    rg_log_partition,
    rg_loss,
)
from tests.losses.rg_cases import FACTS, SCORES, hessian

# --- how good the expansion is ---


def test_error_series_for_small_scores(seed: int) -> None:
    """The error is -mu3 / 6 - kappa4 / 24 plus terms of fifth order in the scores."""
    shape = torch.randn(12).double()
    left = []
    for size in (0.2, 0.1):
        scores = size * shape
        d = scores - scores.mean()
        third, second, fourth = (d**3).mean(), (d**2).mean(), (d**4).mean()
        error = rg_log_partition(scores) - scores.logsumexp(-1)
        left.append((error + third / 6 + (fourth - 3 * second**2) / 24).abs().item())
        assert left[-1] < 0.2 * error.abs().item() + 1e-6
    assert left[1] < left[0] / 16


def bound(scores: Tensor) -> float:
    assert FACTS.bias is not None
    assert FACTS.bias.fn is not None
    return FACTS.bias.fn(scores=scores)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=10))
def test_fact_bias_is_a_bound(scores: list[float]) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    assert abs(rg_log_partition(row) - row.logsumexp(-1)) <= bound(row) + 1e-12


def test_fact_bias_is_reached() -> None:
    worst = 0.0
    for ones in range(1, 100):
        row = torch.zeros(100, dtype=torch.float64)
        row[:ones] = 0.01
        worst = max(worst, abs(rg_log_partition(row) - row.logsumexp(-1)).item() / bound(row))
    assert 0.999 < worst <= 1


@pytest.mark.parametrize(("num_classes", "error"), [(10, -0.23), (100, -11), (1000, -112), (40_981, -3380)])
def test_the_error_at_its_own_optimum_is_not_negligible(num_classes: int, error: float) -> None:
    probs = 1 / torch.arange(1, num_classes + 1, dtype=torch.float64)
    scores = num_classes * probs / probs.sum()
    assert (rg_log_partition(scores) - scores.logsumexp(-1)).item() == pytest.approx(error, rel=0.015)
    assert FACTS.bias is not None
    assert FACTS.bias.status == "contradicted"


# --- what the population minimises ---


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """The centred minimiser of a quadratic risk, which one Newton step finds."""
    start = torch.zeros(num_classes, dtype=torch.float64)
    best = start - torch.linalg.pinv(hessian(risk)(start)) @ torch.func.grad(risk)(start)
    assert torch.func.grad(risk)(best).norm() < 1e-12
    return best - best.mean()


def test_minimiser_is_affine_in_p() -> None:
    probs = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
    best = minimiser(lambda s: (probs * rg_loss(s.expand(4, 4), torch.arange(4), reduction="none")).sum(), 4)
    torch.testing.assert_close(best, 4 * probs - 1)
    assert torch.equal(best.argsort(), probs.argsort()) is FACTS.calibrated.value
    torch.testing.assert_close(rg(best), probs)


def test_minimiser_with_several_positives() -> None:
    """P({a}) = .45, P({b, c}) = .55: C E[y] / E|Y| + const for "sum", b and c first; C E[y/|y|] for "normalized"."""
    labels = torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.bool)
    chance = torch.tensor([0.45, 0.55], dtype=torch.float64)

    def risk(scores: Tensor, multilabel: str) -> Tensor:
        return (chance * rg_loss(scores.expand(2, 3), labels, multilabel=multilabel, reduction="none")).sum()

    mean = (chance.unsqueeze(-1) * labels).sum(0)
    torch.testing.assert_close(minimiser(lambda s: risk(s, "sum"), 3), 3 * mean / mean.sum() - 1)
    normalized = minimiser(lambda s: risk(s, "normalized"), 3)
    torch.testing.assert_close(normalized, 3 * torch.tensor([0.45, 0.275, 0.275]).double() - 1, rtol=0, atol=1e-6)


# --- facts ---


def test_fact_order(seed: int) -> None:
    scores = torch.randn(50, 6)
    assert FACTS.order_preservation is not None
    assert FACTS.order_preservation.value == (
        "strict" if torch.equal(rg(scores).argsort(-1), scores.argsort(-1)) else "none"
    )
    assert rg(torch.tensor([5.0, 0.0, 0.0])).min() < 0  # it is not on the simplex


def test_fact_fenchel_young(seed: int) -> None:
    scores, t = torch.randn(5, 4).double().requires_grad_(), torch.rand(5, 4).double()
    t = t / t.sum(-1, keepdim=True)
    loss = rg_loss(scores, t, multilabel="normalized", reduction="sum")
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.allclose(gradient, rg(scores) - t) is FACTS.fenchel_young.value
    at_target = rg_loss(4 * t, t, multilabel="normalized", reduction="none")
    torch.testing.assert_close(at_target, torch.zeros(5).double())


@pytest.mark.parametrize("num_classes", [1, 2, 7])
def test_fact_convex_and_smoothness(num_classes: int, seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    for size in (0.1, 100.0):
        scores = size * torch.randn(num_classes).double()
        eigenvalues = torch.linalg.eigvalsh(hessian(lambda s: rg_loss(s, torch.tensor(0)))(scores))
        assert (eigenvalues[0].item() >= -1e-12) is FACTS.convex.value
        assert eigenvalues[-1].item() == pytest.approx(FACTS.smoothness.fn(num_classes=num_classes), abs=1e-12)


def test_fact_shift_invariant(seed: int) -> None:
    scores, target = torch.randn(5, 4).double(), torch.randint(4, (5,))
    same = torch.allclose(rg_loss(scores + 3.7, target), rg_loss(scores, target), rtol=0, atol=1e-12)
    assert same is FACTS.shift_invariant.value


def test_fact_cost_and_variance() -> None:
    assert FACTS.cost.fn is not None
    assert FACTS.variance is not None
    assert FACTS.cost.fn(batch=3, num_classes=20) == torch.zeros(3, 20).numel()
    assert FACTS.cost.value == "linear"
    repeated = torch.stack([rg_loss(SCORES[:1], torch.tensor([2])) for _ in range(3)])
    assert repeated.var().item() == FACTS.variance.value
