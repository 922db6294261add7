"""Fenchel-Young losses and Bregman divergences, and the theorem that a weakly ordered map suffices.

For a Fenchel-Young pair with prediction p = p(s) and a target t on the simplex,

    L(t, s) - D(t, p(s)) = <s - grad Omega(p), p - t>

This gap is 0 where Omega is Legendre on the simplex: s - grad Omega(p) is then the same for all classes. For a sparse
map it is the sum, over the classes off the support, of the target's mass times the distance of the score below the
threshold. It is never negative, so L bounds D from above.

The paper's theorem that weak order preservation (WOP) is sufficient for calibration needs a strictly convex Omega,
which the paper does not ask for. For a symmetric Omega, forcing the scores of classes i and j to tie raises the risk
of a distribution p by exactly

    Omega(p) - Omega(p with p_i and p_j replaced by their mean)

This cost is positive for all p_i != p_j exactly if Omega is strictly convex along the line between the two.

References: Blondel, Martins, Niculae, JMLR 2020, propositions 2 and 3; the paper's section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores
from manymax.theory.order_preservation import Map


@checked(scores="finite ... C", target="probs ... C")
def bregman_gap(pair: FenchelYoung, scores: Tensor, target: Tensor) -> Tensor:
    """The gap L(t, s) - D(t, p(s)) between a Fenchel-Young loss and its Bregman divergence, by definition.

    Args:
        pair: the map and its Omega; `member.fenchel_young(**settings)` gives that of a member.
        scores: (..., C).
        target: (..., C) rows on the simplex.

    Returns:
        (...), never negative; 0 for a Legendre Omega.

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


@checked(scores="finite ... C", target="probs ... C")
def threshold_gap(pair: FenchelYoung, scores: Tensor, target: Tensor) -> Tensor:
    """The gap of `bregman_gap` by its formula: sum of t_j (threshold - s_j) over the classes j off the support, (...).

    The threshold is the score at which a class would enter the support: grad Omega(0) - grad Omega(p_i) + s_i, the same
    for all i in the support. Arguments as in `bregman_gap`.

        >>> from manymax.members import FAMILY
        >>> scores, target = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.5, 0.5])
        >>> threshold_gap(FAMILY["sparsemax"].fenchel_young(), scores, target)
        tensor(1.5000)
    """
    probs = pair.map(scores)
    slope = pair.slope(probs)
    # On the support s - grad Omega(p) has one value, read at the likeliest class; off the support it is smaller.
    excess = scores - slope
    on_support = excess.gather(-1, probs.argmax(-1, keepdim=True))
    return torch.where((probs == 0) & (target > 0), target * (on_support - excess), 0).sum(-1)


@checked(scores="finite ... C")
def gradient_residual(pair: FenchelYoung, scores: Tensor) -> Tensor:
    """How far a map is from the gradient of its loss: max over classes of |grad Omega*(s) - p(s)|, (...).

    It is 0 if the map belongs to its Omega. It equals max |grad L(t, s) - (p(s) - t)| for every target t, because the
    target's part cancels. Autograd takes the gradient of Omega*(s) = <p(s), s> - Omega(p(s)) through the map.

    Args:
        pair, scores: as in `bregman_gap`.

    Example: a map with the Omega of another map.
        >>> from manymax import sparsemax
        >>> wrong = FenchelYoung(lambda s: sparsemax(2 * s), lambda p: p.square().sum(-1) / 2)
        >>> scores = torch.tensor([0.3, 0.1, -0.4])
        >>> float(gradient_residual(wrong, scores)) > 0.1
        True
    """
    leaf = scores.detach().requires_grad_()
    probs = pair.map(leaf)
    inner = (torch.where(probs != 0, probs * leaf, 0)).sum(-1)  # a masked class would give 0 * -inf = nan
    (gradient,) = torch.autograd.grad((inner - pair.omega(probs)).sum(), leaf)
    return (gradient - probs).abs().amax(-1).detach()


@checked(scores="finite C")
def asymmetry(map: Map, scores: Tensor) -> float:
    """The largest entry of |J - J'| of a map's Jacobian J at scores (C,).

    A gradient has a symmetric Jacobian: if this is positive, no loss has the gradient map(scores) - target.
    """
    matrix = torch.autograd.functional.jacobian(map, scores)
    return float((matrix - matrix.mT).abs().max())


# The theorem --------------------------------------------------------------------------------------


@checked(probs="probs ... C")
def tie_cost(omega: Map, probs: Tensor, first: int, second: int) -> Tensor:
    """The rise in risk if two classes are given the same score: Omega(p) - Omega(p with both at their mean), (...).

    Args:
        omega: symmetric and convex, (..., C) to (...).
        probs: (..., C) distributions p.
        first, second: the two classes.

    Returns:
        (...), never negative; 0 means that a minimiser of the risk may tie the two classes although p_i != p_j.

    Example: a tie costs something with sparsemax's Omega and nothing with Omega = 0.
        >>> probs = torch.tensor([0.5, 0.3, 0.2])
        >>> tie_cost(lambda p: p.square().sum(-1) / 2, probs, 0, 1), tie_cost(lambda p: 0 * p.sum(-1), probs, 0, 1)
        (tensor(0.0100), tensor(0.))
    """
    merged = probs.clone()
    merged[..., [first, second]] = probs[..., [first, second]].mean(-1, keepdim=True)
    return omega(probs) - omega(merged)


@dataclass(frozen=True)
class OrderTheorem:
    """Whether every tie of classes with p_i != p_j costs something.

    holds: whether the smallest cost is positive.
    smallest_cost: the smallest tie cost over (p_i - p_j)^2.
    probs, first, second: the distribution (C,) and the classes with the smallest cost.
    """

    holds: bool
    smallest_cost: float
    probs: Tensor
    first: int
    second: int


@checked(least={"num_classes": 2, "laws": 1})
def wop_suffices(
    omega: Map, num_classes: int = 4, *, laws: int = 500, seed: int = 0, tolerance: float = 1e-6
) -> OrderTheorem:
    """Whether minimisers of a Fenchel-Young risk rank like p, the conclusion of the paper's theorem, on random p.

    Args:
        omega: symmetric and convex, (..., C) to (...), float64.
        num_classes: C.
        laws: how many random distributions p to try.
        seed: of the distributions.
        tolerance: a tie cost over (p_i - p_j)^2 above this counts as positive.

    Returns:
        The finding, with the distribution and the pair of classes of the smallest cost.

    Example: with Omega = 0 the map is the arg max. It preserves the order weakly, yet equal scores minimise every risk.
        >>> wop_suffices(lambda p: p.square().sum(-1) / 2).holds, wop_suffices(lambda p: 0 * p.sum(-1)).holds
        (True, False)
    """
    if num_classes < 2:
        raise ArgumentError(f"`num_classes` must be at least 2; got {num_classes}.")
    generator = torch.Generator().manual_seed(seed)
    # Normalised exponential variables are uniform on the simplex.
    drawn = -torch.rand(laws, num_classes, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    probs = drawn / drawn.sum(-1, keepdim=True)
    costs = [
        (tie_cost(omega, probs, i, j) / (probs[:, i] - probs[:, j]).square(), i, j)
        for i in range(num_classes)
        for j in range(i)
    ]
    cost, i, j = min(costs, key=lambda candidate: float(candidate[0].min()))
    return OrderTheorem(bool(cost.min() > tolerance), float(cost.min()), probs[cost.argmin()], i, j)


def argmax_pair() -> FenchelYoung:
    """The pair of Omega = 0, the counter-example to the theorem; its map shares all mass among the highest scores."""

    def highest(scores: Tensor) -> Tensor:
        top = (scores == scores.amax(-1, keepdim=True)).to(scores.dtype)
        return top / top.sum(-1, keepdim=True)

    return FenchelYoung(highest, lambda probs: torch.zeros_like(probs[..., 0]), slope=torch.zeros_like)
