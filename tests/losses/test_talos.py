"""Talos: values, the probabilities that it can reach, and what holds of the bound that its authors claim."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from manymax import ArgumentError, talos, talos_loss
from manymax.members.talos.theory import reachable
from tests.exact import normal


def h(score: float, bound: float, tau: float) -> float:
    return (1 / (1 + math.exp(bound - score))) ** (1 / tau)


def test_the_value_by_hand() -> None:
    loss = talos_loss(torch.tensor([[3.0, 1.0, 0.0]]).double(), torch.tensor([2]), k=2, tau=0.5)
    each = [h(score, 1.0, 0.5) for score in (3.0, 1.0, 0.0)]
    assert float(loss) == pytest.approx(math.log(sum(each) / each[2]))


def test_the_gradient_holds_the_bound() -> None:
    scores = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(talos_loss(scores, torch.tensor([2]), k=2, tau=0.5), scores)
    slopes = torch.sigmoid(1.0 - scores.detach()) / 0.5
    expected = (talos(scores.detach(), k=2, tau=0.5) - torch.tensor([0.0, 0.0, 1.0])) * slopes
    torch.testing.assert_close(found, expected)


def test_scores_far_above_the_bound_are_all_the_same() -> None:
    scores = torch.tensor([[90.0, 60.0, 0.0, -3.0]], dtype=torch.float64)
    p = talos(scores, k=3)[0]
    assert p[0] == p[1]
    assert float(p[0] / p[2]) == pytest.approx(2.0)


def test_settings_out_of_range_are_refused() -> None:
    for given in ({"k": 0}, {"k": 1.5}, {"tau": 0.0}):
        with pytest.raises((ArgumentError, TypeError), match=next(iter(given))):
            talos_loss(torch.zeros(1, 3), torch.tensor([0]), **given)


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_its_curvature_stays_below_the_stated_number(tau: float) -> None:
    hessian = torch.func.jacrev(torch.func.grad(lambda s: talos_loss(s, torch.tensor(0), k=2, tau=tau)))
    norms = torch.linalg.matrix_norm(torch.vmap(hessian)(normal(200, 5, scale=3.0)), 2)
    assert norms.max() <= 1 / (2 * tau**2) + 1 / (4 * tau)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_what_it_can_reach_is_within_the_levels_and_no_other_is_closer(k: int, tau: float) -> None:
    """Against probabilities that scores do give, in KL divergence."""
    given = talos(torch.cat([normal(2000, 5, scale=scale) for scale in (0.3, 2.0, 9.0)]), k, tau)
    for p in torch.softmax(normal(20, 5, seed=3, scale=2.0), -1):
        q = reachable(p, k, tau)
        best = q.sort(descending=True).values
        assert float(q.sum()) == pytest.approx(1)
        assert best[0] <= best[k - 1] * 2 ** (1 / tau) * (1 + 1e-9)
        assert -(p * q.log()).sum() <= (-(p * given.log()).sum(-1)).min() + 1e-9


# The bound of its authors ------------------------------------------------------------------------


def test_the_printed_bound_holds_and_says_nothing() -> None:
    """Its right side is never below log K, -log Precision@K of one hit, however good or bad the ranking is."""
    for tau, k in itertools.product((0.05, 0.2, 0.9), (1, 2, 5)):
        constant = math.log(1 + math.e**2 / 2) / tau
        scores = normal(50, 6).clamp(-1, 1)  # cosines
        for own in list(itertools.product([False, True], repeat=6))[1:]:
            target = torch.tensor(own).expand(50, 6)
            losses = talos_loss(scores, target, k=k, tau=tau, multilabel="normalized", reduction="none")
            assert (losses + constant >= math.log(k)).all()
            assert (losses + math.log(2) / tau >= math.log(k) - 1e-9).all()


def test_with_one_log_for_all_positives_the_printed_bound_fails_at_a_large_tau() -> None:
    """K = 20 nearly tied scores, one of them a positive, and eight positives just below: -log (sum of h / sum)."""
    scores = -1e-9 * torch.arange(28).double()
    loss = -talos(scores, k=20, tau=1.0)[19:].sum().log()
    assert -math.log(1 / 20) > loss + math.log(1 + math.e**2 / 2)
    # What has to be added is the log of 1 + misses / hits 2^(-1 / tau), with (log 2) / tau as the constant.
    assert -math.log(1 / 20) <= loss + math.log(2) + math.log(1 + 8 / 2) + 1e-9
