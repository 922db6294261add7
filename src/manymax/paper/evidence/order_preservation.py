"""Checks of the claims on order preservation, consistency and the Fenchel-Young form."""

from __future__ import annotations

import math
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from manymax.members import FAMILY
from manymax.members.entmax.loss import entmax
from manymax.members.hierarchical_softmax.loss import hierarchical_softmax_log_prob
from manymax.members.rankmax.theory import rankmax_levels
from manymax.members.softmax.loss import softmax
from manymax.ops.tree import HuffmanTree
from manymax.paper.evidence.check_result import CheckResult, double, normal, row
from manymax.theory import bregman
from manymax.theory.consistency import consistency
from manymax.theory.gradients import alignment, dcg_direction, tie_loss
from manymax.theory.label_laws import LabelLaw, expected_metric, regret
from manymax.theory.order_preservation import majorizes, member_map, order_preservation_of
from manymax.theory.risk import descend_risk, minimisers, search_minimisers

LAW, PROPOSAL = (0.4, 0.32, 0.28), (0.1, 0.2, 0.7)  # p of the labels and q of the negatives, which differ much


@cache
def keeps_order(name: str) -> CheckResult:
    """The map preserves the order of the scores as its facts state (strictly or weakly), for every example setting."""
    member = FAMILY[name]
    found = [order_preservation_of(member_map(member, **setting)) for setting in member.examples]
    assert member.facts.order_preservation is not None
    holds = all(each.kind == member.facts.order_preservation.value for each in found)
    return CheckResult(
        holds, f"{found[0].kind}; {found[0].witness or 'no tie or inversion found in 9,000 score vectors'}"
    )


@cache
def consistent(name: str) -> CheckResult:
    """Risk minimisers rank rightly for Top-k and DCG, with one label and with the sum over several labels."""
    asked: list[dict[str, Any]] = [
        {"metric": "recall"},
        {"metric": "dcg"},
        {"metric": "precision", "labels": "multi"},
        {"metric": "dcg", "labels": "multi"},
    ]
    settings = FAMILY[name].examples[0]
    found = [consistency(FAMILY[name], trials=40, **question, **settings) for question in asked]
    return CheckResult(
        all(each.holds for each in found),
        f"largest regret {max(each.regret for each in found):.1g} over {sum(each.trials for each in found)} laws",
    )


@cache
def rankmax_ties() -> CheckResult:
    """Rankmax's minimiser ties distinct classes: not Top-2 calibrated at C = 3, not Top-1 at C = 34."""
    law = LabelLaw.single(double((0.6, 0.22, 0.18)))
    scores = minimisers(FAMILY["rankmax"], law.probs).scores[0]
    even = torch.linspace(1.0001, 1, 34, dtype=torch.float64)
    levels = rankmax_levels(even / even.sum())
    top = int((levels == 0).sum())
    tied = bool(scores[1] == scores[2]) and regret(scores, law, "recall", 2) > 0.03 and top > 1
    return CheckResult(
        tied and not consistency(FAMILY["rankmax"], "dcg").holds,
        f"p = {row(law.probs)} has the minimiser {row(scores)}: classes 1 and 2 tie;"
        f" 34 nearly even classes: {top} tie at the top",
    )


@cache
def log_p_for_every_k(name: str) -> CheckResult:
    """The risk minimiser is log p + const for k = 1, 2 and 4, with a proposal that differs much from p."""
    goal, log_q = double(LAW).log(), double(PROPOSAL).log()
    errors = []
    for k in (1, 2, 4):
        found = search_minimisers(FAMILY[name], double(LAW), log_q=log_q, num_negatives=k).scores[0]
        shift = goal.max() if FAMILY[name].facts.shift_invariant.value else 0
        errors.append(float((found - goal + shift).abs().max()))
    listed = ", ".join(f"{error:.0e}" for error in errors)
    return CheckResult(max(errors) < 1e-4, f"largest |s - log p| at k = 1, 2, 4: {listed}")


@cache
def tree_is_consistent() -> CheckResult:
    """With free node scores, the minimiser of the tree's risk has P proportional to E[y]."""
    weights, tree = double((0.9, 0.5, 0.3, 0.7)), HuffmanTree([5, 1, 2, 9])
    nodes = descend_risk(FAMILY["hierarchical_softmax"], torch.zeros(3, dtype=torch.float64), weights, {"tree": tree})
    probs = hierarchical_softmax_log_prob(nodes, torch.eye(3, dtype=torch.float64), tree).exp()
    error = float((probs - weights / weights.sum()).abs().max())
    return CheckResult(error < 1e-5, f"E[y] = {row(weights)} has the minimiser P = {row(probs)}")


@cache
def multilabel_metrics() -> CheckResult:
    """The sum over labels is consistent with P@k and DCG, the normalized form with R@k, and neither with NDCG."""
    member, found = FAMILY["softmax"], {}
    for multilabel in ("sum", "normalized"):
        for metric in ("precision", "recall", "dcg", "ndcg"):
            found[multilabel, metric] = consistency(
                member, metric, labels="multi", multilabel=multilabel, trials=30
            ).holds
    right = {("sum", "precision"), ("sum", "dcg"), ("normalized", "recall")}
    law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), double((0.36, 0.64)))
    values = [expected_metric(scores, law, "ndcg") for scores in (double((1, 0, 0)), double((0, 1, 1)))]
    return CheckResult(
        all(holds == (pair in right) for pair, holds in found.items()) and values[0] < values[1],
        "P({a}) = .36, P({b, c}) = .64: the normalized form ranks a first,"
        f" NDCG {values[0]:.3f}; b, c first has {values[1]:.3f}",
    )


@cache
def schur() -> CheckResult:
    """Softmax does not preserve majorization, the relation "is more spread out" of two score vectors."""
    wide, narrow = double((3, 1, -1)), double((3, 0, 0))
    tops = [float(softmax(scores).max()) for scores in (wide, narrow)]
    holds = majorizes(wide, narrow) and not majorizes(softmax(wide), softmax(narrow))
    return CheckResult(holds, f"(3, 1, -1) majorizes (3, 0, 0), but the top shares are {tops[0]:.3f} < {tops[1]:.3f}")


@cache
def ties_cost_exactly() -> CheckResult:
    """The mean DCG that a group of ties loses, over all permutations of the group, equals the printed lower bound."""
    relevant, weights = [True, False, True, False], [1 / math.log2(i + 1) for i in range(3, 7)]
    gains = [sum(w for w, hit in zip(weights, hits, strict=True) if hit) for hits in permutations(relevant)]
    mean = sum(weights[:2]) - sum(gains) / len(gains)
    scores = double((9, 8, 1, 1, 1, 1))  # the ties are at positions 3 to 6
    found = float(tie_loss(scores, torch.tensor([False, False, *relevant])))
    return CheckResult(abs(mean - found) < 1e-12, f"4 ties, 2 relevant: mean loss {mean:.6f}, formula {found:.6f}")


@cache
def alignment_is_an_equality() -> CheckResult:
    """With d as the paper's formula has it, <p - y, d> = <filled - y, d> - lost; with -d the printed "<=" fails.

    d is a gradient: it lowers the scores of relevant classes, so that -d is the direction in which DCG improves.
    """
    scores, relevant = 3 * normal(100, 6), torch.arange(6).expand(100, 6) < 2
    found = alignment(entmax(scores), scores, relevant, softmax(scores))
    error = float((found.sparse - found.filled + found.lost).abs().max())
    row = int(found.lost.argmax())
    down = -found.sparse[row] > -found.filled[row] - found.lost[row]
    improves = bool((dcg_direction(scores, relevant)[relevant] < 0).all())
    return CheckResult(
        error < 1e-12 and bool(down) and improves,
        f"difference of the two sides {error:.0e} over 100 rows; with -d: {-found.sparse[row]:.3f} >"
        f" {-found.filled[row] - found.lost[row]:.3f}",
    )


def _gaps(name: str, **settings: Any) -> Tensor:
    """Loss minus Bregman divergence at random scores and targets, (200,)."""
    scores, target = 3 * normal(200, 5), torch.softmax(3 * normal(200, 5, seed=1), -1)
    return bregman.bregman_gap(FAMILY[name].fenchel_young(**settings), scores, target)


@cache
def loss_is_bregman() -> CheckResult:
    """The softmax loss is the Bregman divergence of its Omega."""
    gap = float(_gaps("softmax").abs().max())
    return CheckResult(gap < 1e-12, f"largest |loss - divergence| {gap:.0e}")


@cache
def loss_bounds_bregman() -> CheckResult:
    """The losses of sparse maps are at least the divergence, and larger where a target is outside of the support."""
    gaps = [_gaps("sparsemax"), _gaps("entmax", alpha=1.5)]
    low, high = min(float(gap.min()) for gap in gaps), max(float(gap.max()) for gap in gaps)
    return CheckResult(low > -1e-12 and high > 1, f"loss - divergence between {low:.0e} and {high:.3g}")


@cache
def gradient_is_residual() -> CheckResult:
    """The gradient of every Fenchel-Young member is its map minus the target."""
    pairs = [m.fenchel_young(**setting) for m in FAMILY.values() if m.foundation for setting in m.examples]
    worst = max(float(bregman.gradient_residual(pair, 2 * normal(100, 5)).max()) for pair in pairs)
    return CheckResult(worst < 1e-12, f"largest |gradient - (p - t)| {worst:.0e}")


@cache
def rankmax_has_no_potential() -> CheckResult:
    """No loss has the gradient rankmax - e_y: the Jacobian of that field is not symmetric."""
    map, scores = member_map(FAMILY["rankmax"], torch.tensor(0)), double((0.0, 0.5, -0.5))
    value = bregman.asymmetry(map, scores)
    return CheckResult(value > 0.1, f"at s = {row(scores)}, y = 0: largest |J - J'| = {value:.3g}")


@cache
def weak_order_needs_strict_convexity() -> CheckResult:
    """A weakly ordered map suffices with a strictly convex Omega, and not with Omega = 0."""
    pairs = [m.fenchel_young(**setting) for m in FAMILY.values() if m.foundation for setting in m.examples]
    strict = all(bregman.wop_suffices(pair.omega).holds for pair in pairs)
    flat = bregman.argmax_pair()
    weak = order_preservation_of(flat.map).kind == "weak"
    free = bregman.wop_suffices(flat.omega)
    return CheckResult(
        strict and weak and not free.holds,
        f"Omega = 0, p = {row(free.probs)}: the map is weakly ordered and equal scores minimise the risk",
    )
