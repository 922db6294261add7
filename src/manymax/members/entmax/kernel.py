"""Entmax of a block of scores, softmax's neighbours with exact zeros: losses and gradient, sparse where it can be.

Sparsemax is alpha = 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Block, Dense, Kernel, Result, Sparse, merged
from manymax.engine.cost import DOUBLE, MARKED, SEARCH_STEPS, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.row_target import RowTarget
from manymax.members.entmax.loss import omega_slope
from manymax.ops import simplex
from manymax.ops.checks import check_finite

NATIVE = {1.5: native.ENTMAX, 2.0: native.SPARSEMAX}  # the alphas that rows.cpp has

COST = exact_cost(
    EntryCost(Work(streamed=2, passes=40), calls=500, plain=2.2),
    sparse=EntryCost(Work(streamed=0.5, passes=1), calls=900, tables=0.1),
)
# two maxima and the sums at the end of the search; two sums for each of its steps
TRAFFIC = exact_traffic(sums=3.0 + SEARCH_STEPS, row=2 * MARKED + (SEARCH_STEPS + 1) * 2 * DOUBLE)


def entmax_kernel(alpha: float, wants_alpha: bool = False) -> Kernel:
    """Entmax for alpha > 1: rows of small support give a few entries, the others a dense table."""

    dense_before = False

    def kernel(block: Block) -> Result:
        nonlocal dense_before
        target, scores = block.target, block.scores
        picked = target.pick(scores).clone()
        if block.compiled and alpha in NATIVE and not wants_alpha and native.serves(block):
            maximum, conjugate, made = native.run(block, NATIVE[alpha])
            values = target.total * conjugate.to(scores.dtype) - target.inner(picked, maximum, block.spread)
            return Result(values, made)
        parts, wide, maximum = _candidates(scores, alpha, dense_before)
        dense_before = len(wide) == scores.shape[0]
        check_finite(maximum)
        conjugate, slopes = torch.zeros_like(maximum), torch.zeros_like(maximum, dtype=torch.float64)
        order = torch.tensor(alpha, dtype=torch.float64)
        result = Result(picked.new_zeros(0))
        for found in parts:
            probs, _, values = simplex.solve_few(found, alpha)
            conjugate[found.rows] = values.to(scores.dtype)
            if wants_alpha:
                slopes[found.rows] = omega_slope(probs, order)
            if target.coefficient is not None:
                result.parts.append(support_entries(target[found.rows], probs, found, block))
        if len(wide):
            everything = len(wide) == scores.shape[0]
            d = scores.sub_(maximum) if everything else scores[wide].sub_(maximum[wide])
            table, _, conjugate[wide] = simplex.solve_wide_(d, alpha)
            if wants_alpha:
                slopes[wide] = omega_slope(table.double(), order)
            if target.coefficient is not None:
                part = target[wide]
                part.subtract_(table)
                result.parts.append(Dense(table, part.row_coefficient, None if everything else wide))
        result.losses = target.total * conjugate.squeeze(1) - target.inner(picked, maximum, block.spread)
        if wants_alpha and target.coefficient is not None:
            result.grad_setting = -(target.row_coefficient * slopes.squeeze(1)).sum()
        return result

    return kernel


def _candidates(scores: Tensor, alpha: float, dense_before: bool) -> tuple[list[simplex.Candidates], Tensor, Tensor]:
    """Candidates of a block; after a block without any, four of its rows are asked first whether it is worth it."""
    if dense_before and len(scores) > 4 and len(simplex.candidates(scores[:4], alpha - 1)[1]) == 4:
        return [], torch.arange(len(scores), device=scores.device), scores.amax(1, keepdim=True)
    return simplex.candidates(scores, alpha - 1)


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
