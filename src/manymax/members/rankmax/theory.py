"""Closed forms of rankmax: the Jacobian of its map given the label, bounds of its norm, and the risk's minimiser.

    J = ((I - p 1') - (1 - m p) e_y') / S on the support of m classes,   S = sum_j max(0, s_j - s_y + 1)
    0 <= |J| <= m |p| / S   (the bound m / S of the paper is larger)

On the (n, k)-simplex with k > 1 only classes with p < 1 move; J follows from the map by automatic differentiation, and
is as large as one likes, where few of them are barely inside of the margin.

J is not the Hessian of the loss, because the gradient of the loss is not p - e_y. The norm of J comes as close to the
number of classes as one likes, where all other classes are just inside of the margin.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Theory
from manymax.members.rankmax.loss import rankmax


def _jacobian(scores: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """J (..., C, C) for scores (..., C) and labels (...); rows and columns outside of the support are 0."""
    if k > 1:
        rows, ids = scores.reshape(-1, scores.shape[-1]), label.reshape(-1)
        each = torch.func.vmap(torch.func.jacrev(lambda s, y: rankmax(s, y, k=k)))(rows, ids)
        return each.reshape(*scores.shape, scores.shape[-1])
    probs = rankmax(scores, label)
    support = (probs > 0).to(scores.dtype)
    one_hot = torch.nn.functional.one_hot(label, scores.shape[-1]).to(scores.dtype)
    m, total = support.sum(-1)[..., None, None], _violation(scores, label)[..., None, None]
    p, inside, e_y = probs.unsqueeze(-1), support.unsqueeze(-1), one_hot.unsqueeze(-2)
    return (torch.diag_embed(support) - p * support.unsqueeze(-2) - (inside - m * p) * e_y) / total


def _violation(scores: Tensor, label: Tensor) -> Tensor:
    """S = sum_j max(0, s_j - s_y + 1), (...)."""
    return torch.relu(scores - scores.gather(-1, label.unsqueeze(-1)) + 1).sum(-1)


def _norm_bounds(scores: Tensor, label: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """Bounds of |J| from below and from above, (...) each."""
    if k > 1:
        norm = _jacobian(scores, label, k).norm(dim=(-2, -1))
        return torch.zeros_like(norm), norm
    probs = rankmax(scores, label)
    support_size = (probs > 0).sum(-1)
    bound = support_size * probs.norm(dim=-1) / _violation(scores, label)
    return torch.zeros_like(bound), torch.where(support_size > 1, bound, 0)


def rankmax_levels(probs: Tensor) -> Tensor:
    """The scores (C,) that minimise the risk sum_y p_y log S_y of rankmax, found exactly; they are whole numbers.

    Between the kinks s_i - s_j = 1 the risk is concave, so that it is lowest where the scores take levels that are 1
    apart. With N_b classes on the first b levels, a class on level b has S_b = S_(b-1) + N_b; the best levels follow
    by dynamic programming over (N, S), in O(C^4) additions.

    Args:
        probs: (C,) probabilities of the classes.

    Returns:
        (C,) scores, 0 for the most probable class and negative whole numbers for the others.

    Example:
        >>> rankmax_levels(torch.tensor([0.18, 0.6, 0.22]))
        tensor([-1.,  0., -1.])
    """
    ranked, permutation = probs.double().sort(descending=True)
    count = len(probs)
    mass = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)])
    sizes = torch.arange(count * (count + 1) // 2 + 1)  # every value that S can take
    # cost[n, S]: the least risk of the n most probable classes, if a class on the last of their levels has the sum S.
    cost = torch.full((count + 1, len(sizes)), torch.inf, dtype=torch.float64)
    previous = torch.zeros(count + 1, len(sizes), dtype=torch.long)
    cost[0, 0] = 0
    for placed in range(1, count + 1):
        log_s = sizes[placed:].double().log()
        for before in range(placed):  # the classes before + 1 .. placed share a level
            tried = cost[before, : len(sizes) - placed] + (mass[placed] - mass[before]) * log_s
            better = tried < cost[placed, placed:]
            cost[placed, placed:] = torch.where(better, tried, cost[placed, placed:])
            previous[placed, placed:] = torch.where(better, before, previous[placed, placed:])
    # Back from the best end: where each level began.
    ends, total = [count], int(cost[count].argmin())
    while ends[-1]:
        placed = ends[-1]
        ends.append(int(previous[placed, total]))
        total -= placed
    level = torch.bucketize(torch.arange(count), torch.tensor(ends[-2::-1]), right=True)
    return torch.empty_like(probs).scatter(0, permutation, (-level).to(probs.dtype))


def _minimisers(probs: Tensor, _: Tensor | None, k: int = 1, **settings: Any) -> Tensor | None:
    """The one minimiser that is known, (1, C); None with k > 1."""
    return rankmax_levels(probs).unsqueeze(0) if k == 1 else None


def _supremum(num_classes: int, k: int = 1) -> float:
    return float(num_classes) if k == 1 or num_classes <= k else math.inf


THEORY = Theory(jacobian=_jacobian, norm_bounds=_norm_bounds, supremum=_supremum, minimisers=_minimisers)
