"""Softmax of a block of scores: losses and gradient, in place."""

from __future__ import annotations

import torch

from manymax.engine.blocks import Block, BlockResult, Dense, Kernel
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.ranks import columns
from manymax.members.softmax.loss import omega
from manymax.ops.checks import check_finite

COST = exact_cost(EntryCost(Work(exponentials=1), calls=150, plain=2.5))
TRAFFIC = exact_traffic(sums=2, row=MARKED + 2 * DOUBLE)  # the maximum; sum exp(s - max) and sum_i t_i (s_i - max)


def softmax_kernel() -> Kernel:
    """The kernel of the softmax loss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.3490)
    """
    return Kernel(block_softmax, omega=omega)


def block_softmax(block: Block) -> BlockResult:
    """Losses and gradient of a block of scores, which the gradient overwrites."""
    return _whole_rows(block) if block.ranks.alone else _parts_of_rows(block)


def _whole_rows(block: Block) -> BlockResult:
    """With i the likeliest listed class log Z - s_i = -log p_i, which no offset of the scores costs its digits.

    One pass for the softmax and a few over single columns: with all classes at hand no maximum is needed.
    """
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
    result = BlockResult(target.total * partition.squeeze(1) - target.inner(picked, top, block.spread))
    if target.coefficient is not None:
        target.subtract_(probs)
        result.parts.append(Dense(probs, target.row_coefficient))
    return result


def _parts_of_rows(block: Block) -> BlockResult:
    """Softmax over this rank's classes, then times its share of the sum over all ranks."""
    target, scores, ranks = block.target, block.scores, block.ranks
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
    partition, inner = ranks.sum(columns(partial.squeeze(1), inner)).unbind(1)
    result = BlockResult((target.total * partition.log() - inner).to(scores.dtype))
    if target.coefficient is not None:
        probs.mul_((partial / partition.unsqueeze(1)).to(scores.dtype))
        target.subtract_(probs)
        result.parts.append(Dense(probs, target.row_coefficient))
    return result
