"""Rankmax of a block of scores: for each positive a sum over the classes above its cut s_y - 1.

With u_j = max(0, s_j - s_y + 1), S = sum_j u_j and m the number of classes with u_j > 0 the loss of a positive y is
log S and its gradient (1[u > 0] - m e_y) / S. Unlike the threshold of entmax, the cut needs no search: it is known as
soon as the score of the positive is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from manymax.engine import native, native_library
from manymax.engine.blocks import (
    Block,
    BlockResult,
    Dense,
    Kernel,
    Sparse,
    merged,
    native_rows,
    piece_size,
    triton_rows,
)
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, NativeCost, Work, exact_cost, exact_traffic
from manymax.engine.positives import listed_places
from manymax.engine.ranks import Ranks
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.rankmax.best import BestOfRows, take_best_
from manymax.members.rankmax.cut_sums import sums_by_buckets_, sums_by_passes_
from manymax.members.rankmax.saturation import log_scale, saturation
from manymax.ops import simplex
from manymax.ops.checks import check_finite, visible
from manymax.ops.row_blocks import row_blocks

# Up to so many positives in a row a pass over its scores for each of them is cheaper than one pass in which every score
# is searched for among the sorted cuts.
MOST_PASSES = 16

COST = exact_cost(
    EntryCost(Work(streamed=8), calls=150, plain=5.5, each=True),
    sparse=EntryCost(Work(streamed=3), calls=500, tables=0.1),
    # A pass over the scores for each positive, and one more to write its part of the gradient.
    native=NativeCost(Work(streamed=1.5), search=Work(streamed=1), each=Work(passes=2.5), entry=Work(passes=100)),
)
# Three exchanges per block: the maxima, in which every rank sees a nan of any other; for each positive its score and
# weight; for each positive the sum S of the violations and their number m. Sums travel in float64.
TRAFFIC = exact_traffic(sums=3, row=MARKED, each=4 * DOUBLE)


def rankmax_kernel(k: int = 1) -> Kernel:
    """The kernel of the rankmax loss.

    Where few classes come within 1 of a positive the gradient touches only these, so that one of the three matmuls of
    a dense head is left.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_rankmax_loss(input, vectors, torch.tensor([1]))
        tensor(0.9163)
    """
    if k == 1:
        return Kernel(lambda block: _run(block, block_rankmax), undoes_cap=_row_by_row, triton="rankmax")
    # With k > 1 the sums come before what follows from them, as on several ranks.
    return Kernel(lambda block: _run(block, partial(_rows_by_sums, k=k)))


def _row_by_row(block: Block) -> bool:
    """Whether kernel.cpp or kernel_triton.py solves the rows of a block, over classes of this process alone."""
    return native_rows(block) or triton_rows(block)


def _run(block: Block, rows_of: Callable[[Block], BlockResult]) -> BlockResult:
    """The result of a block with its statistics: the loss of a positive i is -log p_i."""
    result = rows_of(block)
    if "nll" in block.keywords.stats:
        result.stats["nll"] = result.losses / block.target.total
    return result


def block_rankmax(block: Block) -> BlockResult:
    """Losses and gradient of a block of scores: a few entries where few classes are above the lowest cut."""
    if not block.ranks.alone:
        return _rows_by_sums(block)
    target, scores = block.target, block.scores
    target, labels = _sorted_positives(target, target.pick(scores))
    block = replace(block, target=target)
    if block.triton:
        from manymax.members.rankmax.kernel_triton import block_rankmax_triton

        return block_rankmax_triton(block, target, labels)
    if not visible(scores):
        return _unseen_rows(block, labels)
    masked = bool((labels == -torch.inf).any())
    # kernel.cpp takes a masked positive for one with the cut -inf, above which is every class: it is refused below.
    if not masked and block.level is not None:
        rows = native.KernelCall(block)
        rows.run("rankmax_rows", labels.contiguous())
        check_finite(rows.maximum)
        return BlockResult(rows.value.to(scores.dtype), [*rows.parts])
    group_tops = simplex.group_maxima(scores)
    # A row of nan or without a live class is reported as such, before a masked positive that may follow from it.
    check_finite(group_tops.amax(1))
    if masked:
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    # The lowest positive has the lowest cut, so that its candidates hold those of all other positives of the row. A row
    # without a positive has the cut +inf and no candidate.
    lowest = labels[:, :1]
    narrow, wide_rows = simplex.collect(scores, group_tops, lowest, lowest, torch.full_like(lowest, -1.0))
    result = BlockResult(scores.new_zeros(scores.shape[0]))
    for candidates in narrow:
        # Few numbers, so that float64 costs little.
        table, part = candidates.scores.double(), target[candidates.rows]
        losses, own = _to_gradient_(table, part, labels[candidates.rows].double())
        result.losses[candidates.rows] = losses.to(scores.dtype)
        if own is not None:
            result.parts.append(_entries(part, labels[candidates.rows], candidates, table, own))
    if len(wide_rows):
        everything = len(wide_rows) == scores.shape[0]
        table, part = (scores, target) if everything else (scores[wide_rows], target[wide_rows])
        result.losses[wide_rows], own = _to_gradient_(table, part, labels if everything else labels[wide_rows])
        if own is not None:
            assert part.ids is not None
            table.scatter_add_(1, part.ids, own)
            # The coefficients of the rows are in the table already: they differ between the positives of a row.
            result.parts.append(Dense(table, torch.ones_like(own[:, 0]), None if everything else wide_rows))
    return result


def _unseen_rows(block: Block, labels: Tensor) -> BlockResult:
    """The result of a block on a device, where nothing is looked at: passes over whole rows."""
    target, scores = block.target, block.scores
    losses, own = _to_gradient_(scores, target, labels)
    if own is None:
        return BlockResult(losses)
    assert target.ids is not None
    scores.scatter_add_(1, target.ids, torch.where(target.weights != 0, own, 0))
    return BlockResult(losses, [Dense(scores, torch.ones_like(losses))])


def _sorted_positives(target: RowTarget, positive_scores: Tensor) -> tuple[RowTarget, Tensor]:
    """The target with the positives of each row sorted by score, lowest first, and those scores, the labels (n, P).

    Padding comes last, with the label +inf, which no class violates.
    """
    assert target.ids is not None  # the engine lists the positives of a member that needs its label
    labels, permutation = torch.where(target.weights != 0, positive_scores, torch.inf).sort(1)
    ids, weights = target.ids.gather(1, permutation), target.weights.gather(1, permutation)
    return replace(target, ids=ids, weights=weights), labels


def _entries(target: RowTarget, labels: Tensor, candidates: simplex.Candidates, table: Tensor, own: Tensor) -> Sparse:
    """The gradient as entries: the table (m, K) over the candidates, and `own` (m, P) of the positives."""
    assert target.ids is not None
    row, column = (table != 0).nonzero(as_tuple=True)
    listed, position = (labels < torch.inf).nonzero(as_tuple=True)
    # A positive has an entry in both lists. They are not merged: whoever sums the entries adds the two.
    return merged(
        candidates.rows[row],
        candidates.ids[row, column],
        table[row, column].to(labels.dtype),
        candidates.rows[listed],
        target.ids[listed, position],
        own[listed, position].to(labels.dtype),
    )


def _to_gradient_(scores: Tensor, target: RowTarget, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Losses (n,), and the gradient in place of the scores (n, K), but for the positives' own part.

    With a_p = coefficient weight_p / S_p, where S_p is the sum of the violations of positive p and m_p their number,
    the scores become sum_p a_p 1[s > s_p - 1]. The positives' own part, -a_p m_p, is returned as (n, P); None if no
    gradient is wanted.
    """
    weights, losses = target.weights.to(scores.dtype), scores.new_zeros(len(scores))
    factors = None if target.coefficient is None else target.coefficient.to(scores.dtype).unsqueeze(1) * weights
    own = None if factors is None else torch.zeros_like(labels)
    for rows, most in _pieces(labels, scores):
        part, part_labels = scores[rows], labels[rows, :most]
        sums_of = sums_by_passes_ if most <= MOST_PASSES else sums_by_buckets_
        sums, own_part = sums_of(part, part_labels, None if factors is None else factors[rows, :most])
        losses[rows] = (weights[rows, :most] * sums.log()).sum(1)
        if own is not None and own_part is not None:
            own[rows, :most] = own_part
            if isinstance(rows, Tensor):  # indexing by a tensor copies: `part` is no view of the scores
                scores[rows] = part
    return losses, own


def _pieces(labels: Tensor, scores: Tensor) -> list[tuple[slice | Tensor, int]]:
    """Rows that fit into cache together, and the largest number of positives among them.

    Every row of a piece pays for that number, so that rows with about as many positives go together.
    """
    classes, size = scores.shape[1], piece_size(scores)
    if not visible(labels):  # on a device the counts are not looked at
        return [(rows, labels.shape[1]) for rows in row_blocks(len(labels), classes, size)]
    count = (labels < torch.inf).sum(1).clamp(min=1)
    if bool((count == count[:1]).all()):
        # The usual case, one positive per row: slices, which copy nothing.
        return [(rows, int(count[0])) for rows in row_blocks(len(labels), classes, size)]
    parts = count.argsort(stable=True).split(max(1, size // max(1, classes)))
    return [(rows, int(count[rows[-1]])) for rows in parts]


# Several ranks, and k > 1 -------------------------------------------------------------------------


def _rows_by_sums(block: Block, k: int = 1) -> BlockResult:
    """The result of a block whose classes are split over ranks: each sums over its own, then the sums are added up.

    With k > 1 the k - 1 best classes of a row are taken out of the table first, and join the sums one by one.
    """
    target, scores, ranks = block.target, block.scores, block.ranks
    # On a device nothing is looked for in groups.
    group_tops = simplex.group_maxima(scores) if block.level is None and visible(scores) else None
    # The first exchange. A nan on one rank reaches all of them, so that all raise and none waits for the others.
    check_finite(ranks.maximum(scores.amax(1) if group_tops is None else group_tops.amax(1)))
    labels, weights, target = _labels_of_all_ranks(target, scores, ranks)
    best = None
    if k > 1:
        best = take_best_(scores, k - 1, ranks)
        group_tops = None if group_tops is None else simplex.group_maxima(scores)
        block = replace(block, tops=None)  # a maximum may have been one of the best
    if block.level is not None:
        return _native_by_sums(replace(block, target=target), labels, weights, best)
    lowest = labels[:, :1]
    narrow: list[simplex.Candidates] = []
    wide_rows = torch.arange(len(scores), device=scores.device)
    if group_tops is not None:
        cut = torch.full_like(lowest, -1.0)
        narrow, wide_rows = simplex.collect(scores, group_tops, lowest, lowest, cut)
    table = scores if len(wide_rows) == len(scores) else scores[wide_rows]
    # Candidates in float64, because they are few; whole rows as views of `table`, so few at a time that they stay in
    # cache while the sums of all positives are taken.
    pieces = [(candidates.rows, candidates.scores.double()) for candidates in narrow]
    pieces += [
        (wide_rows[rows], table[rows])
        for rows in row_blocks(
            table.shape[0], table.shape[1], simplex.SCORES_PER_BLOCK if visible(table) else piece_size(table)
        )
    ]
    own = scores.new_zeros(*labels.shape, 2, dtype=torch.float64)
    for rows, s in pieces:
        for p in range(labels.shape[1]):
            u = _violations(s, labels[rows, p])
            own[rows, p] = torch.stack([u.sum(1), u.sign_().sum(1)], 1).double()
    # One exchange for all rows and positives of the block. No gradient can be written before it, because the shares
    # need the sums of all ranks: the violations are computed a second time below rather than kept.
    losses, shares, sizes, entries = _losses_and_shares(target, labels, weights, ranks.sum(own), best)
    result = BlockResult(losses.to(scores.dtype))
    if shares is None:
        return result
    for rows, s in pieces:
        _shares_in_place_(s, labels[rows], shares[rows])
    for candidates, (_, grad) in zip(narrow, pieces, strict=False):  # the other pieces are views of `table`
        row, column = (grad != 0).nonzero(as_tuple=True)
        values = grad[row, column].to(scores.dtype)
        result.parts.append(Sparse(candidates.rows[row], candidates.ids[row, column], values))
    if len(wide_rows):
        ones = torch.ones_like(table[:, 0])
        result.parts.append(Dense(table, ones, None if len(wide_rows) == len(scores) else wide_rows))
    result.parts += [_entries_of_positives(target, -shares * sizes), *entries]
    return result


def _native_by_sums(block: Block, labels: Tensor, weights: Tensor, best: BestOfRows | None) -> BlockResult:
    """`_rows_by_sums` by kernel.cpp, with the same exchanges, from labels and weights of all ranks, (n, P) each."""
    target, scores = block.target, block.scores
    lowest = labels[:, :1].contiguous()
    count = native.pack_above(block, lowest, torch.full_like(lowest, -1.0))
    own = labels.new_zeros(*labels.shape, 2, dtype=torch.float64)
    table = scores, *scores.shape, block.num_classes, count
    assert block.level is not None
    native_library.call(block.level, "rankmax_sums", scores, *table, labels, labels.shape[1], own, threads=True)
    losses, shares, sizes, entries = _losses_and_shares(target, labels, weights, block.ranks.sum(own), best)
    result = BlockResult(losses.to(scores.dtype))
    if shares is None:
        return result
    if best is not None:  # kernel.cpp looks for the positives of this rank in the table
        taken = best.holds(target.ids) & (target.weights != 0)
        entries.append(_entries_of_positives(replace(target, weights=target.weights * taken), -shares * sizes))
        block = replace(block, target=replace(target, weights=target.weights * ~taken))
    rows = native.KernelCall(block, count=count)
    rows.run("rankmax_gradients", labels, shares.contiguous(), sizes.contiguous())
    result.parts += [*rows.parts, *entries]
    return result


def _losses_and_shares(
    target: RowTarget, labels: Tensor, weights: Tensor, sums: Tensor, best: BestOfRows | None
) -> tuple[Tensor, Tensor | None, Tensor, list[Sparse]]:
    """Losses (n,), shares coefficient weight_p / S_p (n, P), None if no gradient is wanted, sizes m_p, and entries.

    Args:
        target: of the rows.
        labels, weights: (n, P) of the positives of all ranks.
        sums: (n, P, 2) S_p and m_p over the classes of all ranks that are in their tables.
        best: the classes that have been taken out, whose gradient is the last result; None where there are none.
    """
    distances, sizes = sums.unbind(2)
    if best is not None:
        found = saturation(best.scores, labels.double(), distances, sizes)
        losses = (weights * torch.where(weights != 0, log_scale(found), 0)).sum(1)
        factor = torch.where((weights != 0) & (found.sums > found.places), weights, 0)
        distances, sizes = torch.where(factor != 0, found.sums, 1), found.sizes
    else:
        distances = torch.where(weights != 0, distances, 1)  # a missing positive has the sum 0, and with 1 the loss 0
        losses, factor = (weights * distances.log()).sum(1), weights
    if target.coefficient is None:
        return losses, None, sizes, []
    shares = target.coefficient.double().unsqueeze(1) * factor / distances
    entries = [] if best is None else [best.entries((shares.unsqueeze(2) * found.counted).sum(1), target.weights.dtype)]
    return losses, shares, sizes, entries


def _labels_of_all_ranks(target: RowTarget, scores: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, RowTarget]:
    """The scores of the positives, lowest first, +inf where there is none, and their weights, (n, P), of all ranks.

    The third result is the target with its positives in the same order; those of other ranks have the weight 0.
    """
    # Exactly one rank holds a positive and the others add 0: the sum carries its score to all of them.
    positive_scores = torch.where(target.weights != 0, target.pick(scores), 0)
    labels, weights = ranks.sum(torch.stack([positive_scores, target.weights]).double())
    if visible(labels) and (labels == -torch.inf).any():
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    # Sorted on every rank, whatever its back end: kernel.cpp needs the order, and the ranks add up sums by position.
    labels, permutation = torch.where(weights != 0, labels, torch.inf).to(scores.dtype).sort(dim=1, stable=True)
    assert target.ids is not None
    ids, own_weights = target.ids.gather(1, permutation), target.weights.gather(1, permutation)
    return labels, weights.gather(1, permutation), replace(target, ids=ids, weights=own_weights)


def _violations(scores: Tensor, labels: Tensor) -> Tensor:
    """u = max(0, s - s_y + 1), (n, K), from scores (n, K) and one label per row (n,)."""
    return (scores - labels.to(scores.dtype).unsqueeze(1)).add_(1).clamp_(min=0)


def _shares_in_place_(scores: Tensor, labels: Tensor, shares: Tensor) -> None:
    """Overwrite scores (n, K) by sum_p share_p 1[u_p > 0]: the gradient but for the positives' own part."""
    # The scores are read once for each positive, so that they are overwritten only at the end.
    grad = torch.zeros_like(scores)
    for p in range(labels.shape[1]):
        grad.addcmul_(_violations(scores, labels[:, p]).sign_(), shares[:, p, None].to(scores.dtype))
    scores.copy_(grad)


def _entries_of_positives(target: RowTarget, values: Tensor) -> Sparse:
    """Entries of those positives that this rank holds, from values (n, P) of all."""
    assert target.ids is not None
    row, position = listed_places(target.weights)
    values = torch.where(target.weights != 0, values, 0)
    return Sparse(row, target.ids[row, position], values[row, position].to(target.weights.dtype))
