"""Blocks of one rank's scores to losses and its part of the gradient: one kernel for each exact member.

As in heads/kernels.py, where sums over the classes of a row are completed over the ranks. What travels per row:

    softmax          the maximum; sum exp(s - max) and sum_i t_i (s_i - max)
    taylor_softmax   sum f(s) and sum_i t_i log f(s_i)
    entmax           the maximum and a bound of the level; two sums for each step of the search; two sums at its end
    rankmax          for each positive its score and weight, then sum u and the number of classes with u > 0

Every rank gets the same sums, so that all of them take the same decisions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manymax.distributed.collectives import Ranks
from manymax.engine.blocks import PIECE, Block, Dense, Kernel, Result, Sparse
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.entmax.kernel import support_entries
from manymax.members.entmax.loss import omega_slope
from manymax.members.taylor_softmax.loss import polynomial, taylor_exp
from manymax.ops import simplex
from manymax.ops.checks import check_finite, visible

STEPS = 60  # of a search, which takes about 6


def softmax_kernel(ranks: Ranks) -> Kernel:
    """Softmax in place over this rank's classes, then times its share of the sum over all ranks."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        own = scores.amax(1, keepdim=True)
        maximum = ranks.maximum(own)
        check_finite(maximum)
        inner = target.inner(target.pick(scores), maximum, block.spread)
        probs = torch.softmax(scores, 1, out=scores)
        masked = (own == -torch.inf).squeeze(1)
        if masked.any():  # no class of this rank is alive
            probs[masked] = 1.0
        # the likeliest class has p = exp(own - own) / sum exp(s - own)
        partial = (own - maximum).double().exp() / probs.amax(1, keepdim=True)
        partition, inner = ranks.sum(_columns(partial.squeeze(1), inner)).unbind(1)
        result = Result((target.total * partition.log() - inner).to(scores.dtype))
        if target.coefficient is not None:
            probs.mul_((partial / partition.unsqueeze(1)).to(scores.dtype))
            target.subtract_(probs)
            result.parts.append(Dense(probs, target.row_coefficient))
        return result

    return kernel


def taylor_kernel(ranks: Ranks, order: int) -> Kernel:
    """Taylor-softmax: f'(s) / F - t f'(s) / f(s), dense; some rows at a time, which stay in cache."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        pieces = list(simplex.row_blocks(scores.shape[0], scores.shape[1], PIECE))
        own = torch.cat([_taylor_sums(block, rows, order) for rows in pieces])
        total, inner = ranks.sum(own).unbind(1)
        _check_total(total, order)
        result = Result((target.total * total.log() - inner).to(scores.dtype))
        if target.coefficient is not None:
            for rows in pieces:
                _taylor_rows_(scores[rows, : block.num_classes], target[rows], total[rows], order)
            result.parts.append(Dense(scores, target.row_coefficient))
        return result

    return kernel


def _taylor_sums(block: Block, rows: slice, order: int) -> Tensor:
    """(n, 2): this rank's sum f(s), and its part of sum_i t_i log f(s_i)."""
    target, terms = block.target[rows], _taylor_terms(block.scores[rows, : block.num_classes], order)
    total, picked = terms.sum(1), target.pick(terms)
    spread = None
    if target.class_weight is not None:
        spread = torch.where(terms > 0, terms, 1).log_().mul_(target.class_weight).sum(1)
    inner = target.inner(torch.where(picked > 0, picked, 1).log_(), terms.new_zeros(len(terms), 1), spread)
    return _columns(total, inner)


def _taylor_terms(scores: Tensor, order: int) -> Tensor:
    """f(s), (n, C), 0 for a masked class; the masks are looked for where a sum says that there are some."""
    terms = polynomial(scores.double() if order > 4 else scores, order)
    return terms if terms.sum().isfinite() else taylor_exp(scores.to(terms.dtype), order)


def _taylor_rows_(scores: Tensor, target: RowTarget, total: Tensor, order: int) -> None:
    """The gradient in place of the scores (n, C)."""
    terms = _taylor_terms(scores, order)
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


def entmax_kernel(ranks: Ranks, alpha: float, wants_alpha: bool = False) -> Kernel:
    """Entmax for alpha > 1: each rank searches among the classes that can be in the support."""
    beta, order = alpha - 1, torch.tensor(alpha, dtype=torch.float64)

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        heads = simplex.group_maxima(scores)
        maximum = ranks.maximum(heads.amax(1, keepdim=True))
        check_finite(maximum)
        inner = target.inner(target.pick(scores), maximum, block.spread)
        bound = _bound(heads - maximum, beta, ranks)
        cut = -1 / beta - (bound + 1e-4) if simplex._in_v(beta) else -(bound * (1 + 1e-4)) / beta
        parts, wide = simplex.collect(scores, heads, maximum, maximum, cut)
        parts = [_not_empty(found, scores) for found in parts]
        few = [_Piece(found.rows, (found.scores - found.maximum).double()) for found in parts]
        table = _differences(scores, maximum, wide)
        rest = [_Piece(wide[rows], table[rows]) for rows in simplex.row_blocks(*table.shape)]
        level = _search(few, rest, bound.double(), scores.dtype, beta, ranks)

        moment, slopes = torch.zeros_like(level), torch.zeros_like(level)
        result = Result(inner)
        for rows, d in few + rest:
            u, probs = _powers(d, level[rows].to(d.dtype), beta)
            moment[rows] = u.mul_(probs).sum(1, keepdim=True, dtype=torch.float64)
            if wants_alpha:
                slopes[rows] = omega_slope(probs.double(), order)
        if target.coefficient is not None:
            for found, (rows, probs) in zip(parts, few, strict=True):
                result.parts.append(support_entries(target[rows], probs, found, block))
            if len(wide):
                part = target[wide]
                part.subtract_(table)
                result.parts.append(Dense(table, part.row_coefficient, None if len(wide) == len(scores) else wide))
        moment, inner = ranks.sum(_columns(moment.squeeze(1), inner)).unbind(1)
        v = (level if simplex._in_v(beta) else (level - 1) / beta).squeeze(1)
        result.losses = (target.total * ((moment - 1) / alpha - v) - inner).to(scores.dtype)
        if wants_alpha and target.coefficient is not None:
            result.grad_setting = -(target.row_coefficient * slopes.squeeze(1)).sum()
        return result

    return kernel


class _Piece(NamedTuple):
    """Some rows (m,) of a block, and a table (m, K) of what this rank has of them."""

    rows: Tensor
    table: Tensor


def _differences(scores: Tensor, maximum: Tensor, rows: Tensor) -> Tensor:
    """s - max s of some rows, in place where they are all."""
    return scores.sub_(maximum) if len(rows) == len(scores) else scores[rows].sub_(maximum[rows])


def _bound(heads: Tensor, beta: float, ranks: Ranks) -> Tensor:
    """The smallest of the ranks' own levels, (n, 1): each leaves out the classes of the others and is too high.

    A rank whose classes do not reach a sum of 1 even at the highest level, that of a single class, knows no more.
    """
    highest = 0.0 if simplex._in_v(beta) else 1.0
    own = simplex._newton(heads, beta, steps=6).nan_to_num(highest, highest, highest).clamp_(max=highest)
    return -ranks.maximum(-own)


def _search(
    few: list[_Piece], rest: list[_Piece], bound: Tensor, dtype: torch.dtype, beta: float, ranks: Ranks
) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1).

    Args:
        few, rest: d = s - max s of this rank, of candidates and of whole rows; together every row once.
        bound: (n, 1) float64, above the solution.
        dtype: of the scores, which is as exact as the search has to be.
        beta: alpha - 1.
        ranks: of the shards.
    """
    sample = [_Piece(rows, d[:, :: simplex.GROUP].contiguous()) for rows, d in rest]
    start = _newton(few, sample, simplex.GROUP, bound, 1e-3, beta, ranks)
    start = torch.where(start < bound, start, bound)  # nan too
    eps = torch.finfo(dtype).eps
    return _newton(few, rest, 1, start, eps**0.45 if beta <= 0.5 else 8 * eps, beta, ranks)


def _newton(
    few: list[_Piece],
    rest: list[_Piece],
    weight: int,
    level: Tensor,
    tolerance: float,
    beta: float,
    ranks: Ranks,
) -> Tensor:
    """simplex._newton with sums over the ranks, in which `rest` counts `weight` times."""
    for _ in range(STEPS):
        own = level.new_zeros(len(level), 2)
        for index, (rows, d) in enumerate(few + rest):
            sums = torch.cat(simplex._sums(d, level[rows].to(d.dtype), beta, torch.empty_like(d)), 1).double()
            own[rows] = sums if index < len(few) else weight * sums
        total, slope = ranks.sum(own).split(1, 1)
        gap = -simplex._ratio(-total.log(), beta)
        step = total * gap / slope if simplex._in_v(beta) else beta * total * gap / slope
        level = level - step
        if not (step.abs() > tolerance * (level.abs() + 1 if simplex._in_v(beta) else level)).any():
            break
    return level


def _powers(d: Tensor, level: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """u and p = u^(1 / beta), which overwrites d."""
    return simplex._bases(d, level, beta, torch.empty_like(d)), simplex._powers(d, level, beta)


def _not_empty(found: simplex.Candidates, scores: Tensor) -> simplex.Candidates:
    """The candidates, or the first class where a rank has none at all: its probability will be 0."""
    if found.ids.shape[1]:
        return found
    ids = found.rows.new_zeros(len(found.rows), 1)
    return found._replace(scores=scores[found.rows, :1], ids=ids)


def rankmax_kernel(ranks: Ranks) -> Kernel:
    """Rankmax: sums over the classes above s_y - 1, one cut for each positive, for all rows before any gradient."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        heads = simplex.group_maxima(scores)
        check_finite(ranks.maximum(heads.amax(1)))
        labels, weights = _labels(target, scores, ranks)
        lowest = labels.amin(1, keepdim=True)
        parts, wide = simplex.collect(scores, heads, lowest, lowest, torch.full_like(lowest, -1.0))
        table = scores if len(wide) == len(scores) else scores[wide]
        few = [_Piece(found.rows, found.scores.double()) for found in parts]
        rest = [_Piece(wide[rows], table[rows]) for rows in simplex.row_blocks(*table.shape)]
        own = scores.new_zeros(*labels.shape, 2, dtype=torch.float64)
        for rows, s in few + rest:
            for p in range(labels.shape[1]):
                u = _violations(s, labels[rows, p])
                own[rows, p] = torch.stack([u.sum(1), u.sign_().sum(1)], 1).double()
        sums, sizes = ranks.sum(own).unbind(2)
        sums = torch.where(weights != 0, sums, 1)
        result = Result((weights * sums.log()).sum(1).to(scores.dtype))
        if target.coefficient is None:
            return result
        shares = target.coefficient.double().unsqueeze(1) * weights / sums  # (n, P)
        for rows, s in few + rest:
            _to_gradient_(s, labels[rows], shares[rows])
        for found, (_, grad) in zip(parts, few, strict=True):
            row, column = (grad != 0).nonzero(as_tuple=True)
            entries = found.rows[row], found.ids[row, column], grad[row, column].to(scores.dtype)
            result.parts.append(Sparse(*entries))
        if len(wide):
            ones = torch.ones_like(table[:, 0])
            result.parts.append(Dense(table, ones, None if len(wide) == len(scores) else wide))
        result.parts.append(_of_positives(target, -shares * sizes))
        return result

    return kernel


def _labels(target: RowTarget, scores: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The scores of the positives, +inf where there is none, which has no violator; and their weights, (n, P) each."""
    picked = torch.where(target.weights != 0, target.pick(scores), 0)
    labels, weights = ranks.sum(torch.stack([picked, target.weights]).double())
    if visible(labels) and (labels == -torch.inf).any():
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    return torch.where(weights != 0, labels, torch.inf).to(scores.dtype), weights


def _violations(scores: Tensor, labels: Tensor) -> Tensor:
    """u = max(0, s - s_y + 1), (n, K)."""
    return (scores - labels.to(scores.dtype).unsqueeze(1)).add_(1).clamp_(min=0)


def _to_gradient_(scores: Tensor, labels: Tensor, shares: Tensor) -> None:
    """Overwrite scores (n, K) by sum_p share_p 1[u_p > 0]: the gradient but for the positives' own part."""
    grad = torch.zeros_like(scores)
    for p in range(labels.shape[1]):
        grad.addcmul_(_violations(scores, labels[:, p]).sign_(), shares[:, p, None].to(scores.dtype))
    scores.copy_(grad)


def _of_positives(target: RowTarget, values: Tensor) -> Sparse:
    """Entries of the positives that this rank has, from values (n, P) of all."""
    row, position = (target.weights != 0).nonzero(as_tuple=True)
    ids = row if target.ids is None else target.ids[row, position]
    return Sparse(row, ids, values[row, position].to(target.weights.dtype))


def _columns(*values: Tensor) -> Tensor:
    """(n, values), in float64: sums of many numbers travel exactly enough for every dtype."""
    return torch.stack([value.double() for value in values], 1)
