"""Fenchel-Young losses and Bregman divergences, and the theorem that a weakly ordered map suffices.

For a Fenchel-Young pair with prediction p = p(s) and a target t on the simplex,

    L(t, s) - D(t, p(s)) = <s - grad Omega(p), p - t>

It is 0 where Omega is Legendre on the simplex: s - grad Omega(p) is then the same for all classes. For sparse maps it
is the target's mass off the support, times how far each such score is below the threshold: L bounds D from above.

The theorem ("WOP is sufficient for calibration") needs a strictly convex Omega, which the paper does not ask for. For a
symmetric Omega, the risk of a law p rises by exactly

    Omega(p) - Omega(p with p_i and p_j replaced by their mean)

if the scores i and j are forced to tie: positive for all p_i != p_j exactly if Omega is strictly convex along them.

References: Blondel, Martins, Niculae, JMLR 2020, propositions 2 and 3; the paper's section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.errors import ArgumentError
from manymax.ops.checks import check_scores
from manymax.theory.order_preservation import Map


def bregman_gap(pair: FenchelYoung, scores: Tensor, target: Tensor) -> Tensor:
    """L(t, s) - D(t, p(s)), measured.

    Args:
        pair: of a member by `member.fenchel_young(**settings)`, or one's own.
        scores: (..., C).
        target: (..., C) rows on the simplex.

    Returns:
        (...), 0 for a Legendre Omega, never negative.

    Example: softmax has no gap; sparsemax has one where a target is off the support.
        >>> from manymax.members import FAMILY
        >>> scores, target = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.5, 0.5])
        >>> bregman_gap(FAMILY["softmax"].fenchel_young(), scores, target).abs() < 1e-6
        tensor(True)
        >>> bregman_gap(FAMILY["sparsemax"].fenchel_young(), scores, target)
        tensor(1.5000)
    """
    check_scores(scores)
    loss = pair.conjugate(scores) + pair.omega(target) - (target * scores).sum(-1)
    return loss - pair.bregman(target, pair.map(scores))


def threshold_gap(pair: FenchelYoung, scores: Tensor, target: Tensor) -> Tensor:
    """The same by its formula: sum of t_j (threshold - s_j) over the classes j off the support, (...).

    The threshold, in units of scores, is grad Omega(0) - grad Omega(p_i) + s_i, the same for all i in the support.

        >>> from manymax.members import FAMILY
        >>> scores, target = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.5, 0.5])
        >>> threshold_gap(FAMILY["sparsemax"].fenchel_young(), scores, target)
        tensor(1.5000)
    """
    probs = pair.map(scores)
    slope = pair.slope(probs)
    excess = scores - slope  # one value on the support, smaller off it
    level = excess.gather(-1, probs.argmax(-1, keepdim=True))
    return torch.where((probs == 0) & (target > 0), target * (level - excess), 0).sum(-1)


def gradient_residual(pair: FenchelYoung, scores: Tensor) -> Tensor:
    """max |grad L - (p(s) - t)|, (...), which is max |grad Omega*(s) - p(s)| whatever t: 0 for a map and its own Omega.

    The gradient of <p(s), s> - Omega(p(s)) is taken by autograd, through the map.

    Args:
        pair, scores: as in `bregman_gap`.

    Example: a map with another one's Omega is found out.
        >>> from manymax import sparsemax
        >>> wrong = FenchelYoung(lambda s: sparsemax(2 * s), lambda p: p.square().sum(-1) / 2)
        >>> scores = torch.tensor([0.3, 0.1, -0.4])
        >>> float(gradient_residual(wrong, scores)) > 0.1
        True
    """
    leaf = scores.detach().requires_grad_()
    probs = pair.map(leaf)
    inner = (torch.where(probs != 0, probs * leaf, 0)).sum(-1)
    (gradient,) = torch.autograd.grad((inner - pair.omega(probs)).sum(), leaf)
    return (gradient - probs).abs().amax(-1).detach()


def asymmetry(map: Map, scores: Tensor) -> float:
    """The largest |J - J'| of a map's Jacobian at scores (C,): positive if no loss has the gradient map - target."""
    matrix = torch.autograd.functional.jacobian(map, scores)
    return float((matrix - matrix.mT).abs().max())


# The theorem --------------------------------------------------------------------------------------


def tie_cost(omega: Map, probs: Tensor, first: int, second: int) -> Tensor:
    """What it costs in risk to give two classes the same score: Omega(p) - Omega(p with both at their mean), (...).

    Args:
        omega: symmetric and convex, (..., C) to (...).
        probs: (..., C) laws.
        first, second: the classes.

    Returns:
        (...), never negative; 0 means that a minimiser may tie the two, though p tells them apart.

    Example: sparsemax pays, Omega = 0 does not.
        >>> probs = torch.tensor([0.5, 0.3, 0.2])
        >>> tie_cost(lambda p: p.square().sum(-1) / 2, probs, 0, 1), tie_cost(lambda p: 0 * p.sum(-1), probs, 0, 1)
        (tensor(0.0100), tensor(0.))
    """
    merged = probs.clone()
    merged[..., [first, second]] = probs[..., [first, second]].mean(-1, keepdim=True)
    return omega(probs) - omega(merged)


@dataclass(frozen=True)
class OrderTheorem:
    """Whether every tie of distinct classes costs something; if not, the law (C,) and the classes whose tie is free."""

    holds: bool
    smallest_cost: float  # relative to (p_i - p_j)^2
    probs: Tensor
    first: int
    second: int


def wop_suffices(
    omega: Map, num_classes: int = 4, *, laws: int = 500, seed: int = 0, tolerance: float = 1e-6
) -> OrderTheorem:
    """Whether the minimisers of a Fenchel-Young risk rank like p: the conclusion of the paper's theorem, re-run.

    Args:
        omega: symmetric and convex, (..., C) to (...), float64.
        num_classes: C.
        laws: how many random p.
        seed: of the laws.
        tolerance: the smallest tie cost over (p_i - p_j)^2 that counts as a cost.

    Returns:
        The finding, with the law and the pair of the smallest cost.

    Example: with Omega = 0 the map is the arg max, weakly ordered, and equal scores minimise every risk.
        >>> wop_suffices(lambda p: p.square().sum(-1) / 2).holds, wop_suffices(lambda p: 0 * p.sum(-1)).holds
        (True, False)
    """
    if num_classes < 2:
        raise ArgumentError(f"`num_classes` must be at least 2; got {num_classes}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = -torch.rand(laws, num_classes, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    probs = drawn / drawn.sum(-1, keepdim=True)
    costs = [
        (tie_cost(omega, probs, i, j) / (probs[:, i] - probs[:, j]).square(), i, j)
        for i in range(num_classes)
        for j in range(i)
    ]
    cost, i, j = min(costs, key=lambda row: float(row[0].min()))
    law = probs[cost.argmin()]
    return OrderTheorem(bool(cost.min() > tolerance), float(cost.min()), law, i, j)


def argmax_pair() -> FenchelYoung:
    """Omega = 0: the counter-example of the theorem. Its map puts all mass evenly on the highest scores."""

    def highest(scores: Tensor) -> Tensor:
        top = (scores == scores.amax(-1, keepdim=True)).to(scores.dtype)
        return top / top.sum(-1, keepdim=True)

    return FenchelYoung(highest, lambda probs: torch.zeros_like(probs[..., 0]), slope=torch.zeros_like)
