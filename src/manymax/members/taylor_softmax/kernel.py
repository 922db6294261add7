"""Taylor-softmax of a block of scores: losses and gradient, dense, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import PIECE, Block, BlockResult, Dense, Kernel
from manymax.engine.cost import DOUBLE, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.ranks import columns
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.taylor_softmax.loss import check_order, polynomial, taylor_exp
from manymax.ops.checks import check_finite, visible
from manymax.ops.row_blocks import row_blocks

COST = exact_cost(EntryCost(Work(passes=50), calls=200, plain=8))
TRAFFIC = exact_traffic(sums=1, row=2 * DOUBLE)  # sum f(s) and sum_i t_i log f(s_i)


def taylor_kernel(order: int = 2) -> Kernel:
    """The kernel of the Taylor-softmax loss, with the gradient f'(s) / F - t f'(s) / f(s).

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_taylor_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.6016)
    """
    check_order(order)

    def run(block: Block) -> BlockResult:
        target, scores = block.target, block.scores
        # some rows at a time, which stay in cache
        pieces = row_blocks(scores.shape[0], scores.shape[1], PIECE)
        if block.ranks.alone:
            scores[:, block.num_classes :] = 0  # the padding is in no sum, and must not spoil the matmuls
            parts = [_rows_(scores[rows, : block.num_classes], target[rows], order) for rows in pieces]
            result = BlockResult(torch.cat(parts))
        else:
            result = BlockResult(_rows_of_all_(block, pieces, order))
        if target.coefficient is not None:
            result.parts.append(Dense(scores, target.row_coefficient))
        return result

    return Kernel(run)


def _rows_(scores: Tensor, target: RowTarget, order: int) -> Tensor:
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


def _rows_of_all_(block: Block, pieces: list[slice], order: int) -> Tensor:
    """The same where ranks share the classes: sums of all rows, one exchange, then the gradient from terms made anew.

    An exchange for each piece would keep its terms, but cost a message each.
    """
    target, scores = block.target, block.scores
    own = torch.cat([_sums(block, rows, order) for rows in pieces])
    total, inner = block.ranks.sum(own).unbind(1)
    _check_total(total, order)
    if target.coefficient is not None:
        for rows in pieces:
            _gradient_(scores[rows, : block.num_classes], target[rows], total[rows], order)
    return (target.total * total.log() - inner).to(scores.dtype)


def _sums(block: Block, rows: slice, order: int) -> Tensor:
    """(n, 2): this rank's sum f(s), and its part of sum_i t_i log f(s_i)."""
    target, terms = block.target[rows], _terms(block.scores[rows, : block.num_classes], order)
    total, picked = terms.sum(1), target.pick(terms)
    spread = None
    if target.class_weight is not None:
        spread = torch.where(terms > 0, terms, 1).log_().mul_(target.class_weight).sum(1)
    inner = target.inner(torch.where(picked > 0, picked, 1).log_(), terms.new_zeros(len(terms), 1), spread)
    return columns(total, inner)


def _terms(scores: Tensor, order: int) -> Tensor:
    """f(s), (n, C), 0 for a masked class; the masks are looked for where a sum says that there are some."""
    terms = polynomial(scores.double() if order > 4 else scores, order)
    return terms if terms.sum().isfinite() else taylor_exp(scores.to(terms.dtype), order)


def _gradient_(scores: Tensor, target: RowTarget, total: Tensor, order: int) -> None:
    """The gradient in place of the scores (n, C)."""
    terms = _terms(scores, order)
    slope = polynomial(scores.to(terms.dtype), order - 1)
    if not slope.sum().isfinite():
        slope = torch.where(scores > -torch.inf, slope, 0)
        terms = torch.where(terms > 0, terms, 1)
    scores.copy_(slope / total.unsqueeze(1).to(slope.dtype))
    target.subtract_(scores, slope, terms)


def _check_total(total: Tensor, order: int) -> None:
    if not visible(total) or ((total > 0) & total.isfinite()).all():
        return
    if (total == 0).any():
        raise ArgumentError("`scores` has a row in which every class is masked (-inf); leave at least one class alive.")
    raise ArgumentError(f"`scores` must be finite and not too large for `order` {order}; got a sum that is not finite.")
