"""Interactions in the forms that the half-steps read: distinct pairs, and compressed rows of one side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manymax.errors import ArgumentError
from manymax.members.rg.als_arguments import check_ids, check_values

# Entries in a block of rows that share one matrix: small enough for the sums of a block to stay in cache until they
# are solved for.
SHARED_BLOCK = 1 << 20
# Numbers in a block of rows that have a matrix each; it bounds the working memory of that variant.
SEPARATE_BLOCK = 1 << 22


class InteractionPairs(NamedTuple):
    """Distinct interactions: ids of both sides, (nnz,) each, and their values, (nnz,), or None if all are 1."""

    rows: Tensor
    columns: Tensor
    values: Tensor | None

    def transposed(self) -> InteractionPairs:
        """The same pairs with the two sides exchanged."""
        return InteractionPairs(self.columns, self.rows, self.values)


class Rows(nn.Module):
    """One side of the interactions as compressed rows: row r has the entries offsets[r] .. offsets[r + 1] - 1.

    It is a module so that it moves to other devices and dtypes with the model; none of its buffers is in `state_dict`.

        offsets  (R + 1,)
        columns  (nnz,)    ids of the other side
        values   (nnz,)    or None if all are 1
        total    (R,)      sums of the values of each row
    """

    offsets: Tensor
    columns: Tensor
    values: Tensor | None
    total: Tensor

    def __init__(self, pairs: InteractionPairs, num_rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns, values = pairs
        entries = rows.argsort(stable=True)
        offsets = F.pad(torch.bincount(rows, minlength=num_rows).cumsum(0), (1, 0))
        # int32 where the numbers fit: the sums over neighbours read indices from memory, and vectors mostly from cache,
        # so that the size of an index counts.
        index = torch.int32 if max(len(rows), int(columns.max())) < 2**31 else torch.int64
        self.register_buffer("offsets", offsets.to(index), persistent=False)
        self.register_buffer("columns", columns[entries].to(index), persistent=False)
        self.register_buffer("values", None if values is None else values[entries], persistent=False)
        total = torch.bincount(rows, values, minlength=num_rows).to(dtype)
        self.register_buffer("total", total, persistent=False)

    def blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[slice]:
        """Slices of consecutive rows of about the cost `budget`: `per_entry` for each entry, `per_row` for each row."""
        # The cost of all rows before a row, in int64: entries times `per_entry` can exceed int32.
        row = torch.arange(len(self.offsets), device=self.offsets.device)
        cost = self.offsets.long() * per_entry + row * per_row
        cuts = torch.searchsorted(cost, torch.arange(0, int(cost[-1]), budget, device=cost.device))
        bounds = torch.cat([cuts, row[-1:]]).unique().tolist()
        return itertools.starmap(slice, itertools.pairwise(bounds))

    def padded_blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[Tensor]:
        """Ids of rows of similar length, longest first, in blocks that cost `budget` if padded to their longest row."""
        # Sorted by length, so that padding adds little: the first row of a block is its longest.
        lengths, row_ids = self.offsets.diff().sort(descending=True)
        start = 0
        while start < len(row_ids):
            rows = max(1, budget // (int(lengths[start]) * per_entry + per_row))
            yield row_ids[start : start + rows]
            start += rows

    def entries(self, block: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(offsets, columns, values) of a block of consecutive rows, with offsets that begin at 0."""
        offsets = self.offsets[block.start : block.stop + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        return offsets - offsets[0], self.columns[part], None if self.values is None else self.values[part]

    def neighbour_sums(self, block: slice, vectors: Tensor) -> Tensor:
        """sum_i v_ri z_i over the neighbours i of each row of the block, (R', dim)."""
        # `embedding_bag` adds the vectors up as it reads them: no (entries, dim) table is made.
        offsets, columns, values = self.entries(block)
        return F.embedding_bag(
            columns, vectors, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )

    def neighbours(self, block: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """z_i and v_ri of the neighbours i of each row, (R', L, dim) and (R', L), padded to the longest with v = 0."""
        start, length = self.offsets[block], self.offsets[block + 1] - self.offsets[block]
        steps = torch.arange(int(length.max()), device=block.device)
        inside = steps < length[:, None]
        entries = torch.where(inside, start[:, None] + steps, 0)  # padding repeats entry 0, with the value 0
        values = inside.to(vectors.dtype) if self.values is None else self.values[entries] * inside
        return vectors[self.columns[entries]], values


def read_interactions(
    users: Any, items: Tensor | None, values: Tensor | None, shape: tuple[int, int], like: Tensor
) -> InteractionPairs:
    """Check and read interactions as distinct pairs, sorted by user and then by item.

    Args:
        users, items, values: as in `RGFactorization.observe`.
        shape: numbers of users and items.
        like: a tensor whose device the pairs get, and whose dtype the values get.
    """
    if items is None:
        users, items, values = _read_matrix(users, values, shape)
    users, items = check_ids("users", users, shape[0]), check_ids("items", items, shape[1])
    if users.shape != items.shape:
        raise ArgumentError(f"`users` and `items` must have one shape; got {tuple(users.shape)}, {tuple(items.shape)}.")
    if not len(users):
        raise ArgumentError("`users` and `items` must hold at least one interaction; got none.")
    # One number per pair: numbers are sorted many times faster than pairs.
    key = users.to(like.device, torch.int64) * shape[1] + items.to(like.device, torch.int64)
    if values is None:
        key, weights = key.unique(), None
    else:  # values of repeated pairs are added up
        key, pair = key.unique(return_inverse=True)
        weights = torch.bincount(pair, check_values(values, users.shape).to(like)).to(like)
    return InteractionPairs(key // shape[1], key % shape[1], weights)


def _read_matrix(matrix: Any, values: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items and values of a sparse matrix of torch or scipy, (nnz,) each."""
    if values is not None:
        raise ArgumentError("`values` cannot be given with a matrix: its entries are the values.")
    if tuple(getattr(matrix, "shape", ())) != shape:
        got = tuple(getattr(matrix, "shape", ())) or type(matrix).__name__
        raise ArgumentError(f"`users` must be ids with `items`, or a sparse {shape} matrix; got {got}.")
    if isinstance(matrix, Tensor):
        entries = matrix.detach().to_sparse_coo().coalesce()
        return entries.indices()[0], entries.indices()[1], entries.values()
    entries = matrix.tocoo()
    return torch.from_numpy(entries.row).long(), torch.from_numpy(entries.col).long(), torch.from_numpy(entries.data)
