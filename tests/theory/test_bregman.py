"""Losses against Bregman divergences, and the condition that the theorem on weak order preservation needs."""

from __future__ import annotations

import pytest
import scipy.optimize
import torch
from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.members import BASELINE, FAMILY
from manymax.theory.bregman import (
    argmax_pair,
    asymmetry,
    bregman_gap,
    gradient_residual,
    threshold_gap,
    tie_cost,
    wop_suffices,
)
from manymax.theory.order_preservation import member_map, order_preservation_of
from tests import high_precision

PAIRS = [
    pytest.param(member, setting, id=f"{member.name}-{setting}")
    for member in FAMILY.values()
    if member.foundation
    for setting in member.examples
]
LEGENDRE = {"softmax", "rg"}  # softmax on the simplex, RG on the hyperplane around it


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets(rows: int, num_classes: int) -> Tensor:
    """Targets (rows, C): corners of the simplex, and points inside it."""
    vertices = torch.eye(num_classes, dtype=torch.float64)[torch.arange(rows // 2) % num_classes]
    return torch.cat([vertices, torch.softmax(normal(rows - rows // 2, num_classes, seed=9, scale=2), -1)])


@pytest.mark.parametrize(("member", "setting"), PAIRS)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_gap_equals_its_formula(member: Member, setting: dict, scale: float) -> None:
    pair, scores, target = member.fenchel_young(**setting), normal(80, 5, scale=scale), targets(80, 5)
    gap = bregman_gap(pair, scores, target)
    torch.testing.assert_close(gap, threshold_gap(pair, scores, target), atol=1e-12, rtol=1e-10)
    assert (gap > -1e-12).all()
    if member.name in LEGENDRE:
        assert gap.abs().max() < 1e-12
    else:
        inside = (pair.map(scores) > 0).all(-1) | ((pair.map(scores) > 0) | (target == 0)).all(-1)
        assert gap[inside].abs().max() < 1e-12
        assert scale < 1 or gap.max() > 1


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_gap_in_50_digits(alpha: float) -> None:
    scores, target = [2.0, 0.25, -1.5], [0.25, 0.25, 0.5]
    probs = high_precision.entmax(scores, alpha)
    inner = high_precision.mp.fsum(high_precision.mp.mpf(t) * s for t, s in zip(target, scores, strict=True))
    loss = high_precision.conjugate(scores, alpha) + high_precision.omega(target, alpha) - inner
    expected = float(loss - high_precision.bregman(target, probs, alpha))
    pair = FAMILY["entmax"].fenchel_young(alpha=alpha)
    rows = (torch.tensor(values, dtype=torch.float64) for values in (scores, target))
    assert float(bregman_gap(pair, *rows)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("member", "setting"), PAIRS)
def test_gradient_is_map_minus_target(member: Member, setting: dict) -> None:
    assert gradient_residual(member.fenchel_young(**setting), normal(50, 6, scale=2)).max() < 1e-12


def test_a_map_with_the_omega_of_another_has_a_residual() -> None:
    mixed = FenchelYoung(FAMILY["softmax"].fenchel_young().map, FAMILY["sparsemax"].fenchel_young().omega)
    assert gradient_residual(mixed, normal(10, 4)).max() > 0.05


def test_a_map_has_a_potential_exactly_if_its_loss_is_fenchel_young() -> None:
    scores = torch.tensor([0.0, 0.4, -0.4, -3.0], dtype=torch.float64)
    for member in FAMILY.values():
        if member.map is None:
            continue
        if member is not BASELINE and torch.equal(member_map(member)(scores), scores.softmax(0)):
            continue  # the map of another loss: it has that one's potential
        symmetric = asymmetry(member_map(member), scores) < 1e-12
        assert symmetric == (member.foundation is not None)


# The theorem --------------------------------------------------------------------------------------


def tied_risk(pair: FenchelYoung, probs: Tensor, first: int, second: int) -> float:
    """The smallest loss with target p over scores of which two are equal, by a numerical search."""
    kept = [i for i in range(len(probs)) if i != second]

    def risk(free: list[float]) -> float:
        scores = torch.zeros_like(probs)
        scores[kept] = torch.tensor(free, dtype=torch.float64)
        scores[second] = scores[first]
        return float(pair.conjugate(scores) + pair.omega(probs) - probs @ scores)

    found = scipy.optimize.minimize(
        risk, [0.0] * len(kept), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    return float(found.fun)


@pytest.mark.parametrize(("member", "setting"), PAIRS)
def test_a_tie_costs_what_the_formula_says(member: Member, setting: dict) -> None:
    pair, probs = member.fenchel_young(**setting), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for first, second in ((0, 1), (1, 2)):
        expected = tied_risk(pair, probs, first, second)
        assert float(tie_cost(pair.omega, probs, first, second)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("member", "setting"), PAIRS)
def test_the_theorem_holds_for_strictly_convex_members(member: Member, setting: dict) -> None:
    assert wop_suffices(member.fenchel_young(**setting).omega).holds


def test_omega_0_preserves_order_weakly_and_is_not_calibrated() -> None:
    pair, probs = argmax_pair(), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert order_preservation_of(pair.map).kind == "weak"
    finding = wop_suffices(pair.omega)
    assert not finding.holds
    assert finding.smallest_cost == 0

    def risk(scores: Tensor) -> Tensor:
        return pair.conjugate(scores) - (probs * scores).sum(-1)

    equal = risk(torch.zeros(3, dtype=torch.float64))
    assert equal == 0
    assert (risk(normal(200, 3)) >= equal).all()


def test_an_omega_that_is_flat_in_places_is_noticed() -> None:
    """Omega = max(p) is convex but depends on the largest probability alone: ties of the others cost nothing."""
    assert not wop_suffices(lambda p: p.amax(-1)).holds


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="`num_classes` must be at least 2"):
        wop_suffices(lambda p: p.sum(-1), 1)
