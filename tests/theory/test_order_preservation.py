"""The search for scores whose order is not kept: it finds rare violations, and its witnesses show them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.theory.order_preservation import GAP, Witness, majorizes, member_map, order_preservation_of

WITH_MAP = [
    pytest.param(member, setting, id=f"{member.name}-{setting}")
    for member in FAMILY.values()
    if member.map
    for setting in member.examples
]


def normalised(values: Tensor) -> Tensor:
    return values / values.sum(-1, keepdim=True)


@pytest.mark.parametrize(("member", "setting"), WITH_MAP)
@pytest.mark.parametrize("num_classes", [3, 5])
def test_members_preserve_order_as_their_facts_state(member: Member, setting: dict, num_classes: int) -> None:
    found = order_preservation_of(member_map(member, **setting), num_classes)
    assert member.facts.order_preservation is not None
    assert found.kind == member.facts.order_preservation.value
    assert (found.witness is None) == (found.kind == "strict")


@pytest.mark.parametrize(("member", "setting"), WITH_MAP)
def test_a_witness_shows_the_violation(member: Member, setting: dict) -> None:
    found = order_preservation_of(member_map(member, **setting), seed=3)
    if (witness := found.witness) is None:
        return
    torch.testing.assert_close(member_map(member, **setting)(witness.scores[None])[0], witness.probs)
    i, j = witness.higher, witness.lower
    assert witness.scores[i] >= witness.scores[j]
    gap = float(witness.probs[i] - witness.probs[j])
    assert gap < 0 if found.kind == "none" else abs(gap) < 1e-12
    assert str(witness).endswith(f"but p_{i} {'<' if found.kind == 'none' else '='} p_{j}")


def test_sparsemax_is_strict_for_two_classes() -> None:
    """At least one class is above the threshold, so two classes cannot both have the probability 0."""
    assert order_preservation_of(member_map(FAMILY["sparsemax"]), 2, rows=100, rounds=2).kind == "strict"


def test_a_narrow_dip_is_found() -> None:
    """exp with a dip of width 0.05 that no level touches: random rows seldom hit it, the varied rows do."""
    found = order_preservation_of(lambda s: normalised(s.exp() * (1 - 0.5 * torch.exp(-(((s - 0.27) / 0.05) ** 2)))))
    assert found.kind == "none"


def test_a_violation_that_no_random_row_hits_is_found_step_by_step() -> None:
    """Class 4 overtakes class 0 within 0.4 of one point of R^5; margins shrink on the way to that point."""
    corner = torch.tensor([1.7, -2.5, -3.1, -2.2, 0.4], dtype=torch.float64)

    def map(scores: Tensor) -> Tensor:
        values = scores.exp()
        near = 1.02 * torch.exp(-(scores - corner).square().sum(-1) / 8)
        second = (values[..., 0] > values[..., 4]) & (values[..., 4] > values[..., 1:4].amax(-1))
        lift = torch.where(second, near * (values[..., 0] - values[..., 4]), 0)
        return normalised(values + lift[..., None] * torch.eye(5, dtype=torch.float64)[4])

    assert order_preservation_of(map, rounds=0).kind == "strict"
    found = order_preservation_of(map)
    assert found.kind == "none"
    assert found.witness is not None
    assert (found.witness.scores - corner).norm() < 0.5


def test_a_map_that_favours_one_class_does_not_preserve_order() -> None:
    tilt = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.001], dtype=torch.float64)
    assert order_preservation_of(lambda s: normalised(s.exp() * tilt)).kind == "none"


def test_a_constant_map_preserves_order_weakly() -> None:
    found = order_preservation_of(lambda s: torch.full_like(s, 0.2))
    assert found.kind == "weak"
    assert found.witness is not None
    assert found.witness.scores[found.witness.higher] > found.witness.scores[found.witness.lower] + GAP


def test_a_map_that_needs_the_label_gets_the_given_one_or_class_0() -> None:
    scores = torch.tensor([[2.0, 1.5, -1.0]])
    given = member_map(FAMILY["rankmax"], torch.tensor([1]))(scores)
    torch.testing.assert_close(given, torch.tensor([[0.6, 0.4, 0.0]]))
    assert member_map(FAMILY["rankmax"])(scores)[0, 2] == 0


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="`member` must have a map"):
        member_map(FAMILY["nce"])
    with pytest.raises(ArgumentError, match="`num_classes` must be at least 2"):
        order_preservation_of(torch.exp, 1)
    with pytest.raises(ArgumentError, match="`map` must return the shape"):
        order_preservation_of(lambda s: s.sum(-1))


def test_the_text_of_a_tie() -> None:
    tie = Witness(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]), 0, 1)
    assert str(tie) == "s = (1, 0): s_0 = 1 > s_1 = 0, but p_0 = p_1"


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.floats(0, 1), st.data())
def test_a_transfer_from_larger_to_smaller_is_majorized(values: list[float], share: float, data: st.DataObject) -> None:
    wide = torch.tensor(values, dtype=torch.float64)
    i, j = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    narrow = wide.clone()
    narrow[i] += share * (wide[j] - wide[i]) / 2
    narrow[j] -= share * (wide[j] - wide[i]) / 2
    assert majorizes(wide, narrow)
    if abs(values[i] - values[j]) > 0.1 and share > 0.1:
        assert not majorizes(narrow, wide)


def test_majorization_needs_the_same_sum() -> None:
    assert not majorizes(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]))
