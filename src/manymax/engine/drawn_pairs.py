"""The positives of a sampled head, one row for each, and the log q of what was drawn for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.sampled_scores import shift_of_misses
from manymax.engine.target import Target
from manymax.ops.matches import Matches
from manymax.samplers.base import Draw


class PositivePairs(NamedTuple):
    """One row per positive: the row of its query, its class, its weight and the number of its pair, (M,) each.

    The losses on drawn scores are losses of one positive, so that a query with P positives becomes P rows.
    """

    rows: Tensor
    classes: Tensor
    weights: Tensor
    ids: Tensor | None = None  # where averages of training pairs are kept

    @property
    def owner(self) -> Tensor | None:
        """`rows` if some query has more than one positive; None if every pair has a query of its own."""
        # Pairs come row after row, so that two positives of one query are neighbours.
        return self.rows if (self.rows[1:] == self.rows[:-1]).any() else None


def read_positive_pairs(
    read: Target, row_weight: Tensor | None = None, pair_ids: Tensor | None = None
) -> PositivePairs:
    """The positives of a target, row after row, without the rows of weight 0."""
    # A weight of 0 stands for padding, or for a class with a class weight of 0: neither needs a draw.
    counts = read.weights != 0
    if row_weight is not None:
        counts &= (row_weight != 0).unsqueeze(1)
    rows, column = counts.nonzero(as_tuple=True)
    classes = column if read.ids is None else read.ids[rows, column]
    numbers = None if pair_ids is None else pair_ids[rows, column].long()
    return PositivePairs(rows, classes, read.weights[rows, column], numbers)


def log_q_of(draw: Draw, num_classes: int) -> tuple[Tensor | float, Tensor | float]:
    """log q of the positives and of the negatives; that of a uniform proposal where the sampler knows none."""
    uniform = -math.log(num_classes)
    return uniform if draw.log_q_target is None else draw.log_q_target, uniform if draw.log_q is None else draw.log_q


def shift_of(draw: Draw, target: Tensor, num_classes: int, misses: bool) -> Tensor | None:
    """log(k' / k), (M,), to be added to log q of the M positives and of their negatives; None for 0.

    The losses subtract log(k q), with k the number of columns. Among in-batch negatives the positives of a query itself
    are columns but no draws, so that only k' < k columns are. This makes the losses subtract log(k' q), as they should.

    Args:
        draw: of M positives.
        target: (M,) the positives.
        num_classes: C.
        misses: whether hits are left out as well: k' is then the number of draws that are none, and q their
            distribution; see `shift_of_misses`.
    """
    if draw.source_row is None and not misses:
        return None
    share = 1 - _unused_columns(draw, target, num_classes, misses).double() / draw.ids.shape[-1]
    if misses and draw.log_q_target is not None:
        shift = shift_of_misses(share, draw.log_q_target)
    else:
        # A query to which all columns belong has no draws: no shift.
        shift = torch.where(share > 0, share, 1).log()
    return shift if draw.log_q is None else shift.to(draw.log_q.dtype)


def _unused_columns(draw: Draw, target: Tensor, num_classes: int, hits: bool) -> Tensor:
    """How many columns of each row are no draws of its own, or are hits if these are left out too, (M,)."""
    owner = draw.owners(len(target))
    if not draw.shared:
        unused = torch.zeros_like(draw.ids, dtype=torch.bool)
        if draw.source_row is not None:
            unused |= draw.source_row == owner.unsqueeze(-1)
        return (unused | draw.hits(target) if hits else unused).sum(-1)
    # Without a table (M, k): what is both is counted by one number for each pair of an owner and a class.
    count = torch.zeros_like(target)
    if draw.source_row is not None:
        count = count + Matches(draw.source_row).count(owner)
    if hits:
        count = count + Matches(draw.ids).count(target)
    if hits and draw.source_row is not None:
        both = Matches(draw.source_row * num_classes + draw.ids)
        count = count - both.count(owner * num_classes + target)
    return count
