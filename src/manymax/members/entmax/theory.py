"""Closed forms of the entmax Jacobian, for every alpha: softmax has alpha = 1 and sparsemax alpha = 2.

    J = diag(a) - a a' / A,   a = p^(2 - alpha) on the support, 0 elsewhere,   A = sum(a)
    a_(2) <= |J| <= min(a_(1), supremum)

|J| is the spectral norm, a_(1) >= a_(2) the two largest of a, and the supremum that of `smoothness` in loss.py.

Citations: Peters, Niculae, Martins, ACL 2019, proposition 2; the largest eigenvalue of a diagonal matrix minus a
rank-one matrix: Golub, SIAM Review 1973.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Theory
from manymax.errors import ArgumentError
from manymax.members.entmax.loss import entmax, smoothness
from manymax.ops.deformed import power


def closed_forms(map: Callable[..., Tensor], alpha: float | None = None) -> Theory:
    """The closed forms of a map that is entmax at a fixed alpha, or that takes alpha as a setting.

    Args:
        map: from scores (..., C) to probabilities (..., C); it takes the keyword `alpha` unless that is fixed.
        alpha: the value at which alpha is fixed; None for a map that takes it.
    """

    def alpha_of(settings: dict[str, Any]) -> float:
        return float(settings.get("alpha", 1.5)) if alpha is None else alpha

    def jacobian(scores: Tensor, _: Tensor | None = None, **settings: Any) -> Tensor:
        a = _weights(map(scores, **settings), alpha_of(settings))
        return torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2) / a.sum(-1)[..., None, None]

    def norm_bounds(scores: Tensor, _: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
        probs = map(scores, **settings)
        largest = _weights(probs, alpha_of(settings)).topk(min(2, probs.shape[-1]), -1).values
        several = (probs > 0).sum(-1) > 1  # with a single class in the support p = e_i is constant: J = 0
        bound = largest[..., 0].clamp_max(smoothness(scores.shape[-1], alpha_of(settings)))
        return torch.where(several, largest[..., -1], 0), torch.where(several, bound, 0)

    def sharpest(num_classes: int, **settings: Any) -> Tensor:
        return sharpest_scores(num_classes, alpha_of(settings))

    return Theory(jacobian=jacobian, norm_bounds=norm_bounds, sharpest=sharpest)


def _weights(probs: Tensor, alpha: float) -> Tensor:
    """a = p^(2 - alpha) on the support, 0 elsewhere, (..., C)."""
    return torch.where(probs > 0, power(probs, 2 - torch.tensor(alpha, dtype=probs.dtype)), 0)


def entmax_norm(probs: Tensor, alpha: float) -> Tensor:
    """The spectral norm of the entmax Jacobian diag(a) - a a' / A at given probabilities, to the last digits in O(C).

    With a = p^(2 - alpha) and A = sum(a) it is the root x of sum_i a_i^2 / (A (a_i - x)) = 1 that lies between the
    second largest a and the largest.

    Args:
        probs: (..., C), points of the simplex.
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
    # Bisection for x - a_(2) and not for x: where the two largest a are close, the difference keeps its digits. Eighty
    # halvings leave no bit of a float64 undecided.
    low, high = torch.zeros_like(first), first - second
    for _ in range(80):
        middle = (low + high) / 2
        gap = first - second - middle
        sum_of_others = torch.where(others > 0, others.square() / (others - second - middle), 0).sum(-1, keepdim=True)
        above = first.square() / gap + sum_of_others >= total
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (second + low).squeeze(-1)


def sharpest_scores(num_classes: int, alpha: float = 1.5) -> Tensor:
    """Scores (C,), float64, at which the entmax Jacobian has its largest spectral norm, or comes close to it.

    Either two classes share all probability, with norm 2^(alpha-2), or p is proportional to (1, n^-r, ..., n^-r) with
    n = C - 1 and r = 2/(3 - alpha). At alpha = 1 and C > 2 the supremum 1/2 is approached but not reached: the other
    scores would have to be -inf, and are -30. At alpha = 2 every support of two classes or more has the norm 1, and
    all scores are 0.

    Args:
        num_classes: C, at least 2.
        alpha: 1 (softmax) to 2 (sparsemax).

    Example:
        >>> from manymax import entmax
        >>> round(float(entmax_norm(entmax(sharpest_scores(1000)), 1.5)), 4)
        0.8676
    """
    if num_classes < 2:
        raise ArgumentError(f"`num_classes` must be at least 2; got {num_classes}.")
    if alpha == 2:
        return torch.zeros(num_classes, dtype=torch.float64)
    n = num_classes - 1
    scores = torch.full((num_classes,), -30.0, dtype=torch.float64)
    if alpha == 1 or smoothness(num_classes, alpha) == 2 ** (alpha - 2):
        scores[:2] = 0
        return scores
    probs = torch.full_like(scores, n ** (-2 / (3 - alpha)))
    probs[0] = 1
    return ((probs / probs.sum()) ** (alpha - 1) - 1) / (alpha - 1)


THEORY = closed_forms(entmax)
