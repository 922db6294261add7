"""SL@K of a block of scores: softmax with gated target weights, and what the gates add to the gradient.

    loss      sum_i t_i w_i (log Z - s_i)
    gradient  that of softmax with the target weights t_i w_i, and t_i w_i (1 - w_i) / tau (log Z - s_i) at positives

So the kernel of softmax does the work over all classes, on one rank or on many, in torch or in native code.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from manymax.engine.blocks import Block, BlockResult, Kernel, Sparse
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, Work, exact_cost
from manymax.engine.list_bound import list_traffic
from manymax.engine.positives import listed_places
from manymax.engine.statistics import target_statistics
from manymax.members.softmax.kernel import block_softmax

COST = exact_cost(EntryCost(Work(exponentials=1, passes=2), calls=90, plain=3))
# Softmax's two exchanges per block, one for the K largest scores of every rank and one for the gated totals of rows.
TRAFFIC = list_traffic(sums=4, row=MARKED + 3 * DOUBLE, k=20)


# A gate below this is closed: the kernel of softmax divides sums of exponentials by the total of the gated weights, and
# the quotient must stay below the largest number of float32.
LEAST_GATE = 1e-30


def sl_at_k_kernel(k: int = 20, gate_temperature: float = 10.0) -> Kernel:
    """The kernel of SL@K.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_sl_at_k_loss(input, vectors, torch.tensor([1]), k=1, gate_temperature=0.5)
        tensor(0.2702)
    """

    def run(block: Block) -> BlockResult:
        target, dtype = block.target, block.scores.dtype
        bound = block.row_bound.double()
        # Before anything is overwritten. Few numbers, so that float64 costs little.
        positive, picked = target.weights != 0, target.pick(block.scores).double()
        picked = torch.where(positive, picked, 0)
        gates = torch.sigmoid((picked - bound) / gate_temperature)
        gates = torch.where(positive & (gates > LEAST_GATE), gates, 0)
        weights = target.weights * gates.to(dtype)
        gated = replace(target, weights=weights, total=block.ranks.sum(weights.sum(1).double()).to(dtype))
        # A soft cap is undone outside, for the entries below as well as for the table.
        inner = replace(block.keywords, softcap=None)
        result = block_softmax(replace(block, target=gated, keywords=inner))
        assert result.log_sums is not None
        nll = result.log_sums - picked
        if block.keywords.stats:
            # Statistics are those of the positives as they were given.
            found = target_statistics(block.keywords.stats, target, -nll, block.ranks.sum)
            result.stats |= {name: value.to(dtype) for name, value in found.items()}
        if target.coefficient is None:
            return result
        losses = nll
        if block.keywords.z_loss > 0:  # not as a term of 0: the square of an extreme log Z is infinite
            losses = nll + block.keywords.z_loss * result.log_sums.square()
        slopes = gates * (1 - gates) / gate_temperature
        values = target.coefficient.double().unsqueeze(1) * target.weights * torch.where(slopes > 0, slopes * losses, 0)
        row, column = listed_places(torch.where(positive, values, 0))
        # Without ids the weights cover all classes in order.
        classes = column if target.ids is None else target.ids[row, column]
        result.parts.append(Sparse(row, classes, values[row, column].to(dtype)))
        return result

    # The kernels of softmax do the work, and a name of its own has the whole of it checked on a device.
    return Kernel(run, list_length=k, triton="sl_at_k")
