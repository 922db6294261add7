"""Entmax as a differentiable function of scores and alpha.

The forward finds the level of each row by a search (ops/levels.py), which autograd cannot and need not follow. With
beta = alpha - 1 and a = p^(1 - beta) on the support the derivatives of p are

    in the scores   J = diag(a) - a a' / A,   A = sum_i a_i
    in alpha        `_alpha_slope`

and the derivative of Omega*(s) is p in the scores and -d Omega(p) / d alpha at fixed p in alpha.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manymax.members.entmax.alpha import read_alpha
from manymax.ops import operators, simplex
from manymax.ops.checks import readable, visible
from manymax.ops.deformed import chi, log_of, power
from manymax.ops.forward_mode import differentiable


def _rows(scores: Tensor) -> Tensor:
    """Scores (..., C) as (rows, C)."""
    return scores.reshape(-1, scores.shape[-1])


def _row_alpha(scores: Tensor, alpha: Tensor) -> Tensor:
    """Alpha as () or as one value per row, (rows, 1)."""
    if alpha.ndim == 0:
        return alpha
    return alpha.expand(*scores.shape[:-1], 1).reshape(-1, 1)


def _jacobian_times(probs: Tensor, alpha: Tensor, vector: Tensor) -> Tensor:
    """J v, (..., C), for the symmetric Jacobian J of the map in the scores."""
    a = power(probs, 2 - alpha)
    return a * (vector - (a * vector).sum(-1, keepdim=True) / a.sum(-1, keepdim=True))


def _alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """d p / d alpha, (..., C).

    With x = log p, beta = alpha - 1, a = p^(1 - beta), A = sum a, M = sum a x^2 chi(beta x) and H = -sum p x it is
    (M p (1 - beta x) - a x^2 chi(beta x) (1 + beta H)) / A.
    """
    # The formula of Correia et al. divides by beta^2; through `chi` nothing cancels, and alpha = 1 is no special case.
    beta, x, a = alpha - 1, log_of(probs), power(probs, 2 - alpha)
    second = a * x.square() * chi(beta * x)
    mean, entropy = second.sum(-1, keepdim=True), -(probs * x).sum(-1, keepdim=True)
    return (mean * probs * (1 - beta * x) - second * (1 + beta * entropy)) / a.sum(-1, keepdim=True)


def omega_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """d Omega(p) / d alpha at fixed p, (..., 1) for probabilities (..., C)."""
    beta, x = alpha - 1, log_of(probs)
    # Both branches of a `where` are computed: a divisor of 0 would put nan into the gradient of the other branch.
    safe = torch.where(beta > 0, beta, 1)
    first = torch.where(beta > 0, (beta * x).expm1() / safe, x)
    return (probs * (x.square() * chi(beta * x) - first / alpha)).sum(-1, keepdim=True) / alpha


def _sum_to_alpha(grad: Tensor, alpha: Tensor) -> Tensor:
    """A gradient of shape (..., 1), summed to the shape of alpha."""
    return grad.sum_to_size(alpha.shape) if alpha.ndim else grad.sum()


class EntmaxMap(torch.autograd.Function):
    """p (..., C) and the row maxima from (scores, alpha); the backward is written in p, so it can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        rows, row_alpha = _rows(scores), _row_alpha(scores, alpha)
        maximum, log_top, _ = operators.solve(rows, row_alpha)
        probs = operators.apply(rows, row_alpha, maximum, log_top, torch.ones_like(maximum))
        return probs.reshape(scores.shape), maximum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0], inputs[1])
        ctx.save_for_forward(output[0], inputs[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
        probs, alpha = ctx.saved_tensors
        if not torch.is_grad_enabled() and visible(probs, grad, alpha) and alpha.ndim == 0:
            # Plain first-order use: block by block and in place, which autograd could not follow.
            grad_scores = simplex.vjp(_rows(probs), float(alpha), _rows(grad)).reshape(probs.shape)
        else:
            grad_scores = _jacobian_times(probs, alpha, grad)
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            grad_alpha = _sum_to_alpha((grad * _alpha_slope(probs, alpha)).sum(-1, keepdim=True), alpha)
        return grad_scores, grad_alpha

    @staticmethod
    def tangent(ctx: Any, step: Tensor | None, alpha_step: Tensor | None) -> tuple[Tensor, None]:
        probs, alpha = ctx.saved_tensors
        moved = torch.zeros_like(probs)
        if step is not None:
            moved = moved + _jacobian_times(probs, alpha, step)
        if alpha_step is not None:
            moved = moved + _alpha_slope(probs, alpha) * alpha_step
        return moved, None


entmax_map = differentiable(EntmaxMap)


class EntmaxPotential(torch.autograd.Function):
    """total (Omega*(s) - max s) - sum_i weights_i (s_i - max s) over listed ids, per row.

    With total = sum_i weights_i this is the loss of a row, with total = 1 and no ids the conjugate.
    One function computes both, because the forward then needs no table and the backward exactly one.
    `total` and `weights` are constants here: they get no gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: Tensor, total: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        results = operators.solve(_rows(scores), _row_alpha(scores, alpha))
        maximum, log_top, conjugate = (r.reshape(scores.shape[:-1]) for r in results)
        listed = torch.where(weights != 0, scores.gather(-1, ids) - maximum.unsqueeze(-1), 0)
        return total * conjugate - (weights * listed).sum(-1), maximum, log_top

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        # The same ones: for reverse over forward mode under vmap torch keeps one list of their dimensions for both.
        ctx.save_for_forward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scores, alpha, total, ids, weights, maximum, log_top = ctx.saved_tensors
        scale, grad_alpha = grad * total, None
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if twice or ctx.needs_input_grad[1]:
            # The result may be differentiated once more, or alpha's gradient needs p: p comes from a function that
            # autograd knows, at the price of a second search.
            probs = entmax_map(scores, alpha)[0]
            table = scale.unsqueeze(-1) * probs
            if ctx.needs_input_grad[1]:
                grad_alpha = _sum_to_alpha(-scale.unsqueeze(-1) * omega_slope(probs, alpha), alpha)
        elif not readable(grad) and not torch.compiler.is_compiling():
            # One vector of factors after the other would run the operator as often: the table is computed once.
            top, levels = maximum.flatten(), log_top.flatten()
            probs = operators.apply(_rows(scores), _row_alpha(scores, alpha), top, levels, torch.ones_like(top))
            table = scale.unsqueeze(-1) * probs.reshape(scores.shape)
        else:
            # The levels of the forward are kept, so that p needs no search, and `scale` goes in along the way.
            row_alpha, flat = _row_alpha(scores, alpha), (maximum.flatten(), log_top.flatten(), scale.flatten())
            table = operators.apply(_rows(scores), row_alpha, *flat).reshape(scores.shape)
        listed = -grad.unsqueeze(-1) * weights
        # Eager first-order use owns the table and may write into it.
        in_place = not twice and visible(table)
        table = table.scatter_add_(-1, ids, listed) if in_place else table.scatter_add(-1, ids, listed)
        return table, grad_alpha, None, None, None

    @staticmethod
    def tangent(
        ctx: Any, step: Tensor | None, alpha_step: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor, None, None]:
        scores, alpha, total, ids, weights = ctx.saved_tensors[:5]
        probs = entmax_map(scores, alpha)[0]
        moved = torch.zeros_like(total)
        if step is not None:
            # 0 x inf is nan: a padded id names class 0, which may be masked.
            listed = torch.where(weights != 0, weights * step.gather(-1, ids), 0)
            moved = moved + total * (probs * step).sum(-1) - listed.sum(-1)
        if alpha_step is not None:
            moved = moved - total * (omega_slope(probs, alpha) * alpha_step).squeeze(-1)
        return moved, None, None


entmax_potential = differentiable(EntmaxPotential)


def potential(
    scores: Tensor, total: Tensor, ids: Tensor | None, weights: Tensor | None, alpha: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The `potential` of `FenchelYoung` for alpha-entmax; softmax and sparsemax are alpha = 1 and 2.

    Args:
        scores: (..., C).
        total: (...), the factor of Omega*(s) - max s.
        ids, weights: (..., P) listed classes and their weights; None for none.
        alpha: as in `read_alpha`.

    Returns:
        total (Omega*(s) - max s) - sum_i weights_i (s_i - max s) and max s, (...) each.
    """
    if ids is None or weights is None:
        ids = torch.zeros(*scores.shape[:-1], 0, dtype=torch.long, device=scores.device)
        weights = ids.to(scores.dtype)
    value, maximum, _ = entmax_potential(scores, read_alpha(alpha, scores), total, ids, weights)
    return value, maximum
