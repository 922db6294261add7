"""Entmax of a block of scores, for alpha > 1: losses and gradient, with few entries where the support is small.

Sparsemax is alpha = 2. The level of a row, one number, says which of its classes are in the support: ops/simplex.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, Sparse, merged
from manymax.engine.cost import DOUBLE, MARKED, SEARCH_STEPS, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.ranks import Ranks, columns
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.entmax.loss import omega, omega_slope, read_alpha
from manymax.members.softmax.kernel import block_softmax
from manymax.ops import levels, simplex
from manymax.ops.checks import check_finite
from manymax.ops.row_blocks import row_blocks

SOURCE = Path(__file__).with_name("kernel.cpp")
VARIANTS = {1.5: 1, 2.0: 2}  # the alphas that kernel.cpp has, and what it calls them
STEPS = 60  # of a search over ranks, which takes about 6

COST = exact_cost(
    EntryCost(Work(streamed=2, passes=40), calls=500, plain=2.2),
    sparse=EntryCost(Work(streamed=0.5, passes=1), calls=900, tables=0.1),
)
# the maximum and a bound of the level; two sums for each step of the search; two sums at its end
TRAFFIC = exact_traffic(sums=3.0 + SEARCH_STEPS, row=2 * MARKED + (SEARCH_STEPS + 1) * 2 * DOUBLE)


def entmax_kernel(alpha: float | Tensor = 1.5) -> Kernel:
    """The kernel of the entmax loss.

    Where the support is small the gradient touches only its classes, so that of three matmuls one is left. `alpha` is a
    number or a scalar tensor, which gets its gradient.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_entmax_loss(input, vectors, torch.tensor([0]), alpha=1.5)
        tensor(0.1844)
    """
    if isinstance(alpha, Tensor) and alpha.ndim:
        raise ArgumentError(f"`alpha` of a head must be a number or a scalar tensor; got shape {tuple(alpha.shape)}.")
    read = read_alpha(alpha)
    number, learned = float(read.detach()), read.requires_grad
    if number == 1 and learned:
        raise ArgumentError("a head has no gradient in `alpha` at alpha = 1; use `entmax_loss` or start above 1.")
    run = block_softmax if number == 1 else block_entmax(number, learned)

    def omega_of(probs: Tensor, setting: float | Tensor = alpha) -> Tensor:
        return omega(probs, setting)

    return Kernel(run, setting=read if learned else None, omega=omega_of)


def block_entmax(alpha: float, wants_alpha: bool = False) -> Callable[[Block], BlockResult]:
    """From blocks of scores to losses and gradient, for alpha > 1.

    Rows of small support give a few entries, the others a dense table. On one process a row is solved while it is in
    cache; on several every step of the search adds up the sums of all ranks.
    """
    dense_before = False

    def run(block: Block) -> BlockResult:
        nonlocal dense_before
        picked = block.target.pick(block.scores).clone()
        compiled = alpha in VARIANTS and not wants_alpha and native.serves(block)
        if not block.ranks.alone:
            return _parts_of_rows(block, picked, alpha, wants_alpha, compiled)
        if compiled and native.lists_positives(block):
            return _native_rows(block, picked, alpha)
        result, dense_before = _whole_rows(block, picked, alpha, wants_alpha, dense_before)
        return result

    return run


def _native_rows(block: Block, picked: Tensor, alpha: float) -> BlockResult:
    target = block.target
    maximum, conjugate, parts = native.run(block, SOURCE, VARIANTS[alpha])
    inner = target.inner(picked, maximum, block.spread)
    return BlockResult(target.total * conjugate.to(block.scores.dtype) - inner, parts)


def _whole_rows(
    block: Block, picked: Tensor, alpha: float, wants_alpha: bool, dense_before: bool
) -> tuple[BlockResult, bool]:
    """The result of a block that has all classes of its rows, and whether all of its supports are large."""
    target, scores = block.target, block.scores
    parts, wide, maximum = _candidates(scores, alpha, dense_before)
    check_finite(maximum)
    conjugate, slopes = torch.zeros_like(maximum), torch.zeros_like(maximum, dtype=torch.float64)
    order = torch.tensor(alpha, dtype=torch.float64)
    result = BlockResult(picked.new_zeros(0))
    for found in parts:
        probs, _, values = simplex.solve_candidates(found, alpha)
        conjugate[found.rows] = values.to(scores.dtype)
        if wants_alpha:
            slopes[found.rows] = omega_slope(probs, order)
        if target.coefficient is not None:
            result.parts.append(support_entries(target[found.rows], probs, found, block))
    if len(wide):
        d = _differences(scores, maximum, wide)
        table, _, conjugate[wide] = simplex.solve_wide_rows_(d, alpha)
        if wants_alpha:
            slopes[wide] = omega_slope(table.double(), order)
        if target.coefficient is not None:
            result.parts.append(_dense(target, table, wide))
    result.losses = target.total * conjugate.squeeze(1) - target.inner(picked, maximum, block.spread)
    if wants_alpha and target.coefficient is not None:
        result.grad_setting = -(target.row_coefficient * slopes.squeeze(1)).sum()
    return result, len(wide) == scores.shape[0]


def _candidates(scores: Tensor, alpha: float, dense_before: bool) -> tuple[list[simplex.Candidates], Tensor, Tensor]:
    """Candidates of a block; after a block without any, four of its rows are asked first whether it is worth it."""
    if dense_before and len(scores) > 4 and len(simplex.candidates(scores[:4], alpha - 1)[1]) == 4:
        return [], torch.arange(len(scores), device=scores.device), scores.amax(1, keepdim=True)
    return simplex.candidates(scores, alpha - 1)


def _differences(scores: Tensor, maximum: Tensor, rows: Tensor) -> Tensor:
    """s - max s of some rows, in place where they are all."""
    return scores.sub_(maximum) if len(rows) == len(scores) else scores[rows].sub_(maximum[rows])


def _dense(target: RowTarget, table: Tensor, rows: Tensor) -> Dense:
    """The gradient of some rows from their probabilities, in place."""
    part = target[rows]
    part.subtract_(table)
    return Dense(table, part.row_coefficient, None if len(rows) == len(target.total) else rows)


def support_entries(target: RowTarget, probs: Tensor, found: simplex.Candidates, block: Block) -> Dense | Sparse:
    """coefficient (total p - t) of the rows found as entries; dense where smoothing or rows fill t.

    A positive inside of the support is subtracted from its probability before anything is rounded: near a perfect
    prediction the difference is all there is.
    """
    dtype = block.scores.dtype
    if target.ids is None or target.share is not None:
        row, column = (probs > 0).nonzero(as_tuple=True)
        table = torch.zeros(len(found.rows), block.scores.shape[1], dtype=dtype, device=probs.device)
        table[row, found.ids[row, column]] = probs[row, column].to(dtype)
        target.subtract_(table)
        return Dense(table, target.row_coefficient, found.rows)
    listed, position = (target.weights != 0).nonzero(as_tuple=True)
    positives, weights = target.ids[listed, position], target.weights[listed, position].double()
    column = _places(found.ids, listed, positives, block.scores.numel())
    inside = column >= 0
    values = probs * target.total.double().unsqueeze(1)
    values.index_put_((listed[inside], column[inside]), -weights[inside], accumulate=True)
    row, column = (values != 0).nonzero(as_tuple=True)
    factor = target.factor.double()
    outside = listed[~inside]
    return merged(
        found.rows[row],
        found.ids[row, column],
        (values[row, column] * factor[row]).to(dtype),
        found.rows[outside],
        positives[~inside],
        (-weights[~inside] * factor[outside]).to(dtype),
    )


def _places(ids: Tensor, rows: Tensor, wanted: Tensor, budget: int) -> Tensor:
    """The column of ids (n, K) in which row rows_l holds wanted_l, or -1; no more than `budget` ids at a time."""
    step = max(1, budget // ids.shape[1])
    places = []
    for part, ones in zip(rows.split(step), wanted.split(step), strict=True):
        same = ids[part] == ones.unsqueeze(1)
        places.append(torch.where(same.any(1), same.int().argmax(1), -1))
    return torch.cat(places) if places else rows


# Several ranks -----------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some rows (m,) of a block, and a table (m, K) of what this rank has of them."""

    rows: Tensor
    table: Tensor


def _parts_of_rows(block: Block, picked: Tensor, alpha: float, wants_alpha: bool, compiled: bool) -> BlockResult:
    """Each rank searches among the classes that can be in the support; every rank gets the same sums."""
    target, scores, ranks, beta = block.target, block.scores, block.ranks, alpha - 1
    parts, wide, maximum, bound = _shared_candidates(block, beta, compiled)
    inner = target.inner(picked, maximum, block.spread)
    parts = [_not_empty(found, scores) for found in parts]
    few = [_Piece(found.rows, (found.scores - found.maximum).double()) for found in parts]
    table = _differences(scores, maximum, wide)
    rest = [
        _Piece(wide[rows], table[rows]) for rows in row_blocks(table.shape[0], table.shape[1], simplex.SCORES_PER_BLOCK)
    ]
    sums = _native_sums if compiled else _plain_sums
    level = _search(few, rest, bound.double(), scores.dtype, beta, ranks, sums)

    moment, slopes = torch.zeros_like(level), torch.zeros_like(level)
    order = torch.tensor(alpha, dtype=torch.float64)
    result = BlockResult(inner)
    for rows, d in few + rest:
        u, probs = _powers(d, level[rows].to(d.dtype), beta)
        moment[rows] = u.mul_(probs).sum(1, keepdim=True, dtype=torch.float64)
        if wants_alpha:
            slopes[rows] = omega_slope(probs.double(), order)
    if target.coefficient is not None:
        for found, (rows, probs) in zip(parts, few, strict=True):
            result.parts.append(support_entries(target[rows], probs, found, block))
        if len(wide):
            result.parts.append(_dense(target, table, wide))
    moment, inner = ranks.sum(columns(moment.squeeze(1), inner)).unbind(1)
    v = (level if levels.level_is_v(beta) else (level - 1) / beta).squeeze(1)
    result.losses = (target.total * ((moment - 1) / alpha - v) - inner).to(scores.dtype)
    if wants_alpha and target.coefficient is not None:
        result.grad_setting = -(target.row_coefficient * slopes.squeeze(1)).sum()
    return result


def _shared_candidates(
    block: Block, beta: float, compiled: bool
) -> tuple[list[simplex.Candidates], Tensor, Tensor, Tensor]:
    """Candidates of this rank, its other rows, the maxima of all ranks (n, 1) and a level above the solution (n, 1).

    A rank's own level leaves out the classes of the others and is too high: the smallest of all bounds the solution.
    """
    scores, ranks = block.scores, block.ranks
    group_tops = None if compiled else simplex.group_maxima(scores)
    if group_tops is None:
        top, own = scores.new_empty(len(scores), 1), torch.empty(len(scores), 1, dtype=torch.float64)
        shape = (len(scores), scores.shape[1], block.num_classes)
        native.call(SOURCE, "levels", scores, scores, *shape, top, own, numbers=(VARIANTS[1 + beta],), threads=True)
        maximum = ranks.maximum(top)
        check_finite(maximum)
        # at the maximum of all ranks the level of this one's classes is as much higher as its own maximum is lower
        own = own.to(scores.dtype) + beta * (maximum - top)
    else:
        maximum = ranks.maximum(group_tops.amax(1, keepdim=True))
        check_finite(maximum)
        own = levels.newton_level(group_tops - maximum, beta, steps=6)
    # a rank whose classes do not reach a sum of 1 even at the highest level, that of a single class, knows no more
    highest = 0.0 if levels.level_is_v(beta) else 1.0
    bound = -ranks.maximum(-own.nan_to_num(highest, highest, highest).clamp_(max=highest))
    # it is in working precision: widen it by more than its error
    cut = -1 / beta - (bound + 1e-4) if levels.level_is_v(beta) else -(bound * (1 + 1e-4)) / beta
    if group_tops is None:
        parts, wide = native.collect(scores, block.num_classes, maximum, maximum, cut)
    else:
        parts, wide = simplex.collect(scores, group_tops, maximum, maximum, cut)
    return parts, wide, maximum, bound


def _search(
    few: list[_Piece],
    rest: list[_Piece],
    bound: Tensor,
    dtype: torch.dtype,
    beta: float,
    ranks: Ranks,
    sums: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1).

    Args:
        few, rest: d = s - max s of this rank, of candidates and of whole rows; together every row once.
        bound: (n, 1) float64, above the solution.
        dtype: of the scores, which is as exact as the search has to be.
        beta: alpha - 1.
        ranks: of the shards.
        sums: of whole rows.
    """
    sample = [_Piece(rows, d[:, :: simplex.GROUP].contiguous()) for rows, d in rest]
    start = _newton(few, sample, simplex.GROUP, bound, 1e-3, beta, ranks, _plain_sums)
    start = torch.where(start < bound, start, bound)  # nan too
    eps = torch.finfo(dtype).eps
    return _newton(few, rest, 1, start, eps**0.45 if beta <= 0.5 else 8 * eps, beta, ranks, sums)


def _newton(
    few: list[_Piece],
    rest: list[_Piece],
    weight: int,
    level: Tensor,
    tolerance: float,
    beta: float,
    ranks: Ranks,
    sums: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """levels.newton_level with sums over the ranks, in which `rest` counts `weight` times."""
    for _ in range(STEPS):
        own = level.new_zeros(len(level), 2)
        for rows, d in few:
            own[rows] = _plain_sums(d, level[rows], beta)
        for rows, d in rest:
            own[rows] = weight * sums(d, level[rows], beta)
        total, slope = ranks.sum(own).split(1, 1)
        gap = -levels.scaled_expm1(-total.log(), beta)
        step = total * gap / slope if levels.level_is_v(beta) else beta * total * gap / slope
        level = level - step
        if not (step.abs() > tolerance * (level.abs() + 1 if levels.level_is_v(beta) else level)).any():
            break
    return level


def _plain_sums(d: Tensor, level: Tensor, beta: float) -> Tensor:
    """F = sum p and A = sum p^(1 - beta) at a level (m, 1), (m, 2) in float64."""
    return torch.cat(levels.mass_and_slope(d, level.to(d.dtype), beta, torch.empty_like(d)), 1).double()


def _native_sums(d: Tensor, level: Tensor, beta: float) -> Tensor:
    """The same in one pass over each row."""
    total, slope = level.new_empty(len(d)), level.new_empty(len(d))
    given = d, len(d), d.stride(0), d.shape[1], level.contiguous(), total, slope
    native.call(SOURCE, "sums", d, *given, numbers=(VARIANTS[1 + beta],), threads=True)
    return torch.stack([total, slope], 1)


def _powers(d: Tensor, level: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """u and p = u^(1 / beta), which overwrites d."""
    return levels.power_bases(d, level, beta, torch.empty_like(d)), levels.probabilities_(d, level, beta)


def _not_empty(found: simplex.Candidates, scores: Tensor) -> simplex.Candidates:
    """The candidates, or the first class where a rank has none at all: its probability will be 0."""
    if found.ids.shape[1]:
        return found
    ids = found.rows.new_zeros(len(found.rows), 1)
    return found._replace(scores=scores[found.rows, :1], ids=ids)
