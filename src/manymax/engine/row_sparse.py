"""Row-sparse gradients: those of a table of which a step touches few rows, as sparse COO tensors of these rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manymax.ops.checks import visible

# Rows that are looked at, or moved, at a time, so that temporary copies stay small beside the table.
ROWS_AT_A_TIME = 1 << 14


def row_sparse(ids: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient (C, ...) that has `rows` (K, ...) at the distinct sorted `ids` (K,) and 0 elsewhere.

    It is marked as coalesced, so that nobody sorts it again, and torch need not check the ids: they are made here.
    """
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, tuple(shape), is_coalesced=True, check_invariants=False)


def rows_of_table(table: Tensor) -> Tensor:
    """The row-sparse form of a table (C, d): its rows that are not zero, in the memory of the table, which is used up.

    A table that turned out to be wide costs no more than itself: its rows move to its front, and none is copied to
    memory of its own. Rows of zeros are left out, because sparse optimisers move every row that is there.

    Example:
        >>> found = rows_of_table(torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 0.0]]))
        >>> found.indices().tolist(), found.values().tolist()
        ([[1, 3]], [[1.0, 2.0], [3.0, 0.0]])
    """
    live = [(part != 0).any(1) for part in table.split(ROWS_AT_A_TIME)]
    return row_sparse(*compact(table, torch.cat(live)), table.shape)


def compact(table: Tensor, touched: Tensor) -> tuple[Tensor, Tensor]:
    """The ids (K,) where `touched` (C,) is True, and these rows (K, ...) of a table (C, ...), which is used up."""
    ids = touched.nonzero().squeeze(1)
    if 4 * len(ids) <= len(table):
        return ids, table.index_select(0, ids)  # a small copy sets the memory of the table free
    if len(ids) < len(table):
        # Row k comes from row ids_k >= k: what is overwritten has been read before.
        for start in range(0, len(ids), ROWS_AT_A_TIME):
            part = ids[start : start + ROWS_AT_A_TIME]
            table[start : start + len(part)] = table.index_select(0, part)
    return ids, table[: len(ids)]


def distinct_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The indices (sparse dimensions, U), each place once, and the rows (U, ...) of a sparse gradient."""
    ids, values = grad._indices(), grad._values()
    # Autograd forgets that a gradient is coalesced when it puts it into `.grad`. Heads give sorted distinct ids, for
    # which a look costs next to nothing beside the sort and the copy that coalescing takes.
    if grad.is_coalesced() or (visible(ids) and len(ids) == 1 and bool((ids[0, 1:] > ids[0, :-1]).all())):
        return ids, values
    grad = grad.coalesce()
    return grad.indices(), grad.values()
