"""Interactions as the half-steps read them: distinct pairs, and compressed rows of one side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manymax.errors import ArgumentError, ArgumentTypeError

# Entries of a block whose rows share a matrix: the sums of a block stay in cache until they are solved for.
SHARED_BLOCK = 1 << 20
# Numbers in a block whose rows have a matrix each: the working memory of that variant.
SEPARATE_BLOCK = 1 << 22


class InteractionPairs(NamedTuple):
    """Distinct interactions: ids on both sides, (nnz,) each, and their values, or None where all are 1."""

    rows: Tensor
    columns: Tensor
    values: Tensor | None

    def transposed(self) -> InteractionPairs:
        return InteractionPairs(self.columns, self.rows, self.values)


class Rows(nn.Module):
    """One side of the interactions as compressed rows; a module so that it moves with the model.

    `offsets` (R + 1,), `columns` (nnz,), `values` (nnz,) or None where all are 1, `total` (R,) the sums of values.
    None of it is in `state_dict`.
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
        # int32 where the numbers fit: the sums read the indices from memory, the vectors mostly from cache.
        index = torch.int32 if max(len(rows), int(columns.max())) < 2**31 else torch.int64
        self.register_buffer("offsets", offsets.to(index), persistent=False)
        self.register_buffer("columns", columns[entries].to(index), persistent=False)
        self.register_buffer("values", None if values is None else values[entries], persistent=False)
        total = torch.bincount(rows, values, minlength=num_rows).to(dtype)
        self.register_buffer("total", total, persistent=False)

    def blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[slice]:
        """Slices of neighbouring rows that cost about `budget` each, so that threads share each block evenly."""
        row = torch.arange(len(self.offsets), device=self.offsets.device)
        cost = self.offsets.long() * per_entry + row * per_row  # of all rows before this one
        cuts = torch.searchsorted(cost, torch.arange(0, int(cost[-1]), budget, device=cost.device))
        bounds = torch.cat([cuts, row[-1:]]).unique().tolist()
        return itertools.starmap(slice, itertools.pairwise(bounds))

    def padded_blocks(self, budget: int, *, per_entry: int, per_row: int) -> Iterator[Tensor]:
        """Ids of rows of like length, longest first, whose cost within `budget` counts the padding to the longest."""
        length, order = self.offsets.diff().sort(descending=True)
        start = 0
        while start < len(order):
            rows = max(1, budget // (int(length[start]) * per_entry + per_row))
            yield order[start : start + rows]
            start += rows

    def entries(self, block: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """(offsets, columns, values) of a block of neighbouring rows, the offsets from its own start."""
        offsets = self.offsets[block.start : block.stop + 1]
        part = slice(int(offsets[0]), int(offsets[-1]))
        return offsets - offsets[0], self.columns[part], None if self.values is None else self.values[part]

    def neighbour_sums(self, block: slice, vectors: Tensor) -> Tensor:
        """sum_i v_ri z_i for the block's rows, (R', dim)."""
        offsets, columns, values = self.entries(block)
        return F.embedding_bag(
            columns, vectors, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )

    def neighbours(self, block: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """z_i and v_ri for the block's rows, padded to the longest: (R', L, dim) and (R', L), v = 0 on the padding."""
        start, length = self.offsets[block], self.offsets[block + 1] - self.offsets[block]
        steps = torch.arange(int(length.max()), device=block.device)
        inside = steps < length[:, None]
        places = torch.where(inside, start[:, None] + steps, 0)
        values = inside.to(vectors.dtype) if self.values is None else self.values[places] * inside
        return vectors[self.columns[places]], values


def read_interactions(
    users: Any, items: Tensor | None, values: Tensor | None, shape: tuple[int, int], like: Tensor
) -> InteractionPairs:
    """Distinct pairs sorted by user then item, on the device of `like`, values in its dtype."""
    if items is None:
        users, items, values = _read_matrix(users, values, shape)
    users, items = check_ids("users", users, shape[0]), check_ids("items", items, shape[1])
    if users.shape != items.shape:
        raise ArgumentError(f"`users` and `items` must have one shape; got {tuple(users.shape)}, {tuple(items.shape)}.")
    if not len(users):
        raise ArgumentError("`users` and `items` must hold at least one interaction; got none.")
    key = users.to(like.device, torch.int64) * shape[1] + items.to(like.device, torch.int64)
    if values is None:
        key, weights = key.unique(), None
    else:
        key, place = key.unique(return_inverse=True)
        weights = torch.bincount(place, _check_values(values, users.shape).to(like)).to(like)
    return InteractionPairs(key // shape[1], key % shape[1], weights)


def _read_matrix(matrix: Any, values: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(users, items, values) of a sparse matrix of torch or scipy."""
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


def check_tensor(argument: str, value: Tensor) -> None:
    """Refuse what is no tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"`{argument}` must be a tensor; got {type(value).__name__}.")


def _check_values(values: Tensor, shape: torch.Size) -> Tensor:
    check_tensor("values", values)
    if values.shape != shape:
        raise ArgumentError(f"`values` must have the shape of `users`, {tuple(shape)}; got {tuple(values.shape)}.")
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ArgumentError("`values` must be finite and at least 0.")
    return values.detach()


def check_ids(argument: str, ids: Tensor, size: int) -> Tensor:
    """The ids, if they are integers in [0, size) in one dimension."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{argument}` must be an integer tensor; got {got}.")
    if ids.dim() != 1:
        raise ArgumentError(f"`{argument}` must have one dimension; got shape {tuple(ids.shape)}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ArgumentError(f"`{argument}` must lie in [0, {size}); got {int(ids.min())} to {int(ids.max())}.")
    return ids
