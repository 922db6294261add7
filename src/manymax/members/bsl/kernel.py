"""BSL of a block of scores: softmax whose target is the share q of each positive in the soft minimum.

With l_i the softmax losses of the positives of a row, and W the sum of their weights,

    loss      W softmin(l),   softmin(l) = -tau log mean exp(-l_i / tau)
    gradient  W sum_i q_i dl_i,   q the derivative of softmin

Where all positives have the same sum over the classes, q follows from their scores alone: the block is that of softmax
with the target q, and softmin(l) - sum_i q_i l_i is added to its loss. Where each has a sum of its own (`decoupled`,
positives that are excluded), the losses come first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine.blocks import Block, BlockResult, Kernel
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, NativeCost, Work, exact_cost, exact_traffic
from manymax.errors import ArgumentError
from manymax.members.bsl.loss import soft_minimum
from manymax.ops.checks import check_finite, visible

COST = exact_cost(
    EntryCost(Work(exponentials=1), calls=90, plain=2.5),
    native=NativeCost(Work(exponentials=0.8)),
)
# Three exchanges per block: for each positive its score and weight; then those of softmax.
TRAFFIC = exact_traffic(sums=3, row=MARKED + 2 * DOUBLE, each=2 * DOUBLE)


def bsl_kernel(tau: float = 1.0) -> Kernel:
    """The kernel of BSL.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_bsl_loss(input, vectors, torch.tensor([[0, 2]]), tau=0.1)
        tensor(0.4183)
    """
    # Here, because the modules of softmax need those of another member first, which are imported after this one.
    from manymax.members.softmax.kernel import block_softmax, compared_rows, in_one_pass

    def blend(losses: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return soft_minimum(losses, counts, tau)

    def run(block: Block) -> BlockResult:
        if block.keywords.decoupled or block.target.hit is not None:
            return compared_rows(block, blend)
        target = block.target
        scores, counts = _positive_scores(block)
        value, share = soft_minimum(-scores, counts, tau)
        # The weights of the row become factors of its loss and gradient, so that they may have any sign.
        own = torch.where(target.weights != 0, share, 0).to(target.weights.dtype)
        factor = None if target.coefficient is None else target.coefficient * target.total
        total = counts.any(1).to(target.total.dtype)
        result = block_softmax(replace(block, target=replace(target, weights=own, total=total, coefficient=factor)))
        # Both terms are a few differences of scores of the positives: what they have in common cancels in float64.
        rest = value + (share * torch.where(counts, scores, 0)).sum(1)
        result.losses = (target.total * (result.losses + rest)).to(result.losses.dtype)
        return result

    return Kernel(run, undoes_cap=in_one_pass, triton="bsl")


def _positive_scores(block: Block) -> tuple[Tensor, Tensor]:
    """The scores of the positives of all ranks, (n, P) float64, 0 where there are fewer; and where there is one."""
    target, scores = block.target, block.scores
    here = target.weights != 0
    picked = torch.where(here, target.pick(scores), 0)
    # Exactly one rank holds a positive and the others add 0: the sums are its score and its weight.
    found, weights = block.ranks.sum(torch.stack([picked.double(), target.weights.double()])).unbind(0)
    counts = weights != 0
    if visible(scores) and (counts & (found == -torch.inf)).any():
        check_finite(scores.amax(1))  # reported before a masked positive that may follow from it
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    return found, counts
