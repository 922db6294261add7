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

ops/operators.py makes `solve` and `apply` opaque operators for autograd, vmap and torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.ops.row_blocks import row_blocks

GROUP = 16  # classes per group
MOST_OPEN_GROUPS = (8, 64, 1 << 40)  # rows with up to so many open groups go together
SHORT_ROW = 512  # rows this short are searched whole, in float64
SCORES_PER_BLOCK = 1 << 18  # scores per block: the scratch of a block stays in the second-level cache
SCORES_PER_SWEEP = 1 << 23  # scores per block of the pass over group maxima, which streams and keeps nothing
V_BELOW = 0.25  # for smaller beta u = 1 + beta v is kept as v, because log(u) / beta would lose digits

_LOG_SMALLEST = {torch.float32: -80.0, torch.float64: -700.0}  # logarithm of a small normal number

NumberOrColumn = float | Tensor  # alpha or beta: one number, or (rows, 1)


def level_is_v(beta: NumberOrColumn) -> bool:
    """Whether the level of a row is kept as v = (w - 1) / beta instead of w."""
    return isinstance(beta, Tensor) or beta < V_BELOW


def scaled_expm1(exponent: Tensor, beta: NumberOrColumn) -> Tensor:
    """expm1(beta x) / beta, which is x at beta = 0; `exponent` is x."""
    if isinstance(beta, Tensor):
        return torch.where(beta > 0, (beta * exponent).expm1() / torch.where(beta > 0, beta, 1), exponent)
    return (beta * exponent).expm1() / beta


def _level_from_log_top(log_top: Tensor, beta: NumberOrColumn) -> Tensor:
    """w, or v = (w - 1) / beta, from log p_top."""
    return scaled_expm1(log_top, beta) if level_is_v(beta) else (beta * log_top).exp()


def _log_top_from_level(level: Tensor, beta: NumberOrColumn) -> Tensor:
    if isinstance(beta, Tensor):
        return torch.where(beta > 0, (beta * level).log1p() / torch.where(beta > 0, beta, 1), level)
    return (beta * level).log1p() / beta if level_is_v(beta) else level.log() / beta


def power_bases(d: Tensor, level: Tensor, beta: NumberOrColumn, out: Tensor) -> Tensor:
    """u = max(0, w + beta d) from d = s - max s, into `out` (which may be d)."""
    if level_is_v(beta):
        u = torch.add(d, level, out=out).clamp_(min=torch.finfo(d.dtype).min / 4).mul_(beta).add_(1)
    elif beta == 1:
        u = torch.add(d, level, out=out)
    else:
        u = torch.mul(d, beta, out=out).add_(level)
    return u.clamp_(min=0)


def floored_exp_(x: Tensor) -> Tensor:
    """exp(x) in place, exactly 0 from the smallest normal number down.

    Denormal results and exp(-inf) take the processor tens of nanoseconds each. The floor is
    subtracted, so that what was below it is 0; nothing else moves by more than 1e-35.
    """
    low = _LOG_SMALLEST[x.dtype]
    return x.clamp_(min=low).exp_().sub_(1.001 * math.exp(low)).clamp_(min=0)


def probabilities_(d: Tensor, level: Tensor, beta: NumberOrColumn) -> Tensor:
    """p = u^(1/beta) from d = s - max s, overwriting d."""
    if isinstance(beta, Tensor):
        v = (d + level).clamp_(min=torch.finfo(d.dtype).min / 4)  # a masked class: 0 times -inf is no number
        log_p = (beta * v).clamp_(min=-1).log1p_() / torch.where(beta > 0, beta, 1)
        return d.copy_(torch.where(beta > 0, log_p, v).exp_())
    if beta == 1:
        return power_bases(d, level, beta, d)
    if beta == 0.5:
        return power_bases(d, level, beta, d).square_()
    floor = _smallest_base(beta, d.dtype)  # u this small has p = 0, and log(0) is slow
    if level_is_v(beta):
        return floored_exp_(d.add_(level).mul_(beta).clamp_(min=floor - 1).log1p_().div_(beta))
    return floored_exp_(power_bases(d, level, beta, d).clamp_(min=floor).log_().div_(beta))


def _smallest_base(beta: NumberOrColumn, dtype: torch.dtype) -> float:
    """A base u whose power u^(1/beta) is below what counts as 0, by more than rounding can bring it back."""
    tiny = torch.finfo(dtype).tiny
    return tiny if isinstance(beta, Tensor) else max(tiny, math.exp(1.2 * beta * _LOG_SMALLEST[dtype]))


def mass_and_slope(d: Tensor, level: Tensor, beta: NumberOrColumn, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """F = sum p and A = sum p^(1 - beta) = sum p / u at a level, (rows, 1) each."""
    u = power_bases(d, level, beta, scratch)
    if isinstance(beta, float) and beta in (0.5, 1.0):
        first = u.sum(-1, keepdim=True)
        second = (u.sign_() if beta == 1 else u.square_()).sum(-1, keepdim=True)
        return (first, second) if beta == 1 else (second, first)
    p = probabilities_(d.clone(), level, beta)
    total = p.sum(-1, keepdim=True)
    return total, p.div_(u.clamp_(min=_smallest_base(beta, u.dtype))).sum(-1, keepdim=True)


def newton_level(
    d: Tensor,
    beta: NumberOrColumn,
    start: Tensor | None = None,
    mass: float = 1.0,
    scratch: Tensor | None = None,
    steps: int = 60,
) -> Tensor:
    """The level at which the probabilities of d (rows, classes) sum to `mass`, (rows, 1).

    About 6 steps are needed; the default bound only ends a row of nan. Cut short, the result is above the root if the
    start was.
    """
    level = d.new_full((d.shape[0], 1), 0.0 if level_is_v(beta) else 1.0) if start is None else start.clone()
    eps = torch.finfo(d.dtype).eps
    # up to alpha = 1.5 a step leaves an error of the order of its square, above that a class that
    # drops out of the support may leave more
    tolerance = eps**0.45 if isinstance(beta, float) and beta <= 0.5 else 8 * eps
    scratch = torch.empty_like(d) if scratch is None else scratch
    for _ in range(steps):
        total, slope = mass_and_slope(d, level, beta, scratch)
        gap = -scaled_expm1(-(total / mass).log(), beta)  # (1 - F^-beta) / beta
        step = total * gap / slope if level_is_v(beta) else beta * total * gap / slope
        level -= step
        scale = level.abs() + 1 if level_is_v(beta) else level
        if not (step.abs() > tolerance * scale).any():
            break
    return level


def _probs_and_conjugate_(
    d: Tensor, level: Tensor, alpha: NumberOrColumn, beta: NumberOrColumn, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """p (overwriting d), log p_top (float64) and Omega*(s) - max s = E_p[p^beta - 1] / alpha - v, (rows, 1) each."""
    log_top = _log_top_from_level(level.double(), beta.double() if isinstance(beta, Tensor) else beta)
    u = power_bases(d, level, beta, torch.empty_like(d) if scratch is None else scratch)
    p = torch.mul(u, u, out=d) if isinstance(beta, float) and beta == 0.5 else probabilities_(d, level, beta)
    mean = u.mul_(p).sum(-1, keepdim=True) - 1
    v = level if level_is_v(beta) else (level - 1) / beta
    return p, log_top, mean / alpha - v


class Candidates(NamedTuple):
    """A superset of the classes above a cut, for some rows.

    rows: (n,) which rows. maximum: (n, 1) their maxima. scores, ids: (n, K) of the candidates.
    """

    rows: Tensor
    maximum: Tensor
    scores: Tensor
    ids: Tensor


def candidates(scores: Tensor, beta: float) -> tuple[list[Candidates], Tensor, Tensor]:
    """Bound the threshold of each row of (rows, classes) by group maxima and collect what can be above it.

    Returns:
        the candidates of the rows that have few, the other rows (m,), and the maxima of all rows (rows, 1).
    """
    group_tops = group_maxima(scores)
    maximum = group_tops.amax(1, keepdim=True)
    # started above the root the search stays above it, so a few steps give a bound too
    bound = newton_level(group_tops - maximum, beta, steps=6)
    # it is in working precision: widen it by more than its error
    cut = -1 / beta - (bound + 1e-4) if level_is_v(beta) else -(bound * (1 + 1e-4)) / beta
    return (*collect(scores, group_tops, maximum, maximum, cut), maximum)


def group_maxima(scores: Tensor) -> Tensor:
    """(rows, width + tail): the maximum of every 16 classes that are `width` apart, then the last classes alone."""
    rows, classes = scores.shape
    width = classes // GROUP
    grouped = scores[:, : GROUP * width].view(rows, GROUP, width)
    return torch.cat([grouped.amax(1), scores[:, GROUP * width :]], 1) if classes % GROUP else grouped.amax(1)


def collect(
    scores: Tensor, group_tops: Tensor, maximum: Tensor, origin: Tensor, cut: Tensor
) -> tuple[list[Candidates], Tensor]:
    """The classes with s - origin > cut, (rows, 1) each, for the rows that have few of them; and the other rows.

    Rows with few open groups give the classes of those; of the others, rows with at most a sixteenth of the classes
    above the cut give them by selection. More candidates would cost more than the row itself. The difference comes
    first: origin + cut would be rounded to the origin where scores are large.
    """
    width = scores.shape[1] // GROUP
    count = (group_tops[:, :width] - origin > cut).sum(1)
    few = count <= max(1, width // 8)
    if width == 0:
        few = torch.zeros_like(few)
    found, rest = [], (~few).nonzero().squeeze(1)
    if len(rest) < len(few):
        for rows in _rows_of_like_counts(torch.where(few, count, -1)):
            found.append(_candidates_from_groups(scores, group_tops, maximum, rows, int(count[rows].max())))
    # if most groups are open there are more classes above the cut than groups: nothing to select
    some = rest[count[rest] <= 0.63 * width] if width else rest
    if not len(some):
        return found, rest
    selected = _candidates_by_topk(scores, maximum, origin, cut, some)
    if selected is not None:
        found.append(selected)
        left = torch.ones_like(few)
        for part in found:
            left[part.rows] = False
        rest = left.nonzero().squeeze(1)
    return found, rest


def _rows_of_like_counts(count: Tensor) -> Iterator[Tensor]:
    """The rows with counts that are about as large: they are padded to the largest. Negative counts are left out."""
    low = -1
    for high in MOST_OPEN_GROUPS:
        rows = ((count > low) & (count <= high)).nonzero().squeeze(1)
        if len(rows):
            yield rows
        low = high


def _candidates_from_groups(scores: Tensor, group_tops: Tensor, maximum: Tensor, rows: Tensor, k: int) -> Candidates:
    """All classes of the k groups with the largest maxima, and those that are in no group."""
    everything, classes = len(rows) == len(scores), scores.shape[1]
    width = classes // GROUP
    tops = group_tops if everything else group_tops[rows]
    chosen = tops[:, :width].topk(k, sorted=False).indices  # (n, k); group l holds l, l + width, ...
    steps = width * torch.arange(GROUP, device=scores.device)
    ids = (steps[:, None] + chosen[:, None, :]).reshape(len(rows), GROUP * k)
    picked = scores.gather(1, ids) if everything else _gather_scores(scores, rows, ids)
    tail = torch.arange(GROUP * width, classes, device=scores.device).expand(len(rows), -1)
    return Candidates(rows, maximum[rows], torch.cat([picked, tops[:, width:]], 1), torch.cat([ids, tail], 1))


def _gather_scores(scores: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """scores[rows_i, ids_ij]; from flat memory, where it is one piece, that takes a third of the time."""
    if not scores.is_contiguous():
        return scores[rows.unsqueeze(1), ids]
    places = rows.unsqueeze(1) * scores.shape[1] + ids
    return scores.view(-1).index_select(0, places.view(-1)).view(ids.shape)


def _candidates_by_topk(
    scores: Tensor, maximum: Tensor, origin: Tensor, cut: Tensor, rows: Tensor
) -> Candidates | None:
    part = scores if len(rows) == len(scores) else scores[rows]
    above = part - origin[rows]
    # a sum of signs is several times faster than counting a bool table
    count = above.sub_(cut[rows]).clamp_(min=0).sign_().sum(1)
    good = (count <= max(1, scores.shape[1] // GROUP)).nonzero().squeeze(1)
    if not len(good):
        return None
    chosen = part if len(good) == len(part) else part[good]
    picked, ids = chosen.topk(max(1, int(count[good].max())), sorted=False)
    return Candidates(rows[good], maximum[rows[good]], picked, ids)


def solve_candidates(found: Candidates, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """p over the candidates, log p_top and Omega*(s) - max s, in float64."""
    d = (found.scores - found.maximum).double()
    return _probs_and_conjugate_(d, newton_level(d, alpha - 1), alpha, alpha - 1)


def solve_wide_rows_(d: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a large support, d = s - max s: p in place of d, log p_top and Omega*(s) - max s.

    Newton over the whole row, from a start found on every 16th class; some rows at a time, which stay in cache.
    """
    beta, classes = alpha - 1, d.shape[1]
    blocks = row_blocks(d.shape[0], d.shape[1], SCORES_PER_BLOCK)
    scratch = torch.empty_like(d[blocks[0]]) if blocks else d
    low, high = (
        float(_level_from_log_top(torch.tensor(top, dtype=torch.float64).log(), beta)) for top in (1 / classes, 1.0)
    )
    sample = d[:, ::GROUP].contiguous()
    start = newton_level(sample, beta, mass=sample.shape[1] / classes)
    start = start.nan_to_num(high).clamp_(low, high)  # 1/C <= p_top <= 1
    log_tops, conjugates = [], []
    for block in blocks:
        part = d[block]
        room = scratch[: len(part)]
        _, log_top, conjugate = _probs_and_conjugate_(
            part, newton_level(part, beta, start[block], scratch=room), alpha, beta, room
        )
        log_tops.append(log_top)
        conjugates.append(conjugate)
    return d, torch.cat(log_tops), torch.cat(conjugates)


def _solve_long_rows(scores: Tensor, alpha: float) -> list[Tensor]:
    parts, wide, maximum = candidates(scores, alpha - 1)
    log_top, conjugate = torch.zeros_like(maximum, dtype=torch.float64), torch.zeros_like(maximum)
    for found in parts:
        _, tops, values = solve_candidates(found, alpha)
        log_top[found.rows], conjugate[found.rows] = tops, values.to(scores.dtype)
    for block in row_blocks(len(wide), scores.shape[1], SCORES_PER_BLOCK):
        rows = wide[block]
        _, log_top[rows], conjugate[rows] = solve_wide_rows_(scores[rows].sub_(maximum[rows]), alpha)
    return [maximum, log_top, conjugate]


def _solve_softmax(scores: Tensor) -> list[Tensor]:
    log_top = scores.softmax(1).amax(1, keepdim=True).log_()
    return [scores.amax(1, keepdim=True), log_top.double(), -log_top]


def _solve_short_rows(scores: Tensor, alpha: NumberOrColumn) -> list[Tensor]:
    maximum = scores.amax(1, keepdim=True)
    d, beta = (scores - maximum).double(), alpha - 1
    _, log_top, conjugate = _probs_and_conjugate_(d, newton_level(d, beta), alpha, beta)
    return [maximum, log_top, conjugate.to(scores.dtype)]


def solve(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, log p_top (float64) and Omega*(s) - max s, (rows,) each.

    Args:
        scores: (rows, classes) float32 or float64; -inf masks a class.
        alpha: () for all rows or (rows, 1), values in [1, 2].
    """
    rows, classes = scores.shape
    shared = float(alpha) if alpha.ndim == 0 else None
    long = shared is not None and shared > 1 and classes > SHORT_ROW
    parts: list[list[Tensor]] = []
    for block in row_blocks(rows, classes, SCORES_PER_SWEEP if long else SCORES_PER_BLOCK):
        part = scores[block].contiguous()
        if shared == 1:
            parts.append(_solve_softmax(part))
        elif long and shared is not None:
            parts.append(_solve_long_rows(part, shared))
        else:
            parts.append(_solve_short_rows(part, shared if shared is not None else alpha[block].double()))
    if not parts:
        return scores.new_empty(0), scores.new_empty(0, dtype=torch.float64), scores.new_empty(0)
    maximum, log_top, conjugate = (torch.cat(column).squeeze(1) for column in zip(*parts, strict=True))
    return maximum, log_top, conjugate


def apply(scores: Tensor, alpha: Tensor, maximum: Tensor, log_top: Tensor, scale: Tensor) -> Tensor:
    """scale p, (rows, classes), from what `solve` returned; `scale` is (rows,)."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    shared = float(alpha) if alpha.ndim == 0 else None
    for block in row_blocks(scores.shape[0], scores.shape[1], SCORES_PER_BLOCK):
        if shared == 1:
            probs = torch.softmax(scores[block], 1, out=out[block])
        else:
            d = torch.sub(scores[block], maximum[block, None], out=out[block])
            beta = shared - 1 if shared is not None else alpha[block].double() - 1
            level = _level_from_log_top(log_top[block, None], beta).to(d.dtype)
            probs = probabilities_(d, level, beta if isinstance(beta, float) else beta.to(d.dtype))
        probs.mul_(scale[block, None])
    return out


def vjp(probs: Tensor, alpha: float, grad: Tensor) -> Tensor:
    """J g = a (g - <a, g> / sum a) with a = p^(2 - alpha) on the support, block by block."""
    out = torch.empty_like(probs)
    for block in row_blocks(probs.shape[0], probs.shape[1], SCORES_PER_BLOCK):
        p, g = probs[block], grad[block]
        a = p.sign() if alpha == 2 else p.sqrt() if alpha == 1.5 else p if alpha == 1 else p.pow(2 - alpha)
        mean = (a * g).sum(1, keepdim=True) / a.sum(1, keepdim=True)
        torch.sub(g, mean, out=out[block]).mul_(a)
    return out
