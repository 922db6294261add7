"""Curvature: the Jacobian of a map, its rank and null space, its spectral norm and bounds of it.

    softmax, sparsemax, entmax   J = diag(a) - a a' / sum(a),   a = p^(2 - alpha) on the support, 0 elsewhere
    rankmax, given y             J = ((I - p 1') - (1 - m p) e_y') / S on the support
    taylor_softmax               J = (diag(f') - p f'') / F     (f' as a column and as a row)
    rg                           J = (I - 1 1' / C) / C

Each member's record has its formula, in `theory.jacobian`. For a Fenchel-Young loss J is the Hessian of the loss, so
its norm is the loss's curvature. Rankmax's loss has another Hessian.

Reference: the paper's section B.4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError, check_choice
from manymax.members import FAMILY
from manymax.ops.checks import check_scores
from manymax.theory.order_preservation import Map, label_of, member_map

METHODS = ("closed", "autograd")


def jacobian(
    member: Member, scores: Tensor, target: Tensor | None = None, *, method: str = "closed", **settings: Any
) -> Tensor:
    """The Jacobian of a member's map, J_ij = d p_i / d s_j.

    Args:
        member: a row of `FAMILY` that has a map.
        scores: (..., C).
        target: (...) labels, for a map that needs them; class 0 unless given.
        method: "closed", the formula that the member's record gives, autograd where it gives none; or "autograd".
        settings: the member's own, such as `alpha`.

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
    """One row of J per backward pass, for all rows of scores at once."""
    leaf = scores.detach().requires_grad_()
    columns = map(leaf).reshape(-1, scores.shape[-1]).sum(0)
    rows = [torch.autograd.grad(column, leaf, retain_graph=True)[0] for column in columns]
    return torch.stack(rows, -2)


def null_space(jacobian: Tensor, tolerance: float = 1e-9) -> Tensor:
    """An orthonormal basis of {v: J v = 0}, (C, C - rank): score changes that the map does not see.

    Args:
        jacobian: (C, C).
        tolerance: singular values up to this share of the largest count as 0.

    Example: softmax does not see shifts.
        >>> from manymax.members import FAMILY
        >>> null_space(jacobian(FAMILY["softmax"], torch.tensor([2.0, 1.0, 0.0]))).abs().T
        tensor([[0.5774, 0.5774, 0.5774]])
    """
    _, values, right = torch.linalg.svd(jacobian)
    return right[values <= _cut(values, tolerance)].mT


def rank(jacobian: Tensor, tolerance: float = 1e-9) -> Tensor:
    """The rank of J, (...), for (..., C, C): C - 1 for softmax, support - 1 for sparse maps."""
    values = torch.linalg.svdvals(jacobian)
    return (values > _cut(values, tolerance)).sum(-1)


def _cut(values: Tensor, tolerance: float) -> Tensor:
    """What counts as 0 among singular values: the dtype may not resolve the tolerance, and J may be 0 itself."""
    share = max(tolerance, 4 * values.shape[-1] * torch.finfo(values.dtype).eps)
    return (share * values.amax(-1, keepdim=True)).clamp_min(torch.finfo(values.dtype).tiny)


def spectral_norm(map: Map, scores: Tensor, *, iterations: int = 500, tolerance: float = 1e-9, seed: int = 0) -> Tensor:
    """The spectral norm of a map's Jacobian by power iteration on J'J, without a (C, C) table.

    Each step takes J v and J'(J v) from the graph of one call of the map: O(C) memory. The result is a lower bound
    that increases; it is sharp to about (a2/a1)^(2 iterations) for singular values a1 > a2, and always
    to about log(C) / iterations.

    Args:
        map: scores (..., C) to probabilities (..., C), rows independent, differentiable twice.
        scores: (..., C).
        iterations: at most this many steps.
        tolerance: stop when no row grows by more than this share.
        seed: of the first direction.

    Returns:
        (...).

    Example:
        >>> import manymax
        >>> spectral_norm(manymax.sparsemax, torch.tensor([[1.0, 0.5, -1.0], [3.0, 0.0, 0.0]]))
        tensor([1., 0.])
    """
    check_scores(scores)
    leaf = scores.detach().requires_grad_()
    probs = map(leaf)
    dual = torch.zeros_like(probs, requires_grad=True)
    (pulled,) = torch.autograd.grad(probs, leaf, dual, create_graph=True)  # J'u, linear in u: its transpose is J v
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


def norm_bounds(member: Member, scores: Tensor, target: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Bounds of the spectral norm of a member's Jacobian at given scores.

        softmax, sparsemax, entmax   a_(2) <= |J| <= min(a_(1), supremum),  a = p^(2 - alpha), in decreasing order
        rankmax                      0 <= |J| <= m |p| / S   (the paper's m / S is larger)
        rg                           |J| = 1 / C

    Args:
        member: one whose record gives `theory.norm_bounds`, as these do.
        scores: (..., C).
        target: (...) labels, for a map that needs them; class 0 unless given.
        settings: the member's own.

    Returns:
        Lower and upper bound, (...) each.
    """
    known = member.theory.norm_bounds
    if known is None:
        bounded = ", ".join(name for name, row in FAMILY.items() if row.theory.norm_bounds is not None)
        raise ArgumentError(
            f"`member` must be one of {bounded}; no bound is known for {member.name}: its record leaves out"
            " `theory.norm_bounds`."
        )
    return known(scores, label_of(scores, target) if member.needs_label else None, **settings)


def supremum(member: Member, num_classes: int, **settings: Any) -> float:
    """The largest spectral norm of the Jacobian of a member's map over all scores; nan where none is known.

    For a Fenchel-Young member it is the smoothness that its facts state. Rankmax's map has C: all other classes just
    inside of the margin; its loss, whose Hessian is another matrix, has no constant.

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
