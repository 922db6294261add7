"""The positives of a block apart from its other classes, for kernels with a sum of its own for each positive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Sparse
from manymax.errors import ArgumentError
from manymax.ops.checks import check_finite, visible


@dataclass(frozen=True)
class Positives:
    """The positives of the rows of a block, of all ranks, after they have been taken out of the table of scores.

    scores: (n, P) float64, 0 where a row has fewer positives.
    weights: (n, P) float64, their target weights; 0 where a row has fewer.
    row, column: (K,) the places, among n and P, of those that this rank holds.
    ids: (K,) their classes, as this rank numbers them.
    """

    scores: Tensor
    weights: Tensor
    row: Tensor
    column: Tensor
    ids: Tensor

    def entries(self, values: Tensor) -> Sparse:
        """Values (n, P) of all positives as entries of the gradient, of those that this rank holds."""
        return Sparse(self.row, self.ids, values[self.row, self.column])

    def check(self, maximum: Tensor) -> None:
        """Raise for nan and +inf, rows without a live class, and masked positives.

        Args:
            maximum: (n, 1) the largest score of each row that is left in the table, over all ranks.
        """
        listed = torch.where(self.weights != 0, self.scores, -torch.inf)
        check_finite(torch.cat([maximum.double(), listed], 1).amax(1))
        if visible(self.scores) and (self.scores == -torch.inf).any():
            raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")


def take_positives_(block: Block) -> Positives:
    """The positives of a block with listed ids; their scores in the table become -inf, as those of masked classes.

    One exchange: every rank gets the scores of all positives. Maxima of groups of classes that came with the scores are
    too large afterwards.
    """
    target, scores = block.target, block.scores
    assert target.ids is not None
    row, column = (target.weights != 0).nonzero(as_tuple=True)
    ids = target.ids[row, column]
    picked = torch.zeros_like(target.weights)
    picked[row, column] = scores[row, ids]
    scores[row, ids] = -torch.inf
    # Exactly one rank holds a positive and the others add 0: the sums are its score and its weight.
    found, weights = block.ranks.sum(torch.stack([picked.double(), target.weights.double()])).unbind(0)
    return Positives(found, weights, row, column, ids)
