"""The levels of rows whose classes are split over ranks: Newton's method with one exchange per step.

On one process ops/levels.py finds a level while the row is in cache; here every step needs the sums of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine import native_library
from manymax.engine.ranks import Ranks
from manymax.ops import levels, simplex

MOST_STEPS = 60  # about 6 are taken; the limit only ends the search in a row of nan

# From a level (n, 1) and a number k to F = sum p and A = sum p^(1 - beta) over the classes of this rank, (n, 2) in
# float64. A / beta is the slope of F in w. For k > 1 one class in k may stand for k of them.
SumsAt = Callable[[Tensor, int], Tensor]


def search_levels(sums: SumsAt, bound: Tensor, dtype: torch.dtype, beta: float, ranks: Ranks) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1).

    Args:
        sums: over the classes of this rank.
        bound: (n, 1) float64, above the solution.
        dtype: of the scores, which sets how exact the level has to be.
        beta: alpha - 1.
        ranks: the ranks that share the classes.
    """
    # A cheap start: every 16th class of the whole rows stands for 16. Candidates are few and all of them are taken.
    start = _newton(lambda level: sums(level, simplex.GROUP_SIZE), bound, 1e-3, beta, ranks)
    # A sample without a class of the support ends in nan, which this comparison replaces by the bound as well.
    start = torch.where(start < bound, start, bound)
    eps = torch.finfo(dtype).eps
    # Up to alpha = 1.5 a step leaves an error of the order of its square; above, a class that drops out leaves more.
    tolerance = eps**0.45 if beta <= 0.5 else 8 * eps
    return _newton(lambda level: sums(level, 1), start, tolerance, beta, ranks)


def _newton(sums: Callable[[Tensor], Tensor], level: Tensor, tolerance: float, beta: float, ranks: Ranks) -> Tensor:
    """`levels.newton_level` with sums over the ranks."""
    for _ in range(MOST_STEPS):
        # One exchange per step, of both sums of all rows. Every rank then takes the same step and ends the loop at the
        # same time; a rank that went on alone would wait forever.
        total, slope = ranks.sum(sums(level)).split(1, 1)
        gap = -levels.scaled_expm1(-total.log(), beta)  # (1 - F^-beta) / beta
        step = total * gap / slope if levels.level_is_v(beta) else beta * total * gap / slope
        level = level - step
        if not (step.abs() > tolerance * (level.abs() + 1 if levels.level_is_v(beta) else level)).any():
            break
    return level


class Piece(NamedTuple):
    """Some rows (m,) of a block, and for these d = s - max s of classes of this rank, (m, K)."""

    rows: Tensor | slice
    table: Tensor


def plain_sums(few: list[Piece], whole: list[Piece], beta: float) -> SumsAt:
    """The sums over candidates and over whole rows, in plain torch. Together the pieces hold every row once."""
    samples: dict[int, list[Piece]] = {1: whole}

    def sums(level: Tensor, every: int) -> Tensor:
        if every not in samples:
            samples[every] = [Piece(rows, d[:, ::every].contiguous()) for rows, d in whole]
        own = level.new_zeros(len(level), 2)
        for pieces, factor in ((few, 1), (samples[every], every)):
            for rows, d in pieces:
                # Summed in the dtype of d, float64 for candidates and that of the scores for whole rows.
                found = levels.mass_and_slope(d, level[rows].to(d.dtype), beta, torch.empty_like(d))
                own[rows] = factor * torch.cat(found, 1).double()
        return own

    return sums


def native_sums(
    scores: Tensor, num_classes: int, count: Tensor, maximum: Tensor, alpha: Tensor, native_level: str
) -> SumsAt:
    """The sums by kernel.cpp, in one pass over each row and without scratch memory.

    Args:
        scores: (n, C') of this rank, of which the first num_classes columns are classes.
        count: (n,) numbers of candidates in packed rows, -1 for whole rows.
        maximum: (n, 1) of all ranks.
        alpha: () float64.
        native_level: the dispatch level.
    """

    def sums(level: Tensor, every: int) -> Tensor:
        total, slope, at = level.new_empty(len(level)), level.new_empty(len(level)), level.contiguous()
        table = scores, *scores.shape, num_classes, count, maximum
        native_library.call(native_level, "entmax_sums", scores, *table, at, total, slope, alpha, every, threads=True)
        return torch.stack([total, slope], 1)

    return sums
