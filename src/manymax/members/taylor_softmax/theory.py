"""Closed forms of Taylor-softmax: its Jacobian, minimisers of its risk, and its distance from the softmax loss.

    J = (diag(f') - p f'') / F     (f' as a column and as a row),   F = sum f(s)

f is the exponential cut off after an even order. No bound of |J| is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.approximation import ApproximationInput, Parts
from manymax.engine.member import Approximation, Theory
from manymax.members.taylor_softmax.loss import SETTINGS, taylor_exp


def _jacobian(scores: Tensor, _: Tensor | None = None, order: int = 2) -> Tensor:
    value, slope = taylor_exp(scores, order), taylor_exp(scores, order - 1)
    total = value.sum(-1, keepdim=True)
    probs = value / total
    return (torch.diag_embed(slope) - probs.unsqueeze(-1) * slope.unsqueeze(-2)) / total.unsqueeze(-1)


def taylor_branches(probs: Tensor, order: int = 2) -> Tensor:
    """Two minimisers of Taylor-softmax's risk, (2, C): f(s_i) = c p_i on the rising branch, and on the falling one.

    Both have the map p; c is one of many. On the falling branch the highest score belongs to the least probable class.

        >>> taylor_branches(torch.tensor([0.8, 0.2]))
        tensor([[ 1.6458,  0.0000],
                [-3.6458, -2.0000]])
    """
    bottom = _turning_point(order)
    goal = probs.double() / probs.double().min() * 2 * taylor_exp(bottom, order)  # c p_i, twice the least value of f
    branches = []
    for sign in (1.0, -1.0):
        near, far = torch.zeros_like(goal), goal.new_full(goal.shape, 1.0)
        while bool((taylor_exp(bottom + sign * far, order) < goal).any()):
            far = 2 * far
        for _ in range(60):  # bisection: f grows on either side of its lowest point
            middle = (near + far) / 2
            beyond = taylor_exp(bottom + sign * middle, order) >= goal
            near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
        branches.append(bottom + sign * far)
    return torch.stack(branches).to(probs.dtype)


def _turning_point(order: int) -> Tensor:
    """Where f' = 0, (): the root of the polynomial of one order less, which rises everywhere."""
    low, high = torch.tensor(-float(order), dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if taylor_exp(middle, order - 1) > 0 else (middle, high)
    return (low + high) / 2


def _minimisers(probs: Tensor, _: Tensor | None, order: int = 2) -> Tensor | None:
    """Both branches; a class of probability 0 has no score there."""
    return taylor_branches(probs, order) if bool((probs > 0).all()) else None


def _parts(case: ApproximationInput) -> Parts:
    """log F - log f(s_y) - (log Z - s_y)."""
    terms = taylor_exp(case.scores, case.settings["order"])
    log_probs = torch.where(terms > 0, terms, 1).log() - terms.sum(-1, keepdim=True).log()
    return Parts.exact(case.at_labels(case.log_probs - log_probs))


THEORY = Theory(jacobian=_jacobian, minimisers=_minimisers, approximation=Approximation(_parts, settings=SETTINGS))
