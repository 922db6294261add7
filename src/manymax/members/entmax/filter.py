"""Which classes of a row can be in the support of entmax, from small integers: filter.cpp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.filter import FEW, MOST, Filter
from manymax.engine.native_library import call

# Below, supports are wide in any model that has not been made for the purpose.
LEAST_ALPHA = 1.25


def rule_out_below(alpha: float) -> Callable[[Filter, Tensor, Tensor], Tensor] | None:
    """A function that leaves in rows what can be in the support at this alpha; None where that is too much.

    Args:
        alpha: in (1, 2].

    Returns:
        From a filter, queries (n, d) and rows (n, C') to be written to, to how many classes are left of each (n,), -1
        where they are too many.
    """
    if alpha < LEAST_ALPHA:
        return None

    def rule_out(given: Filter, queries: Tensor, out: Tensor) -> Tensor:
        count = torch.empty(len(queries), dtype=torch.long)
        num_classes, d = given.vectors.shape
        classes = *given.tables, given.vectors, given.bias, given.offset, num_classes, d
        rows = queries, len(queries), out, out.shape[1], num_classes // FEW, num_classes // MOST, count
        number = torch.tensor(alpha, dtype=torch.float64)
        call(given.level, "entmax_candidates", out, *classes, *rows, number, threads=True)
        return count

    return rule_out
