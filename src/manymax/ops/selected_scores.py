"""Scores of a few picked classes for each query: from a small table of all scores, or each where its vector stands."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup

GATHERED = 1 << 19  # floats of class vectors gathered at a time: they stay in cache until they are multiplied
TABLE = 1 << 23  # floats that a table of all scores may have: 32 MB
CHEAPER = 6  # a score of a table costs so much less than a picked one, gradients included (d = 16 to 256: 9 to 4)


def table_is_cheaper(num_queries: int, num_classes: int, num_selected: int) -> bool:
    """Whether all scores of the queries cost less than `num_selected` ones; decided from the sizes alone."""
    table = num_queries * num_classes
    return table <= min(TABLE, CHEAPER * num_selected)


def in_table(rows: Tensor | None, ids: Tensor, num_classes: int) -> Tensor:
    """Where the ids (M, k) of queries rows (M,) stand in a flat table, (M k,)."""
    if rows is None:
        rows = torch.arange(len(ids), device=ids.device)
    return (rows.unsqueeze(1) * num_classes + ids).reshape(-1)


def selected_scores(input: Tensor, linear_weight: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """<x_{rows_m}, w_{ids_mj}>.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        ids: (M, k).
        rows: (M,) the query of each row of ids; None for M = R and each its own.

    Returns:
        (M, k), without gradients.

    Example:
        >>> selected_scores(torch.tensor([[2.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[10., 10.,  2.]])
    """
    with torch.no_grad():
        if table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            table = input @ linear_weight.T
            return table.view(-1).index_select(0, in_table(rows, ids, len(linear_weight))).view(ids.shape)
        own = input if rows is None else input.index_select(0, rows)
        if _reads_in_place(own, linear_weight, ids):
            starts = torch.arange(0, ids.numel() + 1, ids.shape[1])
            return _in_place(own, linear_weight, starts, ids.reshape(-1)).view(ids.shape)
        return _gathered(own, linear_weight, ids)


def entry_scores(input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """<x_{rows_e}, w_{ids_e}> for a list of entries, sorted by row.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        rows, ids: (E,).

    Returns:
        (E,), without gradients.

    Example:
        >>> entry_scores(torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([0, 1, 1]),
        ...     torch.tensor([1, 1, 0]))
        tensor([10., 15.,  3.])
    """
    with torch.no_grad():
        if _reads_in_place(input, linear_weight, ids):
            starts = torch.bincount(rows + 1, minlength=len(input) + 1).cumsum(0)
            return _in_place(input, linear_weight, starts, ids)
        out = input.new_empty(len(ids))
        step = max(1, GATHERED // max(1, input.shape[1]))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            torch.sum(lookup(input, rows[part]).mul_(lookup(linear_weight, ids[part])), 1, out=out[part])
        return out


def _reads_in_place(input: Tensor, linear_weight: Tensor, ids: Tensor) -> bool:
    """Where torch can: with values on a processor, and no more entries than the matrix has places."""
    places = len(input) * len(linear_weight)
    return visible(input, linear_weight, ids) and 0 < ids.numel() <= places


def _in_place(input: Tensor, linear_weight: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """Each vector is read where it stands: entries of X W^T at the places of a sparse matrix, and nothing gathered."""
    low, high = torch.aminmax(ids)
    if low < 0 or high >= len(linear_weight):  # nobody else looks
        raise ArgumentError(f"`ids` must be in [0, {len(linear_weight)}); got {int(low if low < 0 else high)}.")
    _silence()
    places = torch.sparse_csr_tensor(
        starts,
        ids,
        input.new_zeros(len(ids)),
        (len(input), len(linear_weight)),
        check_invariants=False,  # a class may be picked twice, and in any order
    )
    return torch.sparse.sampled_addmm(places, input, linear_weight.T, beta=0.0).values()


@functools.cache
def _silence() -> None:
    """Have torch say now, unheard, what it says once a process: that sparse rows are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _gathered(input: Tensor, linear_weight: Tensor, ids: Tensor) -> Tensor:
    """The vectors of a block go into one buffer again and again: touching new memory costs more than the products."""
    out = input.new_empty(ids.shape)
    (num_rows, k), d = ids.shape, input.shape[1]
    step = max(1, GATHERED // max(1, k * d))
    buffer = input.new_empty(min(step, num_rows) * k, d)
    for start in range(0, num_rows, step):
        block = ids[start : start + step]
        vectors = buffer[: block.numel()]
        torch.index_select(linear_weight, 0, block.reshape(-1), out=vectors)
        product = out[start : start + step].unsqueeze(2)
        torch.bmm(vectors.view(len(block), k, d), input[start : start + step].unsqueeze(2), out=product)
    return out
