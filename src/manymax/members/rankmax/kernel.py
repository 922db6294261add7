"""Rankmax of a block of scores: sums over the classes above s_y - 1, one cut for each positive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import PIECE, Block, BlockResult, Dense, Kernel, Sparse, merged
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.ranks import Ranks
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.ops import simplex
from manymax.ops.checks import check_finite, visible
from manymax.ops.row_blocks import row_blocks

SOURCE = Path(__file__).with_name("kernel.cpp")
MOST_PASSES = 16  # positives of a row; for more, a search for the place of each score is cheaper than a pass each

COST = exact_cost(
    EntryCost(Work(streamed=8), calls=150, plain=5.5, each=True),
    sparse=EntryCost(Work(streamed=3), calls=500, tables=0.1),
)
# for each positive its score and weight, then the sum of the violations and their number
TRAFFIC = exact_traffic(sums=3, row=MARKED, each=4 * DOUBLE)


def rankmax_kernel() -> Kernel:
    """The kernel of the rankmax loss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_rankmax_loss(input, vectors, torch.tensor([1]))
        tensor(0.9163)
    """
    return Kernel(block_rankmax)


def block_rankmax(block: Block) -> BlockResult:
    """Losses and gradient of a block of scores: a few entries where few classes are above the lowest cut."""
    if not block.ranks.alone:
        return _parts_of_rows(block)
    target, scores = block.target, block.scores
    target, labels = _by_label(target, target.pick(scores))
    masked = bool((labels == -torch.inf).any())
    block = replace(block, target=target)
    if not masked and native.serves(block) and native.lists_positives(block):
        _, losses, made = native.run(block, SOURCE, labels=labels)
        return BlockResult(losses.to(scores.dtype), made)
    group_tops = simplex.group_maxima(scores)
    check_finite(group_tops.amax(1))
    if masked:
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    lowest = labels[:, :1]
    parts, wide = simplex.collect(scores, group_tops, lowest, lowest, torch.full_like(lowest, -1.0))
    result = BlockResult(scores.new_zeros(scores.shape[0]))
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
    return merged(
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
        return [(rows, int(count[0])) for rows in row_blocks(len(labels), classes, PIECE)]
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


# Several ranks -----------------------------------------------------------------------------------


def _parts_of_rows(block: Block) -> BlockResult:
    """The same where ranks share the classes: the sums of all rows, one exchange, then the gradient."""
    target, scores, ranks = block.target, block.scores, block.ranks
    compiled = native.serves(block)
    group_tops = None if compiled else simplex.group_maxima(scores)
    check_finite(ranks.maximum(scores.amax(1) if group_tops is None else group_tops.amax(1)))
    labels, weights = _labels(target, scores, ranks)
    lowest = labels.amin(1, keepdim=True)
    cut = torch.full_like(lowest, -1.0)
    if group_tops is None:
        parts, wide = native.collect(scores, block.num_classes, lowest, lowest, cut)
    else:
        parts, wide = simplex.collect(scores, group_tops, lowest, lowest, cut)
    table = scores if len(wide) == len(scores) else scores[wide]
    pieces = [(found.rows, found.scores.double()) for found in parts]
    pieces += [
        (wide[rows], table[rows]) for rows in row_blocks(table.shape[0], table.shape[1], simplex.SCORES_PER_BLOCK)
    ]
    own = scores.new_zeros(*labels.shape, 2, dtype=torch.float64)
    for rows, s in pieces:
        for p in range(labels.shape[1]):
            u = _violations(s, labels[rows, p])
            own[rows, p] = torch.stack([u.sum(1), u.sign_().sum(1)], 1).double()
    sums, sizes = ranks.sum(own).unbind(2)
    sums = torch.where(weights != 0, sums, 1)
    result = BlockResult((weights * sums.log()).sum(1).to(scores.dtype))
    if target.coefficient is None:
        return result
    shares = target.coefficient.double().unsqueeze(1) * weights / sums  # (n, P)
    for rows, s in pieces:
        _to_gradient_(s, labels[rows], shares[rows])
    for found, (_, grad) in zip(parts, pieces, strict=False):
        row, column = (grad != 0).nonzero(as_tuple=True)
        result.parts.append(Sparse(found.rows[row], found.ids[row, column], grad[row, column].to(scores.dtype)))
    if len(wide):
        ones = torch.ones_like(table[:, 0])
        result.parts.append(Dense(table, ones, None if len(wide) == len(scores) else wide))
    result.parts.append(_of_positives(target, -shares * sizes))
    return result


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
