"""Entmax on plain tensors: an exact threshold without sorting a row.

With beta = alpha - 1 and d_i = s_i - max s, every alpha in [1, 2] has the form

    p_i = u_i^(1/beta),   u_i = max(0, w + beta d_i),   w = p_top^beta,

where w is the one number per row that makes the p_i sum to 1 (alpha = 1: p_i = p_top e^{d_i}).
The solution is kept as log p_top, which is well conditioned for every alpha.

The search. F(w) = sum p_i, and F^beta is the (1/beta)-norm of u: convex and increasing in w, and
linear while the support stays the same and the scores are equal. Newton's method on F^beta = 1,
started at w = 1 where F >= 1, therefore decreases to the root without bracketing,

    w <- w - F (1 - F^-beta) / A,   A = sum p_i^(1-beta),

in a handful of steps; for alpha = 2 it ends exactly, with the support. Leaving classes out of F
can only raise the root, so a search over the maxima of groups of classes bounds it from above and
tells which groups can hold a class of the support. Few such groups: the search runs over their
classes alone, in float64. Many: it runs over the row, from a start found on every 16th class.

`solve` and `apply` are opaque operators for autograd, vmap and torch.compile; entmax.py
differentiates around them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 16  # classes per group
SMALL = 512  # rows this short are searched whole, in float64
BLOCK = 1 << 19  # scores per block: the scratch of a block stays in the second-level cache
SWEEP = 1 << 23  # scores per block of the pass over group maxima, which streams and keeps nothing
LOG1P_BELOW = 0.25  # for smaller beta u = 1 + beta v is kept as v, because log(u) / beta would lose digits

_LOW = {torch.float32: -80.0, torch.float64: -700.0}  # logarithm of a small normal number

Order = float | Tensor  # alpha or beta: one number, or (rows, 1)


def row_blocks(rows: int, classes: int, size: int = BLOCK) -> list[slice]:
    """Slices over the rows, each with about `size` scores; a function of the shape alone."""
    step = max(1, size // max(1, classes))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _in_v(beta: Order) -> bool:
    """Whether the level of a row is kept as v = (w - 1) / beta instead of w."""
    return isinstance(beta, Tensor) or beta < LOG1P_BELOW


def _ratio(exponent: Tensor, beta: Order) -> Tensor:
    """expm1(beta x) / beta, which is x at beta = 0; `exponent` is x."""
    if isinstance(beta, Tensor):
        return torch.where(beta > 0, (beta * exponent).expm1() / torch.where(beta > 0, beta, 1), exponent)
    return (beta * exponent).expm1() / beta


def _level(log_top: Tensor, beta: Order) -> Tensor:
    """w, or v = (w - 1) / beta, from log p_top."""
    return _ratio(log_top, beta) if _in_v(beta) else (beta * log_top).exp()


def _log_top(level: Tensor, beta: Order) -> Tensor:
    if isinstance(beta, Tensor):
        return torch.where(beta > 0, (beta * level).log1p() / torch.where(beta > 0, beta, 1), level)
    return (beta * level).log1p() / beta if _in_v(beta) else level.log() / beta


def _bases_(d: Tensor, level: Tensor, beta: Order) -> Tensor:
    """Overwrite d = s - max s with u = max(0, w + beta d)."""
    if _in_v(beta):
        return d.add_(level).mul_(beta).add_(1).clamp_(min=0)
    if beta != 1:
        d.mul_(beta)
    return d.add_(level).clamp_(min=0)


def floored_exp_(x: Tensor) -> Tensor:
    """exp(x) in place, exactly 0 from the smallest normal number down.

    Denormal results and exp(-inf) take the processor tens of nanoseconds each. The floor is
    subtracted, so that what was below it is 0; nothing else moves by more than 1e-35.
    """
    low = _LOW[x.dtype]
    return x.clamp_(min=low).exp_().sub_(1.001 * math.exp(low)).clamp_(min=0)


def _powers(d: Tensor, level: Tensor, beta: Order) -> Tensor:
    """p = u^(1/beta) from d = s - max s, overwriting d."""
    if isinstance(beta, Tensor):
        v = d + level
        log_p = (beta * v).clamp_(min=-1).log1p_() / torch.where(beta > 0, beta, 1)
        return d.copy_(torch.where(beta > 0, log_p, v).exp_())
    if beta == 1:
        return _bases_(d, level, beta)
    if beta == 0.5:
        return _bases_(d, level, beta).square_()
    floor = math.exp(beta * _LOW[d.dtype])  # u this small has p = 0, and log(0) is slow
    if _in_v(beta):
        return floored_exp_(d.add_(level).mul_(beta).clamp_(min=floor - 1).log1p_().div_(beta))
    return floored_exp_(_bases_(d, level, beta).clamp_(min=floor).log_().div_(beta))


def _sums(d: Tensor, level: Tensor, beta: Order, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """F = sum p and A = sum p^(1 - beta) = sum p / u at a level, (rows, 1) each."""
    u = _bases_(scratch.copy_(d), level, beta)
    if isinstance(beta, float) and beta in (0.5, 1.0):
        first = u.sum(-1, keepdim=True)
        second = (u.sign_() if beta == 1 else u.square_()).sum(-1, keepdim=True)
        return (first, second) if beta == 1 else (second, first)
    p = _powers(d.clone(), level, beta)
    total = p.sum(-1, keepdim=True)
    return total, p.div_(u.clamp_(min=torch.finfo(u.dtype).tiny)).sum(-1, keepdim=True)


def _newton(d: Tensor, beta: Order, start: Tensor | None = None, mass: float = 1.0) -> Tensor:
    """The level at which the probabilities of d (rows, classes) sum to `mass`, (rows, 1)."""
    level = d.new_full((d.shape[0], 1), 0.0 if _in_v(beta) else 1.0) if start is None else start.clone()
    tolerance = 8 * torch.finfo(d.dtype).eps
    scratch = torch.empty_like(d)
    for _ in range(60):  # about 6 steps are needed; the bound only ends a row of nan
        total, slope = _sums(d, level, beta, scratch)
        gap = -_ratio(-(total / mass).log(), beta)  # (1 - F^-beta) / beta
        step = total * gap / slope if _in_v(beta) else beta * total * gap / slope
        level -= step
        scale = level.abs() + 1 if _in_v(beta) else level
        if not (step.abs() > tolerance * scale).any():
            break
    return level


def _finish(d: Tensor, level: Tensor, alpha: Order, beta: Order) -> list[Tensor]:
    """log p_top (float64) and Omega*(s) - max s = E_p[(p^beta - 1)] / alpha - v, (rows, 1) each; overwrites d."""
    precise = level.double()
    log_top = _log_top(precise, beta.double() if isinstance(beta, Tensor) else beta)
    u = _bases_(d.clone(), level, beta)
    mean = (_powers(d, level, beta).mul_(u)).sum(-1, keepdim=True) - 1
    v = level if _in_v(beta) else (level - 1) / beta
    return [log_top, mean / alpha - v]


def _candidates(scores: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Row maxima, a superset of the support as (rows, K) scores, and which rows it is good for.

    A row whose support may reach into more than an eighth of the groups is not good: its
    candidates would cost more than the row itself.
    """
    rows, classes = scores.shape
    width = classes // GROUP
    grouped = scores[:, : GROUP * width].view(rows, GROUP, width)  # group l: classes l, l + width, ...
    heads = torch.cat([grouped.amax(1), scores[:, GROUP * width :]], 1)  # the last classes are groups of one
    maximum = heads.amax(1, keepdim=True)
    below = heads - maximum
    bound = _newton(below, beta)
    # the bound is a root in working precision: widen it by more than its error
    cut = -1 / beta - (bound + 1e-4) if _in_v(beta) else -(bound * (1 + 1e-4)) / beta
    count = (below[:, :width] > cut).sum(1)
    good = count <= max(1, width // 8)
    k = int(torch.where(good, count, 0).max())
    chosen = heads[:, :width].topk(k, sorted=False).indices  # (rows, k) groups
    picked = grouped.gather(2, chosen[:, None, :].expand(rows, GROUP, k)).reshape(rows, GROUP * k)
    return maximum, torch.cat([picked, heads[:, width:]], 1), good


def _solve_wide(d: Tensor, alpha: float, beta: float) -> list[Tensor]:
    """Rows with a large support: Newton over the whole row, from a start found on every 16th class."""
    sample = d[:, ::GROUP].contiguous()
    start = _newton(sample, beta, mass=sample.shape[1] / d.shape[1])
    low, high = (_level(torch.tensor(top, dtype=d.dtype).log(), beta) for top in (1 / d.shape[1], 1.0))
    start = start.nan_to_num(float(high)).clamp_(float(low), float(high))  # 1/C <= p_top <= 1
    return _finish(d, _newton(d, beta, start), alpha, beta)


def _solve_long(scores: Tensor, alpha: float, beta: float) -> list[Tensor]:
    maximum, picked, good = _candidates(scores, beta)
    d = (picked - maximum).double()
    log_top, conjugate = _finish(d, _newton(d, beta), alpha, beta)
    conjugate = conjugate.to(scores.dtype)
    wide = (~good).nonzero().squeeze(1)
    for block in row_blocks(len(wide), scores.shape[1]):
        rows = wide[block]
        log_top[rows], conjugate[rows] = _solve_wide(scores[rows].sub_(maximum[rows]), alpha, beta)
    return [maximum, log_top, conjugate]


def _solve_softmax(scores: Tensor) -> list[Tensor]:
    log_top = scores.softmax(1).amax(1, keepdim=True).log_()
    return [scores.amax(1, keepdim=True), log_top.double(), -log_top]


def _solve_short(scores: Tensor, alpha: Order) -> list[Tensor]:
    maximum = scores.amax(1, keepdim=True)
    d, beta = (scores - maximum).double(), alpha - 1
    log_top, conjugate = _finish(d, _newton(d, beta), alpha, beta)
    return [maximum, log_top, conjugate.to(scores.dtype)]


def _solve(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, log p_top (float64) and Omega*(s) - max s, (rows,) each.

    Args:
        scores: (rows, classes) float32 or float64; -inf masks a class.
        alpha: () for all rows or (rows, 1), values in [1, 2].
    """
    rows, classes = scores.shape
    shared = float(alpha) if alpha.ndim == 0 else None
    long = shared is not None and shared > 1 and classes > SMALL
    parts: list[list[Tensor]] = []
    for block in row_blocks(rows, classes, SWEEP if long else BLOCK):
        part = scores[block].contiguous()
        if shared == 1:
            parts.append(_solve_softmax(part))
        elif long and shared is not None:
            parts.append(_solve_long(part, shared, shared - 1))
        else:
            parts.append(_solve_short(part, shared if shared is not None else alpha[block].double()))
    if not parts:
        return scores.new_empty(0), scores.new_empty(0, dtype=torch.float64), scores.new_empty(0)
    maximum, log_top, conjugate = (torch.cat(column).squeeze(1) for column in zip(*parts, strict=True))
    return maximum, log_top, conjugate


def _apply(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    """scale p, (rows, classes), from what `solve` returned; `scale` is (rows,)."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    shared = float(alpha) if alpha.ndim == 0 else None
    for block in row_blocks(*scores.shape):
        if shared == 1:
            probs = torch.softmax(scores[block], 1, out=out[block])
        else:
            d = torch.sub(scores[block], maximum[block, None], out=out[block])
            beta = shared - 1 if shared is not None else alpha[block].double() - 1
            level = _level(log_top[block, None], beta).to(d.dtype)
            probs = _powers(d, level, beta if isinstance(beta, float) else beta.to(d.dtype))
        probs.mul_(scale[block, None])
    return out


def vjp(probs: Tensor, alpha: float, grad: Tensor) -> Tensor:
    """J g = a (g - <a, g> / sum a) with a = p^(2 - alpha) on the support, block by block."""
    out = torch.empty_like(probs)
    for block in row_blocks(*probs.shape):
        p, g = probs[block], grad[block]
        a = p.sign() if alpha == 2 else p.sqrt() if alpha == 1.5 else p if alpha == 1 else p.pow(2 - alpha)
        mean = (a * g).sum(1, keepdim=True) / a.sum(1, keepdim=True)
        torch.sub(g, mean, out=out[block]).mul_(a)
    return out


solve = torch.library.custom_op("manymax::entmax_solve", _solve, mutates_args=())
apply = torch.library.custom_op("manymax::entmax_apply", _apply, mutates_args=())


@solve.register_fake
def _(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[0]
    return scores.new_empty(rows), scores.new_empty(rows, dtype=torch.float64), scores.new_empty(rows)


@apply.register_fake
def _(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _merge(size: int, x: Tensor, dim: int | None) -> Tensor:
    """Fold a vmapped dimension into the rows."""
    batched = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return batched.flatten(0, 1)


def _merge_alpha(size: int, rows: int, alpha: Tensor, dim: int | None) -> Tensor:
    if dim is None and alpha.ndim == 0:
        return alpha
    batched = alpha.expand(size, *alpha.shape) if dim is None else alpha.movedim(dim, 0)
    return batched.reshape(size, -1, 1).expand(size, rows, 1).reshape(size * rows, 1)


@solve.register_vmap
def _(info, in_dims, scores: Tensor, alpha: Tensor):  # type: ignore[no-untyped-def]
    size = info.batch_size
    merged = _merge(size, scores, in_dims[0])
    rows = merged.shape[0] // size
    results = solve(merged, _merge_alpha(size, rows, alpha, in_dims[1]))
    return tuple(r.unflatten(0, (size, rows)) for r in results), (0, 0, 0)


@apply.register_vmap
def _(info, in_dims, scores: Tensor, alpha: Tensor, *row_tensors: Tensor):  # type: ignore[no-untyped-def]
    size = info.batch_size
    merged = _merge(size, scores, in_dims[0])
    rows = merged.shape[0] // size
    flat = [_merge(size, x, dim) for x, dim in zip(row_tensors, in_dims[2:], strict=True)]
    result = apply(merged, _merge_alpha(size, rows, alpha, in_dims[1]), *flat)
    return result.unflatten(0, (size, rows)), 0
