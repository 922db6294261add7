"""Blocks of one rank's scores to losses and its part of the gradient: one kernel for each exact member.

As in heads/kernels.py, where sums over the classes of a row are completed over the ranks. What travels per row:

    softmax          the maximum; sum exp(s - max) and sum_i t_i (s_i - max)
    taylor_softmax   sum f(s) and sum_i t_i log f(s_i)
    entmax           the maximum and a bound of the level; two sums for each step of the search; two at its end
    rankmax          for each positive its score and weight, then sum u and the number of classes with u > 0

Every rank gets the same sums, so that all of them take the same decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.distributed.collectives import Ranks
from manymax.errors import ArgumentError
from manymax.heads.blocks import Block, Dense, Kernel, Result, Sparse
from manymax.heads.kernels import _entries, taylor_exp_slope
from manymax.heads.target import RowTarget
from manymax.losses.entmax import omega_slope
from manymax.losses.taylor_softmax import taylor_exp
from manymax.ops import simplex
from manymax.ops.checks import check_finite, visible

STEPS = 60  # of a search, which takes about 6


def softmax_kernel(ranks: Ranks) -> Kernel:
    """Softmax in place."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        maximum = ranks.maximum(scores.amax(1, keepdim=True))
        check_finite(maximum)
        inner = target.inner(target.pick(scores), maximum, block.spread)
        terms = simplex.floored_exp_(scores.sub_(maximum))
        partition, inner = ranks.sum(_columns(terms.sum(1), inner)).unbind(1)
        result = Result((target.total * partition.log() - inner).to(scores.dtype))
        if target.coefficient is not None:
            probs = terms.div_(partition.to(scores.dtype).unsqueeze(1))
            target.subtract_(probs)
            result.parts.append(Dense(probs, target.row_coefficient))
        return result

    return kernel


def taylor_kernel(ranks: Ranks, order: int) -> Kernel:
    """Taylor-softmax: f'(s) / F - t f'(s) / f(s), dense."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        terms = taylor_exp(scores.double() if order > 4 else scores, order)
        slope = torch.where(scores > -torch.inf, taylor_exp_slope(scores.to(terms.dtype), order), 0)
        log_terms = torch.where(terms > 0, terms, 1).log()
        spread = None
        if target.class_weight is not None:
            spread = (log_terms[:, : block.num_classes] * target.class_weight).sum(1)
        inner = target.inner(target.pick(log_terms), terms.new_zeros(len(terms), 1), spread)
        total, inner = ranks.sum(_columns(terms.sum(1), inner)).unbind(1)
        _check_total(total, order)
        result = Result((target.total * total.log() - inner).to(scores.dtype))
        if target.coefficient is not None:
            table = (slope / total.unsqueeze(1)).to(scores.dtype)
            target.subtract_(table, (slope / torch.where(terms > 0, terms, 1)).to(scores.dtype))
            result.parts.append(Dense(table, target.row_coefficient))
        return result

    return kernel


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
        level = _bound(heads - maximum, beta, ranks)
        cut = -1 / beta - (level + 1e-4) if simplex._in_v(beta) else -(level * (1 + 1e-4)) / beta
        parts, wide = simplex.collect(scores, heads, maximum, maximum, cut)
        parts = [_not_empty(found, scores) for found in parts]
        few = [(found.rows, (found.scores - found.maximum).double()) for found in parts]
        rest = [(wide, _differences(scores, maximum, wide))] if len(wide) else []
        level = _search([*few, *rest], level.double(), beta, scores.dtype, ranks)

        moment, slopes = torch.zeros_like(level), torch.zeros_like(level)
        result = Result(inner)
        for index, (rows, d) in enumerate([*few, *rest]):
            u, probs = _powers(d, level[rows].to(d.dtype), beta)
            moment[rows] = (u * probs).sum(1, keepdim=True, dtype=torch.float64)
            if wants_alpha:
                slopes[rows] = omega_slope(probs.double(), order)
            if target.coefficient is None:
                continue
            if index < len(parts):
                result.parts.append(_entries(target[rows], probs, parts[index], block))
            else:
                part = target[rows]
                part.subtract_(probs)
                result.parts.append(Dense(probs, part.row_coefficient, rows))
        moment, inner = ranks.sum(_columns(moment.squeeze(1), inner)).unbind(1)
        v = (level if simplex._in_v(beta) else (level - 1) / beta).squeeze(1)
        result.losses = (target.total * ((moment - 1) / alpha - v) - inner).to(scores.dtype)
        if wants_alpha and target.coefficient is not None:
            result.grad_setting = -(target.row_coefficient * slopes.squeeze(1)).sum()
        return result

    return kernel


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


def _search(parts: list[tuple[Tensor, Tensor]], level: Tensor, beta: float, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    """The level at which the probabilities of all ranks sum to 1, (n, 1): simplex._newton with sums over the ranks.

    Args:
        parts: (rows (m,), d = s - max s (m, K)) of this rank; together they have every row once.
        level: (n, 1) float64, above the solution.
        beta: alpha - 1.
        dtype: of the scores, which is as exact as the search has to be.
        ranks: of the shards.
    """
    eps = torch.finfo(dtype).eps
    tolerance = eps**0.45 if beta <= 0.5 else 8 * eps  # as there
    for _ in range(STEPS):
        own = level.new_zeros(len(level), 2)
        for rows, d in parts:
            own[rows] = torch.cat(simplex._sums(d, level[rows].to(d.dtype), beta, torch.empty_like(d)), 1).double()
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
        found = [_few(part) for part in parts] + ([_wide(wide, scores)] if len(wide) else [])
        own = scores.new_zeros(*labels.shape, 2, dtype=torch.float64)
        for rows, table, _ in found:
            for p in range(labels.shape[1]):
                u = _violations(table, labels[rows, p])
                own[rows, p] = torch.stack([u.sum(1), u.sign_().sum(1)], 1).double()
        sums, sizes = ranks.sum(own).unbind(2)
        sums = torch.where(weights != 0, sums, 1)
        result = Result((weights * sums.log()).sum(1).to(scores.dtype))
        if target.coefficient is not None:
            shares = target.coefficient.double().unsqueeze(1) * weights / sums  # (n, P)
            result.parts = _rankmax_gradient(target, found, labels, shares, sizes, scores.dtype)
        return result

    return kernel


_Part = tuple[Tensor, Tensor, Tensor | None]  # rows, scores and the classes of the columns, None for all


def _few(found: simplex.Candidates) -> _Part:
    return found.rows, found.scores.double(), found.ids


def _wide(rows: Tensor, scores: Tensor) -> _Part:
    return rows, scores if len(rows) == len(scores) else scores[rows], None


def _violations(scores: Tensor, labels: Tensor) -> Tensor:
    """u = max(0, s - s_y + 1)."""
    return (scores - labels.to(scores.dtype).unsqueeze(1)).add_(1).clamp_(min=0)


def _labels(target: RowTarget, scores: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The scores of the positives, +inf where there is none, which has no violator; and their weights, (n, P) each."""
    mine = target.weights != 0
    picked = torch.where(mine, target.pick(scores), 0)
    labels, weights = ranks.sum(torch.stack([picked, target.weights]).double())
    if visible(labels) and (labels == -torch.inf).any():
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    return torch.where(weights != 0, labels, torch.inf).to(scores.dtype), weights


def _rankmax_gradient(
    target: RowTarget, found: list[_Part], labels: Tensor, shares: Tensor, sizes: Tensor, dtype: torch.dtype
) -> list[Dense | Sparse]:
    """share (1_support - m e_y) for every positive: the support of this rank, and its own positives."""
    listed, position = (target.weights != 0).nonzero(as_tuple=True)
    minus = -(shares * sizes)[listed, position].to(dtype)
    parts: list[Dense | Sparse] = []
    for rows, table, ids in found:
        share = shares[rows].to(table.dtype)
        grad = torch.zeros_like(table)
        for p in range(labels.shape[1]):
            grad.addcmul_(_violations(table, labels[rows, p]).sign_(), share[:, p, None])
        if ids is None:
            parts.append(Dense(grad, torch.ones_like(grad[:, 0]), rows))
        else:
            row, column = (grad != 0).nonzero(as_tuple=True)
            parts.append(Sparse(rows[row], ids[row, column], grad[row, column].to(dtype)))
    if target.ids is not None and len(listed):
        parts.append(Sparse(listed, target.ids[listed, position], minus))
    return parts


def _columns(*values: Tensor) -> Tensor:
    """(n, values), in float64: sums of many numbers travel exactly enough for every dtype."""
    return torch.stack([value.double() for value in values], 1)
