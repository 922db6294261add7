"""How fast gradient descent converges on a linear head.

For scores s = W x with ridge (gamma/2) |W|^2 and a loss of curvature B in the scores, the objective has

    smoothness          L = B L_G + gamma,   L_G = |X'X / N|_2 for N examples x, the rows of X
    strong convexity    mu = gamma
    condition number    kappa = L / mu
    step sizes          eta_max = 2 / L (larger steps can diverge),   eta* = 2 / (L + mu)
    contraction         a step of size eta* multiplies the distance to the optimum by at most
                        rho = (kappa - 1) / (kappa + 1)

B is the supremum over all scores, so rho is a worst case. `worst_head` reaches it; a given problem may be much faster.
None of this holds for scores that are not linear in the parameters: there the Hessian has another term, and no ridge
makes the objective convex.

References: the paper's section B.4; Nesterov, "Introductory lectures on convex optimization", theorem 2.1.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import visible
from manymax.theory.order_preservation import member_map


@dataclass(frozen=True)
class Rates:
    """The constants of gradient descent on a linear head; the module's docstring defines them."""

    smoothness: float
    strong_convexity: float
    kappa: float
    eta_max: float
    eta_star: float
    rho: float


@checked
def rates(curvature: float, feature_norm: float, ridge: float) -> Rates:
    """The constants of a linear head.

    Args:
        curvature: B, the supremum of the loss's Hessian norm in the scores.
        feature_norm: L_G, the largest eigenvalue of X'X / N.
        ridge: gamma > 0.

    Returns:
        The constants.

    Example:
        >>> r = rates(curvature=0.5, feature_norm=2.0, ridge=0.1)
        >>> round(r.kappa, 6), round(r.eta_max, 4), round(r.eta_star, 4), round(r.rho, 4)
        (11.0, 1.8182, 1.6667, 0.8333)
    """
    if not ridge > 0:
        raise ArgumentError(
            f"`ridge` must be positive: without it no step contracts along shifts of all scores; got {ridge}."
        )
    if not (curvature >= 0 and feature_norm >= 0):
        raise ArgumentError(f"`curvature` and `feature_norm` must not be negative; got {curvature}, {feature_norm}.")
    smoothness = curvature * feature_norm + ridge
    kappa = smoothness / ridge
    # rho = (kappa - 1) / (kappa + 1), without infinity over infinity for a loss that is not smooth
    rho = 1 - 2 * ridge / (smoothness + ridge)
    return Rates(smoothness, ridge, kappa, 2 / smoothness, 2 / (smoothness + ridge), rho)


@checked(features="finite examples dim", least={"num_classes": 1})
def head_rates(member: Member, features: Tensor, num_classes: int, ridge: float, **settings: Any) -> Rates:
    """The constants of a member's linear head on given features.

    Args:
        member: one whose facts state its smoothness.
        features: (N, d), the examples.
        num_classes: C.
        ridge: gamma > 0.
        settings: settings of the member, and sizes on which its smoothness depends, such as `num_negatives`.
    """
    if features.ndim != 2:
        raise ArgumentError(f"`features` must be (examples, dim); got shape {tuple(features.shape)}.")
    feature_norm = float(torch.linalg.matrix_norm(features.double(), 2)) ** 2 / len(features)
    return rates(curvature_of(member, num_classes, **settings), feature_norm, ridge)


@checked(least={"num_classes": 1})
def curvature_of(member: Member, num_classes: int, **settings: Any) -> float:
    """The curvature B of a member: the smoothness that its facts state for these settings and sizes."""
    known = member.facts.smoothness.fn
    if known is None:
        raise ArgumentError(f"`member` must state its smoothness; {member.name} does not.")
    return float(known(num_classes=num_classes, **settings))


# Gradient descent --------------------------------------------------------------------------------


@checked(features="finite examples dim")
def head_gradient(
    member: Member, features: Tensor, target: Tensor, ridge: float, **settings: Any
) -> Callable[[Tensor], Tensor]:
    """The gradient of mean_n l(y_n, W x_n) + (gamma/2) |W|^2 as a function of W (C, d).

    Args:
        member: one whose loss sees all scores.
        features: (N, d), the examples.
        target: (N,) labels, or any other target of the member's loss.
        ridge: gamma.
        settings: settings of the member, such as `alpha`.

    Returns:
        A function from W (C, d) to the gradient (C, d).
    """

    def gradient(weight: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        losses = member.loss(features @ leaf.mT, target, reduction="none", **settings)
        return torch.autograd.grad(losses.mean() + ridge / 2 * leaf.square().sum(), leaf)[0]

    return gradient


@checked(start="finite ...", least={"steps": 0})
def descend(gradient: Callable[[Tensor], Tensor], start: Tensor, step: float, steps: int) -> Tensor:
    """Plain gradient descent with a fixed step size; returns the start and every iterate, (steps + 1, ...)."""
    path = [start]
    for _ in range(steps):
        path.append(path[-1] - step * gradient(path[-1]))
    return torch.stack(path)


@checked
def contractions(path: Tensor, optimum: Tensor) -> Tensor:
    """The ratio |W_(t+1) - W*| / |W_t - W*| of every step of a path (steps + 1, ...), (steps,)."""
    if path.ndim < 2 or path.shape[1:] != optimum.shape or not optimum.numel():
        raise ArgumentError(
            f"`path` must be iterates (steps + 1, ...) of the shape of `optimum`, {tuple(optimum.shape)};"
            f" got {tuple(path.shape)}."
        )
    distance = (path - optimum).flatten(1).norm(dim=-1)
    if visible(distance) and not (distance.isfinite() & (distance > 0))[:-1].all():
        raise ArgumentError("`path` must be finite and reach `optimum` in its last iterate at the earliest.")
    return distance[1:] / distance[:-1]


@checked(least={"num_classes": 2})
def worst_head(
    member: Member, num_classes: int, feature_norm: float, ridge: float, **settings: Any
) -> tuple[Callable[[Tensor], Tensor], Tensor, Rates]:
    """A linear head on which gradient descent is as slow as the constants say.

    It has one feature x with x^2 = L_G and a fixed offset s0 of the scores, at which the map's Jacobian has its largest
    norm; the target is p(s0). The optimum is W = 0, where the Hessian has the eigenvalues L and gamma.

    Args:
        member: a Fenchel-Young member that has `theory.sharpest`, as softmax, sparsemax, entmax and rg do.
        num_classes, feature_norm, ridge: C, L_G, gamma.
        settings: settings of the member, such as `alpha`.

    Returns:
        The gradient as a function of W (C,); a direction (C,) of the largest curvature; the constants.

    Example: each step of size eta* shrinks the distance by the factor rho, along steep and flat directions alike.
        >>> from manymax.members import FAMILY
        >>> gradient, steep, r = worst_head(FAMILY["sparsemax"], 5, feature_norm=2.0, ridge=0.1)
        >>> path = descend(gradient, 0.01 * (steep + 1), r.eta_star, 20)
        >>> float(contractions(path, torch.zeros(5)).max()) - r.rho < 1e-12
        True
    """
    if member.foundation is None:
        raise ArgumentError(f"`member` must be Fenchel-Young; {member.name} is not: {member.facts.fenchel_young.text}.")
    offset = member.needed("theory.sharpest")(num_classes, **settings)
    map, x = member_map(member, **settings), feature_norm**0.5
    target = map(offset)

    def gradient(weight: Tensor) -> Tensor:
        return x * (map(offset + x * weight) - target) + ridge * weight

    hessian = torch.autograd.functional.jacobian(map, offset)
    return (
        gradient,
        torch.linalg.eigh(hessian).eigenvectors[:, -1],
        rates(curvature_of(member, num_classes, **settings), feature_norm, ridge),
    )
