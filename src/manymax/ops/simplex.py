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

import torch
from torch import Tensor

GROUP = 16  # classes per group
SMALL = 512  # rows this short are searched whole, in float64
BLOCK = 1 << 19  # scores per block: the scratch of a block stays in the second-level cache
LOG1P_BELOW = 0.25  # for smaller beta u = 1 + beta v is kept as v, because log(u) / beta would lose digits


def row_blocks(rows: int, classes: int) -> list[slice]:
    """Slices over the rows, each with about BLOCK scores; a function of the shape alone."""
    step = max(1, BLOCK // max(1, classes))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _level(log_top: Tensor, beta: float | Tensor) -> Tensor:
    """w, or v = (w - 1) / beta for a small beta, from log p_top."""
    if isinstance(beta, float):
        return (beta * log_top).exp() if beta >= LOG1P_BELOW else (beta * log_top).expm1() / beta
    return torch.where(beta > 0, (beta * log_top).expm1() / torch.where(beta > 0, beta, 1), log_top)


def _log_top(level: Tensor, beta: float | Tensor) -> Tensor:
    if isinstance(beta, float):
        return level.log() / beta if beta >= LOG1P_BELOW else (beta * level).log1p() / beta
    return torch.where(beta > 0, (beta * level).log1p() / torch.where(beta > 0, beta, 1), level)


def _probs_(d: Tensor, level: Tensor, beta: float | Tensor) -> Tensor:
    """Overwrite d = s - max s with p."""
    if isinstance(beta, Tensor):
        safe = torch.where(beta > 0, beta, 1)
        v = d + level
        return d.copy_(torch.where(beta > 0, (beta * v).clamp_(min=-1).log1p_() / safe, v).exp_())
    if beta < LOG1P_BELOW:
        return d.add_(level).mul_(beta).clamp_(min=-1).log1p_().div_(beta).exp_()
    u = d.mul_(beta).add_(level).clamp_(min=0)
    if beta == 1:
        return u
    return u.square_() if beta == 0.5 else u.log_().div_(beta).exp_()


def _sums(d: Tensor, level: Tensor, beta: float | Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """F = sum p and A = sum p^(1 - beta) = sum p / u at a level, (rows, 1) each; `out` is scratch like d."""
    if isinstance(beta, float) and beta >= LOG1P_BELOW:
        u = torch.mul(d, beta, out=out).add_(level).clamp_(min=0)
        if beta in (0.5, 1.0):
            first = u.sum(-1, keepdim=True)
            second = (u.sign_() if beta == 1 else u.square_()).sum(-1, keepdim=True)
            return (first, second) if beta == 1 else (second, first)
        p = u.log().div_(beta).exp_()
    else:
        u = torch.add(d, level, out=out).mul_(beta).add_(1).clamp_(min=0)
        p = _probs_(d.clone(), level, beta)
    total = p.sum(-1, keepdim=True)
    return total, p.div_(u.clamp_(min=torch.finfo(u.dtype).tiny)).sum(-1, keepdim=True)


def _newton(d: Tensor, beta: float | Tensor, start: Tensor | None = None, mass: float = 1.0) -> Tensor:
    """The level at which the probabilities of d (rows, classes) sum to `mass`, (rows, 1)."""
    small = isinstance(beta, Tensor) or beta < LOG1P_BELOW
    level = start.clone() if start is not None else d.new_full((d.shape[0], 1), 0.0 if small else 1.0)
    tolerance = 8 * torch.finfo(d.dtype).eps
    scratch = torch.empty_like(d)
    for _ in range(60):  # about 6 steps are needed; the bound only ends a row of nan
        total, slope = _sums(d, level, beta, scratch)
        log_ratio = (total / mass).log()
        if small:  # (1 - F^-beta) / beta, and its limit log F
            step = total * _expm1_ratio(log_ratio, beta) / slope
            scale = level.abs() + 1
        else:
            step = -total * (-beta * log_ratio).expm1() / slope
            scale = level
        level -= step
        if not (step.abs() > tolerance * scale).any():
            break
    return level


def _expm1_ratio(log_ratio: Tensor, beta: float | Tensor) -> Tensor:
    """(1 - F^-beta) / beta from log F."""
    if isinstance(beta, float):
        return (-beta * log_ratio).expm1() / -beta
    return torch.where(beta > 0, (-beta * log_ratio).expm1() / -torch.where(beta > 0, beta, 1), log_ratio)


def _conjugate(p: Tensor, level: Tensor, alpha: float | Tensor, beta: float | Tensor) -> Tensor:
    """Omega*(s) - max s = E_p[(p^beta - 1)] / alpha - v, (rows, 1); overwrites p."""
    if isinstance(beta, float) and beta >= LOG1P_BELOW:
        v = (level - 1) / beta
        mean = p.square().sum(-1, keepdim=True) if beta == 1 else p.pow(alpha).sum(-1, keepdim=True)
        return (mean - 1) / alpha - v
    log_p = torch.where(p > 0, p, 1).log_()
    return (p * (beta * log_p).expm1_()).sum(-1, keepdim=True) / alpha - level


def _candidates(scores: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Row maxima, a superset of the support as (rows, K) scores, and which rows it is good for.

    A row whose support may reach into more than an eighth of the groups is not good: its
    candidates would cost more than the row itself.
    """
    rows, classes = scores.shape
    width = classes // GROUP
    grouped = scores[:, : GROUP * width].view(rows, GROUP, width)  # group l: classes l, l + width, ...
    heads = grouped.amax(1)
    tail = scores[:, GROUP * width :]
    if tail.shape[1]:
        maximum = torch.maximum(heads.amax(1, keepdim=True), tail.amax(1, keepdim=True))
    else:
        maximum = heads.amax(1, keepdim=True)
    below = heads - maximum
    bound = _newton(torch.cat([below, tail - maximum], 1), beta)
    # the bound is a root in working precision: widen it by more than its error
    if beta < LOG1P_BELOW:
        cut = -1 / beta - (bound + 1e-4)
    else:
        cut = -(bound * (1 + 1e-4)) / beta
    is_open = below > cut
    count = is_open.sum(1)
    good = count <= max(1, width // 8)
    k = int(count[good].max()) if bool(good.any()) else 0
    if k == 0:
        return maximum, tail, good
    chosen = heads.topk(k, sorted=False).indices  # (rows, k) groups
    picked = grouped.gather(2, chosen[:, None, :].expand(rows, GROUP, k)).reshape(rows, GROUP * k)
    return maximum, torch.cat([picked, tail], 1), good


def _solve_rows(d: Tensor, alpha: float | Tensor, beta: float | Tensor, start: Tensor | None = None) -> list[Tensor]:
    level = _newton(d, beta, start)
    conjugate = _conjugate(_probs_(d.clone(), level, beta), level, alpha, beta)
    return [_log_top(level.double(), beta if isinstance(beta, float) else beta.double()), conjugate]


def _solve_long(scores: Tensor, alpha: float, beta: float) -> list[Tensor]:
    maximum, picked, good = _candidates(scores, beta)
    log_top, conjugate = _solve_rows((picked - maximum).double(), alpha, beta)
    conjugate = conjugate.to(scores.dtype)
    if not bool(good.all()):
        wide = scores[~good] - maximum[~good]
        sample = wide[:, ::GROUP].contiguous()
        start = _newton(sample, beta, mass=sample.shape[1] / wide.shape[1])
        low, high = (_level(wide.new_tensor(top).log(), beta) for top in (1 / wide.shape[1], 1))  # 1/C <= p_top <= 1
        start = start.nan_to_num(float(high)).clamp_(low, high)
        log_top[~good], conjugate[~good] = _solve_rows(wide, alpha, beta, start)
    return [maximum, log_top, conjugate]


def _softmax_rows(scores: Tensor) -> list[Tensor]:
    maximum = scores.amax(1, keepdim=True)
    log_z = (scores - maximum).exp_().sum(1, keepdim=True).log_()
    return [maximum, -log_z.double(), log_z]


def _solve(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, log p_top (float64) and Omega*(s) - max s, (rows,) each.

    Args:
        scores: (rows, classes) float32 or float64; -inf masks a class.
        alpha: () for all rows or (rows, 1), values in [1, 2].
    """
    rows, classes = scores.shape
    shared = float(alpha) if alpha.ndim == 0 else None
    parts: list[list[Tensor]] = []
    for block in row_blocks(rows, classes):
        part = scores[block].contiguous()
        if shared == 1:
            parts.append(_softmax_rows(part))
        elif shared is not None and classes > SMALL:
            parts.append(_solve_long(part, shared, shared - 1))
        else:
            maximum = part.amax(1, keepdim=True)
            d = (part - maximum).double()
            order = shared if shared is not None else alpha[block].double()
            log_top, conjugate = _solve_rows(d, order, order - 1)
            parts.append([maximum, log_top, conjugate.to(scores.dtype)])
    if not parts:
        return scores.new_empty(0), scores.new_empty(0, dtype=torch.float64), scores.new_empty(0)
    maximum, log_top, conjugate = (torch.cat(column).squeeze(1) for column in zip(*parts, strict=True))
    return maximum, log_top, conjugate


def _apply(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    """scale p, (rows, classes), from what `solve` returned; `scale` is (rows,)."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    shared = float(alpha) if alpha.ndim == 0 else None
    for block in row_blocks(*scores.shape):
        d = torch.sub(scores[block], maximum[block, None], out=out[block])
        beta = shared - 1 if shared is not None else alpha[block].to(scores.dtype) - 1
        top = log_top[block, None]
        if shared == 1:
            d.add_(top).exp_()
        else:
            _probs_(d, _level(top, beta if isinstance(beta, float) else beta.double()).to(d.dtype), beta)
        d.mul_(scale[block, None])
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
