"""Taylor-softmax of a block of scores: losses and gradient, dense, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import PIECE, Block, Dense, Kernel, Result
from manymax.engine.cost import DOUBLE, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.taylor_softmax.loss import polynomial
from manymax.ops import simplex
from manymax.ops.checks import check_finite

COST = exact_cost(EntryCost(Work(passes=50), calls=200, plain=8))
TRAFFIC = exact_traffic(sums=1, row=2 * DOUBLE)


def taylor_kernel(order: int) -> Kernel:
    """Taylor-softmax: f'(s) / F - t f'(s) / f(s), dense, in place; some rows at a time, which stay in cache."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        scores[:, block.num_classes :] = 0  # the padding is in no sum, and must not spoil the matmuls
        losses = [
            _taylor_rows_(scores[rows, : block.num_classes], target[rows], order)
            for rows in simplex.row_blocks(scores.shape[0], scores.shape[1], PIECE)
        ]
        result = Result(torch.cat(losses))
        if target.coefficient is not None:
            result.parts.append(Dense(scores, target.row_coefficient))
        return result

    return kernel


def _taylor_rows_(scores: Tensor, target: RowTarget, order: int) -> Tensor:
    """Losses (n,); f'(s) / F - t f'(s) / (|t| f(s)) in place of the scores (n, C)."""
    s = scores.double() if order > 4 else scores  # from order 6 on the terms cancel below 0
    terms, slope = polynomial(s, order), polynomial(s, order - 1)
    total = terms.sum(1, keepdim=True)
    live = None
    if not total.isfinite().all():  # a masked class, or scores that are refused
        check_finite(scores.amax(1))
        live = scores > -torch.inf
        total = terms.masked_fill_(~live, 0).sum(1, keepdim=True)
        if not total.isfinite().all():
            raise ArgumentError(f"the scores are too large for `order` {order}: the polynomial overflows.")
    picked = target.pick(terms).log()
    if live is not None:
        terms, slope = terms.masked_fill_(~live, 1), slope.masked_fill_(~live, 0)
    if target.coefficient is not None:
        torch.div(slope, total, out=scores)
        target.subtract_(scores, slope, terms)
    spread = None if target.class_weight is None else terms.log_().mul_(target.class_weight).sum(1)
    return -target.inner(picked, total.log(), spread).to(scores.dtype)
