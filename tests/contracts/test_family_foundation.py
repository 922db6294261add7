"""Every member with a Fenchel-Young pair: conjugate, Omega and Bregman divergence belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax import ManymaxError
from tests.exact import EXACT, INF, Case, cases, close, normal, score_rows


@pytest.mark.parametrize("case", cases(foundation=True))
def test_gradient_of_the_conjugate_is_the_map(case: Case) -> None:
    scores = normal(3, 6).requires_grad_()
    conjugate = case.member.conjugate(scores, **case.setting)
    assert conjugate.shape == (3,)
    (grad,) = torch.autograd.grad(conjugate.sum(), scores)
    close(grad, case.probs(scores).detach())


@pytest.mark.parametrize("case", cases(foundation=True))
@settings(max_examples=25)
@given(row=score_rows(), seed=st.integers(0, 1000))
def test_fenchel_inequality(case: Case, row: tuple[Tensor, Tensor], seed: int) -> None:
    scores, _ = row
    live = scores > -INF
    conjugate = case.member.conjugate(scores, **case.setting)
    own = case.probs(scores)
    other = torch.where(live, normal(*scores.shape, seed=seed, scale=2), -INF).softmax(-1)
    finite = torch.where(live, scores, 0)
    slack = 1e-12 * (1 + finite.abs().amax(-1))
    # <p, s> <= Omega(p) + Omega*(s), with equality at the map
    assert (conjugate + case.member.omega(other, **case.setting) - (other * finite).sum(-1) >= -slack).all()
    gap = conjugate + case.member.omega(own, **case.setting) - (own * finite).sum(-1)
    assert (gap.abs() <= slack).all()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_omega_is_zero_at_vertices_and_negative_inside(case: Case) -> None:
    close(case.member.omega(torch.eye(4, dtype=torch.float64), **case.setting), torch.zeros(4, dtype=torch.float64))
    inside = case.member.omega(normal(5, 4).softmax(-1), **case.setting)
    assert (inside < 0).all()
    uniform = case.member.omega(torch.full((4,), 0.25, dtype=torch.float64), **case.setting)
    assert (uniform <= inside).all()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_the_loss_is_at_least_the_bregman_divergence(case: Case) -> None:
    scores = torch.cat([normal(50, 5, scale=2), normal(50, 5, scale=0.1)])
    target = normal(100, 5, seed=1, scale=2).softmax(-1)
    loss = case.loss(scores, target, multilabel="normalized", reduction="none")
    probs = case.probs(scores)
    bregman = case.member.bregman(target, probs, **case.setting)
    assert (loss >= bregman - 1e-12).all()
    whole = (probs > 0).all(-1)  # no class is cut off: then they are equal
    assert whole.any()
    close(loss[whole], bregman[whole], 1e-10)
    if not whole.all():
        assert (loss[~whole] > bregman[~whole] + 1e-9).any()


@pytest.mark.parametrize("case", cases(foundation=True))
def test_bregman_divergence_is_a_divergence(case: Case) -> None:
    sparse = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.6, 0.4]], dtype=torch.float64)
    for p in sparse:
        divergences = case.member.bregman(p.expand(4, 3), sparse, **case.setting)
        same = (sparse == p).all(-1)
        assert (divergences[~same] > 1e-3).all()
        close(divergences[same], torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("member", [m for m in EXACT if m.foundation is None], ids=lambda m: m.name)
def test_a_member_without_omega_says_so(member: Any) -> None:
    for function in (member.conjugate, member.omega, lambda p: member.bregman(p, p)):
        with pytest.raises(ManymaxError, match=f"{member.name} is not a Fenchel-Young loss"):
            function(torch.full((3,), 1 / 3))
