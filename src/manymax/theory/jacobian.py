"""Curvature: the Jacobian of a map, its rank and null space, its spectral norm and bounds of it.

    softmax, sparsemax, entmax   J = diag(a) - a a' / sum(a),   a = p^(2 - alpha) on the support, 0 elsewhere
    rankmax, given y             J = ((I - p 1') - (1 - m p) e_y') / S on the support
    taylor_softmax               J = (diag(f') - p f'') / F     (f' as a column and as a row)
    rg                           J = (I - 1 1' / C) / C

For a Fenchel-Young loss J is the Hessian of the loss, so its norm is the loss's curvature. Rankmax's loss has
another Hessian.

References: the paper's section B.4; entmax: Peters, Niculae, Martins, ACL 2019, proposition 2; the largest eigenvalue
of a diagonal matrix minus a rank-one matrix: Golub, SIAM Review 1973.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError, check_choice
from manymax.members.entmax.loss import smoothness
from manymax.members.taylor_softmax.loss import taylor_exp
from manymax.ops.checks import check_scores
from manymax.ops.deformed import power
from manymax.theory.order import Map, member_map

ALPHAS: dict[str, float] = {"softmax": 1.0, "sparsemax": 2.0}  # members that are entmax at a fixed alpha
METHODS = ("closed", "autograd")


def jacobian(
    member: Member, scores: Tensor, target: Tensor | None = None, *, method: str = "closed", **settings: Any
) -> Tensor:
    """The Jacobian of a member's map, J_ij = d p_i / d s_j.

    Args:
        member: a row of `FAMILY` that has a map.
        scores: (..., C).
        target: (...) labels, for a map that needs them; class 0 unless given.
        method: "closed", the formula above, or "autograd".
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
    if method == "autograd" or member.name not in CLOSED:
        return _by_autograd(member_map(member, target, **settings), scores)
    return CLOSED[member.name](member, scores, target, **settings)


def _by_autograd(map: Map, scores: Tensor) -> Tensor:
    """One row of J per backward pass, for all rows of scores at once."""
    leaf = scores.detach().requires_grad_()
    columns = map(leaf).reshape(-1, scores.shape[-1]).sum(0)
    rows = [torch.autograd.grad(column, leaf, retain_graph=True)[0] for column in columns]
    return torch.stack(rows, -2)


def _tsallis(member: Member, scores: Tensor, _: Tensor | None, **settings: Any) -> Tensor:
    probs = member_map(member, **settings)(scores)
    a = _weights(probs, ALPHAS.get(member.name) or settings.get("alpha", 1.5))
    return torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2) / a.sum(-1)[..., None, None]


def _weights(probs: Tensor, alpha: float) -> Tensor:
    """a = p^(2 - alpha) on the support, 0 elsewhere, (..., C)."""
    return torch.where(probs > 0, power(probs, 2 - torch.tensor(alpha, dtype=probs.dtype)), 0)


def _rankmax(member: Member, scores: Tensor, target: Tensor | None) -> Tensor:
    label = torch.zeros_like(scores[..., 0], dtype=torch.long) if target is None else target
    probs = member_map(member, label)(scores)
    support = (probs > 0).to(scores.dtype)
    one_hot = torch.nn.functional.one_hot(label, scores.shape[-1]).to(scores.dtype)
    m, total = support.sum(-1)[..., None, None], _violation(scores, label)[..., None, None]
    p, inside, e_y = probs.unsqueeze(-1), support.unsqueeze(-1), one_hot.unsqueeze(-2)
    return (torch.diag_embed(support) - p * support.unsqueeze(-2) - (inside - m * p) * e_y) / total


def _violation(scores: Tensor, label: Tensor) -> Tensor:
    """S = sum_j max(0, s_j - s_y + 1), (...)."""
    return torch.relu(scores - scores.gather(-1, label.unsqueeze(-1)) + 1).sum(-1)


def _taylor(_: Member, scores: Tensor, __: Tensor | None, order: int = 2) -> Tensor:
    value, slope = taylor_exp(scores, order), taylor_exp(scores, order - 1)
    total = value.sum(-1, keepdim=True)
    probs = value / total
    return (torch.diag_embed(slope) - probs.unsqueeze(-1) * slope.unsqueeze(-2)) / total.unsqueeze(-1)


def _rg(_: Member, scores: Tensor, __: Tensor | None) -> Tensor:
    live = (scores > -torch.inf).to(scores.dtype)
    count = live.sum(-1)[..., None, None]
    return (torch.diag_embed(live) - live.unsqueeze(-1) * live.unsqueeze(-2) / count) / count


CLOSED: dict[str, Callable[..., Tensor]] = {
    "softmax": _tsallis,
    "sparsemax": _tsallis,
    "entmax": _tsallis,
    "rankmax": _rankmax,
    "taylor_softmax": _taylor,
    "rg": _rg,
}


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


def entmax_norm(probs: Tensor, alpha: float) -> Tensor:
    """The spectral norm of the entmax Jacobian diag(a) - a a' / A at given probabilities, to the last digits in O(C).

    With a = p^(2 - alpha), A = sum(a) it is the root x of sum_i a_i^2 / (A (a_i - x)) = 1 between the second largest
    a and the largest.

    Args:
        probs: (..., C) on the simplex.
        alpha: 1 (softmax) to 2 (sparsemax).

    Returns:
        (...) float64.

    Example:
        >>> entmax_norm(torch.tensor([0.5, 0.5]), alpha=1.0), entmax_norm(torch.tensor([1.0, 0.0]), alpha=1.5)
        (tensor(0.5000, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    a = _weights(probs.double(), alpha)
    if a.shape[-1] == 1:
        return torch.zeros_like(a[..., 0])
    total = a.sum(-1, keepdim=True)
    top = a.topk(2, -1)
    first, second = top.values.split(1, -1)
    others = a.scatter(-1, top.indices[..., :1], 0)
    low, high = torch.zeros_like(first), first - second  # of x - a_(2), which keeps its digits where the two are close
    for _ in range(80):
        step = (low + high) / 2
        gap = first - second - step
        rest = torch.where(others > 0, others.square() / (others - second - step), 0).sum(-1, keepdim=True)
        above = first.square() / gap + rest >= total
        low, high = torch.where(above, low, step), torch.where(above, step, high)
    return (second + low).squeeze(-1)


def norm_bounds(member: Member, scores: Tensor, target: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Bounds of the spectral norm of a member's Jacobian at given scores.

        softmax, sparsemax, entmax   a_(2) <= |J| <= min(a_(1), supremum),  a = p^(2 - alpha), in decreasing order
        rankmax                      0 <= |J| <= m |p| / S   (the paper's m / S is larger)
        rg                           |J| = 1 / C

    Args:
        member: one of these.
        scores: (..., C).
        target: (...) labels for rankmax; class 0 unless given.
        settings: the member's own.

    Returns:
        Lower and upper bound, (...) each.
    """
    probs = member_map(member, target, **settings)(scores)
    if CLOSED.get(member.name) is _tsallis:
        alpha = ALPHAS.get(member.name) or settings.get("alpha", 1.5)
        largest = _weights(probs, alpha).topk(min(2, probs.shape[-1]), -1).values
        several = (probs > 0).sum(-1) > 1  # with a single class in the support nothing can move
        bound = largest[..., 0].clamp_max(supremum(member, scores.shape[-1], **settings))
        return torch.where(several, largest[..., -1], 0), torch.where(several, bound, 0)
    if member.name == "rankmax":
        label = torch.zeros_like(scores[..., 0], dtype=torch.long) if target is None else target
        support_size = (probs > 0).sum(-1)
        bound = support_size * probs.norm(dim=-1) / _violation(scores, label)
        return torch.zeros_like(bound), torch.where(support_size > 1, bound, 0)
    if member.name == "rg":
        count = (scores > -torch.inf).sum(-1)
        exact = torch.where(count > 1, 1 / count.to(scores.dtype), 0)
        return exact, exact
    raise ArgumentError(
        f"`member` must be softmax, sparsemax, entmax, rankmax or rg; no bound is known for {member.name}."
    )


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
    if member.foundation is not None and member.facts.smoothness.fn is not None:
        return float(member.facts.smoothness.fn(num_classes=num_classes, **settings))
    return float(num_classes) if member.name == "rankmax" else math.nan


def sharpest_scores(num_classes: int, alpha: float = 1.5) -> Tensor:
    """Scores (C,), float64, at which the entmax Jacobian has its largest spectral norm.

    Either two classes share everything, with norm 2^(alpha-2), or p is proportional to (1, n^-r, ..., n^-r) with
    n = C - 1 and r = 2/(3 - alpha). At alpha = 1 and C > 2 the supremum 1/2 is not attained: the others are at -30.

        >>> from manymax import entmax
        >>> round(float(entmax_norm(entmax(sharpest_scores(1000)), 1.5)), 4)
        0.8676
    """
    if num_classes < 2:
        raise ArgumentError(f"`num_classes` must be at least 2; got {num_classes}.")
    n = num_classes - 1
    scores = torch.full((num_classes,), -30.0, dtype=torch.float64)
    if alpha == 1 or smoothness(num_classes, alpha) == 2 ** (alpha - 2):
        scores[:2] = 0
        return scores
    probs = torch.full_like(scores, n ** (-2 / (3 - alpha)))
    probs[0] = 1
    return ((probs / probs.sum()) ** (alpha - 1) - 1) / (alpha - 1)
