"""Blocks of scores to losses and gradients: one kernel for each exact member.

Every loss here is total partition - sum_i t_i values_i with a gradient of the form
coefficient (map - t / total), except for rankmax, whose sums run over the violators of each positive.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine import native as compiled
from manymax.engine.blocks import Block, Dense, Kernel, Result, Sparse
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.entmax.loss import omega_slope
from manymax.members.taylor_softmax.loss import polynomial
from manymax.ops import simplex
from manymax.ops.checks import check_finite

PIECE = 1 << 17  # scores at a time where a block is gone over several times: they and two tables more stay in cache
COMPILED = {1.5: compiled.ENTMAX, 2.0: compiled.SPARSEMAX}  # the alphas that rows.cpp has
MOST_PASSES = 16  # positives of a row; for more, a search for the place of each score is cheaper than a pass each


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
        if block.compiled and alpha in COMPILED and not wants_alpha and compiled.serves(block):
            maximum, conjugate, made = compiled.run(block, COMPILED[alpha])
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


def rankmax_kernel() -> Kernel:
    """Rankmax: sums over the classes above s_y - 1, one cut for each positive."""

    def kernel(block: Block) -> Result:
        target, scores = block.target, block.scores
        if target.ids is None:
            target = _listed(target)
        target, labels = _by_label(target, target.pick(scores))
        masked = bool((labels == -torch.inf).any())
        block = replace(block, target=target)
        if block.compiled and not masked and compiled.serves(block):
            _, losses, made = compiled.run(block, compiled.RANKMAX, labels)
            return Result(losses.to(scores.dtype), made)
        heads = simplex.group_maxima(scores)
        check_finite(heads.amax(1))
        if masked:
            raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
        lowest = labels[:, :1]
        parts, wide = simplex.collect(scores, heads, lowest, lowest, torch.full_like(lowest, -1.0))
        result = Result(scores.new_zeros(scores.shape[0]))
        for found in parts:
            table, part = found.scores.double(), target[found.rows]
            losses, own = _rankmax_(table, part, labels[found.rows].double())
            result.losses[found.rows] = losses.to(scores.dtype)
            if own is not None and part.ids is not None:
                result.parts.append(_rankmax_entries(part.ids, labels[found.rows], found, table, own))
        if len(wide):
            everything = len(wide) == scores.shape[0]
            table, part = (scores, target) if everything else (scores[wide], target[wide])
            result.losses[wide], own = _rankmax_(table, part, labels if everything else labels[wide])
            if own is not None and part.ids is not None:
                table.scatter_add_(1, part.ids, own)
                result.parts.append(Dense(table, torch.ones_like(own[:, 0]), None if everything else wide))
        return result

    return kernel


def _listed(target: RowTarget) -> RowTarget:
    """Bool rows as padded ids."""
    count = (target.weights != 0).sum(1)
    ids = (target.weights != 0).to(torch.uint8).topk(max(1, int(count.max())), dim=1).indices
    return replace(target, ids=ids, weights=target.weights.gather(1, ids))


def _by_label(target: RowTarget, picked: Tensor) -> tuple[RowTarget, Tensor]:
    """The target with the positives of each row by their scores, lowest first, and those scores (n, P).

    What stands for no positive comes last, with +inf, which nothing violates.
    """
    labels, order = torch.where(target.weights != 0, picked, torch.inf).sort(1)
    ids = None if target.ids is None else target.ids.gather(1, order)
    return replace(target, ids=ids, weights=target.weights.gather(1, order)), labels


def _rankmax_entries(ids: Tensor, labels: Tensor, found: simplex.Candidates, table: Tensor, own: Tensor) -> Sparse:
    """The entries of the table (n, K) over the candidates, and those of the positives, (n, P)."""
    row, column = (table != 0).nonzero(as_tuple=True)
    listed, position = (labels < torch.inf).nonzero(as_tuple=True)
    return _merged(
        found.rows[row],
        found.ids[row, column],
        table[row, column].to(labels.dtype),
        found.rows[listed],
        ids[listed, position],
        own[listed, position].to(labels.dtype),
    )


def _rankmax_(scores: Tensor, target: RowTarget, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Losses (n,), and with a_p = coefficient weight_p / S_p what the positives get for themselves, -a_p m_p, (n, P).

    sum_p a_p 1[s > s_p - 1] takes the place of the scores (n, K).
    """
    weights, losses = target.weights.to(scores.dtype), scores.new_zeros(len(scores))
    factors = None if target.coefficient is None else target.coefficient.to(scores.dtype).unsqueeze(1) * weights
    own = None if factors is None else torch.zeros_like(labels)
    for rows, most in _pieces(labels, scores.shape[1]):
        part, some = scores[rows], labels[rows, :most]
        sums_of = _sums_by_passes_ if most <= MOST_PASSES else _sums_by_buckets_
        sums, extra = sums_of(part, some, None if factors is None else factors[rows, :most])
        losses[rows] = (weights[rows, :most] * sums.log()).sum(1)
        if own is not None and extra is not None:
            own[rows, :most] = extra
            if isinstance(rows, Tensor):  # then `part` is a copy
                scores[rows] = part
    return losses, own


def _pieces(labels: Tensor, classes: int) -> list[tuple[slice | Tensor, int]]:
    """Rows that stay in cache, and their largest number of positives: rows of about as many go together."""
    count = (labels < torch.inf).sum(1).clamp(min=1)
    if bool((count == count[:1]).all()):
        return [(rows, int(count[0])) for rows in simplex.row_blocks(len(labels), classes, PIECE)]
    parts = count.argsort(stable=True).split(max(1, PIECE // max(1, classes)))
    return [(rows, int(count[rows[-1]])) for rows in parts]


def _sums_by_passes_(scores: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """S_p and -a_p m_p, (n, P) each, and the scores overwritten: a pass over them for each positive."""
    single = labels.shape[1] == 1
    room, table = (scores, scores) if single else (torch.empty_like(scores), torch.zeros_like(scores))
    sums, sizes = [], []
    for p, label in enumerate(labels.split(1, 1)):
        # the difference comes first: s_p - 1 would be rounded to s_p where scores are large
        violation = torch.sub(scores, label, out=room).add_(1).clamp_(min=0)
        sums.append(violation.sum(1, keepdim=True).clamp_(min=1))  # 1 is the positive's own; a missing one has 0
        if factors is not None:
            share = factors[:, p : p + 1] / sums[-1]
            sizes.append(violation.sign_().sum(1, keepdim=True))
            violation.mul_(share) if single else table.addcmul_(violation, share)
    total = torch.cat(sums, 1)
    if factors is None:
        return total, None
    if not single:
        scores.copy_(table)
    return total, -factors / total * torch.cat(sizes, 1)


def _sums_by_buckets_(scores: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same in one pass for all positives: every score falls between two of the sorted cuts s_p - 1.

    Sums over what is above a cut are then sums over buckets. In float64, because they are large and cancel.
    """
    maximum = scores.amax(1, keepdim=True).double()
    d, (cuts, order) = scores.double() - maximum, (labels.double() - maximum - 1).sort(1)
    bucket = torch.searchsorted(cuts, d)  # how many cuts are below
    empty = d.new_zeros(len(d), cuts.shape[1] + 1)
    sizes = _from_the_right(empty.scatter_add(1, bucket, d.new_ones(()).expand_as(d)))
    sums = _from_the_right(empty.scatter_add(1, bucket, d)) - sizes * cuts.clamp(max=0)
    sums.clamp_(min=1)
    back = order.argsort(1)
    if factors is None:
        return sums.gather(1, back).to(scores.dtype), None
    shares = factors.double().gather(1, order) / sums
    steps = torch.nn.functional.pad(shares.cumsum(1), (1, 0)).to(scores.dtype)
    torch.gather(steps, 1, bucket, out=scores)
    own = -shares * sizes
    return sums.gather(1, back).to(scores.dtype), own.gather(1, back).to(scores.dtype)


def _from_the_right(buckets: Tensor) -> Tensor:
    """(n, P): the sums over the buckets right of each cut, from (n, P + 1)."""
    return buckets[:, 1:].flip(1).cumsum(1).flip(1)
