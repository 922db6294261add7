"""Closed forms of Taylor-softmax: its Jacobian, minimisers of its risk, and its distance from the softmax loss.

    J_ij = (1{i = j} f'(s_j) - p_i f'(s_j)) / F,   F = sum_j f(s_j)

f is the Taylor polynomial of the exponential, of an even order. No bound of |J| is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.approximation import ApproximationInput, Parts
from manymax.engine.member import Approximation, Theory
from manymax.members.taylor_softmax.loss import SETTINGS, taylor_exp


def _jacobian(scores: Tensor, _: Tensor | None = None, order: int = 2) -> Tensor:
    """J (..., C, C) for scores (..., C)."""
    value, slope = taylor_exp(scores, order), taylor_exp(scores, order - 1)
    total = value.sum(-1, keepdim=True)
    probs = value / total
    return (torch.diag_embed(slope) - probs.unsqueeze(-1) * slope.unsqueeze(-2)) / total.unsqueeze(-1)


def taylor_branches(probs: Tensor, order: int = 2) -> Tensor:
    """Two minimisers of the risk of Taylor-softmax, with f(s_i) = c p_i on the rising and on the falling branch of f.

    The map of both is p. Any c for which the equations have solutions would do; here c p_i is at least twice the least
    value of f. On the falling branch the highest score belongs to the least probable class.

    Args:
        probs: (C,) probabilities, all positive.
        order: an even order.

    Returns:
        (2, C): the scores on the rising branch, and those on the falling one.

    Example:
        >>> taylor_branches(torch.tensor([0.8, 0.2]))
        tensor([[ 1.6458,  0.0000],
                [-3.6458, -2.0000]])
    """
    bottom = _turning_point(order)
    goal = probs.double() / probs.double().min() * 2 * taylor_exp(bottom, order)  # c p_i
    branches = []
    for sign in (1.0, -1.0):
        # Bisection for the distance from the lowest point, from which f grows on either side.
        low, high = torch.zeros_like(goal), goal.new_full(goal.shape, 1.0)
        while bool((taylor_exp(bottom + sign * high, order) < goal).any()):
            high = 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            beyond = taylor_exp(bottom + sign * middle, order) >= goal
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
        branches.append(bottom + sign * high)
    return torch.stack(branches).to(probs.dtype)


def _turning_point(order: int) -> Tensor:
    """Where f is lowest, (): the root of f', the polynomial of one order less, which increases everywhere."""
    low, high = torch.tensor(-float(order), dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if taylor_exp(middle, order - 1) > 0 else (middle, high)
    return (low + high) / 2


def _minimisers(probs: Tensor, _: Tensor | None, order: int = 2) -> Tensor | None:
    """`taylor_branches`; None where a class has the probability 0, because f is never 0."""
    return taylor_branches(probs, order) if bool((probs > 0).all()) else None


def _parts(case: ApproximationInput) -> Parts:
    """The error against the softmax loss for each label, log F - log f(s_y) - (log Z - s_y)."""
    terms = taylor_exp(case.scores, case.settings["order"])
    log_probs = torch.where(terms > 0, terms, 1).log() - terms.sum(-1, keepdim=True).log()
    return Parts.exact(case.at_labels(case.log_probs - log_probs))


THEORY = Theory(jacobian=_jacobian, minimisers=_minimisers, approximation=Approximation(_parts, settings=SETTINGS))
