"""Measurements behind the claims: each function re-runs one statement and says what it found.

All of them are deterministic, need few classes and take at most a few seconds; together they are `manymax theory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.losses import FAMILY
from manymax.losses.entmax import entmax
from manymax.losses.hierarchical_softmax import hierarchical_softmax_log_prob, mean_code_length
from manymax.losses.nce import expected_loss, nce_loss
from manymax.losses.nce import variance as nce_variance
from manymax.losses.rankmax import rankmax_loss
from manymax.losses.rg import (
    class_moments,
    error_bound,
    rg_log_partition,
    rg_log_partition_from_moments,
)
from manymax.losses.sampled_softmax import sampled_softmax_loss
from manymax.losses.softmax import softmax, softmax_loss
from manymax.ops import simplex
from manymax.ops.alias import alias_table, draw_from_alias_table
from manymax.ops.divergences import chi_square, jensen_shannon, kl
from manymax.ops.tree import HuffmanTree
from manymax.theory import bregman, jacobian, rates
from manymax.theory.bias_variance import estimate
from manymax.theory.consistency import (
    LabelLaw,
    all_samples,
    conditional_risk,
    consistency,
    descend_risk,
    expected_metric,
    minimisers,
    rankmax_levels,
    regret,
    search_minimisers,
)
from manymax.theory.gradients import alignment, dcg_direction, tie_loss
from manymax.theory.order import majorizes, member_map, order_of

LAW, PROPOSAL = (0.4, 0.32, 0.28), (0.1, 0.2, 0.7)  # p and q, far apart
SCORES = (1.2, 0.3, -0.4, -1.1)  # scores whose third moment is not 0
NOISE = (0.3, 0.1, 0.4, 0.2)  # a proposal for them


@dataclass(frozen=True)
class Finding:
    """Whether a statement stood up when it was run again, and what was measured."""

    holds: bool
    measured: str


Check = Callable[[], Finding]


def _double(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _row(values: Tensor, digits: int = 3) -> str:
    return "(" + ", ".join(f"{value:.{digits}g}" for value in values.tolist()) + ")"


# Order and consistency ----------------------------------------------------------------------------


@cache
def order(name: str) -> Finding:
    """The order that the map keeps is the one that its facts state, for every setting."""
    member = FAMILY[name]
    found = [order_of(member_map(member, **setting)) for setting in member.settings]
    assert member.facts.order is not None
    holds = all(each.kind == member.facts.order.value for each in found)
    return Finding(holds, f"{found[0].kind}; {found[0].witness or 'no tie or inversion found in 9,000 score vectors'}")


@cache
def consistent(name: str) -> Finding:
    """Top-k calibrated and DCG-consistent for one label, and for the sum over several: no minimiser ranks wrongly."""
    asked: list[dict[str, Any]] = [
        {"metric": "recall"},
        {"metric": "dcg"},
        {"metric": "precision", "labels": "multi"},
        {"metric": "dcg", "labels": "multi"},
    ]
    settings = FAMILY[name].settings[0]
    found = [consistency(FAMILY[name], trials=40, **question, **settings) for question in asked]
    return Finding(
        all(each.holds for each in found),
        f"largest regret {max(each.regret for each in found):.1g} over {sum(each.trials for each in found)} laws",
    )


@cache
def rankmax_ties() -> Finding:
    """Rankmax's minimiser ties distinct classes: not Top-2 calibrated at C = 3, not Top-1 at C = 34."""
    law = LabelLaw.single(_double((0.6, 0.22, 0.18)))
    scores = minimisers(FAMILY["rankmax"], law.probs).scores[0]
    even = torch.linspace(1.0001, 1, 34, dtype=torch.float64)
    levels = rankmax_levels(even / even.sum())
    top = int((levels == 0).sum())
    tied = bool(scores[1] == scores[2]) and regret(scores, law, "recall", 2) > 0.03 and top > 1
    return Finding(
        tied and not consistency(FAMILY["rankmax"], "dcg").holds,
        f"p = {_row(law.probs)} has the minimiser {_row(scores)}: classes 1 and 2 tie;"
        f" 34 nearly even classes: {top} tie at the top",
    )


@cache
def log_p_for_every_k(name: str) -> Finding:
    """The risk minimiser is log p + const for k = 1, 2, 4, with a proposal far from p."""
    goal, log_q = _double(LAW).log(), _double(PROPOSAL).log()
    errors = []
    for k in (1, 2, 4):
        found = search_minimisers(FAMILY[name], _double(LAW), log_q=log_q, num_negatives=k).scores[0]
        shift = goal.max() if FAMILY[name].facts.shift_invariant.value else 0
        errors.append(float((found - goal + shift).abs().max()))
    listed = ", ".join(f"{error:.0e}" for error in errors)
    return Finding(max(errors) < 1e-4, f"largest |s - log p| at k = 1, 2, 4: {listed}")


@cache
def tree_is_consistent() -> Finding:
    """With free node scores, the minimiser of the tree's risk has P proportional to E[y]."""
    weights, tree = _double((0.9, 0.5, 0.3, 0.7)), HuffmanTree([5, 1, 2, 9])
    nodes = descend_risk(FAMILY["hierarchical_softmax"], torch.zeros(3, dtype=torch.float64), weights, {"tree": tree})
    probs = hierarchical_softmax_log_prob(nodes, torch.eye(3, dtype=torch.float64), tree).exp()
    error = float((probs - weights / weights.sum()).abs().max())
    return Finding(error < 1e-5, f"E[y] = {_row(weights)} has the minimiser P = {_row(probs)}")


@cache
def multilabel_metrics() -> Finding:
    """The sum is right for P@k and DCG, the normalized form for R@k, and neither for NDCG."""
    member, found = FAMILY["softmax"], {}
    for multilabel in ("sum", "normalized"):
        for metric in ("precision", "recall", "dcg", "ndcg"):
            found[multilabel, metric] = consistency(
                member, metric, labels="multi", multilabel=multilabel, trials=30
            ).holds
    right = {("sum", "precision"), ("sum", "dcg"), ("normalized", "recall")}
    law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), _double((0.36, 0.64)))
    values = [expected_metric(scores, law, "ndcg") for scores in (_double((1, 0, 0)), _double((0, 1, 1)))]
    return Finding(
        all(holds == (pair in right) for pair, holds in found.items()) and values[0] < values[1],
        "P({a}) = .36, P({b, c}) = .64: the normalized form ranks a first,"
        f" NDCG {values[0]:.3f}; b, c first has {values[1]:.3f}",
    )


@cache
def schur() -> Finding:
    """Softmax does not keep the relation "is more spread out"."""
    wide, narrow = _double((3, 1, -1)), _double((3, 0, 0))
    tops = [float(softmax(scores).max()) for scores in (wide, narrow)]
    holds = majorizes(wide, narrow) and not majorizes(softmax(wide), softmax(narrow))
    return Finding(holds, f"(3, 1, -1) majorizes (3, 0, 0), but the top shares are {tops[0]:.3f} < {tops[1]:.3f}")


@cache
def ties_cost_exactly() -> Finding:
    """Over all orders of a block of ties, the mean loss of DCG is the printed bound: an equality."""
    relevant, weights = [True, False, True, False], [1 / math.log2(i + 1) for i in range(3, 7)]
    orders = [sum(w for w, hit in zip(weights, order, strict=True) if hit) for order in permutations(relevant)]
    mean = sum(weights[:2]) - sum(orders) / len(orders)
    scores = _double((9, 8, 1, 1, 1, 1))  # the block is at positions 3 to 6
    found = float(tie_loss(scores, torch.tensor([False, False, *relevant])))
    return Finding(abs(mean - found) < 1e-12, f"4 ties, 2 relevant: mean loss {mean:.6f}, formula {found:.6f}")


@cache
def alignment_is_an_equality() -> Finding:
    """<p - y, d> = <filled - y, d> - lost with d as its formula; as the direction of improvement, -d, "<=" fails."""
    scores, relevant = 3 * _normal(100, 6), torch.arange(6).expand(100, 6) < 2
    found = alignment(entmax(scores), scores, relevant, softmax(scores))
    error = float((found.sparse - found.filled + found.lost).abs().max())
    row = int(found.lost.argmax())
    down = -found.sparse[row] > -found.filled[row] - found.lost[row]
    improves = bool((dcg_direction(scores, relevant)[relevant] < 0).all())  # it lowers the relevant: a gradient
    return Finding(
        error < 1e-12 and bool(down) and improves,
        f"difference of the two sides {error:.0e} over 100 rows; with -d: {-found.sparse[row]:.3f} >"
        f" {-found.filled[row] - found.lost[row]:.3f}",
    )


# Fenchel-Young and Bregman ------------------------------------------------------------------------


def _gaps(name: str, **settings: Any) -> Tensor:
    """Loss minus Bregman divergence at random scores and targets, (200,)."""
    scores, target = 3 * _normal(200, 5), torch.softmax(3 * _normal(200, 5, seed=1), -1)
    return bregman.bregman_gap(FAMILY[name].fenchel_young(**settings), scores, target)


@cache
def loss_is_bregman() -> Finding:
    """Softmax's loss is the Bregman divergence of its Omega."""
    gap = float(_gaps("softmax").abs().max())
    return Finding(gap < 1e-12, f"largest |loss - divergence| {gap:.0e}")


@cache
def loss_bounds_bregman() -> Finding:
    """The losses of sparse maps are at least the divergence, and more where a target is off the support."""
    gaps = [_gaps("sparsemax"), _gaps("entmax", alpha=1.5)]
    low, high = min(float(gap.min()) for gap in gaps), max(float(gap.max()) for gap in gaps)
    return Finding(low > -1e-12 and high > 1, f"loss - divergence between {low:.0e} and {high:.3g}")


@cache
def gradient_is_residual() -> Finding:
    """The gradient of every Fenchel-Young member is its map minus the target."""
    pairs = [m.fenchel_young(**setting) for m in FAMILY.values() if m.foundation for setting in m.settings]
    worst = max(float(bregman.gradient_residual(pair, 2 * _normal(100, 5)).max()) for pair in pairs)
    return Finding(worst < 1e-12, f"largest |gradient - (p - t)| {worst:.0e}")


@cache
def rankmax_has_no_potential() -> Finding:
    """No loss has the gradient rankmax - e_y: the Jacobian of that field is not symmetric."""
    map, scores = member_map(FAMILY["rankmax"], torch.tensor(0)), _double((0.0, 0.5, -0.5))
    value = bregman.asymmetry(map, scores)
    return Finding(value > 0.1, f"at s = {_row(scores)}, y = 0: largest |J - J'| = {value:.3g}")


@cache
def weak_order_needs_strict_convexity() -> Finding:
    """A weakly ordered map suffices with a strictly convex Omega, and not with Omega = 0."""
    pairs = [m.fenchel_young(**setting) for m in FAMILY.values() if m.foundation for setting in m.settings]
    strict = all(bregman.wop_suffices(pair.omega).holds for pair in pairs)
    flat = bregman.argmax_pair()
    weak = order_of(flat.map).kind == "weak"
    free = bregman.wop_suffices(flat.omega)
    return Finding(
        strict and weak and not free.holds,
        f"Omega = 0, p = {_row(free.probs)}: the map is weakly ordered and equal scores minimise the risk",
    )


# Curvature ----------------------------------------------------------------------------------------


@cache
def entmax_supremum(name: str) -> Finding:
    """The largest Jacobian norm is the stated one: reached or approached, and not passed at random scores."""
    member = FAMILY[name]
    found = []
    for num_classes in (2, 48, 1000):
        for setting in member.settings:
            alpha = jacobian.ALPHAS.get(name) or setting["alpha"]
            bound = jacobian.supremum(member, num_classes, **setting)
            sharpest = torch.zeros(num_classes) if alpha == 2 else jacobian.sharpest_scores(num_classes, alpha)
            scores = torch.cat([sharpest.double()[None], 3 * _normal(40, num_classes), _normal(40, num_classes)])
            norms = jacobian.entmax_norm(entmax(scores, alpha), alpha)
            found.append((bool((norms <= bound + 1e-12).all() and norms[0] > bound - 1e-9), float(norms[0]), bound))
    _, reached, bound = found[-len(member.settings)]
    return Finding(all(holds for holds, *_ in found), f"at C = 1000 {reached:.6g} reached, {bound:.6g} stated")


@cache
def rankmax_is_not_smooth() -> Finding:
    """Rankmax's gradient jumps at s_j = s_y - 1; its map has |J| <= m |p| / S <= m / S, up to C."""
    step = 1e-6
    gradients = []
    for side in (-step, step):
        scores = _double((0.0, -1.0 + side)).requires_grad_()
        gradients.append(torch.autograd.grad(rankmax_loss(scores, torch.tensor(0)), scores)[0])
    jump = float((gradients[1] - gradients[0]).norm())
    member, scores = FAMILY["rankmax"], _normal(200, 6)
    norms = torch.linalg.matrix_norm(jacobian.jacobian(member, scores), 2)
    bounded = bool((norms <= jacobian.norm_bounds(member, scores)[1] + 1e-12).all())
    inside = torch.full((6,), -1 + 1e-9, dtype=torch.float64)
    inside[0] = 0
    largest = float(torch.linalg.matrix_norm(jacobian.jacobian(member, inside), 2))
    return Finding(
        bounded and jump > 0.5 and abs(largest - 6) < 1e-6,
        f"s = (0, -1), y = 0: the gradient jumps by {jump:.3g}; the map's Jacobian reaches {largest:.3g} for 6 classes",
    )


def _hessian_norm(loss: Callable[[Tensor], Tensor], scores: Tensor) -> float:
    hessian = torch.autograd.functional.hessian(loss, scores)
    assert isinstance(hessian, Tensor)
    return float(torch.linalg.matrix_norm(hessian, 2))


def _sampled_curvature(name: str, ids: list[int], scores: Tensor) -> float:
    """Norm of the Hessian in all scores (C,) of a sampled loss of label 0 with the negatives `ids`."""
    loss = sampled_softmax_loss if name == "sampled_softmax" else nce_loss
    uniform = -math.log(len(scores))
    return _hessian_norm(
        lambda s: loss(s[0], s[torch.tensor(ids)], log_q_positive=uniform, log_q_negative=uniform), scores
    )


@cache
def sampled_softmax_supremum() -> Finding:
    """At most 1/2 with distinct and with repeated negatives, and 1/2 is approached."""
    samples = ([1, 2, 3], [1, 1, 2], [1, 1, 1], [0, 0, 1])
    drawn = [_sampled_curvature("sampled_softmax", ids, 2 * s) for ids in samples for s in _normal(20, 4)]
    even = _sampled_curvature("sampled_softmax", [1, 2, 3], _double((0, 0, -30, -30)))
    return Finding(
        max(*drawn, even) <= 0.5 + 1e-12 and even > 0.5 - 1e-9, f"largest of 81 curvatures {max(*drawn, even):.6g}"
    )


@cache
def nce_supremum() -> Finding:
    """1/4 if all classes of the sample are distinct; a class drawn four times has four times as much."""
    k, centre = 4, torch.full((6,), math.log(4 / 6), dtype=torch.float64)  # d = 0 for all classes
    distinct = [_sampled_curvature("nce", [1, 2, 3, 4], s) for s in (centre, *(centre + _normal(20, 6)))]
    repeated = _sampled_curvature("nce", [1] * k, centre)
    holds = max(distinct) <= 0.25 + 1e-12 and abs(distinct[0] - 0.25) < 1e-9 and abs(repeated - k / 4) < 1e-9
    return Finding(holds, f"distinct negatives {max(distinct):.3g}; one class drawn 4 times: {repeated:.3g}")


@cache
def tree_supremum() -> Finding:
    """The curvature in the node scores of a binary tree is at most 1/4, reached at 0."""
    tree, member = HuffmanTree([5, 1, 2, 9]), FAMILY["hierarchical_softmax"]
    vectors = torch.eye(3, dtype=torch.float64)

    def curvature(nodes: Tensor) -> float:
        return _hessian_norm(lambda x: member.loss(x, vectors, torch.tensor(1), tree), nodes)

    values = [curvature(nodes) for nodes in (torch.zeros(3, dtype=torch.float64), *_normal(20, 3))]
    return Finding(
        abs(values[0] - 0.25) < 1e-12 and max(values) <= 0.25 + 1e-12, f"{values[0]:.3g} at 0, no more elsewhere"
    )


@cache
def rg_supremum() -> Finding:
    """RG's Hessian has the norm 1/C everywhere."""
    matrices = jacobian.jacobian(FAMILY["rg"], _normal(5, 7), method="autograd")
    error = float((torch.linalg.matrix_norm(matrices, 2) - 1 / 7).abs().max())
    return Finding(error < 1e-12, f"|norm - 1/C| at most {error:.0e} for C = 7")


@cache
def ranks() -> Finding:
    """The rank of the Jacobian is C - 1 for softmax, with shifts as null space, and support - 1 for sparse maps."""
    scores = _normal(50, 6)
    dense = bool((jacobian.rank(jacobian.jacobian(FAMILY["softmax"], scores)) == 5).all())
    null = jacobian.null_space(jacobian.jacobian(FAMILY["softmax"], scores[0]))
    shifts = null.shape == (6, 1) and bool(torch.allclose(null, null.mean().expand_as(null)))
    sparse = all(
        bool((jacobian.rank(jacobian.jacobian(member, scores)) == (member_map(member)(scores) > 0).sum(-1) - 1).all())
        for member in (FAMILY["sparsemax"], FAMILY["entmax"])
    )
    return Finding(dense and shifts and sparse, "50 score vectors of 6 classes, no exception")


@cache
def condition() -> Finding:
    """The nonzero eigenvalues of softmax's Jacobian have no lower bound."""
    probs = _double((0.5, 0.5 - 1e-6, 1e-6))
    values = torch.linalg.eigvalsh(jacobian.jacobian(FAMILY["softmax"], probs.log()))
    number = float(values[-1] / values[1])
    return Finding(number > 1e5, f"p = (.5, .5 - 1e-6, 1e-6): condition number {number:.1e}; sparsemax has 1")


@cache
def descent_contracts() -> Finding:
    """Gradient descent with eta* contracts by rho on the worst head, and diverges beyond eta_max."""
    errors, grown = [], []
    for name in ("softmax", "sparsemax", "entmax", "rg"):
        gradient, steep, r = rates.worst_head(FAMILY[name], 60, feature_norm=2.0, ridge=0.05)
        zero = torch.zeros(60, dtype=torch.float64)
        path = rates.descend(gradient, 1e-4 * (steep + 60**-0.5), r.eta_star, 10)  # with more, rg is down to rounding
        errors.append(abs(float(rates.contractions(path, zero).max()) - r.rho))
        over, under = (rates.descend(gradient, 1e-6 * steep, f * r.eta_max, 40) for f in (1.02, 0.98))
        grown.append(bool(over[-1].norm() > over[0].norm() and under[-1].norm() < under[0].norm()))
    return Finding(max(errors) < 1e-4 and all(grown), f"|contraction - rho| at most {max(errors):.0e} for four members")


@cache
def rate_link(left: str, right: str) -> Finding:
    """One link of the paper's chain of rates, with the facts' worst-case curvatures."""
    (link,) = [link for link in rates.rate_ordering() if (link.left, link.right) == (left, right)]
    return Finding(
        link.holds, f"rho = {link.left_rho:.5f} and {link.right_rho:.5f} at L_G = 1, gamma = .01, C = 1000, k = 100"
    )


def denied(check: Check) -> Finding:
    """The opposite of a finding: what is contradicted must fail."""
    found = check()
    return Finding(not found.holds, found.measured)


@cache
def rates_are_not_pointwise() -> Finding:
    """At s = (1, 0) sparsemax is flat and softmax is not: the order of suprema is none of the curvatures."""
    scores = _double((1.0, 0.0))
    sparse, dense = (
        float(torch.linalg.matrix_norm(jacobian.jacobian(FAMILY[name], scores), 2)) for name in ("sparsemax", "softmax")
    )
    return Finding(
        sparse == 0 and dense > 0.39, f"s = (1, 0): |J| = {sparse:.3g} for sparsemax, {dense:.3f} for softmax"
    )


# Cost ---------------------------------------------------------------------------------------------


class _Touched(TorchDispatchMode):
    """Counts the numbers that operations touch; a sort of n counts n log2 n, what is gathered counts once."""

    SORTS, GATHERS = ("sort", "argsort", "msort"), ("index", "index_select", "gather", "embedding")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        looked_at = result if name in self.GATHERS else (args, kwargs, result)
        sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(looked_at) if isinstance(t, Tensor)]
        if sizes and not func.is_view:
            self.count += max(sizes) * (math.log2(max(sizes)) if name in self.SORTS else 1)
        return result


def _count(run: Callable[[], object]) -> float:
    with _Touched() as mode:
        run()
    return mode.count


def _scores(batch: int, num_classes: int) -> Tensor:
    """Half of the rows peaked, half of them flat."""
    spread = torch.tensor([30.0, 1e-3]).repeat(batch // 2)[:, None]
    return (spread * _normal(batch, num_classes)).float()


def _exact_step(name: str, batch: int, num_classes: int) -> float:
    """Numbers touched by loss and gradient; of the sparse maps by search and map, which their operators hide."""
    member, scores = FAMILY[name], _scores(batch, num_classes)
    if name in ("sparsemax", "entmax"):
        alpha = torch.tensor(jacobian.ALPHAS.get(name, 1.5), dtype=torch.float64)

        def search() -> Tensor:
            maximum, log_top, _ = simplex.solve(scores, alpha)
            return simplex.apply(scores, alpha, maximum, log_top, torch.ones_like(maximum))

        return _count(search)
    leaf = scores.requires_grad_()
    return _count(lambda: torch.autograd.grad(member.loss(leaf, torch.arange(batch) % 7), leaf))


@cache
def linear_cost(name: str) -> Finding:
    """Numbers touched grow like N C, and not like N C log C."""
    base = _exact_step(name, 8, 2**11)
    grown = [_exact_step(name, n, c) / base for n, c in ((8, 2**15), (32, 2**11))]
    return Finding(
        abs(grown[0] / 16 - 1) < 0.15 and abs(grown[1] / 4 - 1) < 0.15,
        f"16 times the classes touch {grown[0]:.3g} times the numbers (N C log C: {16 * 15 / 11:.3g}),"
        f" 4 times the batch {grown[1]:.3g}",
    )


@cache
def sampled_cost(name: str) -> Finding:
    """Numbers touched grow like N k; the number of classes does not enter, drawing included."""
    loss = sampled_softmax_loss if name == "sampled_softmax" else nce_loss

    def step(batch: int, num_classes: int, k: int) -> float:
        keep, alias = alias_table(torch.ones(num_classes, dtype=torch.float64))
        generator = torch.Generator().manual_seed(0)
        table = torch.zeros(num_classes)

        def run() -> None:
            ids = draw_from_alias_table(keep, alias, (batch, k), generator=generator)
            leaf = table[ids].requires_grad_()
            torch.autograd.grad(loss(torch.zeros(batch), leaf, log_q_positive=-9.0, log_q_negative=-9.0), leaf)

        return _count(run)

    base = step(8, 1000, 100)
    more, classes = step(8, 1000, 1600) / base, step(8, 64_000, 100) / base
    return Finding(
        abs(more / 16 - 1) < 0.15 and classes == 1,
        f"16 times the negatives touch {more:.3g} times the numbers, 64 times the classes {classes:.3g}",
    )


@cache
def tree_cost() -> Finding:
    """A label touches the nodes of its path; the mean path is within 1 bit of the entropy of the counts."""
    counts = 1 / torch.arange(1, 1025, dtype=torch.float64)
    tree, probs = HuffmanTree(counts), counts / counts.sum()
    entropy = float(-(probs * probs.log2()).sum())
    nodes = torch.zeros(tree.num_nodes, 2, dtype=torch.float64, requires_grad=True)
    labels = [0, 5, 100, 1023]
    x = torch.ones(2, dtype=torch.float64)
    loss = FAMILY["hierarchical_softmax"].loss
    gradients = [torch.autograd.grad(loss(x, nodes, torch.tensor(label), tree), nodes)[0] for label in labels]
    touched = [int(gradient.any(-1).sum()) for gradient in gradients]
    mean = mean_code_length(1024, counts)
    return Finding(
        touched == tree.lengths[labels].tolist() and entropy <= mean < entropy + 1 and mean_code_length(1024) == 10,
        f"C = 1024: paths of 10 for equal counts; {mean:.2f} for Zipf's law, entropy {entropy:.2f} bits",
    )


@cache
def tree_depth() -> Finding:
    """A Huffman tree can be C - 1 deep."""
    tree = HuffmanTree([2**i for i in range(20)])
    return Finding(tree.depth == 19, f"counts 1, 2, 4, ... of 20 classes: depth {tree.depth}, ceil(log2 C) = 5")


@cache
def rg_needs_no_table() -> Finding:
    """RG's log partition from mean and covariance of the class vectors is that from all scores."""
    queries, items = _normal(5, 3), _normal(50, 3, seed=1)
    value = rg_log_partition_from_moments(queries, class_moments(items))
    error = float((value - rg_log_partition(queries @ items.T)).abs().max())
    return Finding(error < 1e-12, f"largest difference to all scores {error:.0e}")


# Bias and variance --------------------------------------------------------------------------------


def _sampled(correction: str, num_negatives: int, target: int | None = None) -> dict[str, float]:
    """Exact bias and variance on SCORES with the proposal NOISE; the mean over y ~ P without a label."""
    label = None if target is None else torch.tensor([target])
    result = estimate(
        "sampled_softmax",
        _double(SCORES)[None],
        label,
        log_q=_double(NOISE).log(),
        num_negatives=num_negatives,
        correction=correction,
    )
    return {"bias": float(result.exact_bias + result.offset), "variance": float(result.exact_variance)}


def _chi2() -> float:
    return float(chi_square(softmax(_double(SCORES)), _double(NOISE)))


@cache
def importance_bias_vanishes() -> Finding:
    """E[log Z-hat] tends to log Z for the estimate that the paper analyses, and for "partition"."""
    values = {name: [_sampled(name, k, 0)["bias"] for k in (10, 1000, 100_000)] for name in ("importance", "partition")}
    holds = all(abs(v[2]) < 1e-4 and abs(v[2]) < abs(v[1]) < abs(v[0]) for v in values.values())
    listed = ", ".join(f"{value:.1e}" for value in values["importance"])
    return Finding(holds, f"k = 10, 1000, 100,000: {listed}")


@cache
def sampled_curvature_bias() -> Finding:
    """-chi2/(2k) for importance sampling alone, -v/(2k) for "partition", +chi2/(2k) over y ~ P for "logq"."""
    k, probs, q = 10_000, softmax(_double(SCORES)), _double(NOISE)
    others = torch.arange(len(probs)) != 0
    v = float((probs[others].square() / q[others]).sum() - (1 - probs[0]).square())
    # of "logq" the constant log((k + 1) q_y) is no bias of the gradient; it is taken off in the mean over y
    offset = float((probs * ((k + 1) * q).log()).sum())
    measured = {
        "importance": _sampled("importance", k)["bias"] / (-_chi2() / (2 * k)),
        "partition": _sampled("partition", k, 0)["bias"] / (-v / (2 * k)),
        "logq": (_sampled("logq", k)["bias"] - offset) / (_chi2() / (2 * k)),
    }
    listed = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
    return Finding(
        all(abs(value - 1) < 0.02 for value in measured.values()), f"exact / predicted at k = 10,000: {listed}"
    )


@cache
def sampled_variance() -> Finding:
    """chi2/k to leading order, for importance sampling and for "logq"."""
    k = 10_000
    ratios = [_sampled(name, k, 0)["variance"] / (_chi2() / k) for name in ("importance", "logq")]
    return Finding(
        all(abs(r - 1) < 0.02 for r in ratios), f"exact / chi2/k at k = 10,000: {ratios[0]:.4f}, {ratios[1]:.4f}"
    )


def _simple() -> tuple[float, float, int]:
    """log(Z~/Z) and k Var_q(e^s)/Z~^2 of the uncorrected loss at k = 1000, label 0."""
    k, scores, q = 1000, _double(SCORES), _double(NOISE)
    mean = (q * scores.exp()).sum()
    total = scores[0].exp() + k * mean
    spread = (q * (scores.exp() - mean).square()).sum()
    return float((total / scores.exp().sum()).log()), float(k * spread / total.square()), k


@cache
def simple_bias() -> Finding:
    """log(Z~/Z), Z~ = e^(s_y) + k E_q[e^s], is all of the uncorrected loss's bias but O(1/k); it grows like log k."""
    asymptotic, _, k = _simple()
    exact = _sampled("none", k, 0)["bias"]
    return Finding(abs(exact - asymptotic) < 1e-3, f"k = 1000: {asymptotic:.4f} predicted, {exact:.4f} exact")


@cache
def simple_curvature() -> Finding:
    """-k Var_q(e^s)/(2 Z~^2) is what remains."""
    asymptotic, variance, k = _simple()
    ratio = (_sampled("none", k, 0)["bias"] - asymptotic) / (-variance / 2)
    return Finding(abs(ratio - 1) < 0.02, f"exact / predicted at k = 1000: {ratio:.4f}")


@cache
def simple_variance() -> Finding:
    """k Var_q(e^s)/Z~^2 to leading order."""
    _, variance, k = _simple()
    ratio = _sampled("none", k, 0)["variance"] / variance
    return Finding(abs(ratio - 1) < 0.02, f"exact / predicted at k = 1000: {ratio:.4f}")


@cache
def nce_bias() -> Finding:
    """E[loss] = (1 + k)(H_b - JS) by enumeration; its gap to the softmax risk is not (1 + k) JS."""
    probs, q, k = softmax(_double(SCORES)), _double(NOISE), 3
    mean = float(conditional_risk(FAMILY["nce"], probs.log(), probs, log_q=q.log(), num_negatives=k))
    right = float(expected_loss(probs, q, k))
    entropy = float(-(probs * probs.log()).sum())
    printed = float((1 + k) * jensen_shannon(probs, q, 1 / (1 + k)))
    return Finding(
        abs(mean - right) < 1e-12 and abs(mean - entropy - printed) > 0.1,
        f"k = 3: E[loss] - H(P) = {mean - entropy:.4f}, printed {printed:.4f}",
    )


def _nce_terms(num_negatives: int) -> tuple[Tensor, Tensor]:
    """NCE's loss of label 0 on every sample, (n,), and the chances of the samples, (n,)."""
    scores, log_q = softmax(_double(SCORES)).log(), _double(NOISE).log()
    ids, chances = all_samples(log_q, num_negatives)
    loss = nce_loss(
        scores[0].expand(len(ids)),
        scores[ids],
        log_q_positive=log_q[0].expand(len(ids)),
        log_q_negative=log_q[ids],
        reduction="none",
    )
    return loss, chances


@cache
def nce_has_no_curvature() -> Finding:
    """NCE adds its draws up: its mean is the positive's term plus k times the mean of one draw, exactly."""
    k, scores, q = 5, softmax(_double(SCORES)).log(), _double(NOISE)
    loss, chances = _nce_terms(k)
    logits = scores - (k * q).log()
    linear = torch.nn.functional.softplus(-logits[0]) + k * (q * torch.nn.functional.softplus(logits)).sum()
    error = float((loss @ chances - linear).abs())
    return Finding(error < 1e-12, f"difference {error:.0e}")


@cache
def nce_exact_variance() -> Finding:
    """k Var_q(log(k + P/q)) by enumeration; the printed k chi2/(1 + k)^2 is too large."""
    k, probs, q = 5, softmax(_double(SCORES)), _double(NOISE)
    loss, chances = _nce_terms(k)
    measured = float(chances @ (loss - loss @ chances).square())
    right, printed = float(nce_variance(probs, q, k)), k * _chi2() / (1 + k) ** 2
    return Finding(
        abs(measured - right) < 1e-12 and printed > 1.05 * measured, f"k = 5: {measured:.4f}, printed {printed:.4f}"
    )


def _tree_case() -> tuple[Tensor, Tensor, Tensor, HuffmanTree]:
    """A flat P_s, the log P of a tree with random node scores, these scores, and the tree."""
    tree, nodes = HuffmanTree([5, 1, 2, 9]), _normal(3)
    log_tree = hierarchical_softmax_log_prob(nodes, torch.eye(3, dtype=torch.float64), tree)
    return softmax(_double(SCORES)), log_tree, nodes, tree


@cache
def tree_bias() -> Finding:
    """The mean of log P_s - log P_tree over y ~ P_s is the KL divergence; the printed sign gives another number."""
    probs, log_tree, *_ = _tree_case()
    right = float((probs * (probs.log() - log_tree)).sum())
    printed = float((probs * (-probs.log() - log_tree)).sum())
    divergence = float(kl(probs, log_tree.exp()))
    return Finding(
        abs(right - divergence) < 1e-12 and abs(printed - divergence) > 0.1,
        f"KL = {divergence:.4f}, mean {right:.4f}; with the sign of section B.5: {printed:.4f}",
    )


@cache
def deterministic(name: str) -> Finding:
    """Nothing is drawn: two evaluations are equal, and so are their logarithms' means."""
    if name == "hierarchical_softmax":
        values = [_tree_case()[1] for _ in range(2)]
    else:
        values = [FAMILY[name].loss(_double(SCORES), torch.tensor(0)) for _ in range(2)]
    return Finding(bool((values[0] == values[1]).all()), "two evaluations are equal")


@cache
def softmax_is_exact() -> Finding:
    """The softmax loss has the exact log partition."""
    scores = _normal(10, 6)
    error = float((softmax_loss(scores, torch.arange(10) % 6, reduction="none") - _reference(scores)).abs().max())
    return Finding(error < 1e-12, f"largest difference {error:.0e}")


def _reference(scores: Tensor) -> Tensor:
    return scores.exp().sum(-1).log() - scores[torch.arange(10), torch.arange(10) % 6]


@cache
def rg_bias() -> Finding:
    """Third order in the centred scores with a bound that holds; far from negligible at RG's own optimum."""
    scores = 2 * _normal(200, 5)
    error = (rg_log_partition(scores) - scores.logsumexp(-1)).abs()
    small = 1e-3 * (_double(SCORES) - _double(SCORES).mean())
    third = (rg_log_partition(small) - small.logsumexp(-1)) / (-(small**3).mean() / 6)
    zipf = 1 / torch.arange(1, 1001, dtype=torch.float64)
    optimum = 1000 * zipf / zipf.sum()
    there = float(rg_log_partition(optimum) - optimum.logsumexp(-1))
    return Finding(
        bool((error <= error_bound(scores) + 1e-12).all()) and abs(float(third) - 1) < 0.02 and there < -100,
        f"small scores: error / (-mu3/6) = {float(third):.4f}; at its optimum for Zipf's law, C = 1000: {there:.0f}",
    )


@cache
def sampled_gradient() -> Finding:
    """Even with q = P the expected gradient of "logq" is k/(k + 1) of softmax's: no unbiased estimate."""
    probs, k = softmax(_double(SCORES)), 3
    scores = _double(SCORES).requires_grad_()
    label = torch.eye(len(probs), dtype=torch.float64)[0]
    risk = conditional_risk(FAMILY["sampled_softmax"], scores, label, log_q=probs.log(), num_negatives=k)
    (gradient,) = torch.autograd.grad(risk, scores)
    ratio = gradient / (probs - label)
    return Finding(
        bool((ratio - k / (k + 1)).abs().max() < 1e-12), f"q = P, k = 3: {_row(ratio)} of softmax's gradient"
    )
