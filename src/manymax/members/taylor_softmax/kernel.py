"""Taylor-softmax of a block of scores: losses, and a dense gradient in place of the scores.

With f(s) = sum_{k <= order} s^k / k!, whose derivative f' is the polynomial of one order less, and F = sum_j f(s_j)

    loss      sum_i t_i (log F - log f(s_i)) = total log F - sum_i t_i log f(s_i)
    gradient  total f'(s) / F - t f'(s) / f(s)
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, piece_size
from manymax.engine.cost import DOUBLE, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.ranks import columns
from manymax.engine.row_target import RowTarget
from manymax.engine.statistics import target_statistics
from manymax.errors import ArgumentError
from manymax.members.taylor_softmax.loss import check_order, polynomial, taylor_exp
from manymax.ops.checks import check_finite, visible
from manymax.ops.row_blocks import row_blocks

COST = exact_cost(EntryCost(Work(passes=30), calls=200, plain=8))
# One exchange per block of two sums per row in float64: sum_j f(s_j) and sum_i t_i log f(s_i). No maximum is needed,
# because a polynomial overflows only where scores are refused anyway.
TRAFFIC = exact_traffic(sums=1, row=2 * DOUBLE)

TAYLOR_STATISTICS = ("nll", "log_z", "entropy", "target_prob", "support")

# Higher orders are computed in float64. Below 0 the terms s^k / k! alternate in sign, and together they are up to 70
# times (order 6) or 2,000 times (order 12) as large as their sum: float32 would lose two to four of its seven digits.
MOST_FLOAT32_ORDER = 4


def taylor_kernel(order: int = 2) -> Kernel:
    """The kernel of the Taylor-softmax loss.

    With F = sum_j f(s_j) the gradient of the loss in the scores is f'(s) / F - t f'(s) / f(s).

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_taylor_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.6016)
    """
    check_order(order)

    def run(block: Block) -> BlockResult:
        target, scores = block.target, block.scores
        # f and f' are two more tables, and in float64 twice as large: some rows at a time, which stay in cache.
        pieces = row_blocks(scores.shape[0], scores.shape[1], piece_size(scores))
        found = _statistics(block, pieces, order)  # before the gradient overwrites the scores
        if block.ranks.alone:
            # The padding is -inf, and a polynomial of it is not 0 as an exponential would be: it is left out of all
            # sums, and set to 0, so that the table that is handed on is finite everywhere.
            scores[:, block.num_classes :] = 0
            parts = [_whole_rows_(scores[rows, : block.num_classes], target[rows], order) for rows in pieces]
            result = BlockResult(torch.cat(parts), stats=found)
        else:
            result = BlockResult(_sharded_rows_(block, pieces, order), stats=found)
        if target.coefficient is not None:
            result.parts.append(Dense(scores, target.row_coefficient))
        return result

    return Kernel(run)


def _statistics(block: Block, pieces: list[slice], order: int) -> dict[str, Tensor]:
    """The statistics of the rows that are asked for, from p = f(s) / F."""
    wanted, dtype, ranks = block.keywords.stats, block.scores.dtype, block.ranks
    if not any(name in TAYLOR_STATISTICS for name in wanted):
        return {}
    sums, logs = [], []
    for rows in pieces:
        terms = _terms(block.scores[rows, : block.num_classes], order).double()
        # sum f, sum f log f and the number of f > 0 over the classes of this rank
        sums.append(columns(terms.sum(1), -torch.special.entr(terms).sum(1), (terms > 0).sum(1)))
        logs.append(block.target[rows].pick(terms).log())
    total, moment, support = ranks.sum(torch.cat(sums)).unbind(1)
    log_z = total.log()
    found = target_statistics(wanted, block.target, torch.cat(logs) - log_z.unsqueeze(1), ranks.sum)
    found |= {"log_z": log_z, "entropy": log_z - moment / total}
    every = {name: value.to(dtype) for name, value in found.items()} | {"support": support.long()}
    return {name: value for name, value in every.items() if name in wanted}


def _whole_rows_(scores: Tensor, target: RowTarget, order: int) -> Tensor:
    """Losses (n,) of rows with all their classes; f'(s) / F - t f'(s) / (total f(s)) in place of the scores (n, C)."""
    # The factor coefficient x total of the gradient is put on the rows later, as for every dense part.
    s = scores.double() if order > MOST_FLOAT32_ORDER else scores
    terms, slope = polynomial(s, order), polynomial(s, order - 1)
    total = terms.sum(1, keepdim=True)
    live = None
    # f(-inf) = +inf at an even order. So one look at the sums tells whether there is a masked class at all, and blocks
    # without one, which are the rule, need no pass that looks for masks. On a device nobody waits for that look.
    if not visible(total) or not total.isfinite().all():
        check_finite(scores.amax(1))  # nan, +inf, or a row without a live class
        live = scores > -torch.inf
        total = terms.masked_fill_(~live, 0).sum(1, keepdim=True)
        if visible(total) and not total.isfinite().all():
            raise ArgumentError(f"the scores are too large for `order` {order}: the polynomial overflows.")
    positive_logs = target.pick(terms).log()
    if live is not None:
        # f = 1 and f' = 0 give a masked class the gradient 0, and log f = 0 where smoothing takes all logarithms.
        terms, slope = terms.masked_fill_(~live, 1), slope.masked_fill_(~live, 0)
    if target.coefficient is not None:
        torch.div(slope, total, out=scores)
        target.subtract_(scores, slope, terms)
    # Last, because the logarithm overwrites the terms.
    spread = None if target.class_weight is None else terms.log_().mul_(target.class_weight).sum(1)
    return -target.inner(positive_logs, total.log(), spread).to(scores.dtype)


def _sharded_rows_(block: Block, pieces: list[slice], order: int) -> Tensor:
    """The losses (n,) of a block whose classes are split over ranks; the gradient in place of the scores.

    The sums of all rows come first, then one exchange, then the gradient.
    """
    target, scores = block.target, block.scores
    # An exchange for each piece could keep the terms of that piece for the gradient, but each message waits for the
    # slowest rank. The terms are computed a second time instead.
    own = torch.cat([_sums(block, rows, order) for rows in pieces])
    total, inner = block.ranks.sum(own).unbind(1)
    _check_total(total, order)
    if target.coefficient is not None:
        for rows in pieces:
            _gradient_(scores[rows, : block.num_classes], target[rows], total[rows], order)
    return (target.total * total.log() - inner).to(scores.dtype)


def _sums(block: Block, rows: slice, order: int) -> Tensor:
    """(n, 2): this rank's sum_j f(s_j), and its part of sum_i t_i log f(s_i)."""
    target, terms = block.target[rows], _terms(block.scores[rows, : block.num_classes], order)
    total, positive_terms = terms.sum(1), target.pick(terms)
    spread = None
    if target.class_weight is not None:
        # A masked class has f = 0; its class weight is 0 too, and 0 times log 0 would be nan.
        spread = torch.where(terms > 0, terms, 1).log_().mul_(target.class_weight).sum(1)
    # Positives of other ranks stand here as class 0 with weight 0: log f = 0 even if that class is masked.
    positive_logs = torch.where(positive_terms > 0, positive_terms, 1).log_()
    inner = target.inner(positive_logs, terms.new_zeros(len(terms), 1), spread)
    return columns(total, inner)


def _terms(scores: Tensor, order: int) -> Tensor:
    """f(s), (n, C), 0 for a masked class; masks are looked for only where the sum of all terms says there are some."""
    terms = polynomial(scores.double() if order > MOST_FLOAT32_ORDER else scores, order)
    return terms if visible(terms) and terms.sum().isfinite() else taylor_exp(scores.to(terms.dtype), order)


def _gradient_(scores: Tensor, target: RowTarget, total: Tensor, order: int) -> None:
    """The gradient in place of the scores (n, C), given F (n,) over the classes of all ranks."""
    terms = _terms(scores, order)
    slope = polynomial(scores.to(terms.dtype), order - 1)
    # f'(-inf) = -inf at an odd order: as above, a sum tells whether there are masked classes.
    if not visible(slope) or not slope.sum().isfinite():
        slope = torch.where(scores > -torch.inf, slope, 0)
        terms = torch.where(terms > 0, terms, 1)
    scores.copy_(slope / total.unsqueeze(1).to(slope.dtype))
    target.subtract_(scores, slope, terms)


def _check_total(total: Tensor, order: int) -> None:
    """Raise if F (n,) is 0 or not finite; it is the same on all ranks, so that all of them raise."""
    if not visible(total) or ((total > 0) & total.isfinite()).all():
        return
    if (total == 0).any():
        raise ArgumentError("`scores` has a row in which every class is masked (-inf); leave at least one class alive.")
    raise ArgumentError(f"`scores` must be finite and not too large for `order` {order}; got a sum that is not finite.")
