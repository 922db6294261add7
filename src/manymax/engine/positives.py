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
    row, column: (K,) the places, among n and P, of those that this rank holds; see `listed_places`.
    ids: (K,) their classes, as this rank numbers them.
    here: (n, P) which positives this rank holds.
    """

    scores: Tensor
    weights: Tensor
    row: Tensor
    column: Tensor
    ids: Tensor
    here: Tensor

    def entries(self, values: Tensor) -> Sparse:
        """Values (n, P) of all positives as entries of the gradient, of those that this rank holds."""
        values = values if visible(values) else torch.where(self.here, values, 0)
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
    here = target.weights != 0
    row, column = listed_places(target.weights)
    ids = target.ids[row, column]
    if visible(scores):
        picked = torch.zeros_like(target.weights)
        picked[row, column] = scores[row, ids]
        scores[row, ids] = -torch.inf
    else:
        picked = torch.where(here, scores.gather(1, target.ids), 0)
        mask_(scores, target.ids, here)
    # Exactly one rank holds a positive and the others add 0: the sums are its score and its weight.
    found, weights = block.ranks.sum(torch.stack([picked.double(), target.weights.double()])).unbind(0)
    return Positives(found, weights, row, column, ids, here)


def listed_places(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns (K,) of the weights (n, P) that are not 0, in order.

    On a device their number is not known to the host, which would wait for it: there all places are listed, and the
    entries of those without a weight must have the value 0.
    """
    if visible(weights):
        row, column = (weights != 0).nonzero(as_tuple=True)
        return row, column
    place, width = torch.arange(weights.numel(), device=weights.device), max(1, weights.shape[1])
    return place // width, place % width


def mask_(scores: Tensor, ids: Tensor, which: Tensor) -> None:
    """Set scores (n, C') to -inf, in place, at those ids (n, P) that are meant, however many they are."""
    # A minimum: +inf leaves a score as it is, and several ids of a row may be the same.
    bound = torch.where(which, -torch.inf, torch.inf).to(scores.dtype)
    scores.scatter_reduce_(1, torch.where(which, ids, 0), bound, "amin")
