"""Talos of a block of scores: softmax of log h = log sigma(s - b) / tau, and the slope of log h in the scores.

The kernel of softmax does the work, on one rank or on many, in torch or in native code; its gradient is that in log h.
The slope sigma(b - s) / tau turns it into that in the scores. The scores are overwritten by then, so that the slopes
are a second table, of the size of the block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, Listed, Mixed, Sparse, piece_size, triton_rows
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, Work, exact_cost
from manymax.engine.list_bound import list_traffic
from manymax.members.softmax.kernel import block_softmax
from manymax.ops.checks import check_finite
from manymax.ops.row_blocks import row_blocks

COST = exact_cost(EntryCost(Work(exponentials=3, passes=8), calls=120, plain=6))
# Softmax's two exchanges per block, and one for the K largest scores of every rank.
TRAFFIC = list_traffic(sums=3, row=MARKED + 2 * DOUBLE, k=20)


def talos_kernel(k: int = 20, tau: float = 1.0) -> Kernel:
    """The kernel of Talos.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_talos_loss(input, vectors, torch.tensor([1]), k=1)
        tensor(1.1104)
    """

    def run(block: Block) -> BlockResult:
        scores, rescore = block.scores, block.rescore
        bound = block.row_bound
        if _fused(block):
            from manymax.members.softmax.kernel_triton import LogSigmoid, block_softmax_triton

            return block_softmax_triton(block, LogSigmoid(bound, tau))
        if block.target.bound is not None:
            # nan and +inf would pass for a class at the top of the list, where every score is the same. The search for
            # the K-th largest finds them.
            check_finite(block.ranks.maximum(scores.amax(1, keepdim=True)))
        slopes = None if block.target.coefficient is None else torch.empty_like(scores)
        for rows in row_blocks(
            len(scores), scores.shape[1], piece_size(scores)
        ):  # pieces that stay in cache between the passes
            _to_log_h_(scores[rows], bound[rows], tau, None if slopes is None else slopes[rows])

        def rescore_log_h(rows: Tensor) -> Tensor:
            return _to_log_h_(rescore(rows), bound[rows], tau, None)

        # A soft cap is undone outside. The maxima of groups were those of the scores.
        keywords = replace(block.keywords, softcap=None)
        result = block_softmax(replace(block, keywords=keywords, tops=None, rescore=rescore_log_h))
        if slopes is not None:
            result.parts = [_times_slopes(part, slopes) for part in result.parts]
        return result

    return Kernel(run, undoes_cap=_fused, list_length=k, triton="talos")


def _fused(block: Block) -> bool:
    """Whether a Triton kernel takes log h, its softmax and the slopes in one go: one sum per row, all classes here."""
    return triton_rows(block) and block.target.hit is None and not block.keywords.decoupled


def _to_log_h_(scores: Tensor, bound: Tensor, tau: float, slopes: Tensor | None) -> Tensor:
    """log sigma(s - b) / tau in place of scores (n, C'); sigma(b - s) / tau goes to `slopes`.

    A masked class stays at -inf. Its slope is 1 / tau, which multiplies a probability of exactly 0.
    """
    if slopes is not None:
        torch.sub(bound, scores, out=slopes).sigmoid_().div_(tau)
    return torch.div(logsigmoid(scores.sub_(bound)), tau, out=scores)


def _times_slopes(part: Dense | Sparse | Mixed | Listed, slopes: Tensor) -> Dense | Sparse | Mixed | Listed:
    """A part of the gradient in log h as one in the scores; a table is changed in place."""
    if isinstance(part, Sparse):
        return replace(part, values=part.values * slopes[part.rows, part.classes])
    # Softmax gives dense rows, all of them and in order.
    part.table.mul_(slopes)
    return part
