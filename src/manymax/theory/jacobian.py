"""Curvature: the Jacobian of a map, its rank and null space, its spectral norm and bounds of that norm.

    softmax, sparsemax, entmax   J = diag(a) - a a' / sum(a),   a = p^(2 - alpha) on the support, 0 elsewhere
    rankmax, given y             J = ((I - p 1') - (1 - m p) e_y') / S on the support
    taylor_softmax               J = (diag(g) - p g') / F,   g the derivatives of the polynomial f, F = sum(f)
    rg                           J = (I - 1 1' / C) / C

A prime stands for the transpose; rankmax has the support size m and S = sum_j max(0, s_j - s_y + 1). Each member gives
its formula in `Member.theory.jacobian`. For a Fenchel-Young loss J is the Hessian of the loss, so its norm is the
loss's curvature. The Hessian of rankmax's loss is another matrix.

Citation: the paper's section B.4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError, check_choice
from manymax.members import FAMILY
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores
from manymax.theory.order_preservation import Map, label_of, member_map

METHODS = ("closed", "autograd")


@checked(scores="scores ... C")
def jacobian(
    member: Member, scores: Tensor, target: Tensor | None = None, *, method: str = "closed", **settings: Any
) -> Tensor:
    """The Jacobian of a member's map, J_ij = d p_i / d s_j.

    Args:
        member: a row of `FAMILY` that has a map.
        scores: (..., C).
        target: (...) labels, for a map that needs them; class 0 if None.
        method: "closed" for the member's formula, or autograd where it has none; "autograd" for autograd always.
        settings: settings of the member, such as `alpha`.

    Returns:
        (..., C, C).

    Example:
        >>> from manymax.members import FAMILY
        >>> jacobian(FAMILY["sparsemax"], torch.tensor([1.0, 0.5, -1.0]))
        tensor([[ 0.5000, -0.5000,  0.0000],
                [-0.5000,  0.5000,  0.0000],
                [ 0.0000,  0.0000,  0.0000]])
    """
    check_choice("method", method, METHODS)
    check_scores(scores)
    known = member.theory.jacobian
    if method == "autograd" or known is None:
        return _by_autograd(member_map(member, target, **settings), scores)
    return known(scores, label_of(scores, target) if member.needs_label else None, **settings)


def _by_autograd(map: Map, scores: Tensor) -> Tensor:
    """J (..., C, C) by one backward pass per class, each for all rows of scores at once."""
    leaf = scores.detach().requires_grad_()
    # Rows of scores do not interact, so the gradient of sum over the rows of p_i holds row i of J for each of them.
    sums = map(leaf).reshape(-1, scores.shape[-1]).sum(0)
    rows_of_j = [torch.autograd.grad(total, leaf, retain_graph=True)[0] for total in sums]
    return torch.stack(rows_of_j, -2)


@checked(jacobian="wide C C", least={"tolerance": 0})
def null_space(jacobian: Tensor, tolerance: float = 1e-9) -> Tensor:
    """An orthonormal basis of {v: J v = 0}, (C, C - rank): changes of the scores that do not change the map's result.

    Args:
        jacobian: (C, C).
        tolerance: singular values up to this share of the largest count as 0.

    Example: adding a constant to all scores does not change softmax.
        >>> from manymax.members import FAMILY
        >>> null_space(jacobian(FAMILY["softmax"], torch.tensor([2.0, 1.0, 0.0]))).abs().T
        tensor([[0.5774, 0.5774, 0.5774]])
    """
    _, values, right = torch.linalg.svd(jacobian)
    return right[values <= _cut(values, tolerance)].mT


@checked(jacobian="wide ... C C", least={"tolerance": 0})
def rank(jacobian: Tensor, tolerance: float = 1e-9) -> Tensor:
    """The rank of J, (...), for (..., C, C): C - 1 for softmax, support - 1 for sparse maps."""
    values = torch.linalg.svdvals(jacobian)
    return (values > _cut(values, tolerance)).sum(-1)


def _cut(values: Tensor, tolerance: float) -> Tensor:
    """The size up to which singular values (..., C) count as 0, (..., 1)."""
    # In float32 rounding alone exceeds the default tolerance; and where J = 0 the largest value is no scale, tiny is.
    share = max(tolerance, 4 * values.shape[-1] * torch.finfo(values.dtype).eps)
    return (share * values.amax(-1, keepdim=True)).clamp_min(torch.finfo(values.dtype).tiny)


@checked(scores="scores ... C", least={"iterations": 1, "tolerance": 0})
def spectral_norm(map: Map, scores: Tensor, *, iterations: int = 500, tolerance: float = 1e-9, seed: int = 0) -> Tensor:
    """The spectral norm of a map's Jacobian by power iteration on J'J, without a (C, C) table.

    Each step takes J v and J'(J v) from the graph of one call of the map, in O(C) memory. The estimate is a lower bound
    that grows with every step. Its relative error is about (a2/a1)^(2 iterations) for the largest singular values
    a1 > a2, and at most about log(C) / iterations in any case.

    Args:
        map: function from scores (..., C) to probabilities (..., C) that treats rows independently and is twice
            differentiable.
        scores: (..., C).
        iterations: at most this many steps.
        tolerance: stop when the estimate of no row grows by more than this share.
        seed: of the random first direction.

    Returns:
        (...), one norm per row.

    Example:
        >>> import manymax
        >>> spectral_norm(manymax.sparsemax, torch.tensor([[1.0, 0.5, -1.0], [3.0, 0.0, 0.0]]))
        tensor([1., 0.])
    """
    check_scores(scores)
    leaf = scores.detach().requires_grad_()
    probs = map(leaf)
    dual = torch.zeros_like(probs, requires_grad=True)
    # J'u is linear in u (here `dual`), so its gradient in u along v is J v: a forward product by two backward passes.
    (pulled,) = torch.autograd.grad(probs, leaf, dual, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(scores.shape, generator=generator, dtype=torch.float64).to(scores)
    v = torch.nn.functional.normalize(v, dim=-1)
    norm = torch.zeros_like(scores[..., 0])
    for _ in range(iterations):
        (image,) = torch.autograd.grad(pulled, dual, v, retain_graph=True)
        (back,) = torch.autograd.grad(probs, leaf, image, retain_graph=True)
        previous, norm = norm, image.norm(dim=-1)
        if bool((norm - previous <= tolerance * norm).all()):
            break
        v = torch.nn.functional.normalize(back, dim=-1)
    return norm


@checked(scores="scores ... C")
def norm_bounds(member: Member, scores: Tensor, target: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """A lower and an upper bound of the spectral norm of a member's Jacobian at given scores.

        softmax, sparsemax, entmax   a_(2) <= |J| <= min(a_(1), supremum),  a = p^(2 - alpha), in decreasing order
        rankmax                      0 <= |J| <= m |p| / S   (the paper's m / S is larger)
        rg                           |J| = 1 / C

    Args:
        member: one that has `theory.norm_bounds`, as those above.
        scores: (..., C).
        target: (...) labels, for a map that needs them; class 0 if None.
        settings: settings of the member, such as `alpha`.

    Returns:
        Lower and upper bound, (...) each.

    Example:
        >>> from manymax.members import FAMILY
        >>> norm_bounds(FAMILY["rg"], torch.zeros(4))
        (tensor(0.2500), tensor(0.2500))
    """
    known = member.theory.norm_bounds
    if known is None:
        bounded = ", ".join(name for name, row in FAMILY.items() if row.theory.norm_bounds is not None)
        raise ArgumentError(
            f"`member` must be one of {bounded}; no bound is known for {member.name}: its entry has no"
            " `theory.norm_bounds`."
        )
    return known(scores, label_of(scores, target) if member.needs_label else None, **settings)


@checked(least={"num_classes": 1})
def supremum(member: Member, num_classes: int, **settings: Any) -> float:
    """The largest spectral norm of the Jacobian of a member's map over all scores; nan where none is known.

    For a Fenchel-Young member it is the smoothness that its facts state. For rankmax it is C, reached where all other
    classes are just inside the margin; that is the map's, and its loss, whose Hessian is another matrix, has none.

        >>> from manymax.members import FAMILY
        >>> supremum(FAMILY["rankmax"], 7), round(supremum(FAMILY["entmax"], 1000), 4)
        (7.0, 0.8676)
    """
    if num_classes == 1:
        return 0.0
    if member.theory.supremum is not None:
        return float(member.theory.supremum(num_classes, **settings))
    if member.foundation is not None and member.facts.smoothness.fn is not None:
        return float(member.facts.smoothness.fn(num_classes=num_classes, **settings))
    return math.nan
