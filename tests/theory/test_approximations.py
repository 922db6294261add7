"""Approximations that draw nothing (RG, Taylor-softmax, trees), and which members are approximations at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from manymax import HuffmanTree, taylor_softmax_loss
from manymax.engine.approximation import Parts
from manymax.engine.member import Approximation, Setting, Theory
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY
from manymax.members.rg.loss import error_bound
from manymax.members.rg.theory import rg_series
from manymax.table import Table
from manymax.theory.approximations import approximations, tree_log_probs
from manymax.theory.bias_variance import deviation, estimate, negatives_needed
from tests.exact import labels, normal
from tests.theory.bias_helpers import SCORES, TARGET


def test_rg_error_and_its_series() -> None:
    scores = 0.2 * normal(6, 40)
    found = estimate("rg", scores, labels(6, num_classes=40))
    truth = math.log(40) + scores.mean(-1) + scores.var(-1, correction=0) / 2 - scores.logsumexp(-1)
    torch.testing.assert_close(found.exact_bias, truth)
    centred = scores - scores.mean(-1, keepdim=True)
    third = -(centred**3).mean(-1) / 6
    fourth = -((centred**4).mean(-1) - 3 * (centred**2).mean(-1) ** 2) / 24
    torch.testing.assert_close(torch.stack(rg_series(scores)), torch.stack([third, fourth]))
    torch.testing.assert_close(found.bias, third + fourth)
    assert ((found.bias - truth).abs() <= 0.02 * third.abs().max()).all()
    assert (truth.abs() <= error_bound(scores)).all()
    masked = torch.cat([scores, torch.full((6, 1), -torch.inf, dtype=torch.float64)], -1)
    torch.testing.assert_close(error_bound(masked), error_bound(scores))
    assert found.in_range.float().mean() > 0.5
    assert estimate("rg", 20 * scores).in_range.float().mean() < 0.5
    assert (found.exact_variance == 0).all()


def test_rg_error_of_symmetric_scores_is_of_fourth_order() -> None:
    third, fourth = rg_series(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    assert third == 0
    assert fourth != 0


def test_taylor_error_is_the_difference_of_the_losses() -> None:
    scores, target = normal(5, 7), labels(5, num_classes=7)
    for order in (2, 4):
        found = estimate("taylor_softmax", scores, target, order=order)
        taylor = taylor_softmax_loss(scores, target, order=order, reduction="none")
        full = torch.nn.functional.cross_entropy(scores, target, reduction="none")
        torch.testing.assert_close(found.exact_bias, taylor - full)
    assert (found.deviation < estimate("taylor_softmax", scores, target).deviation).float().mean() > 0.5


def test_tree_error_is_a_divergence() -> None:
    """The bias is log P(y) - log P_tree(y), and KL(P || P_tree) over y ~ P; the paper has the other sign."""
    other = normal(2, 4).log_softmax(-1)
    log_probs = SCORES.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - other)).sum(-1)
    torch.testing.assert_close(estimate("hsm", SCORES, tree=other).exact_bias, kl)
    pointwise = (log_probs - other).gather(-1, TARGET[:, None]).squeeze(-1)
    torch.testing.assert_close(estimate("hsm", SCORES, TARGET, tree=other).exact_bias, pointwise)
    assert (deviation("hsm", SCORES, tree=HuffmanTree([1, 1, 2, 5])) == 0).all()


@pytest.mark.parametrize("arity", [2, 3])
def test_a_tree_of_small_vectors_deviates_the_less_the_larger_they_are(arity: int) -> None:
    scores, tree = 2 * normal(12, 10), HuffmanTree(list(range(1, 11)), arity=arity)
    full = tree_log_probs(scores, tree, dim=12)
    torch.testing.assert_close(full, scores.log_softmax(-1))
    gaps = [deviation("hsm", scores, tree=tree_log_probs(scores, tree, dim=d)).mean().item() for d in (1, 3, 6, 12)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    torch.testing.assert_close(tree_log_probs(scores, tree, dim=2).exp().sum(-1), torch.ones(12).double())


def test_softmax_does_not_deviate_and_other_losses_are_refused() -> None:
    assert (deviation("softmax", SCORES) == 0).all()
    with pytest.raises(ArgumentError, match=r"no approximation of softmax: its entry has no `theory\.approximation`"):
        estimate("sparsemax", SCORES)
    with pytest.raises(ArgumentError, match=r"draws no negatives: its entry has no `theory\.approximation\.draws`"):
        negatives_needed("rg", SCORES, 0.1)
    with pytest.raises(ManymaxError, match="did you mean"):
        estimate("sampled_softmx", SCORES)


def test_every_member_whose_facts_state_a_bias_is_an_approximation() -> None:
    stated = {member.name for member in FAMILY.values() if member.facts.bias is not None}
    assert stated <= set(approximations())


def test_a_new_member_states_its_own_approximation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formula, settings with their ranges and missing fields are all read from its entry."""
    shift = Setting("shift", float, 0.5, "Added to the loss.", least=0)
    known = Approximation(lambda case: Parts.exact(torch.full_like(case.shares, case.settings["shift"])), (shift,))
    member = replace(FAMILY["rankmax"], name="shifted", theory=Theory(approximation=known))
    monkeypatch.setattr("manymax.theory.approximations.FAMILY", Table("loss", *FAMILY.values(), member))
    torch.testing.assert_close(deviation("shifted", SCORES), torch.full((2,), 0.25).double())
    torch.testing.assert_close(deviation("shifted", SCORES, TARGET, shift=2.0), torch.full((2,), 4.0).double())
    with pytest.raises(ArgumentError, match="`shift` must be a number of at least 0"):
        estimate("shifted", SCORES, shift=-1.0)
    with pytest.raises(ArgumentError, match=r"got 'shifted', which draws no negatives"):
        negatives_needed("shifted", SCORES, 0.1)
