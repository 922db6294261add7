"""SigLIP's loss of a block of scores: losses, and the gradient in place of the scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, piece_size
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def siglip_kernel() -> Kernel:
    """The kernel of SigLIP's loss."""
    return Kernel(block_siglip)


def block_siglip(block: Block) -> BlockResult:
    """Losses (n,) and gradient of a block of scores (n, C'); the gradient overwrites the scores.

    With the sign of the positives turned round every entry has the loss softplus(s), of which sigma(s) is the gradient.
    The other way, softplus(s) for all and s_y subtracted, would lose the digits of a small loss at a large s_y.
    """
    target, scores = block.target, block.scores
    _turn_positives_(scores, target)
    losses = scores.new_zeros(len(scores))
    step = max(1, piece_size(scores) // scores.shape[1])
    for start in range(0, len(scores), step):  # in pieces, which stay in cache between the two passes
        piece = scores[start : start + step]
        losses[start : start + step] = _softplus_sums(piece)
        if target.coefficient is not None:
            piece.sigmoid_()  # 0 at -inf: masked entries and the padding add nothing to the products that follow
    # Each rank has sums over its own documents.
    losses = block.ranks.sum(losses)
    if visible(losses) and not losses.isfinite().all():
        raise ArgumentError("`scores` must not hold nan or +inf, nor -inf at a positive; got at least one such row.")
    if target.coefficient is None:
        return BlockResult(losses)
    _turn_positives_(scores, target)
    return BlockResult(losses, [Dense(scores, target.factor)])


def _turn_positives_(scores: Tensor, target: RowTarget) -> None:
    """Turn the signs of the positives of each row, in place."""
    assert target.ids is not None  # listed by `Takes`: no float rows
    if visible(scores):
        row, column = (target.weights != 0).nonzero(as_tuple=True)
        positive = row, target.ids[row, column]
        scores[positive] = -scores[positive]
        return
    # On a device nobody waits for their number: s - 2 s, which is exact, and nothing where a row has fewer.
    own = scores.gather(1, target.ids)
    scores.scatter_add_(1, target.ids, torch.where(target.weights != 0, -2 * own, 0))


def _softplus_sums(scores: Tensor) -> Tensor:
    """The sums of softplus(s) over the rows of scores (n, C'), (n,); 0 for -inf."""
    # Not torch's softplus, which returns s beyond 20 and has an error of 2e-9 there.
    return -logsigmoid(-scores).sum(1)
