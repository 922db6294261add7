"""The positives of a sampled head, one row for each, and the log q of what was drawn for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.target import Target
from manymax.ops.matches import Matches
from manymax.samplers.base import Draw


class PositivePairs(NamedTuple):
    """One row per positive: the row of its query, its class and its weight, (M,) each.

    The losses on drawn scores are losses of one positive, so that a query with P positives becomes P rows.
    """

    rows: Tensor
    classes: Tensor
    weights: Tensor

    @property
    def owner(self) -> Tensor | None:
        """`rows` if some query has more than one positive; None if every pair has a query of its own."""
        # Pairs come row after row, so that two positives of one query are neighbours.
        return self.rows if (self.rows[1:] == self.rows[:-1]).any() else None


def read_positive_pairs(read: Target, row_weight: Tensor | None = None) -> PositivePairs:
    """The positives of a target, row after row, without the rows of weight 0."""
    # A weight of 0 stands for padding, or for a class with a class weight of 0: neither needs a draw.
    counts = read.weights != 0
    if row_weight is not None:
        counts &= (row_weight != 0).unsqueeze(1)
    rows, column = counts.nonzero(as_tuple=True)
    classes = column if read.ids is None else read.ids[rows, column]
    return PositivePairs(rows, classes, read.weights[rows, column])


def log_q_of(draw: Draw, num_classes: int) -> tuple[Tensor | float, Tensor | float]:
    """log q of the positives and of the negatives; that of a uniform proposal where the sampler knows none."""
    uniform = -math.log(num_classes)
    return uniform if draw.log_q_target is None else draw.log_q_target, uniform if draw.log_q is None else draw.log_q


def shift_of(draw: Draw, batch: int) -> Tensor | None:
    """log(k' / k), (M,), to be added to log q of the M = `batch` positives and of their negatives; None for 0.

    The losses subtract log(k q), with k the number of columns. Among in-batch negatives the positives of a query itself
    are columns but no draws, so that only k' < k columns are. This makes the losses subtract log(k' q), as they should.
    """
    if draw.source_row is None:
        return None
    if draw.shared:
        own = Matches(draw.source_row).count(draw.owners(batch))
    else:
        own = (draw.source_row == draw.owners(batch).unsqueeze(-1)).sum(-1)
    share = 1 - own.double() / draw.ids.shape[-1]
    # A query to which all columns belong has no draws: no shift.
    shift = torch.where(share > 0, share, 1).log()
    return shift if draw.log_q is None else shift.to(draw.log_q.dtype)
