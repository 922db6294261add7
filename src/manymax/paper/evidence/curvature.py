"""Checks of the claims on Jacobians, smoothness and rates of convergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from manymax.members import FAMILY
from manymax.members.entmax.loss import entmax
from manymax.members.entmax.theory import entmax_norm
from manymax.members.nce.loss import nce_loss
from manymax.members.rankmax.loss import rankmax_loss
from manymax.members.sampled_softmax.loss import sampled_softmax_loss
from manymax.ops.tree import HuffmanTree
from manymax.paper.evidence.check_result import CheckResult, double, normal
from manymax.paper.learning_rates import rate_ordering
from manymax.theory import jacobian, rates
from manymax.theory.order_preservation import member_map

ALPHAS = {"softmax": 1.0, "sparsemax": 2.0}  # members that are entmax at a fixed alpha


@cache
def entmax_supremum(name: str) -> CheckResult:
    """The supremum of the Jacobian's norm is the stated one: it is approached, and not exceeded at random scores."""
    member = FAMILY[name]
    found = []
    for num_classes in (2, 48, 1000):
        for setting in member.examples:
            alpha = ALPHAS.get(name) or setting["alpha"]
            bound = jacobian.supremum(member, num_classes, **setting)
            sharpest = member.needed("theory.sharpest")(num_classes, **setting)
            scores = torch.cat([sharpest[None], 3 * normal(40, num_classes), normal(40, num_classes)])
            norms = entmax_norm(entmax(scores, alpha), alpha)
            found.append((bool((norms <= bound + 1e-12).all() and norms[0] > bound - 1e-9), float(norms[0]), bound))
    _, reached, bound = found[-len(member.examples)]
    return CheckResult(all(holds for holds, *_ in found), f"at C = 1000 {reached:.6g} reached, {bound:.6g} stated")


@cache
def rankmax_is_not_smooth() -> CheckResult:
    """Rankmax's gradient jumps at s_j = s_y - 1; its map has |J| <= m |p| / S <= m / S, which can be as large as C."""
    step = 1e-6
    gradients = []
    for side in (-step, step):
        scores = double((0.0, -1.0 + side)).requires_grad_()
        gradients.append(torch.autograd.grad(rankmax_loss(scores, torch.tensor(0)), scores)[0])
    jump = float((gradients[1] - gradients[0]).norm())
    member, scores = FAMILY["rankmax"], normal(200, 6)
    norms = torch.linalg.matrix_norm(jacobian.jacobian(member, scores), 2)
    bounded = bool((norms <= jacobian.norm_bounds(member, scores)[1] + 1e-12).all())
    inside = torch.full((6,), -1 + 1e-9, dtype=torch.float64)
    inside[0] = 0
    largest = float(torch.linalg.matrix_norm(jacobian.jacobian(member, inside), 2))
    return CheckResult(
        bounded and jump > 0.5 and abs(largest - 6) < 1e-6,
        f"s = (0, -1), y = 0: the gradient jumps by {jump:.3g}; the map's Jacobian reaches {largest:.3g} for 6 classes",
    )


def _hessian_norm(loss: Callable[[Tensor], Tensor], scores: Tensor) -> float:
    """The spectral norm of the Hessian of a loss at scores (C,)."""
    hessian = torch.autograd.functional.hessian(loss, scores)
    assert isinstance(hessian, Tensor)
    return float(torch.linalg.matrix_norm(hessian, 2))


def _sampled_curvature(name: str, ids: list[int], scores: Tensor) -> float:
    """The spectral norm of the Hessian in all scores (C,) of a sampled loss with label 0 and the negatives `ids`."""
    loss = sampled_softmax_loss if name == "sampled_softmax" else nce_loss
    uniform = -math.log(len(scores))
    return _hessian_norm(
        lambda s: loss(s[0], s[torch.tensor(ids)], log_q_positive=uniform, log_q_negative=uniform), scores
    )


@cache
def sampled_supremum() -> CheckResult:
    """The curvature of sampled softmax is at most 1/2, with distinct or repeated negatives, and approaches 1/2."""
    samples = ([1, 2, 3], [1, 1, 2], [1, 1, 1], [0, 0, 1])
    drawn = [_sampled_curvature("sampled_softmax", ids, 2 * s) for ids in samples for s in normal(20, 4)]
    even = _sampled_curvature("sampled_softmax", [1, 2, 3], double((0, 0, -30, -30)))
    return CheckResult(
        max(*drawn, even) <= 0.5 + 1e-12 and even > 0.5 - 1e-9, f"largest of 81 curvatures {max(*drawn, even):.6g}"
    )


@cache
def nce_supremum() -> CheckResult:
    """The curvature of NCE is 1/4 if the classes of a sample are distinct, and k/4 if one class is drawn k times."""
    # Scores of log(k q) make every logit 0, where the curvature of the logistic loss is largest.
    k, centre = 4, torch.full((6,), math.log(4 / 6), dtype=torch.float64)
    distinct = [_sampled_curvature("nce", [1, 2, 3, 4], s) for s in (centre, *(centre + normal(20, 6)))]
    repeated = _sampled_curvature("nce", [1] * k, centre)
    holds = max(distinct) <= 0.25 + 1e-12 and abs(distinct[0] - 0.25) < 1e-9 and abs(repeated - k / 4) < 1e-9
    return CheckResult(holds, f"distinct negatives {max(distinct):.3g}; one class drawn 4 times: {repeated:.3g}")


@cache
def tree_supremum() -> CheckResult:
    """The curvature in the node scores of a binary tree is at most 1/4, which it has at scores of 0."""
    tree, member = HuffmanTree([5, 1, 2, 9]), FAMILY["hierarchical_softmax"]
    vectors = torch.eye(3, dtype=torch.float64)

    def curvature(nodes: Tensor) -> float:
        return _hessian_norm(lambda x: member.loss(x, vectors, torch.tensor(1), tree), nodes)

    values = [curvature(nodes) for nodes in (torch.zeros(3, dtype=torch.float64), *normal(20, 3))]
    return CheckResult(
        abs(values[0] - 0.25) < 1e-12 and max(values) <= 0.25 + 1e-12, f"{values[0]:.3g} at 0, no more elsewhere"
    )


@cache
def rg_supremum() -> CheckResult:
    """RG's Hessian has the norm 1/C everywhere."""
    matrices = jacobian.jacobian(FAMILY["rg"], normal(5, 7), method="autograd")
    error = float((torch.linalg.matrix_norm(matrices, 2) - 1 / 7).abs().max())
    return CheckResult(error < 1e-12, f"|norm - 1/C| at most {error:.0e} for C = 7")


@cache
def ranks() -> CheckResult:
    """The rank of the Jacobian is C - 1 for softmax, with shifts as null space, and support - 1 for sparse maps."""
    scores = normal(50, 6)
    dense = bool((jacobian.rank(jacobian.jacobian(FAMILY["softmax"], scores)) == 5).all())
    null = jacobian.null_space(jacobian.jacobian(FAMILY["softmax"], scores[0]))
    shifts = null.shape == (6, 1) and bool(torch.allclose(null, null.mean().expand_as(null)))
    sparse = all(
        bool((jacobian.rank(jacobian.jacobian(member, scores)) == (member_map(member)(scores) > 0).sum(-1) - 1).all())
        for member in (FAMILY["sparsemax"], FAMILY["entmax"])
    )
    return CheckResult(dense and shifts and sparse, "50 score vectors of 6 classes, no exception")


@cache
def condition() -> CheckResult:
    """The nonzero eigenvalues of softmax's Jacobian have no lower bound."""
    probs = double((0.5, 0.5 - 1e-6, 1e-6))
    values = torch.linalg.eigvalsh(jacobian.jacobian(FAMILY["softmax"], probs.log()))
    number = float(values[-1] / values[1])
    return CheckResult(number > 1e5, f"p = (.5, .5 - 1e-6, 1e-6): condition number {number:.1e}; sparsemax has 1")


@cache
def descent_contracts() -> CheckResult:
    """Gradient descent with eta* contracts by rho on the worst head, and diverges beyond eta_max."""
    errors, grown = [], []
    for name in ("softmax", "sparsemax", "entmax", "rg"):
        gradient, steep, r = rates.worst_head(FAMILY[name], 60, feature_norm=2.0, ridge=0.05)
        zero = torch.zeros(60, dtype=torch.float64)
        # Ten steps: after more of them RG's error would be one of rounding.
        path = rates.descend(gradient, 1e-4 * (steep + 60**-0.5), r.eta_star, 10)
        errors.append(abs(float(rates.contractions(path, zero).max()) - r.rho))
        over, under = (rates.descend(gradient, 1e-6 * steep, f * r.eta_max, 40) for f in (1.02, 0.98))
        grown.append(bool(over[-1].norm() > over[0].norm() and under[-1].norm() < under[0].norm()))
    return CheckResult(
        max(errors) < 1e-4 and all(grown), f"|contraction - rho| at most {max(errors):.0e} for four members"
    )


@cache
def rate_link(left: str, right: str) -> CheckResult:
    """One link of the paper's chain of rates, with the worst-case curvatures that the members' facts state."""
    (link,) = [link for link in rate_ordering() if (link.left, link.right) == (left, right)]
    return CheckResult(
        link.holds, f"rho = {link.left_rho:.5f} and {link.right_rho:.5f} at L_G = 1, gamma = .01, C = 1000, k = 100"
    )


@cache
def rates_are_not_pointwise() -> CheckResult:
    """Suprema do not order curvatures at given scores: at s = (1, 0) sparsemax has curvature 0, and softmax more."""
    scores = double((1.0, 0.0))
    sparse, dense = (
        float(torch.linalg.matrix_norm(jacobian.jacobian(FAMILY[name], scores), 2)) for name in ("sparsemax", "softmax")
    )
    return CheckResult(
        sparse == 0 and dense > 0.39, f"s = (1, 0): |J| = {sparse:.3g} for sparsemax, {dense:.3f} for softmax"
    )
