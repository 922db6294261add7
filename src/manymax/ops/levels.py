"""The level of a row: the one number per row from which all of its entmax probabilities follow.

With beta = alpha - 1 and d_i = s_i - max s <= 0, every alpha in [1, 2] has the form

    p_i = u_i^(1/beta),   u_i = max(0, w + beta d_i),   w = p_top^beta,

where w, the level, is the number that makes the p_i sum to 1 and p_top is the largest probability
(alpha = 1 is the limit p_i = p_top e^{d_i}). Two forms of the level are in use, because neither is
accurate for every alpha:

    w                       for beta >= 1/4, where w can be small and 1 + beta v would lose its digits
    v = (w - 1) / beta      below: u = 1 + beta (v + d), and v becomes log p_top at beta = 0

What `simplex.solve` keeps of a row is log p_top, which is well conditioned for every alpha.

The search for the level. Let F(w) = sum p_i. Its root F = 1 is found by Newton's method, not on F, which is a
power of degree 1/beta and would need about log C steps, but on F^beta, the (1/beta)-norm of u. A norm of
convex increasing functions is convex and increasing in w; Newton's method on such a function, started above the
root, decreases to the root and never crosses it, so that no bracket is needed. At w = 1 the top class alone has
p = 1, hence F >= 1: this start is above the root of every row. A step is

    w <- w - F (1 - F^-beta) / A,   A = sum p_i^(1-beta) = beta dF/dw.

On rows of equal scores F^beta is linear and one step ends the search; for alpha = 2 it is linear while the support
stays the same, so that the search ends exactly once the support is found. About 6 steps are usual.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# log(u) / beta divides the rounding error of u, which is near 1 when beta is small, by beta. Below this beta the level
# is therefore kept as v, and log1p of the small number beta (v + d) takes the place of log(u).
V_BELOW = 0.25

# The logarithm of a probability that counts as 0, a little above the smallest normal number (e^-87 and e^-708).
_LOG_SMALLEST = {torch.float32: -80.0, torch.float64: -700.0}

NumberOrColumn = float | Tensor  # alpha or beta: one number for all rows, or a tensor (rows, 1)


def level_is_v(beta: NumberOrColumn) -> bool:
    """Whether the level is kept as v = (w - 1) / beta instead of w."""
    # with one beta per row it is always v: some rows may have beta = 0, where w is 1 for every p_top
    return isinstance(beta, Tensor) or beta < V_BELOW


def scaled_expm1(exponent: Tensor, beta: NumberOrColumn) -> Tensor:
    """expm1(beta x) / beta for x = `exponent`, and its limit x at beta = 0."""
    if isinstance(beta, Tensor):
        # the inner `where` keeps 0/0 out of the branch that is not taken
        return torch.where(beta > 0, (beta * exponent).expm1() / torch.where(beta > 0, beta, 1), exponent)
    return (beta * exponent).expm1() / beta


def level_from_log_top(log_top: Tensor, beta: NumberOrColumn) -> Tensor:
    """The level, w or v as `level_is_v` says, of rows whose largest probability has the logarithm `log_top`."""
    return scaled_expm1(log_top, beta) if level_is_v(beta) else (beta * log_top).exp()


def log_top_from_level(level: Tensor, beta: NumberOrColumn) -> Tensor:
    """The logarithm of the largest probability: the inverse of `level_from_log_top`."""
    if isinstance(beta, Tensor):
        return torch.where(beta > 0, (beta * level).log1p() / torch.where(beta > 0, beta, 1), level)
    return (beta * level).log1p() / beta if level_is_v(beta) else level.log() / beta


def power_bases(d: Tensor, level: Tensor, beta: NumberOrColumn, out: Tensor) -> Tensor:
    """u = max(0, w + beta d), whose power 1/beta is the probability, from d = s - max s.

    Args:
        d: (rows, classes); -inf for a masked class.
        level: (rows, 1).
        beta: alpha - 1.
        out: (rows, classes), where the result goes; may be `d` itself.
    """
    if level_is_v(beta):
        # v + d comes first, times beta second: w + beta d would round digits of v away. A masked class is clamped to
        # a finite number, because beta may be 0 and 0 times -inf is nan; its u is then 1, but its probability is 0.
        u = torch.add(d, level, out=out).clamp_(min=torch.finfo(d.dtype).min / 4).mul_(beta).add_(1)
    elif beta == 1:
        u = torch.add(d, level, out=out)  # one pass over the block instead of two
    else:
        u = torch.mul(d, beta, out=out).add_(level)
    return u.clamp_(min=0)


def _floored_exp_(x: Tensor) -> Tensor:
    """exp(x) in place, and exactly 0 where exp(x) is below e^-80 (float32) or e^-700 (float64).

    Every other result is too small by at most 2e-35.
    """
    # Denormal results and exp(-inf) take the processor tens of nanoseconds each, a normal one less than one. So x is
    # clamped from below, and the exponential of the bound, with a margin for its rounding, is subtracted from
    # everything: what was at the bound becomes exactly 0, as the support of a sparse map requires.
    low = _LOG_SMALLEST[x.dtype]
    return x.clamp_(min=low).exp_().sub_(1.001 * math.exp(low)).clamp_(min=0)


def probabilities_(d: Tensor, level: Tensor, beta: NumberOrColumn) -> Tensor:
    """p = u^(1/beta) from d = s - max s (rows, classes) and the level (rows, 1), in place of d."""
    if isinstance(beta, Tensor):
        # as in `power_bases`: finite, because 0 times -inf is nan
        v = (d + level).clamp_(min=torch.finfo(d.dtype).min / 4)
        # outside of the support beta v <= -1, and log1p(-1) = -inf becomes p = 0
        log_p = (beta * v).clamp_(min=-1).log1p_() / torch.where(beta > 0, beta, 1)
        return d.copy_(torch.where(beta > 0, log_p, v).exp_())
    # alpha = 2 and alpha = 1.5 need no logarithm: a general power costs several times as much as a square
    if beta == 1:
        return power_bases(d, level, beta, d)
    if beta == 0.5:
        return power_bases(d, level, beta, d).square_()
    smallest = _smallest_base(beta, d.dtype)  # clamped to it, because log(0) is slow
    if level_is_v(beta):
        return _floored_exp_(d.add_(level).mul_(beta).clamp_(min=smallest - 1).log1p_().div_(beta))
    return _floored_exp_(power_bases(d, level, beta, d).clamp_(min=smallest).log_().div_(beta))


def _smallest_base(beta: NumberOrColumn, dtype: torch.dtype) -> float:
    """A base u > 0 whose power u^(1/beta) counts as 0; the factor 1.2 keeps it so after rounding."""
    tiny = torch.finfo(dtype).tiny
    return tiny if isinstance(beta, Tensor) else max(tiny, math.exp(1.2 * beta * _LOG_SMALLEST[dtype]))


def mass_and_slope(d: Tensor, level: Tensor, beta: NumberOrColumn, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """F = sum p and A = sum p^(1 - beta) = sum p / u at a level, (rows, 1) each.

    Args:
        d: (rows, classes) s - max s; kept.
        level: (rows, 1).
        beta: alpha - 1.
        scratch: (rows, classes), overwritten.
    """
    # the caller hands in the same scratch for every step: touching new memory costs twice as much as an exponential
    u = power_bases(d, level, beta, scratch)
    if isinstance(beta, float) and beta in (0.5, 1.0):
        first = u.sum(-1, keepdim=True)
        # alpha = 2: F = sum u, and A is the size of the support; a sum of signs is 4 times faster than (u > 0).sum().
        # alpha = 1.5: A = sum u, F = sum u^2.
        second = (u.sign_() if beta == 1 else u.square_()).sum(-1, keepdim=True)
        return (first, second) if beta == 1 else (second, first)
    p = probabilities_(d.clone(), level, beta)
    total = p.sum(-1, keepdim=True)
    # p / u instead of a second power; outside of the support it is 0 / smallest, not 0 / 0
    return total, p.div_(u.clamp_(min=_smallest_base(beta, u.dtype))).sum(-1, keepdim=True)


def newton_level(
    d: Tensor,
    beta: NumberOrColumn,
    start: Tensor | None = None,
    mass: float = 1.0,
    scratch: Tensor | None = None,
    steps: int = 60,
) -> Tensor:
    """The level at which the probabilities of each row sum to `mass`, by Newton's method.

    Args:
        d: (rows, classes) s - max s.
        beta: alpha - 1.
        start: (rows, 1) level to start from; by default that of p_top = 1, which is above every root.
        mass: the wanted sum; below 1 where d is a sample of the classes.
        scratch: (rows, classes) memory to overwrite.
        steps: most steps. A search that is cut short ends above the root if it started above it, so that its result
            is still a bound.

    Returns:
        (rows, 1), w or v as `level_is_v` says.
    """
    level = d.new_full((d.shape[0], 1), 0.0 if level_is_v(beta) else 1.0) if start is None else start.clone()
    eps = torch.finfo(d.dtype).eps
    # Up to alpha = 1.5 a class enters the support with a bounded second derivative (u^(1/beta), 1/beta >= 2): a step
    # leaves an error of the order of its square, and a step of about sqrt(eps) is the last. Above, a class that drops
    # out of the support may leave more, and only a step of rounding size is the last.
    tolerance = eps**0.45 if isinstance(beta, float) and beta <= 0.5 else 8 * eps
    scratch = torch.empty_like(d) if scratch is None else scratch
    for _ in range(steps):
        total, slope = mass_and_slope(d, level, beta, scratch)
        # (1 - (F / mass)^-beta) / beta; expm1 keeps the digits when F is close to the mass, and log F is the limit at 0
        gap = -scaled_expm1(-(total / mass).log(), beta)
        # dw = beta dv: the step in w has a factor beta, the step in v has none and is defined at beta = 0
        step = total * gap / slope if level_is_v(beta) else beta * total * gap / slope
        level -= step
        # w lies in (0, 1] and is wanted to relative precision; v reaches 0, where its error is absolute
        scale = level.abs() + 1 if level_is_v(beta) else level
        # "not (>)" instead of "<=": a row of nan fails every comparison and must not keep the others waiting
        if not (step.abs() > tolerance * scale).any():
            break
    return level


def probs_and_conjugate_(
    d: Tensor, level: Tensor, alpha: NumberOrColumn, beta: NumberOrColumn, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities at the level of each row, and the conjugate of the regulariser.

    On the support d = (u - 1) / beta - v. Put into Omega*(s) - max s = <p, d> - Omega(p) this leaves

        Omega*(s) - max s = (sum p u - 1) / alpha - v,

    in which nothing is divided by beta and no d = -inf is multiplied by p = 0.

    Args:
        d: (rows, classes) s - max s; overwritten by the probabilities.
        level: (rows, 1), at which the probabilities sum to 1.
        alpha, beta: beta = alpha - 1.
        scratch: (rows, classes) memory to overwrite.

    Returns:
        p (rows, classes), log p_top (rows, 1) in float64, and Omega*(s) - max s (rows, 1).
    """
    # in float64, also for float32 rows: `apply` computes the level anew from it, and should get this one again
    log_top = log_top_from_level(level.double(), beta.double() if isinstance(beta, Tensor) else beta)
    u = power_bases(d, level, beta, torch.empty_like(d) if scratch is None else scratch)
    # d is read for the last time here: u is kept beside p, because both are in the sum below
    p = torch.mul(u, u, out=d) if isinstance(beta, float) and beta == 0.5 else probabilities_(d, level, beta)
    mean = u.mul_(p).sum(-1, keepdim=True) - 1  # E_p[u - 1], because the p sum to 1
    v = level if level_is_v(beta) else (level - 1) / beta
    return p, log_top, mean / alpha - v
