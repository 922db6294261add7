"""Entmax on plain tensors: the exact probabilities of rows of scores, without sorting a row.

levels.py has the formulas and Newton's search for the level of a row. This file decides which classes the search runs
over:

    short rows (at most 512 classes)    all classes, in float64
    long rows with a small support      the classes that can be in the support, in float64
    long rows with a large support      all classes, from a start that was found on every 16th class

Which classes can be in the support is known before the search: leaving classes out of the sum of the probabilities can
only raise the level at which the sum is 1, so the level of a few classes is a bound from above for the level of the
row, and all classes of the support are above the threshold that belongs to it. The few are the maxima of groups of 16
classes. One pass over the row finds them, and every further step reads a sixteenth of the row; a group whose maximum
is below the threshold is done with. A sort takes many times as long as the product that makes the scores.

ops/operators.py makes `solve` and `apply` opaque operators for autograd, vmap and torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.ops.levels import (
    NumberOrColumn,
    level_from_log_top,
    level_is_v,
    newton_level,
    probabilities_,
    probs_and_conjugate_,
)
from manymax.ops.row_blocks import row_blocks

GROUP = 16  # classes per group

# Rows are handled together if their numbers of open groups fall between the same two of these: all of them are padded
# to the largest number, and one row with many open groups should not make a hundred others pay for it.
MOST_OPEN_GROUPS = (8, 64, 1 << 40)
SHORT_ROW = 512  # classes; in rows this short the detour over groups costs more than it saves
SCORES_PER_BLOCK = 1 << 18  # 1 MB of float32: a block and its scratch stay in the second-level cache over all steps
SCORES_PER_SWEEP = 1 << 23  # scores per block of the pass over group maxima, which reads each score only once


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
    return probs_and_conjugate_(d, newton_level(d, alpha - 1), alpha, alpha - 1)


def solve_wide_rows_(d: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a large support, d = s - max s: p in place of d, log p_top and Omega*(s) - max s.

    Newton over the whole row, from a start found on every 16th class; some rows at a time, which stay in cache.
    """
    beta, classes = alpha - 1, d.shape[1]
    blocks = row_blocks(d.shape[0], d.shape[1], SCORES_PER_BLOCK)
    scratch = torch.empty_like(d[blocks[0]]) if blocks else d
    low, high = (
        float(level_from_log_top(torch.tensor(top, dtype=torch.float64).log(), beta)) for top in (1 / classes, 1.0)
    )
    sample = d[:, ::GROUP].contiguous()
    start = newton_level(sample, beta, mass=sample.shape[1] / classes)
    start = start.nan_to_num(high).clamp_(low, high)  # 1/C <= p_top <= 1
    log_tops, conjugates = [], []
    for block in blocks:
        part = d[block]
        room = scratch[: len(part)]
        _, log_top, conjugate = probs_and_conjugate_(
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


def _solve_alpha_one(scores: Tensor) -> list[Tensor]:
    log_top = scores.softmax(1).amax(1, keepdim=True).log_()
    return [scores.amax(1, keepdim=True), log_top.double(), -log_top]


def _solve_short_rows(scores: Tensor, alpha: NumberOrColumn) -> list[Tensor]:
    maximum = scores.amax(1, keepdim=True)
    d, beta = (scores - maximum).double(), alpha - 1
    _, log_top, conjugate = probs_and_conjugate_(d, newton_level(d, beta), alpha, beta)
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
            parts.append(_solve_alpha_one(part))
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
            level = level_from_log_top(log_top[block, None], beta).to(d.dtype)
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
