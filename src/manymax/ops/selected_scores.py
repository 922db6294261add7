"""Scores of a few selected classes for each query in plain torch, computed by the fastest of three ways.

table      all scores of all queries by one matmul, then those that are wanted: where the table is small
in place   a sampled product of matrices, which reads each class vector where it is stored: on the CPU
gathering  copies of the class vectors of some queries at a time, then a batched product: everywhere else

Scores have the dtype of the queries. Class vectors may have another one, half precision for example: those that are
selected are then converted, some at a time, and never the whole table.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup

GATHERED_FLOATS = 1 << 19  # floats of class vectors copied at a time: 2 MB, still in cache when they are multiplied
TABLE_FLOATS = 1 << 23  # largest table of all scores: 32 MB of float32
# A score of the table costs a sixth of a selected one, gradients included, because a matmul reads a class vector once
# for many queries. Measured: a ninth at d = 16, a fourth at d = 256.
TABLE_ADVANTAGE = 6


def table_is_cheaper(num_queries: int, num_classes: int, num_selected: int) -> bool:
    """Whether a table of all scores costs less than `num_selected` single scores."""
    # the sizes alone decide: forward and backward pass then take the same way, and the advisor can predict it
    table = num_queries * num_classes
    return table <= min(TABLE_FLOATS, TABLE_ADVANTAGE * num_selected)


def flat_positions(rows: Tensor | None, ids: Tensor, num_classes: int) -> Tensor:
    """Positions of the entries (rows_m, ids_mj) in a flattened (R, C) table, (M k,).

    Args:
        rows: (M,) the query of each row of ids; None for M = R, where each row of ids belongs to its own query.
        ids: (M, k).
        num_classes: C.
    """
    if rows is None:
        rows = torch.arange(len(ids), device=ids.device)
    return (rows.unsqueeze(1) * num_classes + ids).reshape(-1)


def selected_scores(input: Tensor, linear_weight: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """The scores <x_{rows_m}, w_{ids_mj}> of selected classes.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors, of any float dtype.
        ids: (M, k) the selected classes.
        rows: (M,) the query of each row of ids; None for M = R, where each row of ids belongs to its own query.

    Returns:
        (M, k) in the dtype of the queries. Gradients do not flow through it: engine/selected_scores.py has them.

    Example:
        >>> selected_scores(torch.tensor([[2.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[10., 10.,  2.]])
    """
    # no graph here: autograd would keep the copies of class vectors, or the table, until the backward pass
    with torch.no_grad():
        if table_is_cheaper(len(input), len(linear_weight), ids.numel()):
            # At most `TABLE_ADVANTAGE` times as many class vectors as a query selects: no large table to convert.
            table = input @ linear_weight.to(input.dtype).T
            return table.view(-1).index_select(0, flat_positions(rows, ids, len(linear_weight))).view(ids.shape)
        own = input if rows is None else input.index_select(0, rows)
        if _can_read_in_place(own, linear_weight, ids):
            starts = torch.arange(0, ids.numel() + 1, ids.shape[1])  # k entries in every row of the sparse matrix
            return _scores_in_place(own, linear_weight, starts, ids.reshape(-1)).view(ids.shape)
        return _scores_by_gathering(own, linear_weight, ids)


def entry_scores(input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The scores <x_{rows_e}, w_{ids_e}> of a list of entries.

    Unlike in `selected_scores`, queries may have different numbers of entries.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        rows, ids: (E,) query and class of each entry; `rows` must be sorted.

    Returns:
        (E,). Gradients do not flow through it.

    Example:
        >>> entry_scores(torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [5.0]]), torch.tensor([0, 1, 1]),
        ...     torch.tensor([1, 1, 0]))
        tensor([10., 15.,  3.])
    """
    with torch.no_grad():
        if _can_read_in_place(input, linear_weight, ids):
            # row pointers of a CSR matrix: entry r is the number of entries before row r
            starts = torch.bincount(rows + 1, minlength=len(input) + 1).cumsum(0)
            return _scores_in_place(input, linear_weight, starts, ids)
        out = input.new_empty(len(ids))
        # queries are copied too, one for each entry, because entries of a query have no common length
        step = max(1, GATHERED_FLOATS // max(1, input.shape[1]))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            # In place, so that the product has the dtype of the queries whatever that of the class vectors is.
            torch.sum(lookup(input, rows[part]).mul_(lookup(linear_weight, ids[part])), 1, out=out[part])
        return out


def selected_sums(linear_weight: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """sum_j factors_mj w_{ids_mj}, the gradient of selected scores in the queries.

    Args:
        linear_weight: (C, d) class vectors.
        ids: (M, k) the selected classes.
        factors: (M, k) in the dtype of the result.

    Returns:
        (M, d).

    Example:
        >>> selected_sums(torch.tensor([[1.0], [5.0]]), torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[18.]])
    """
    if factors.dtype == linear_weight.dtype:
        # 2-D ids are bags by themselves, one per row of ids.
        return embedding_bag(ids, linear_weight, mode="sum", per_sample_weights=factors.contiguous())
    out = factors.new_empty(len(ids), linear_weight.shape[1])
    for part in _parts(ids, linear_weight.shape[1]):
        vectors = lookup(linear_weight, ids[part]).to(factors.dtype)
        torch.bmm(factors[part].unsqueeze(1), vectors, out=out[part].unsqueeze(1))
    return out


def _can_read_in_place(input: Tensor, linear_weight: Tensor, ids: Tensor) -> bool:
    """Whether torch has a sampled product for these tensors: eager use on the CPU, at most as many entries as R C."""
    # A sparse matrix may not have more entries than places, although here classes can repeat. On a GPU and under
    # torch.compile `visible` says no.
    num_places = len(input) * len(linear_weight)
    if input.dtype != linear_weight.dtype:
        return False
    return visible(input, linear_weight, ids) and 0 < ids.numel() <= num_places


def _scores_in_place(input: Tensor, linear_weight: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """The entries of X W^T at the places of a sparse matrix, (E,); no class vector is copied.

    Args:
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        starts: (R + 1,) where the entries of each query begin in `ids`.
        ids: (E,).
    """
    # sampled_addmm does not check the ids: a wrong one would read memory outside of the class vectors
    low, high = torch.aminmax(ids)
    if low < 0 or high >= len(linear_weight):
        raise ArgumentError(f"`ids` must be in [0, {len(linear_weight)}); got {int(low if low < 0 else high)}.")
    _use_up_sparse_warning()
    places = torch.sparse_csr_tensor(
        starts,
        ids,
        input.new_zeros(len(ids)),
        (len(input), len(linear_weight)),
        check_invariants=False,  # a class may be selected twice and in any order, which a checked matrix forbids
    )
    return torch.sparse.sampled_addmm(places, input, linear_weight.T, beta=0.0).values()


@functools.cache
def _use_up_sparse_warning() -> None:
    """Make torch give its warning that sparse CSR tensors are in beta, which it gives once per process, unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _parts(ids: Tensor, d: int) -> Iterator[slice]:
    """Slices of the rows of ids (M, k), so that their class vectors of d numbers have `GATHERED_FLOATS` together."""
    step = max(1, GATHERED_FLOATS // max(1, ids.shape[1] * d))
    return (slice(start, start + step) for start in range(0, len(ids), step))


def _scores_by_gathering(input: Tensor, linear_weight: Tensor, ids: Tensor) -> Tensor:
    """Copy the class vectors of some queries at a time, and multiply: (M, k) for queries (M, d) and ids (M, k)."""
    out = input.new_empty(ids.shape)
    k, d = ids.shape[1], input.shape[1]
    # one buffer for all blocks: touching new memory costs more than the products
    buffer = linear_weight.new_empty(min(len(ids) * k, max(k, GATHERED_FLOATS // max(1, d))), d)
    for part in _parts(ids, d):
        block = ids[part]
        vectors = buffer[: block.numel()]
        torch.index_select(linear_weight, 0, block.reshape(-1), out=vectors)
        widened = vectors.view(len(block), k, d).to(input.dtype)
        torch.bmm(widened, input[part].unsqueeze(2), out=out[part].unsqueeze(2))
    return out
