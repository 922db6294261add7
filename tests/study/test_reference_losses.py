"""The reference losses BPR, BCE and gBCE: their formulas, facts, and the interface that they share with all heads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import manymax
from manymax import FAMILY, ArgumentError
from manymax.engine.member import Member
from manymax.heads import LinearHead
from manymax.heads.build import head_class
from manymax.members import REFERENCE_LOSSES
from manymax.members.bce.loss import bce_loss
from manymax.members.bpr.loss import bpr_loss
from manymax.members.gbce.loss import gbce_loss
from manymax.samplers import UniformSampler

C, DIM = 23, 6

each = pytest.mark.parametrize("entry", REFERENCE_LOSSES.values(), ids=lambda entry: entry.name)


def slow_loss(name: str, positive: float, negative: list[float]) -> float:
    """The loss of one row by its formula, in Python numbers."""

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    others = -sum(log_sigmoid(-s) for s in negative)
    if name == "bpr":
        return -sum(log_sigmoid(positive - s) for s in negative) / len(negative)
    if name == "bce":
        return -log_sigmoid(positive) + others / len(negative)
    share, t = len(negative) / (C - 1), 0.75
    return -share * (t * (1 - 1 / share) + 1 / share) * log_sigmoid(positive) + others


def plain_loss(entry: Member, num_classes: int, **settings: float) -> Callable[..., torch.Tensor]:
    """The plain loss of an entry, for this number of classes if it asks for one."""
    needs = "num_classes" in inspect.signature(entry.loss).parameters
    return partial(entry.loss, **settings, **({"num_classes": num_classes} if needs else {}))


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


def test_losses_of_large_scores_is_finite() -> None:
    scores = torch.tensor([1e4, -1e4])
    for loss in (bpr_loss, bce_loss, partial(gbce_loss, num_classes=C)):
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
    assert list(REFERENCE_LOSSES) == ["bpr", "bce", "gbce"]
    assert not set(REFERENCE_LOSSES) & set(FAMILY)


@each
def test_facts_of_a_reference_loss(entry: Member, seed: int) -> None:
    """For labels from p and single negatives from q: the minimiser, convexity, smoothness and shifts."""
    p, q = torch.distributions.Dirichlet(torch.ones(2, 5, dtype=torch.float64)).sample()
    loss, fact = plain_loss(entry, 5), entry.facts.smoothness

    def risk(scores: torch.Tensor) -> torch.Tensor:
        losses = torch.stack([loss(s.expand(5), scores.unsqueeze(1)) for s in scores])  # (label, negative)
        return (p.unsqueeze(1) * q * losses).sum()

    # gBCE adds a constant: its positive weighs b = 1 - t (1 - 1 / 4) for one negative of four others
    best = (p / q).log() + (math.log(1 - 0.75 * 0.75) if entry.name == "gbce" else 0.0)
    assert fact.fn is not None
    smoothness = fact.fn(num_classes=5, **dict.fromkeys(fact.sizes, 1))
    assert fact.value in (None, smoothness)
    assert torch.func.grad(risk)(best).abs().max() < 1e-12
    for scores in (best, torch.zeros(5, dtype=torch.float64), 3 * torch.randn(5, dtype=torch.float64)):
        curvature = torch.linalg.eigvalsh(torch.autograd.functional.hessian(risk, scores))
        assert curvature.min() > -1e-12
        assert curvature.max() <= smoothness + 1e-12
    same = torch.isclose(risk(best), risk(best + 1))
    assert bool(same) == entry.facts.shift_invariant.value
    assert entry.facts.convex.value
    assert entry.facts.calibrated.value


def test_gbce_at_its_ends_is_bce_and_calibrated(seed: int) -> None:
    """t = 0 gives the positive the weight 1; t = 1 makes sigmoid(s) = p, if negatives are never the positive."""
    positive, negative = torch.randn(4), torch.randn(4, 7)
    plain = gbce_loss(positive, negative, num_classes=C, t=0.0)
    own = torch.nn.functional.softplus(-positive)
    torch.testing.assert_close(plain, own + 7 * (bce_loss(positive, negative) - own))
    p = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample()

    def risk(scores: torch.Tensor) -> torch.Tensor:
        """The mean over labels y ~ p and all pairs of two negatives of the four classes other than y."""
        others = [[s for j, s in enumerate(scores) if j != y] for y in range(5)]
        samples = torch.stack([torch.stack([torch.stack([a, b]) for a in row for b in row]) for row in others])
        return (p * gbce_loss(scores.unsqueeze(1), samples, num_classes=5, t=1.0).mean(1)).sum()

    assert torch.func.grad(risk)(p.logit()).abs().max() < 1e-12


def test_bad_calibrations_are_refused() -> None:
    for t in (-0.1, 1.5, math.nan):
        with pytest.raises(ArgumentError, match=r"`t` must be a number in \[0, 1\]"):
            gbce_loss(torch.zeros(1), torch.zeros(1, 2), num_classes=5, t=t)
        with pytest.raises(ArgumentError, match="`t` must"):
            head_class(REFERENCE_LOSSES["gbce"])(DIM, C, t=t)
