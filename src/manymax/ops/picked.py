"""Scores of a few picked classes for each query: from a small table of all scores, or from gathered vectors."""

from __future__ import annotations

import torch
from torch import Tensor

GATHERED = 1 << 19  # floats of class vectors gathered at a time: they stay in cache until they are multiplied
TABLE = 1 << 23  # floats that a table of all scores may have: 32 MB
CHEAPER = 16  # a score of a table costs so much less than a gathered one (measured at d = 64: 16 to 40)


def table_is_cheaper(num_queries: int, num_classes: int, num_picked: int) -> bool:
    """Whether all scores of the queries cost less than `num_picked` ones; decided from the sizes alone."""
    table = num_queries * num_classes
    return table <= min(TABLE, CHEAPER * num_picked)


def in_table(rows: Tensor | None, ids: Tensor, num_classes: int) -> Tensor:
    """Where the ids (M, k) of queries rows (M,) stand in a flat table, (M k,)."""
    if rows is None:
        rows = torch.arange(len(ids), device=ids.device)
    return (rows.unsqueeze(1) * num_classes + ids).reshape(-1)


def picked_scores(input: Tensor, linear_weight: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """<x_{rows_m}, w_{ids_mj}>.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        ids: (M, k).
        rows: (M,) the query of each row of ids; None for M = R and each its own.

    Returns:
        (M, k), without gradients.

    Example:
        >>> picked_scores(torch.tensor([[2.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[10., 10.,  2.]])
    """
    with torch.no_grad():
        if table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            table = input @ linear_weight.T
            return table.view(-1).index_select(0, in_table(rows, ids, len(linear_weight))).view(ids.shape)
        return _gathered(input if rows is None else input.index_select(0, rows), linear_weight, ids)


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
