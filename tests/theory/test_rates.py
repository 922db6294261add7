"""The constants of a linear head, and gradient descent that is as fast and as slow as they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manymax.engine.member import Theory
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY
from manymax.members.nce.theory import expected_nce_curvature
from manymax.paper.learning_rates import rate_ordering
from manymax.theory.rates import (
    contractions,
    descend,
    head_gradient,
    head_rates,
    rates,
    worst_head,
)
from manymax.theory.risk import conditional_risk

SMOOTH = [("softmax", {}), ("sparsemax", {}), ("entmax", {"alpha": 1.5}), ("entmax", {"alpha": 1.2}), ("rg", {})]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_constants_equal_their_formulas() -> None:
    r = rates(0.5, 3.0, 0.2)
    assert (r.smoothness, r.strong_convexity, r.kappa) == pytest.approx((1.7, 0.2, 8.5))
    assert (r.eta_max, r.eta_star, r.rho) == pytest.approx((2 / 1.7, 2 / 1.9, 7.5 / 9.5))


def test_a_loss_that_is_not_smooth_has_no_step_and_no_rate() -> None:
    r = rates(math.inf, 1.0, 0.1)
    assert (r.eta_max, r.eta_star, r.rho) == (0, 0, 1)


@pytest.mark.parametrize(("name", "setting"), SMOOTH)
def test_descent_is_never_slower_than_rho(name: str, setting: dict) -> None:
    member, features, target = FAMILY[name], normal(40, 3), torch.arange(40) % 5
    r = head_rates(member, features, 5, ridge=0.4, **setting)
    gradient = head_gradient(member, features, target, 0.4, **setting)
    optimum = descend(gradient, torch.zeros(5, 3, dtype=torch.float64), r.eta_star, 200)[-1]
    assert gradient(optimum).norm() < 1e-9
    for seed in range(2):
        path = descend(gradient, 2 * normal(5, 3, seed=seed), r.eta_star, 20)
        assert contractions(path, optimum).max() <= r.rho + 1e-9


@pytest.mark.parametrize(("name", "setting"), SMOOTH)
@pytest.mark.parametrize("num_classes", [2, 60])
def test_the_worst_head_is_as_slow_as_rho(name: str, setting: dict, num_classes: int) -> None:
    gradient, steep, r = worst_head(FAMILY[name], num_classes, feature_norm=2.0, ridge=0.1, **setting)
    zero = torch.zeros(num_classes, dtype=torch.float64)
    for direction in (steep, torch.ones_like(steep)):
        path = descend(gradient, 1e-5 * direction, r.eta_star, 8)
        torch.testing.assert_close(
            contractions(path, zero), torch.full((8,), r.rho, dtype=torch.float64), rtol=1e-4, atol=0
        )
    for factor, grows in ((1.02, True), (0.98, False)):
        path = descend(gradient, 1e-6 * steep, factor * r.eta_max, 30)
        assert bool(path[-1].norm() > path[0].norm()) == grows


def test_the_papers_ordering_of_rates_fails_in_two_places() -> None:
    links = {(link.left, link.right): link for link in rate_ordering()}
    failing = {pair for pair, link in links.items() if not link.holds}
    assert failing == {("nce", "sampled_softmax"), ("softmax", "hierarchical_softmax")}
    assert links["softmax", "hierarchical_softmax"].left_rho > links["softmax", "hierarchical_softmax"].right_rho
    assert links["entmax", "sparsemax"].left_rho < links["entmax", "sparsemax"].right_rho
    assert rate_ordering(alpha=2.0)[-1].holds


@pytest.mark.parametrize("target", [0, 1])
def test_expected_curvature_of_nce(target: int) -> None:
    """The Hessian of the enumerated risk at scores log(k q), where every sigmoid is 1/2."""
    log_q, k = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log(), 4
    scores = log_q + math.log(k)
    label = torch.eye(3, dtype=torch.float64)[target]
    hessian = torch.autograd.functional.hessian(
        lambda s: conditional_risk(FAMILY["nce"], s, label, log_q=log_q, num_negatives=k), scores
    )
    assert float(torch.linalg.matrix_norm(hessian, 2)) == pytest.approx(expected_nce_curvature(log_q, target, k))


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="`ridge` must be positive"):
        rates(0.5, 1.0, 0.0)
    with pytest.raises(ArgumentError, match="must not be negative"):
        rates(-0.5, 1.0, 0.1)
    with pytest.raises(ArgumentError, match=r"`features` must have shape \(examples, dim\)"):
        head_rates(FAMILY["softmax"], torch.zeros(3), 4, 0.1)
    with pytest.raises(ArgumentError, match="`member` must be Fenchel-Young; rankmax is not"):
        worst_head(FAMILY["rankmax"], 3, 1.0, 0.1)
    left_out = replace(FAMILY["softmax"], theory=Theory())
    with pytest.raises(ManymaxError, match=r"softmax has no `theory\.sharpest`"):
        worst_head(left_out, 3, 1.0, 0.1)
