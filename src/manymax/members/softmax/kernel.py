"""Softmax of a block of scores: losses, and the gradient in place of the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine import native, native_library
from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, Sparse, native_rows, piece_size, triton_rows
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, NativeCost, Work, exact_cost, exact_traffic
from manymax.engine.positives import listed_places, take_positives_
from manymax.engine.ranks import columns
from manymax.engine.statistics import target_statistics
from manymax.errors import ArgumentError
from manymax.members.softmax.loss import omega
from manymax.ops.checks import check_finite, visible

COST = exact_cost(
    EntryCost(Work(exponentials=1), calls=60, plain=2.5),
    native=NativeCost(Work(exponentials=0.8)),
)
# Two exchanges per block. The first carries the row maxima, the second, in float64, two sums per row:
# sum_j exp(s_j - max) and sum_i t_i (s_i - max).
TRAFFIC = exact_traffic(sums=2, row=MARKED + 2 * DOUBLE)

# From the losses of the positives of each row (n, P), and which of them there are, to the loss of the row (n,) and its
# derivative in theirs (n, P).
Blend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# The name of its kernels in kernel_triton.py.
TRITON = "softmax"
# A positive with a probability below this has too few digits left in float32, whose normal numbers end at 1e-38, for
# its logarithm to be the loss.
LEAST_PROBABILITY = 1e-30


def softmax_kernel() -> Kernel:
    """The kernel of the softmax loss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.3490)
    """
    return Kernel(block_softmax, omega=omega, undoes_cap=in_one_pass, triton=TRITON, moved=moved)


def moved(sums: Tensor, mass: Tensor, change: Tensor) -> Tensor:
    """The sums of `_rows_in_parts` (n, 2) relative to maxima that have risen by `change` (n,).

    sum_j exp(s_j - m - change) = exp(-change) sum_j exp(s_j - m)
    sum_i t_i (s_i - m - change) = sum_i t_i (s_i - m) - change sum_i t_i
    """
    partition, inner = sums.unbind(1)
    # Where nothing has been summed yet, the maximum may fall from the 0 that stood for it, and exp overflow.
    partition = torch.where(partition != 0, partition * (-change).exp(), 0)
    return torch.stack([partition, inner - change * mass], 1)


def block_softmax(block: Block) -> BlockResult:
    """Losses (n,) and gradient of a block of scores (n, C'); the gradient overwrites the scores."""
    keywords = block.keywords
    if keywords.decoupled or block.target.hit is not None:
        return compared_rows(block)
    if triton_rows(block):
        from manymax.members.softmax.kernel_triton import block_softmax_triton

        return block_softmax_triton(block)
    # On a device rows in which the positives underflow cannot be looked for: its maximum is known for every row there.
    if not block.ranks.alone or keywords.z_loss > 0 or keywords.stats or not visible(block.scores):
        return _rows_in_parts(block)
    return _native_rows(block) if in_one_pass(block) else _whole_rows(block)


def in_one_pass(block: Block) -> bool:
    """Whether kernel.cpp or kernel_triton.py finishes the rows of a block, over classes of this process alone."""
    keywords = block.keywords
    if block.target.hit is not None or keywords.decoupled:
        return False
    return triton_rows(block) or (native_rows(block) and not (keywords.z_loss > 0 or keywords.stats))


def _native_rows(block: Block) -> BlockResult:
    """The result of a block that holds all classes of its rows, by kernel.cpp: a pass less than in torch."""
    target, rows = block.target, native.KernelCall(block)
    # Before the exponentials overwrite the scores; for float rows `pick` is a view of them, hence the copy.
    positive_scores = target.pick(block.scores).clone()
    rows.run("softmax_rows")
    check_finite(rows.maximum)
    # loss = total (log Z - max s) - sum_i t_i (s_i - max s): only differences of scores.
    inner = target.inner(positive_scores, rows.maximum, block.spread)
    log_sums = (rows.value + rows.maximum.squeeze(1).double()).unsqueeze(1)
    losses = (target.total * rows.value - inner).to(block.scores.dtype)
    return BlockResult(losses, [*rows.parts], log_sums=log_sums)


def _whole_rows(block: Block) -> BlockResult:
    """The result of a block that holds all classes of its rows.

    With b the most probable positive of a row,

        loss = sum_i t_i (log Z - s_i) = total (log Z - s_b) - sum_i t_i (s_i - s_b),   log Z - s_b = -log p_b.

    Only differences of scores are left, so that a large offset of the scores costs no digits.
    """
    target, scores = block.target, block.scores
    has_weight = (target.total != 0).unsqueeze(1)
    # Taken before the softmax overwrites the scores; for float rows `pick` is a view of them, hence the copy.
    positive_scores = target.pick(scores).clone()
    # With float rows any class may be the offset, and the best is the maximum of the row. With listed positives the
    # offset is one of these, which saves a pass over the table for the maximum.
    offset = scores.amax(1, keepdim=True) if target.ids is None else torch.empty(0)
    # In place: the block is the only table that a step holds. Masked classes and the padding are -inf and become
    # exact zeros, so that they add nothing to the products that follow.
    probs = torch.softmax(scores, 1, out=scores)
    if target.ids is None:
        listed = best_prob = probs.amax(1, keepdim=True)
    else:
        listed = target.pick(probs)
        # A weight of 0 pads the list of positives: -1 keeps it from being the best.
        best_prob, best = torch.where(target.weights != 0, listed, -1.0).max(1, keepdim=True)
        offset = positive_scores.gather(1, best)
    best_loss = -best_prob.clamp(min=0).log()
    # Rows in which even the best positive has underflowed, and rows with nan, which come from nan or +inf scores or
    # from a row without a live class. They are rare, so that their scores are computed again rather than kept.
    lost = (~(best_prob > LEAST_PROBABILITY) & has_weight | listed.isnan().any(1, keepdim=True)).squeeze(1)
    if lost.any():
        rows = lost.nonzero().squeeze(1)
        rescored = block.rescore(rows)
        top = rescored.amax(1, keepdim=True)
        check_finite(top)
        # Under full smoothing no listed class has a weight, and the first may be padding at a masked class.
        offset[rows] = torch.where(best_prob[rows] < 0, top, offset[rows])
        best_loss[rows] = rescored.sub_(offset[rows]).logsumexp(1, keepdim=True)
    # A row without a positive, or with positives of class weight 0 alone, has total 0: 0 times inf would be nan.
    best_loss, offset = torch.where(has_weight, best_loss, 0), torch.where(has_weight, offset, 0)
    log_sums = best_loss.double() + offset
    result = BlockResult(target.total * best_loss.squeeze(1) - target.inner(positive_scores, offset, block.spread))
    result.log_sums = log_sums
    if target.coefficient is not None:
        target.subtract_(probs)
        result.parts.append(Dense(probs, target.row_coefficient))
    return result


def _rows_in_parts(block: Block) -> BlockResult:
    """The result of a block whose classes may be split over ranks: each rank has a part of every row.

    Each rank turns its scores into e^(s - m) relative to a maximum m of its own, or into their softmax; a factor of the
    row makes probabilities over the classes of all ranks out of them.
    """
    target, ranks, dtype, in_torch = block.target, block.ranks, block.scores.dtype, block.level is None
    z_loss = block.keywords.z_loss
    # Before anything is overwritten; for float rows `pick` is a view of the scores, hence the copy.
    positive_scores = target.pick(block.scores).clone()
    support = _live_classes(block)
    rank_maximum, rank_sum, moment = _sums(block)
    # First exchange. A nan on one rank wins, so that all ranks raise the same error and none waits for the others.
    maximum = ranks.maximum(rank_maximum)
    check_finite(maximum)
    # Relative to the maximum of all ranks, which every rank knows: the parts of the sum can be added up.
    inner = target.inner(positive_scores, maximum, block.spread)
    # In float64, because the exponential spans many orders of magnitude; 0 where all classes of this rank are masked.
    factor = (rank_maximum - maximum).double().exp().squeeze(1)
    # Second exchange: both sums of a row in one message.
    partition, inner = ranks.sum(columns(factor * rank_sum, inner)).unbind(1)
    log_z = partition.log() + maximum.squeeze(1).double()
    losses = target.total * (partition.log() + z_loss * log_z.square()) - inner
    result = BlockResult(losses.to(dtype), log_sums=log_z.unsqueeze(1))
    if block.keywords.stats:
        share = factor * rank_sum / partition  # of the probability, on this rank
        result.stats = _statistics(block, positive_scores, log_z, share, moment, support)
    if target.coefficient is None:
        return result
    # d (log Z + c (log Z)^2) = (1 + 2 c log Z) p
    share = (factor * rank_sum / partition if in_torch else factor / partition) * (1 + 2 * z_loss * log_z)
    share = share.to(dtype)
    in_table = ranks.alone and not visible(block.scores)  # all of the row is here, and entries would have to be sorted
    if target.ids is not None and target.share is None and not in_table:
        # coefficient (total share e - t): the factor of the row stays outside of the table, and the few positives are
        # entries of their own, because it may be 0 in float32 where another rank holds all of the probability.
        row, column = listed_places(target.weights)
        values = -(target.factor.unsqueeze(1) * target.weights)[row, column]
        result.parts += [
            Dense(block.scores, target.row_coefficient * share),
            Sparse(row, target.ids[row, column], values.to(dtype)),
        ]
        return result
    if not in_table or z_loss > 0:  # else it is 1
        block.scores.mul_(share.unsqueeze(1))
    target.subtract_(block.scores)
    result.parts.append(Dense(block.scores, target.row_coefficient))
    return result


def compared_rows(block: Block, blend: Blend | None = None) -> BlockResult:
    """The result of a block whose positives have sums of their own: `decoupled`, or positives that are excluded.

    With N the classes that are no positives and are not excluded, and K the positives that are not,

        loss = sum_i t_i (log S_i - s_i),   S_i = sum over N + sum over K without i + e^(s_i)

    of exponentials, the last of them unless decoupled.

    The sum over N is taken once per row; all others are sums over the few positives.

    Args:
        block: the scores and their target, with listed positives.
        blend: another function of the losses of the positives than their sum by weights, which are then factors of it.
    """
    target, ranks, dtype, in_torch = block.target, block.ranks, block.scores.dtype, block.level is None
    z_loss, own = block.keywords.z_loss, 0.0 if block.keywords.decoupled else 1.0
    positives = take_positives_(block)
    scores, weights = positives.scores, positives.weights
    without_tops = replace(block, tops=None)  # a maximum may have been that of a positive
    rank_maximum, rank_sum, _ = _sums(without_tops)
    positive = weights != 0
    maximum = ranks.maximum(rank_maximum).double()
    positives.check(maximum)
    top = torch.maximum(maximum, torch.where(positive, scores, -torch.inf).amax(1, keepdim=True))
    top = torch.where(top > -torch.inf, top, 0)
    factor = (rank_maximum.double() - top).exp().squeeze(1)  # 0 where all classes of this rank are left out
    others = ranks.sum(factor * rank_sum).unsqueeze(1)
    each = torch.where(positive, (scores - top).exp(), 0)
    counted = each if target.hit is None else torch.where(target.hit, 0, each)
    sums = others + _sum_without_one(counted) + own * each
    if visible(sums) and (positive & (sums == 0)).any():
        raise ArgumentError(
            "a row has no class left that its positive is compared with: every other one is excluded, or so far below"
            " it that its share is 0 in numbers."
        )
    log_sums = torch.where(positive, sums, 1).log()
    log_z = log_sums + top
    each_loss = torch.where(positive, log_sums - (scores - top) + z_loss * log_z.square(), 0)
    if blend is None:
        losses = (weights * each_loss).sum(1)
    else:
        total = weights.sum(1)
        value, share = blend(each_loss, positive)
        losses, weights = total * value, total.unsqueeze(1) * share
    result = BlockResult(losses.to(dtype), log_sums=log_z)
    if target.coefficient is None:
        return result
    # d loss / d log S_i over S_i: what a class of the sum S_i gets for its exponential
    rate = torch.where(positive, weights * (1 + 2 * z_loss * log_z) / sums, 0)
    gradient = counted * _sum_without_one(rate) + own * each * rate - weights
    coefficient = target.factor.double()
    share = rate.sum(1) * (factor * rank_sum if in_torch else factor)
    result.parts += [
        Dense(block.scores, (coefficient * share).to(dtype)),
        positives.entries((coefficient.unsqueeze(1) * gradient).to(dtype)),
    ]
    return result


def _sum_without_one(values: Tensor) -> Tensor:
    """For each entry of values (n, P) the sum of the others of its row, (n, P)."""
    # Sums from both ends, and not the whole sum minus the entry, which would lose the others where it is much larger.
    zero = values.new_zeros(len(values), 1)
    before = torch.cat([zero, values.cumsum(1)[:, :-1]], 1)
    after = torch.cat([values.flip(1).cumsum(1).flip(1)[:, 1:], zero], 1)
    return before + after


def _live_classes(block: Block) -> Tensor | None:
    """(n,) the number of classes of this rank that are not masked, if it is asked for."""
    if "support" not in block.keywords.stats:
        return None
    return (block.scores[:, : block.num_classes] > -torch.inf).sum(1)


def _statistics(
    block: Block, positive_scores: Tensor, log_z: Tensor, share: Tensor, moment: Tensor | None, support: Tensor | None
) -> dict[str, Tensor]:
    """The statistics of the rows that are asked for.

    Args:
        positive_scores: (n, P) or (n, C) scores of the listed classes.
        log_z: (n,).
        share: (n,) the probability of the classes of this rank.
        moment: (n,) sum_c q_c log q_c, with q the softmax over the classes of this rank; None if nobody needs it.
        support: (n,) live classes of this rank, or None.
    """
    wanted, ranks, dtype = block.keywords.stats, block.ranks, block.scores.dtype
    log_probs = positive_scores.double() - log_z.unsqueeze(1)
    found = target_statistics(wanted, block.target, log_probs, ranks.sum)
    if "log_z" in wanted:
        found["log_z"] = log_z
    if moment is not None:
        # p = share q on this rank: sum p log p = share (sum q log q + log share)
        own = torch.where(share > 0, share * (moment + torch.where(share > 0, share, 1).log()), 0)
        found["entropy"] = -ranks.sum(own)
    found = {name: value.to(dtype) for name, value in found.items()}
    if support is not None:
        found["support"] = ranks.sum(support)
    return found


def _sums(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Maxima (n, 1), sums of exponentials (n,) and sum_c q_c log q_c (n,) over the classes of this rank; see below."""
    if block.triton:
        from manymax.members.softmax.kernel_triton import sum_in_place_triton

        return sum_in_place_triton(block)
    return (_sum_in_place if block.level is None else _native_sum_in_place)(block)


def _native_sum_in_place(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Maxima m (n, 1) and sums of e^(s - m) (n,) over the classes of this rank; e^(s - m) overwrites the scores.

    And sum_c q_c log q_c (n,) of their softmax q, where a statistic needs it.
    """
    assert block.level is not None
    scores = block.scores
    top, total = scores.new_empty(len(scores), 1), torch.empty(len(scores), dtype=torch.float64)
    moment = torch.empty_like(total) if "entropy" in block.keywords.stats else None
    native_library.call(
        block.level,
        "softmax_parts",
        scores,
        scores,
        *scores.shape,
        block.num_classes,
        block.tops,
        top,
        total,
        moment,
        threads=True,
    )
    if moment is not None:
        live = total > 0  # sum e d / Z - log Z of d = s - m; 0 where all classes of this rank are masked
        moment = torch.where(live, moment / torch.where(live, total, 1) - torch.where(live, total, 1).log(), 0)
    return top, total, moment


def _sum_in_place(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in plain torch, but for the scores: they become their softmax, e^(s - m) divided by the sums."""
    looks = visible(block.scores)
    # The place of the maximum spares a device a pass; on a processor a maximum without it is faster.
    maximum, place = (block.scores.amax(1, keepdim=True), None) if looks else block.scores.max(1, keepdim=True)
    probs = torch.softmax(block.scores, 1, out=block.scores)
    masked = (maximum == -torch.inf).squeeze(1)
    if not looks and not block.ranks.alone:
        probs.masked_fill_(masked.unsqueeze(1), 1.0)
    elif looks and masked.any():
        # All classes of the row on this rank are masked, and their softmax is nan. With 1 in place of nan the factor
        # exp(-inf) makes both their share of the partition function and their gradient 0.
        probs[masked] = 1.0
    moment = None
    if "entropy" in block.keywords.stats:
        step = max(1, piece_size(probs) // probs.shape[1])
        moment = -torch.cat([torch.special.entr(piece).sum(1, dtype=torch.float64) for piece in probs.split(step)])
    # Without another pass for the sum: the largest probability is 1 / sum_j exp(s_j - m).
    largest = probs.amax(1) if place is None else probs.gather(1, place).squeeze(1)
    return maximum, 1 / largest.double(), moment
