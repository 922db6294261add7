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

VARIANTS = {1.5: 1, 2.0: 2}  # the values of alpha that kernel.cpp is compiled for, and the numbers it knows them by
MOST_STEPS = 60  # about 6 are taken; the limit only ends the search in a row of nan


class Piece(NamedTuple):
    """Some rows (m,) of a block, and for these d = s - max s of classes of this rank, (m, K)."""

    rows: Tensor
    table: Tensor


def search_levels(
    few: list[Piece],
    whole: list[Piece],
    bound: Tensor,
    dtype: torch.dtype,
    beta: float,
    ranks: Ranks,
    sums: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1).

    Args:
        few, whole: d = s - max s of this rank, of candidates and of whole rows; together they hold every row once.
        bound: (n, 1) float64, above the solution.
        dtype: of the scores, which sets how exact the level has to be.
        beta: alpha - 1.
        ranks: the ranks that share the classes.
        sums: the function for the sums of whole rows, `plain_sums` or `native_sums`.
    """
    # A cheap start: every 16th class of the whole rows stands for 16. Candidates are few and all of them are taken.
    sample = [Piece(rows, d[:, :: simplex.GROUP_SIZE].contiguous()) for rows, d in whole]
    start = _newton(few, sample, simplex.GROUP_SIZE, bound, 1e-3, beta, ranks, plain_sums)
    # A sample without a class of the support ends in nan, which this comparison replaces by the bound as well.
    start = torch.where(start < bound, start, bound)
    eps = torch.finfo(dtype).eps
    # Up to alpha = 1.5 a step leaves an error of the order of its square; above, a class that drops out leaves more.
    return _newton(few, whole, 1, start, eps**0.45 if beta <= 0.5 else 8 * eps, beta, ranks, sums)


def _newton(
    few: list[Piece],
    whole: list[Piece],
    weight: int,
    level: Tensor,
    tolerance: float,
    beta: float,
    ranks: Ranks,
    sums: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """`levels.newton_level` with sums over the ranks, in which the classes of `whole` count `weight` times."""
    for _ in range(MOST_STEPS):
        own = level.new_zeros(len(level), 2)
        for rows, d in few:
            own[rows] = plain_sums(d, level[rows], beta)
        for rows, d in whole:
            own[rows] = weight * sums(d, level[rows], beta)
        # One exchange per step, of both sums of all rows. Every rank then takes the same step and ends the loop at the
        # same time; a rank that went on alone would wait forever.
        total, slope = ranks.sum(own).split(1, 1)
        gap = -levels.scaled_expm1(-total.log(), beta)  # (1 - F^-beta) / beta
        step = total * gap / slope if levels.level_is_v(beta) else beta * total * gap / slope
        level = level - step
        if not (step.abs() > tolerance * (level.abs() + 1 if levels.level_is_v(beta) else level)).any():
            break
    return level


def plain_sums(d: Tensor, level: Tensor, beta: float) -> Tensor:
    """F = sum p and A = sum p^(1 - beta) at a level (m, 1), (m, 2) in float64. A / beta is the slope of F in w."""
    # Summed in the dtype of d, float64 for candidates and that of the scores for whole rows; float64 for the exchange.
    return torch.cat(levels.mass_and_slope(d, level.to(d.dtype), beta, torch.empty_like(d)), 1).double()


def native_sums(native_level: str, d: Tensor, level: Tensor, beta: float) -> Tensor:
    """`plain_sums` by kernel.cpp, in one pass over each row and without scratch memory.

    Args:
        native_level: of the native library, as `native.level_of` gives it.
        d, level, beta: as in `plain_sums`.
    """
    total, slope = level.new_empty(len(d)), level.new_empty(len(d))
    arguments = d, len(d), d.stride(0), d.shape[1], level.contiguous(), total, slope
    native_library.call(native_level, "entmax_sums", d, *arguments, numbers=(VARIANTS[1 + beta],), threads=True)
    return torch.stack([total, slope], 1)
