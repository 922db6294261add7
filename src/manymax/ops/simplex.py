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

GROUP_SIZE = 16  # classes per group

# Rows are handled together if their numbers of open groups fall between the same two of these: all of them are padded
# to the largest number, and one row with many open groups should not make a hundred others pay for it.
MOST_OPEN_GROUPS = (8, 64, 1 << 40)
SHORT_ROW = 512  # classes; in rows this short the detour over groups costs more than it saves
SCORES_PER_BLOCK = 1 << 18  # 1 MB of float32: a block and its scratch stay in the second-level cache over all steps
SCORES_PER_SWEEP = 1 << 23  # scores per block of the pass over group maxima, which reads each score only once


class Candidates(NamedTuple):
    """A superset of the classes above a cut, for some of the rows of a block.

    rows: (n,) the rows. maximum: (n, 1) their largest scores. scores, ids: (n, K) the candidates and their classes.
    """

    rows: Tensor
    maximum: Tensor
    scores: Tensor
    ids: Tensor


def candidates(scores: Tensor, beta: float) -> tuple[list[Candidates], Tensor, Tensor]:
    """The classes of each row that can be in its support, from a bound of its level by group maxima.

    Args:
        scores: (rows, classes); -inf masks a class.
        beta: alpha - 1 > 0.

    Returns:
        the candidates of the rows that have few, the other rows (m,), and the maxima of all rows (rows, 1).
    """
    group_tops = group_maxima(scores)
    maximum = group_tops.amax(1, keepdim=True)
    # A search that starts above the root stays above it: cut short after 6 steps it still gives a bound from above, and
    # a slightly worse bound costs less than the last steps.
    bound = newton_level(group_tops - maximum, beta, steps=6)
    # u > 0 means d > -w / beta = -1 / beta - v. The bound comes from float32 arithmetic: the cut is lowered by more
    # than the rounding error, because a class that is missing here is missing for good.
    cut = -1 / beta - (bound + 1e-4) if level_is_v(beta) else -(bound * (1 + 1e-4)) / beta
    return (*collect(scores, group_tops, maximum, maximum, cut), maximum)


def group_maxima(scores: Tensor) -> Tensor:
    """The maxima of groups of 16 classes, (rows, width + tail) for scores (rows, classes), width = classes // 16.

    Group l holds the classes l, l + width, l + 2 width, ... The classes that fill no group follow one by one.
    """
    # strided groups, not neighbours: the maxima of neighbouring groups are then taken over 16 stretches of memory that
    # are read in order, many groups per instruction
    rows, classes = scores.shape
    width = classes // GROUP_SIZE
    grouped = scores[:, : GROUP_SIZE * width].view(rows, GROUP_SIZE, width)
    return torch.cat([grouped.amax(1), scores[:, GROUP_SIZE * width :]], 1) if classes % GROUP_SIZE else grouped.amax(1)


def collect(
    scores: Tensor, group_tops: Tensor, maximum: Tensor, origin: Tensor, cut: Tensor
) -> tuple[list[Candidates], Tensor]:
    """The classes with s - origin > cut, for the rows that have few of them; and the other rows.

    A group is open if its maximum is above the cut. A row with few open groups gives all classes of those. A row with
    more of them, but at most a sixteenth of its classes above the cut, gives these classes by a selection. With more
    candidates than that, working on them would cost more than working on the whole row.

    Args:
        scores: (rows, classes).
        group_tops: (rows, width + tail), from `group_maxima`.
        maximum: (rows, 1), handed on with the candidates.
        origin, cut: (rows, 1) each.

    Returns:
        the candidates, in a few pieces with disjoint rows, and the rows (m,) that are in no piece.
    """
    width = scores.shape[1] // GROUP_SIZE
    # s - origin > cut, never s > origin + cut: where scores are large the sum would be rounded to the origin, while the
    # difference of two close numbers is exact
    open_groups = (group_tops[:, :width] - origin > cut).sum(1)  # (rows,)
    few_open = open_groups <= max(1, width // 8)
    if width == 0:  # fewer than 16 classes: nothing to open
        few_open = torch.zeros_like(few_open)
    found, other_rows = [], (~few_open).nonzero().squeeze(1)
    if len(other_rows) < len(few_open):
        for rows in _rows_of_like_counts(torch.where(few_open, open_groups, -1)):
            found.append(_candidates_from_groups(scores, group_tops, maximum, rows, int(open_groups[rows].max())))
    # A sixteenth of the classes, spread at random, opens 1 - 1/e = 63 % of the groups. In a row with more open groups
    # there are most likely too many classes above the cut: it is not worth the pass that counts them.
    countable = other_rows[open_groups[other_rows] <= 0.63 * width] if width else other_rows
    if not len(countable):
        return found, other_rows
    selected = _candidates_by_topk(scores, maximum, origin, cut, countable)
    if selected is not None:
        found.append(selected)
        left = torch.ones_like(few_open)
        for part in found:
            left[part.rows] = False
        other_rows = left.nonzero().squeeze(1)
    return found, other_rows


def _rows_of_like_counts(count: Tensor) -> Iterator[Tensor]:
    """The rows whose counts (rows,) are about as large, one set after the other; rows of negative counts are left out.

    The rows of a set are padded to its largest count.
    """
    low = -1
    for high in MOST_OPEN_GROUPS:
        rows = ((count > low) & (count <= high)).nonzero().squeeze(1)
        if len(rows):
            yield rows
        low = high


def _candidates_from_groups(scores: Tensor, group_tops: Tensor, maximum: Tensor, rows: Tensor, k: int) -> Candidates:
    """All classes of the k groups with the largest maxima, and the classes that are in no group, (n, 16 k + tail).

    With k the largest number of open groups of these rows, no open group is left out.
    """
    all_rows, classes = len(rows) == len(scores), scores.shape[1]
    width = classes // GROUP_SIZE
    tops = group_tops if all_rows else group_tops[rows]
    opened = tops[:, :width].topk(k, sorted=False).indices  # (n, k)
    offsets = width * torch.arange(GROUP_SIZE, device=scores.device)  # group l holds l, l + width, l + 2 width, ...
    ids = (offsets[:, None] + opened[:, None, :]).reshape(len(rows), GROUP_SIZE * k)
    gathered = scores.gather(1, ids) if all_rows else _gather_scores(scores, rows, ids)
    # the classes that fill no group are few (at most 15) and are candidates in any case
    tail = torch.arange(GROUP_SIZE * width, classes, device=scores.device).expand(len(rows), -1)
    return Candidates(rows, maximum[rows], torch.cat([gathered, tops[:, width:]], 1), torch.cat([ids, tail], 1))


def _gather_scores(scores: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """scores[rows_i, ids_ij], (n, K) for rows (n,) and ids (n, K)."""
    if not scores.is_contiguous():
        return scores[rows.unsqueeze(1), ids]
    # index_select from the flat memory takes a third of the time of indexing with two tensors
    positions = rows.unsqueeze(1) * scores.shape[1] + ids
    return scores.view(-1).index_select(0, positions.view(-1)).view(ids.shape)


def _candidates_by_topk(
    scores: Tensor, maximum: Tensor, origin: Tensor, cut: Tensor, rows: Tensor
) -> Candidates | None:
    """The largest scores of those of `rows` that have at most a sixteenth of their classes above the cut."""
    part = scores if len(rows) == len(scores) else scores[rows]
    above = part - origin[rows]
    # a sum of signs is 4 times faster than counting a bool table
    count = above.sub_(cut[rows]).clamp_(min=0).sign_().sum(1)
    few_above = (count <= max(1, scores.shape[1] // GROUP_SIZE)).nonzero().squeeze(1)
    if not len(few_above):
        return None
    chosen = part if len(few_above) == len(part) else part[few_above]
    # the same number for all rows, the largest: what a row has too many of is below its cut and does no harm
    top_scores, ids = chosen.topk(max(1, int(count[few_above].max())), sorted=False)
    return Candidates(rows[few_above], maximum[rows[few_above]], top_scores, ids)


def solve_candidates(found: Candidates, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities of the candidates (n, K), log p_top (n, 1) and Omega*(s) - max s (n, 1), all in float64.

    Candidates are few, so that float64 costs next to nothing.
    """
    d = (found.scores - found.maximum).double()
    return probs_and_conjugate_(d, newton_level(d, alpha - 1), alpha, alpha - 1)


def solve_wide_rows_(d: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a large support: p in place of d = s - max s, log p_top and Omega*(s) - max s, (rows, 1) each.

    Newton's method over the whole row, in the dtype of the scores, from a start that was found on every 16th class.
    """
    beta, classes = alpha - 1, d.shape[1]
    # all steps of a few rows, then the next rows: the rows are in cache from the second step on
    blocks = row_blocks(d.shape[0], d.shape[1], SCORES_PER_BLOCK)
    scratch = torch.empty_like(d[blocks[0]]) if blocks else d
    low, high = (
        float(level_from_log_top(torch.tensor(top, dtype=torch.float64).log(), beta)) for top in (1 / classes, 1.0)
    )
    # On the sample the probabilities should sum to its share of the classes. Its level is an estimate, not a bound: if
    # it is below the root, the first step over the whole row goes above it, by convexity, and the others come down.
    sample = d[:, ::GROUP_SIZE].contiguous()
    start = newton_level(sample, beta, mass=sample.shape[1] / classes)
    # 1/C <= p_top <= 1 holds for the row, not for the sample; the lower end also keeps F > 0. A sample of masked
    # classes alone has the level nan.
    start = start.nan_to_num(high).clamp_(low, high)
    log_tops, conjugates = [], []
    for block in blocks:
        part = d[block]
        block_scratch = scratch[: len(part)]
        level = newton_level(part, beta, start[block], scratch=block_scratch)
        _, log_top, conjugate = probs_and_conjugate_(part, level, alpha, beta, block_scratch)
        log_tops.append(log_top)
        conjugates.append(conjugate)
    return d, torch.cat(log_tops), torch.cat(conjugates)


def _solve_long_rows(scores: Tensor, alpha: float) -> list[Tensor]:
    """`solve` for a block of long rows and alpha > 1, (rows, 1) each."""
    parts, wide, maximum = candidates(scores, alpha - 1)
    log_top, conjugate = torch.zeros_like(maximum, dtype=torch.float64), torch.zeros_like(maximum)
    for found in parts:
        _, tops, values = solve_candidates(found, alpha)
        log_top[found.rows], conjugate[found.rows] = tops, values.to(scores.dtype)
    # `scores` belongs to the caller: the differences, which are overwritten, are a copy of a few rows at a time
    for block in row_blocks(len(wide), scores.shape[1], SCORES_PER_BLOCK):
        rows = wide[block]
        _, log_top[rows], conjugate[rows] = solve_wide_rows_(scores[rows].sub_(maximum[rows]), alpha)
    return [maximum, log_top, conjugate]


def _solve_alpha_one(scores: Tensor) -> list[Tensor]:
    """`solve` for alpha = 1, where Omega*(s) - max s = log sum e^(s - max s) = -log p_top; (rows, 1) each."""
    log_top = scores.softmax(1).amax(1, keepdim=True).log_()
    return [scores.amax(1, keepdim=True), log_top.double(), -log_top]


def _solve_short_rows(scores: Tensor, alpha: NumberOrColumn) -> list[Tensor]:
    """`solve` over all classes in float64, also for one alpha per row; (rows, 1) each."""
    maximum = scores.amax(1, keepdim=True)
    d, beta = (scores - maximum).double(), alpha - 1
    _, log_top, conjugate = probs_and_conjugate_(d, newton_level(d, beta), alpha, beta)
    return [maximum, log_top, conjugate.to(scores.dtype)]


def solve(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve rows of scores for their levels.

    Args:
        scores: (rows, classes) float32 or float64; -inf masks a class.
        alpha: () for all rows or (rows, 1), values in [1, 2].

    Returns:
        the maximum of each row, log p_top (float64) and Omega*(s) - max s, (rows,) each.

    Example: sparsemax of (1, 0.5, -1) is (0.75, 0.25, 0).

        >>> scores, alpha = torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor(2.0)
        >>> maximum, log_top, conjugate = solve(scores, alpha)
        >>> apply(scores, alpha, maximum, log_top, torch.ones(1))
        tensor([[0.7500, 0.2500, 0.0000]])
    """
    # No probabilities are returned: from maximum and log p_top `apply` computes them anew in the backward pass, so that
    # autograd keeps two numbers per row instead of a (rows, classes) table.
    rows, classes = scores.shape
    shared = float(alpha) if alpha.ndim == 0 else None
    # one alpha per row is a rare case: all of its rows are searched whole
    long = shared is not None and shared > 1 and classes > SHORT_ROW
    parts: list[list[Tensor]] = []
    for block in row_blocks(rows, classes, SCORES_PER_SWEEP if long else SCORES_PER_BLOCK):
        part = scores[block].contiguous()  # `group_maxima` views it in another shape
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
    """scale p, (rows, classes): the probabilities of rows that `solve` has solved, times a number per row.

    Args:
        scores: (rows, classes), as for `solve`.
        alpha: () or (rows, 1), as for `solve`.
        maximum, log_top: (rows,), from `solve`.
        scale: (rows,), for example the gradient of the losses, which saves a second pass over the table.
    """
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    shared = float(alpha) if alpha.ndim == 0 else None
    for block in row_blocks(scores.shape[0], scores.shape[1], SCORES_PER_BLOCK):
        if shared == 1:
            probs = torch.softmax(scores[block], 1, out=out[block])
        else:
            d = torch.sub(scores[block], maximum[block, None], out=out[block])
            # the level in float64 from log p_top, and only then in the dtype of the scores: expm1 and exp of a rounded
            # number would be further off
            beta = shared - 1 if shared is not None else alpha[block].double() - 1
            level = level_from_log_top(log_top[block, None], beta).to(d.dtype)
            probs = probabilities_(d, level, beta if isinstance(beta, float) else beta.to(d.dtype))
        probs.mul_(scale[block, None])
    return out


def vjp(probs: Tensor, alpha: float, grad: Tensor) -> Tensor:
    """J g = a (g - <a, g> / sum a) with a = p^(2 - alpha) on the support and 0 elsewhere, (rows, classes).

    Args:
        probs: (rows, classes) the probabilities p.
        alpha: one number for all rows.
        grad: (rows, classes) the gradient g with respect to the probabilities.
    """
    # J = diag(a) - a a^T / sum a is symmetric: the product from the left and from the right are the same. It is never
    # formed, which would take (rows, classes, classes).
    out = torch.empty_like(probs)
    for block in row_blocks(probs.shape[0], probs.shape[1], SCORES_PER_BLOCK):
        p, g = probs[block], grad[block]
        # pow is slow where a sign or a root will do, and 0^0 would be 1 outside of the support at alpha = 2
        a = p.sign() if alpha == 2 else p.sqrt() if alpha == 1.5 else p if alpha == 1 else p.pow(2 - alpha)
        mean = (a * g).sum(1, keepdim=True) / a.sum(1, keepdim=True)
        torch.sub(g, mean, out=out[block]).mul_(a)
    return out
