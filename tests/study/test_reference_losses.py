"""The reference losses BPR and BCE: their formulas, facts, and the interface that they share with all heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import manymax
from manymax import FAMILY
from manymax.engine.member import Member
from manymax.heads import LinearHead
from manymax.heads.build import head_class
from manymax.members import REFERENCE_LOSSES
from manymax.members.bce.loss import bce_loss
from manymax.members.bpr.loss import bpr_loss
from manymax.samplers import UniformSampler

C, DIM = 23, 6

each = pytest.mark.parametrize("entry", REFERENCE_LOSSES.values(), ids=lambda entry: entry.name)


def slow_loss(name: str, positive: float, negative: list[float]) -> float:
    """The loss of one row by its formula, in Python numbers."""

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    if name == "bpr":
        return -sum(log_sigmoid(positive - s) for s in negative) / len(negative)
    return -log_sigmoid(positive) - sum(log_sigmoid(-s) for s in negative) / len(negative)


@each
@pytest.mark.parametrize("shared", [False, True])
def test_the_head_is_the_formula_on_its_own_draws(entry: Member, shared: bool, seed: int) -> None:
    queries, vectors = torch.randn(5, DIM, dtype=torch.float64), torch.randn(C, DIM, dtype=torch.float64)
    target = torch.randint(C, (5,))
    head = head_class(entry)(
        None, C, num_negatives=4, shared=shared, generator=torch.Generator().manual_seed(seed), reduction="none"
    )
    value = head(queries, target, vectors)
    draw = UniformSampler(C)(4, target=target, shared=shared, generator=torch.Generator().manual_seed(seed))
    scores = queries @ vectors.T
    for n in range(5):
        ids = draw.ids if shared else draw.ids[n]
        expected = slow_loss(entry.name, float(scores[n, target[n]]), [float(scores[n, j]) for j in ids])
        assert float(value[n]) == pytest.approx(expected)


@each
def test_gradients(entry: Member, seed: int) -> None:
    queries = torch.randn(3, DIM, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(C, DIM, dtype=torch.float64, requires_grad=True)
    target, generator = torch.randint(C, (3,)), torch.Generator()
    head = head_class(entry)(None, C, num_negatives=3, generator=generator)

    def loss(queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(seed)
        return head(queries, target, vectors)

    assert torch.autograd.gradcheck(loss, (queries, vectors))


def test_one_negative_of_bpr_is_sampled_softmax_without_correction(seed: int) -> None:
    queries, vectors, target = torch.randn(9, DIM), torch.randn(C, DIM), torch.randint(C, (9,))
    ours = head_class(REFERENCE_LOSSES["bpr"])(None, C, num_negatives=1, generator=torch.Generator().manual_seed(1))
    other = manymax.LinearSampledSoftmaxLoss(
        None, C, num_negatives=1, correction="none", generator=torch.Generator().manual_seed(1)
    )
    torch.testing.assert_close(ours(queries, target, vectors), other(queries, target, vectors))


def test_bce_of_large_scores_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4])
    for loss in (bpr_loss, bce_loss):
        assert loss(scores, scores.flip(0).unsqueeze(1)).isfinite().all()


@each
def test_a_reference_loss_has_a_head_like_the_others(entry: Member, seed: int) -> None:
    """A training loop that knows no loss by name trains it, with any form of target, with own vectors or given ones."""
    target = torch.randint(C, (64,))
    queries, head = nn.Parameter(torch.randn(64, DIM)), head_class(entry)(DIM, C, num_negatives=20)
    optimizer = torch.optim.Adam([queries, *head.parameters()], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        head(queries, target).backward()
        optimizer.step()
    assert isinstance(head, LinearHead)
    assert (head.topk(queries, 1)[1].squeeze(1) == target).double().mean() > 0.6
    assert head.scores(queries).shape == (64, C)
    padded = torch.stack([target, torch.full_like(target, -100)], 1)
    rows, grouped = manymax.group_pairs(torch.arange(64), target)
    for form in (padded, grouped):
        assert head(queries[rows], form, torch.randn(C, DIM)).isfinite()


def test_reference_losses_are_no_members() -> None:
    assert list(REFERENCE_LOSSES) == ["bpr", "bce"]
    assert not set(REFERENCE_LOSSES) & set(FAMILY)


@each
def test_facts_of_a_reference_loss(entry: Member, seed: int) -> None:
    """For labels from p and single negatives from q: the minimiser, convexity, smoothness and shifts."""
    p, q = torch.distributions.Dirichlet(torch.ones(2, 5, dtype=torch.float64)).sample()

    def risk(scores: torch.Tensor) -> torch.Tensor:
        losses = torch.stack([entry.loss(s.expand(5), scores.unsqueeze(1)) for s in scores])  # (label, negative)
        return (p.unsqueeze(1) * q * losses).sum()

    best = (p / q).log()
    assert torch.func.grad(risk)(best).abs().max() < 1e-12
    for scores in (best, torch.zeros(5, dtype=torch.float64), 3 * torch.randn(5, dtype=torch.float64)):
        curvature = torch.linalg.eigvalsh(torch.autograd.functional.hessian(risk, scores))
        assert curvature.min() > -1e-12
        assert curvature.max() <= entry.facts.smoothness.value + 1e-12
    same = torch.isclose(risk(best), risk(best + 1))
    assert bool(same) == entry.facts.shift_invariant.value
    assert entry.facts.convex.value
    assert entry.facts.calibrated.value
