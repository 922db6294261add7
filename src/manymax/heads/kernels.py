"""Blocks of scores to losses and gradients: one kernel for each exact member.

Every loss here is total partition - sum_i t_i values_i with a gradient of the form
coefficient (map - t / total), except for rankmax, whose sums run over the violators of each positive.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.heads.blocks import Block, Dense, Kernel, Result, Sparse
from manymax.heads.target import RowTarget
from manymax.losses.entmax import omega_slope
from manymax.losses.taylor_softmax import polynomial
from manymax.ops import simplex
from manymax.ops.checks import check_finite


def softmax_kernel() -> Kernel:
    """Softmax in place. With i the likeliest listed class log Z - s_i = -log p_i, which no offset costs its digits."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        counts = (target.total != 0).unsqueeze(1)
        picked = target.pick(scores).clone()
        top = scores.amax(1, keepdim=True) if target.ids is None else torch.empty(0)
        probs = torch.softmax(scores, 1, out=scores)
        if target.ids is None:
            listed = top_prob = probs.amax(1, keepdim=True)
        else:
            listed = target.pick(probs)
            top_prob, best = torch.where(target.weights != 0, listed, -1.0).max(1, keepdim=True)
            top = picked.gather(1, best)
        partition = -top_prob.clamp(min=0).log()
        # no digits left, or nan: these rows once more
        lost = (~(top_prob > 1e-30) & counts | listed.isnan().any(1, keepdim=True)).squeeze(1)
        if lost.any():
            rows = lost.nonzero().squeeze(1)
            again = block.rescore(rows)
            check_finite(again.amax(1))
            partition[rows] = again.sub_(top[rows]).logsumexp(1, keepdim=True)
        partition, top = torch.where(counts, partition, 0), torch.where(counts, top, 0)
        result = Result(target.total * partition.squeeze(1) - target.inner(picked, top, block.spread))
        if target.coefficient is not None:
            target.subtract_(probs)
            result.parts.append(Dense(probs, target.row_coefficient))
        return result

    return kernel


def entmax_kernel(alpha: float, wants_alpha: bool = False) -> Kernel:
    """Entmax for alpha > 1: rows of small support give a few entries, the others a dense table."""

    dense_before = False

    def kernel(block: Block) -> Result:
        nonlocal dense_before
        target, scores = block.target, block.scores
        picked = target.pick(scores).clone()
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
    return _merged(
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


def _merged(*columns: Tensor) -> Sparse:
    """Two lists of entries as one."""
    return Sparse(*(torch.cat([columns[i], columns[i + 3]]) for i in range(3)))


def taylor_kernel(order: int) -> Kernel:
    """Taylor-softmax: f'(s) / F - t f'(s) / f(s), dense, in place; some rows at a time, which stay in cache."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        scores[:, block.num_classes :] = 0  # the padding is in no sum, and must not spoil the matmuls
        losses = [
            _taylor_rows_(scores[rows, : block.num_classes], target[rows], order)
            for rows in simplex.row_blocks(*scores.shape)
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
        target.subtract_(scores, slope.div_(terms).to(scores.dtype))
    spread = None if target.class_weight is None else terms.log_().mul_(target.class_weight).sum(1)
    return -target.inner(picked, total.log(), spread).to(scores.dtype)


def taylor_exp_slope(scores: Tensor, order: int) -> Tensor:
    """f'(s), the Taylor polynomial of one order less."""
    return polynomial(torch.where(scores > -torch.inf, scores, 0), order - 1)


def rankmax_kernel() -> Kernel:
    """Rankmax: sums over the classes above s_y - 1, one cut for each positive."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        if target.ids is None:
            target = _listed(target)
        wanted = target.weights != 0
        labels = torch.where(wanted, target.pick(scores), torch.inf)  # (n, P); a missing positive has no violator
        heads = simplex.group_maxima(scores)
        check_finite(heads.amax(1))
        if (labels == -torch.inf).any():
            raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
        lowest = labels.amin(1, keepdim=True)
        parts, wide = simplex.collect(scores, heads, lowest, lowest, torch.full_like(lowest, -1.0))
        result = Result(scores.new_zeros(scores.shape[0]))
        for found in parts:
            part, losses = _rankmax_few(target[found.rows], labels[found.rows], found, scores.dtype)
            result.losses[found.rows] = losses
            if part is not None:
                result.parts.append(part)
        if len(wide):
            everything = len(wide) == scores.shape[0]
            table = scores if everything else scores[wide]
            dense, losses = _rankmax_wide(target[wide], table, labels[wide])
            result.losses[wide] = losses
            if dense is not None:
                result.parts.append(replace(dense, rows=None if everything else wide))
        return result

    return kernel


def _listed(target: RowTarget) -> RowTarget:
    """Bool rows as padded ids."""
    count = (target.weights != 0).sum(1)
    ids = (target.weights != 0).to(torch.uint8).topk(max(1, int(count.max())), dim=1).indices
    return replace(target, ids=ids, weights=target.weights.gather(1, ids))


def _rankmax_few(
    target: RowTarget, labels: Tensor, found: simplex.Candidates, dtype: torch.dtype
) -> tuple[Sparse | None, Tensor]:
    scores = found.scores.double()
    losses, table, minus = scores.new_zeros(len(scores)), torch.zeros_like(scores), []
    for p in range(labels.shape[1]):
        weight = target.weights[:, p].double()
        violation = (scores - labels[:, p, None].double()).add_(1).clamp_(min=0)
        total = torch.where(weight != 0, violation.sum(1), 1)
        losses += weight * total.log()
        if target.coefficient is None:
            continue
        share = target.coefficient.double() * weight / total
        support = violation.sign_()
        table.addcmul_(support, share.unsqueeze(1))
        minus.append(-share * support.sum(1))
    if target.coefficient is None or target.ids is None:
        return None, losses.to(dtype)
    row, column = (table != 0).nonzero(as_tuple=True)
    listed, position = (target.weights != 0).nonzero(as_tuple=True)
    merged = _merged(
        found.rows[row],
        found.ids[row, column],
        table[row, column].to(dtype),
        found.rows[listed],
        target.ids[listed, position],
        torch.stack(minus, 1)[listed, position].to(dtype),
    )
    return merged, losses.to(dtype)


def _rankmax_wide(target: RowTarget, scores: Tensor, labels: Tensor) -> tuple[Dense | None, Tensor]:
    """Overwrites `scores` if there is one positive per row."""
    losses = scores.new_zeros(scores.shape[0])
    single = labels.shape[1] == 1
    table = scores if single else torch.zeros_like(scores)
    scratch = scores if single else torch.empty_like(scores)
    for p in range(labels.shape[1]):
        weight = target.weights[:, p]
        violation = torch.sub(scores, labels[:, p, None], out=scratch).add_(1).clamp_(min=0)
        total = torch.where(weight != 0, violation.sum(1), 1)
        losses += weight * total.log()
        if target.coefficient is None:
            continue
        share = target.coefficient * weight / total
        support = violation.sign_()
        support.scatter_add_(1, target.ids[:, p, None], -support.sum(1, keepdim=True))  # type: ignore[index]
        if single:
            return Dense(support, share), losses
        table.addcmul_(support, share.unsqueeze(1))
    if target.coefficient is None:
        return None, losses
    return Dense(table, torch.ones_like(losses)), losses
