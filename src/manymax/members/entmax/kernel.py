"""Entmax of a block of scores, for alpha > 1: losses, and a gradient with few entries where the support is small.

Sparsemax is alpha = 2. With beta = alpha - 1 and d_i = s_i - max s the probabilities of a row are

    p_i = u_i^(1/beta),   u_i = max(0, w + beta d_i),   with w such that sum_i p_i = 1.

The number w is the level of the row; ops/levels.py says how it is found without sorting, and why it is kept as
v = (w - 1) / beta where beta is small. The loss of a row needs Omega*(s) - max s = (sum_i u_i p_i - 1) / alpha - v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine import native, native_library
from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, Sparse, merged, native_rows, triton_rows
from manymax.engine.cost import (
    DOUBLE,
    MARKED,
    SEARCH_STEPS,
    Cost,
    EntryCost,
    NativeCost,
    Shape,
    Way,
    Work,
    exact_cost,
    exact_traffic,
)
from manymax.engine.ranks import Ranks, columns
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.entmax.alpha import read_alpha
from manymax.members.entmax.autograd import omega_slope
from manymax.members.entmax.filter import rule_out_below
from manymax.members.entmax.from_levels import bases_and_probs_, conjugate_of, dense_gradient, grad_alpha
from manymax.members.entmax.level_search import Piece, native_sums, plain_sums, search_levels
from manymax.members.entmax.loss import omega
from manymax.members.entmax.statistics import add_statistics, statistics, wanted_sums
from manymax.members.entmax.unseen import unseen_rows
from manymax.members.softmax.kernel import COST as SOFTMAX_COST
from manymax.members.softmax.kernel import TRITON as SOFTMAX_TRITON
from manymax.members.softmax.kernel import block_softmax, in_one_pass
from manymax.ops import levels, simplex
from manymax.ops.checks import check_finite, visible
from manymax.ops.row_blocks import row_blocks

# At alpha = 1.5 and 2 the powers of the probabilities are products; at any other alpha every step of the search takes a
# logarithm and an exponential of each score.
SIMPLE_COST = exact_cost(
    EntryCost(Work(streamed=2, passes=40), calls=500, plain=2.2),
    sparse=EntryCost(Work(streamed=0.5, passes=1), calls=900, tables=0.1),
    native=NativeCost(Work(streamed=1.5), search=Work(exponentials=1), entry=Work(passes=100)),
)
POWER_COST = exact_cost(
    EntryCost(Work(streamed=2, passes=40, exponentials=14), calls=500, plain=2.2),
    sparse=EntryCost(Work(streamed=0.5, passes=1, exponentials=2), calls=900, tables=0.1),
    native=NativeCost(Work(streamed=1.5), search=Work(exponentials=4), entry=Work(passes=300)),
)
# Exchanges per block: the maximum and a bound of the level; two sums per row in each step of the search; two sums per
# row at its end. Sums travel in float64.
TRAFFIC = exact_traffic(sums=3.0 + SEARCH_STEPS, row=2 * MARKED + (SEARCH_STEPS + 1) * 2 * DOUBLE)


def entmax_cost(shape: Shape, way: Way, alpha: float | Tensor = 1.5) -> Cost:
    """The cost of a step, by the kind of power that alpha takes."""
    number = float(alpha)
    if number == 1:  # the same kernel, and every class in the support
        return SOFTMAX_COST(shape, way)
    return (SIMPLE_COST if number in (1.5, 2.0) else POWER_COST)(shape, way)


def entmax_kernel(alpha: float | Tensor = 1.5) -> Kernel:
    """The kernel of the entmax loss.

    Where the support is small the gradient touches only its classes, so that one of the three matmuls of a dense head
    is left. `alpha` is a number or a scalar tensor; a tensor gets its gradient.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_entmax_loss(input, vectors, torch.tensor([0]), alpha=1.5)
        tensor(0.1844)
    """
    if isinstance(alpha, Tensor) and alpha.ndim:
        raise ArgumentError(f"`alpha` of a head must be a number or a scalar tensor; got shape {tuple(alpha.shape)}.")
    alpha_tensor = read_alpha(alpha)
    number, learned = float(alpha_tensor.detach()), alpha_tensor.requires_grad
    if number == 1 and learned:
        raise ArgumentError("a head has no gradient in `alpha` at alpha = 1; use `entmax_loss` or start above 1.")
    # At alpha = 1 the support is every class and there is no level to search for: softmax has its own kernel.
    run = block_softmax if number == 1 else block_entmax(number, learned)
    undoes_cap = in_one_pass if number == 1 else row_by_row

    # The normalised form of the loss adds Omega(t). The engine passes `setting` only where alpha is learned.
    def omega_at(probs: Tensor, setting: float | Tensor = alpha) -> Tensor:
        return omega(probs, setting)

    rule_out = None if number == 1 else rule_out_below(number)
    triton = SOFTMAX_TRITON if number == 1 else _triton_name(number)
    setting = alpha_tensor if learned else None
    return Kernel(run, setting, omega_at, undoes_cap=undoes_cap, rule_out=rule_out, triton=triton)


def _triton_name(alpha: float) -> str:
    """The name of the Triton kernel of an alpha: one for each kind of power, because a learned alpha moves."""
    if alpha in (1.5, 2.0):
        return f"entmax at alpha = {alpha:g}"
    return f"entmax {'below' if levels.level_is_v(alpha - 1) else 'from'} alpha = {1 + levels.V_BELOW}"


def row_by_row(block: Block) -> bool:
    """Whether kernel.cpp or kernel_triton.py solves the rows of a block, over classes of this process alone."""
    return native_rows(block) or triton_rows(block)


def block_entmax(alpha: float, wants_alpha: bool = False) -> Callable[[Block], BlockResult]:
    """A function from a block of scores to its losses and gradient, for a fixed alpha > 1.

    Rows of small support give a few entries of the gradient, the others a dense table. On one process a row is solved
    while it is in cache; on several every step of the search adds up the sums of all ranks.

    Args:
        alpha: in (1, 2].
        wants_alpha: whether the gradient in alpha is wanted too.
    """
    # The blocks of a call come from the same model: where no row of a block had a small support, the next block
    # probably has none either.
    dense_before = False

    def run(block: Block) -> BlockResult:
        nonlocal dense_before
        if block.filtered is not None:
            return _native_rows(block, block.filtered.positives, alpha, wants_alpha)
        if triton_rows(block):
            from manymax.members.entmax.kernel_triton import block_entmax_triton

            return block_entmax_triton(block, alpha, wants_alpha)
        # Before anything is overwritten; for float rows `pick` is a view of the scores, hence the copy.
        positive_scores = block.target.pick(block.scores).clone()
        if block.level is not None:
            whole = block.ranks.alone
            return (_native_rows if whole else _sharded_native)(block, positive_scores, alpha, wants_alpha)
        if not visible(block.scores):
            return unseen_rows(block, positive_scores, alpha, wants_alpha)
        if not block.ranks.alone:
            return _sharded_rows(block, positive_scores, alpha, wants_alpha)
        result, dense_before = _whole_rows(block, positive_scores, alpha, wants_alpha, dense_before)
        return result

    return run


def _native_rows(block: Block, positive_scores: Tensor, alpha: float, wants_alpha: bool) -> BlockResult:
    """The result of a block with all classes of its rows, by kernel.cpp."""
    filtered = block.filtered
    target, rows = block.target, native.KernelCall(block, count=None if filtered is None else filtered.count)
    level = torch.empty_like(rows.value)
    slopes = torch.empty_like(rows.value) if wants_alpha else None
    entropy, support = wanted_sums(block)
    rows.run(
        "entmax_rows",
        torch.tensor(alpha, dtype=torch.float64),
        level,
        slopes,
        entropy,
        support,
        int(filtered is not None),
    )
    check_finite(rows.maximum)
    inner = target.inner(positive_scores, rows.maximum, block.spread)
    losses = target.total * conjugate_of(rows.value, level, alpha) - inner
    stats = statistics(block, positive_scores, rows.maximum, level, alpha, entropy, support)
    return BlockResult(losses.to(block.scores.dtype), [*rows.parts], grad_alpha(target, slopes), stats)


def _whole_rows(
    block: Block, positive_scores: Tensor, alpha: float, wants_alpha: bool, dense_before: bool
) -> tuple[BlockResult, bool]:
    """The result of a block with all classes of its rows, and whether the supports of all its rows are large."""
    target, scores = block.target, block.scores
    narrow, wide_rows, maximum = _candidates(scores, alpha, dense_before)
    check_finite(maximum)
    # Omega*(s) - max s and the offset max s are kept apart: their sum would round small losses away.
    conjugate, slopes = torch.zeros_like(maximum), torch.zeros_like(maximum, dtype=torch.float64)
    alpha_tensor = torch.tensor(alpha, dtype=torch.float64)
    result = BlockResult(positive_scores.new_zeros(0))
    log_top, (entropy, support) = torch.zeros_like(maximum, dtype=torch.float64), wanted_sums(block)
    for candidates in narrow:
        # Few numbers, so that float64 costs nothing: p - t keeps its digits where p is close to t.
        probs, log_top[candidates.rows], values = simplex.solve_candidates(candidates, alpha)
        conjugate[candidates.rows] = values.to(scores.dtype)
        add_statistics(probs, candidates.rows, entropy, support)
        if wants_alpha:
            slopes[candidates.rows] = omega_slope(probs, alpha_tensor)
        if target.coefficient is not None:
            result.parts.append(support_entries(target[candidates.rows], probs, candidates, block))
    if len(wide_rows):
        # In the dtype of the scores, and in place of them where all rows are wide: a second table of the size of the
        # block costs more than a pass over it, because fresh memory is slow to touch for the first time.
        below_maximum = _below_maximum(scores, maximum, wide_rows)
        probs, log_top[wide_rows], conjugate[wide_rows] = simplex.solve_wide_rows_(below_maximum, alpha)
        add_statistics(probs, wide_rows, entropy, support)
        if wants_alpha:
            slopes[wide_rows] = omega_slope(probs.double(), alpha_tensor)
        if target.coefficient is not None:
            result.parts.append(dense_gradient(target, probs, wide_rows))
    result.losses = target.total * conjugate.squeeze(1) - target.inner(positive_scores, maximum, block.spread)
    result.grad_setting = grad_alpha(target, slopes.squeeze(1) if wants_alpha else None)
    level = levels.level_from_log_top(log_top, alpha - 1).squeeze(1)
    result.stats = statistics(block, positive_scores, maximum, level, alpha, entropy, support)
    return result, len(wide_rows) == scores.shape[0]


def _candidates(scores: Tensor, alpha: float, dense_before: bool) -> tuple[list[simplex.Candidates], Tensor, Tensor]:
    """Candidates of the rows with few, the other rows (m,), and the maxima of all rows (n, 1)."""
    # The search for candidates is a pass over the block and some steps on the maxima of its groups, all for nothing
    # where no row has few. After such a block four rows are tried first: if all of them have many, so does the block.
    if dense_before and len(scores) > 4 and len(simplex.candidates(scores[:4], alpha - 1)[1]) == 4:
        return [], torch.arange(len(scores), device=scores.device), scores.amax(1, keepdim=True)
    return simplex.candidates(scores, alpha - 1)


def _below_maximum(scores: Tensor, maximum: Tensor, rows: Tensor) -> Tensor:
    """d = s - max s of some rows, (m, C'): in place where these are all rows of the block, else in a copy."""
    # The difference comes first in every formula: s + level would be rounded to s where the scores have a large offset.
    return scores.sub_(maximum) if len(rows) == len(scores) else scores[rows].sub_(maximum[rows])


def support_entries(target: RowTarget, probs: Tensor, candidates: simplex.Candidates, block: Block) -> Dense | Sparse:
    """The gradient coefficient (total p - t) of the rows of some candidates, from their probabilities (m, K).

    As entries; as a dense table where t has an entry for every class, with float rows or smoothing.
    """
    dtype = block.scores.dtype
    if target.ids is None or target.share is not None:
        row, column = (probs > 0).nonzero(as_tuple=True)
        table = torch.zeros(len(candidates.rows), block.scores.shape[1], dtype=dtype, device=probs.device)
        table[row, candidates.ids[row, column]] = probs[row, column].to(dtype)
        target.subtract_(table)
        return Dense(table, target.row_coefficient, candidates.rows)
    listed, position = (target.weights != 0).nonzero(as_tuple=True)
    positives, weights = target.ids[listed, position], target.weights[listed, position].double()
    column = _columns_of(candidates.ids, listed, positives, block.scores.numel())
    inside = column >= 0
    values = probs * target.total.double().unsqueeze(1)
    # total p - t in float64, before anything is rounded to the dtype of the scores: near a perfect prediction this
    # difference is all there is. `accumulate` subtracts t from what is there instead of overwriting it.
    values.index_put_((listed[inside], column[inside]), -weights[inside], accumulate=True)
    # Candidates are a superset of the support: those outside of it have p = 0 and drop out here.
    row, column = (values != 0).nonzero(as_tuple=True)
    factor = target.factor.double()
    outside = listed[~inside]
    # A positive outside of the support has p = 0: its entry is -t alone.
    return merged(
        candidates.rows[row],
        candidates.ids[row, column],
        (values[row, column] * factor[row]).to(dtype),
        candidates.rows[outside],
        positives[~inside],
        (-weights[~inside] * factor[outside]).to(dtype),
    )


def _columns_of(ids: Tensor, rows: Tensor, wanted: Tensor, budget: int) -> Tensor:
    """For each l the column in which row rows_l of ids (m, K) holds wanted_l, or -1.

    No more than `budget` comparisons are held at a time.
    """
    # Candidates are in no order, so that each is compared with each positive of its row: with many of both this would
    # need more memory than the block of scores itself.
    step = max(1, budget // ids.shape[1])
    found = []
    for some_rows, some_wanted in zip(rows.split(step), wanted.split(step), strict=True):
        same = ids[some_rows] == some_wanted.unsqueeze(1)
        found.append(torch.where(same.any(1), same.int().argmax(1), -1))
    return torch.cat(found) if found else rows


# Several ranks -----------------------------------------------------------------------------------


def _sharded_native(block: Block, positive_scores: Tensor, alpha: float, wants_alpha: bool) -> BlockResult:
    """The result of a block whose classes are split over ranks, by kernel.cpp; the exchanges are those of torch."""
    target, scores, ranks, beta = block.target, block.scores, block.ranks, alpha - 1
    alpha_tensor = torch.tensor(alpha, dtype=torch.float64)
    top, own = scores.new_empty(len(scores), 1), torch.empty(len(scores), 1, dtype=torch.float64)
    table = scores, *scores.shape, block.num_classes, block.tops
    assert block.level is not None
    native_library.call(block.level, "entmax_bounds", scores, *table, top, own, alpha_tensor, threads=True)
    # A nan on one rank reaches all of them, so that all raise and none waits for the others.
    maximum = ranks.maximum(top)
    check_finite(maximum)
    # u must not change when `top` becomes the maximum of all ranks: w grows by beta times the difference, v by it.
    own = own.to(scores.dtype) + (maximum - top) * (1 if levels.level_is_v(beta) else beta)
    bound, cut = _bound_and_cut(own, beta, ranks)
    inner = target.inner(positive_scores, maximum, block.spread)
    count = native.pack_above(block, maximum, cut)
    sums = native_sums(scores, block.num_classes, count, maximum, alpha_tensor, block.level)
    level = search_levels(sums, bound.double(), scores.dtype, beta, ranks).squeeze(1)
    rows = native.KernelCall(block, maximum, count)
    slopes = torch.empty_like(rows.value) if wants_alpha else None
    entropy, support = wanted_sums(block)
    rows.run("entmax_gradients", alpha_tensor, level.contiguous(), slopes, entropy, support)
    moment, inner = ranks.sum(columns(rows.value, inner)).unbind(1)
    losses = (target.total * conjugate_of(moment, level, alpha) - inner).to(scores.dtype)
    stats = statistics(block, positive_scores, maximum, level, alpha, entropy, support)
    return BlockResult(losses, [*rows.parts], grad_alpha(target, slopes), stats)


def _sharded_rows(block: Block, positive_scores: Tensor, alpha: float, wants_alpha: bool) -> BlockResult:
    """The result of a block whose classes are split over ranks.

    Each rank looks at those of its classes that can be in the support. All ranks get the same sums, so that they find
    the same levels, and each computes the gradient of its own classes.
    """
    target, scores, ranks, beta = block.target, block.scores, block.ranks, alpha - 1
    group_tops = simplex.group_maxima(scores)
    maximum = ranks.maximum(group_tops.amax(1, keepdim=True))
    check_finite(maximum)
    # From above Newton's method stays above the root: six steps on the group maxima give a bound, and need not give the
    # root itself.
    bound, cut = _bound_and_cut(levels.newton_level(group_tops - maximum, beta, steps=6), beta, ranks)
    narrow, wide_rows = simplex.collect(scores, group_tops, maximum, maximum, cut)
    inner = target.inner(positive_scores, maximum, block.spread)
    narrow = [_at_least_one(candidates, scores) for candidates in narrow]
    # Subtracted in the dtype of the scores, where the difference of two nearby numbers is exact, and then widened.
    few = [Piece(found.rows, (found.scores - found.maximum).double()) for found in narrow]
    table = _below_maximum(scores, maximum, wide_rows)
    # Views of `table`, each so small that it stays in cache with its scratch while a step passes over it several times.
    whole = [
        Piece(wide_rows[rows], table[rows])
        for rows in row_blocks(table.shape[0], table.shape[1], simplex.SCORES_PER_BLOCK)
    ]
    level = search_levels(plain_sums(few, whole, beta), bound.double(), scores.dtype, beta, ranks)

    moment, slopes = torch.zeros_like(level), torch.zeros_like(level)
    alpha_tensor = torch.tensor(alpha, dtype=torch.float64)
    result = BlockResult(inner)
    entropy, support = wanted_sums(block)
    for rows, d in few + whole:
        # From here on the pieces, and with them `table`, hold probabilities.
        u, probs = bases_and_probs_(d, level[rows].to(d.dtype), beta)
        # This rank's part of sum u p = sum p^alpha. The sum is in float64: 1 is subtracted from it below.
        moment[rows] = u.mul_(probs).sum(1, keepdim=True, dtype=torch.float64)
        add_statistics(probs, rows, entropy, support)
        if wants_alpha:
            slopes[rows] = omega_slope(probs.double(), alpha_tensor)
    if target.coefficient is not None:
        for found, (rows, probs) in zip(narrow, few, strict=True):
            result.parts.append(support_entries(target[rows], probs, found, block))
        if len(wide_rows):
            result.parts.append(dense_gradient(target, table, wide_rows))
    # The last exchange: what the losses need, sum u p and sum_i t_i (s_i - max s).
    moment, inner = ranks.sum(columns(moment.squeeze(1), inner)).unbind(1)
    result.losses = (target.total * conjugate_of(moment, level.squeeze(1), alpha) - inner).to(scores.dtype)
    result.grad_setting = grad_alpha(target, slopes.squeeze(1) if wants_alpha else None)
    result.stats = statistics(block, positive_scores, maximum, level.squeeze(1), alpha, entropy, support)
    return result


def _bound_and_cut(own: Tensor, beta: float, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A level above the solution, from that of each rank, and the d = s - max s above which classes can be in it.

    A level that is found over the classes of one rank alone is too high, because all other classes are left out of its
    sum. So every rank has an upper bound of the solution, and the lowest of them is the best.

    Args:
        own: (n, 1) the level of this rank.
        beta: alpha - 1.
        ranks: the ranks that share the classes.
    """
    # No level is above that of a single class, p_top = 1. A rank whose classes do not reach a sum of 1 even there, or
    # that has no live class (nan, inf), knows no more than this.
    highest = 0.0 if levels.level_is_v(beta) else 1.0
    bound = -ranks.maximum(-own.nan_to_num(highest, highest, highest).clamp_(max=highest))  # a minimum over ranks
    # u > 0 as a condition on d = s - max s. The bound is in working precision: it is widened by more than its error,
    # so that rounding leaves no class of the support out.
    cut = -1 / beta - (bound + 1e-4) if levels.level_is_v(beta) else -(bound * (1 + 1e-4)) / beta
    return bound, cut


def _at_least_one(candidates: simplex.Candidates, scores: Tensor) -> simplex.Candidates:
    """The candidates; where this rank has none in any of these rows, the first class, whose probability will be 0."""
    if candidates.ids.shape[1]:
        return candidates
    # All classes of this rank are below the cut. One of them spares the sums below the special case of no column.
    ids = candidates.rows.new_zeros(len(candidates.rows), 1)
    return candidates._replace(scores=scores[candidates.rows, :1], ids=ids)
