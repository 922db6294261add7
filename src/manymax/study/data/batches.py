"""Batches of training: the rows from which a backbone makes queries, and the target of each query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from manymax.engine.row_target import group_pairs
from manymax.engine.target import Target
from manymax.errors import ArgumentError, check_choice
from manymax.study.data.interactions import PADDING, Lists, Split


@dataclass(frozen=True)
class Batch:
    """The rows of one training step, or of some users in evaluation.

    Args:
        users: (B,) int64.
        history: (B, T) items in time order, padded at the end with -100; None for backbones that use the user's number.
        target: the target of the head: one positive per query, (B,), or several, as (B, P) padded with -100 or as a
            `Target`. With `every_position` (N,), one positive per entry of the history. None in evaluation.
        every_position: if true, each of the N entries of the history makes a query, row after row and without the
            padding; otherwise each row makes one query, after its last item.
        exclude: (B, E) the items that are left out of the sums of each row, padded with -100; None for none.
        pair_ids: shaped like the ids of the target, the place of each target in the items of the training part. It is
            the same in every epoch. None if nobody asked for it.
    """

    users: Tensor
    history: Tensor | None = None
    target: Tensor | Target | None = None
    every_position: bool = False
    exclude: Tensor | None = None
    pair_ids: Tensor | None = None


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, a sequence whose entries are made when they are asked for.

    A resumed run can therefore start at any batch without making those before it.

    Args:
        rows: for each batch the numbers of its rows; what is numbered (pairs, users, windows) is up to `make`.
        make: turns the row numbers of a batch into the batch.
    """

    rows: tuple[Tensor, ...]
    make: Callable[[Tensor], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.make(self.rows[index])

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make, self.rows)


class Reader(Protocol):
    """The part of a backbone that batches depend on: whether it reads histories or uses the numbers of users."""

    needs_history: bool


def training_batches(
    split: Split,
    backbone: Reader,
    *,
    batch_size: int,
    batches: str = "pairs",
    chunk: int = 8,
    positions: str = "all",
    max_length: int = 20,
    grouped: bool = True,
    exclude: bool = False,
    numbered: bool = False,
    generator: torch.Generator,
) -> Batches:
    """One epoch over the training part, in random order.

    Whatever the rows are, a batch holds `batch_size` positives: exactly so many, or, if rows have several positives, so
    many on average, because rows are not divided. Positives of one user in a batch are grouped into one row, which
    gives the loss of separate pairs with one row of scores (see `group_pairs`).

    Args:
        split: its training part is used.
        backbone: says whether it needs histories.
        batch_size: number of positives in a batch.
        batches: for backbones without histories. "pairs": single (user, item) pairs in random order; "users": all pairs
            of a user together; "chunks": `chunk` random pairs of a user together.
        chunk: number of pairs of a user that stay together with "chunks". One row of scores serves them all.
        positions: for backbones with histories. "all": one row per user with the latest `max_length` items, each the
            target of those before it; "windows": the whole history of a user in rows of up to `max_length` items, cut
            at different places in each epoch; "prefix": one row per item, with up to `max_length` items before it as
            the history.
        max_length: largest number of items of a history.
        grouped: whether positives of one user in a batch of "pairs" share a row. Of most members the loss is the same
            either way.
        exclude: whether the batches list all training items of each user, for backbones without histories.
        numbered: whether batches have `pair_ids`, for losses that keep something about each training pair.
        generator: for the order, and for the cuts of "windows".

    Example:
        >>> from types import SimpleNamespace
        >>> lists = Lists(torch.tensor([0, 3, 5]), torch.tensor([4, 2, 7, 2, 6]))
        >>> epoch = training_batches(
        ...     Split(lists, lists, lists, num_items=8),
        ...     SimpleNamespace(needs_history=True),
        ...     batch_size=8,
        ...     generator=torch.Generator().manual_seed(0),
        ... )
        >>> epoch[0].history, epoch[0].target
        (tensor([[   4,    2],
                [   2, -100]]), tensor([2, 7, 6]))
    """
    check_choice("batches", batches, ("pairs", "chunks", "users"))
    makers = {"all": _sequences, "windows": _windows, "prefix": _prefixes}
    check_choice("positions", positions, tuple(makers))
    for name, value in {"batch_size": batch_size, "max_length": max_length, "chunk": chunk}.items():
        if value < 1:
            raise ArgumentError(f"`{name}` must be at least 1; got {value}.")
    if not (split.train.lengths > (1 if backbone.needs_history else 0)).any():
        enough = "two interactions" if backbone.needs_history else "an interaction"
        raise ArgumentError(f"`split` has nothing to train on: no user has {enough} in its training part.")
    if backbone.needs_history:
        return makers[positions](split.train, batch_size, max_length, numbered, generator)
    if batches == "users":
        made = _users(split.train, batch_size, numbered, generator)
    else:
        size = 1 if batches == "pairs" else chunk
        made = _pairs(split.train, batch_size, size, grouped, numbered, generator)
    return _with_lists(made, split.train) if exclude else made


def _with_lists(batches: Batches, train: Lists) -> Batches:
    """The same batches; each lists the training items of its users as what their sums leave out."""

    def make(rows: Tensor) -> Batch:
        batch = batches.make(rows)
        return replace(batch, exclude=train.padded(batch.users))

    return replace(batches, make=make)


def _grouped(train: Lists, users: Tensor, rows: Tensor, numbered: bool) -> Batch:
    """The batch of the pairs `rows`, entries of `train.items`, whose users are `users[rows]`."""
    if not numbered:
        distinct, target = group_pairs(users[rows], train.items[rows])
        return Batch(distinct, target=target)
    distinct, target, pair_ids = group_pairs(users[rows], train.items[rows], rows)
    return Batch(distinct, target=target, pair_ids=pair_ids)


def _pairs(
    train: Lists, batch_size: int, chunk: int, grouped: bool, numbered: bool, generator: torch.Generator
) -> Batches:
    users = train.users()

    def make(rows: Tensor) -> Batch:
        if not grouped:
            return Batch(users[rows], target=train.items[rows], pair_ids=rows if numbered else None)
        return _grouped(train, users, rows, numbered)

    permutation = torch.randperm(users.numel(), generator=generator)
    if chunk > 1:
        permutation = _in_chunks(train, permutation, chunk, generator)
    return Batches(permutation.split(batch_size), make)


def _in_chunks(train: Lists, permutation: Tensor, chunk: int, generator: torch.Generator) -> Tensor:
    """A random order of the pairs (n,) in which each user's pairs stand in chunks of `chunk`.

    Which pairs share a chunk is random (from `permutation`), and so is the order of the chunks. The sort is that of
    numpy, which is several times faster than torch's; the chunks are laid out by index arithmetic without a sort.

    Args:
        train: the lists; a pair is an entry of `train.items`.
        permutation: (n,) a random permutation of the pairs.
    """
    count = permutation.numel()
    place = torch.empty_like(permutation)  # the inverse permutation: where each pair stands
    place[permutation] = torch.arange(count)
    # Sort by (user, place) packed into one number; the remainder is the place, so each user's pairs come at random.
    keys = np.sort((train.users() * count + place).numpy())
    by_user = permutation[torch.from_numpy(keys) % count]
    chunks = (train.lengths + chunk - 1) // chunk  # (U,) number of chunks of each user
    owner = torch.arange(len(train)).repeat_interleave(chunks)  # (chunks,) the user of each chunk
    number_in_user = torch.arange(owner.numel()) - (chunks.cumsum(0) - chunks)[owner]
    starts = train.offsets[owner] + chunk * number_in_user  # into `by_user`
    lengths = (train.offsets[owner + 1] - starts).clamp(max=chunk)  # the last chunk of a user may be shorter
    shuffled = torch.empty_like(owner)
    shuffled[torch.randperm(owner.numel(), generator=generator)] = torch.arange(owner.numel())
    starts, lengths = starts[shuffled], lengths[shuffled]
    # Entry i of the result, in a chunk that begins at p in the result and at s in `by_user`, is by_user[i + s - p].
    shift = starts - (lengths.cumsum(0) - lengths)
    return by_user[torch.arange(count) + shift.repeat_interleave(lengths)]


def _users(train: Lists, batch_size: int, numbered: bool, generator: torch.Generator) -> Batches:
    """One row per user, with all of the user's items as positives."""
    every_user = train.users()

    def make(users: Tensor) -> Batch:
        row, column = (train.padded(users) != PADDING).nonzero(as_tuple=True)
        return _grouped(train, every_user, train.offsets[users[row]] + column, numbered)

    return Batches(_shuffled(train.lengths, batch_size, generator), make)


def _sequences(train: Lists, batch_size: int, max_length: int, numbered: bool, generator: torch.Generator) -> Batches:
    """One row per user: the latest items as the history, and each of them but the first as a target."""

    def make(users: Tensor) -> Batch:
        items = train.padded(users, max_length + 1)  # one more: the last item is a target only
        target = items[:, 1:]
        real = target != PADDING
        # The last item of a shorter list must leave the history, because it has no target: hence `where(real, ...)`.
        batch = Batch(users, torch.where(real, items[:, :-1], PADDING), target[real], every_position=True)
        if not numbered:
            return batch
        # The targets of a user are the last entries of the list.
        first = train.offsets[users + 1] - real.sum(1)
        return replace(batch, pair_ids=(first[:, None] + torch.arange(real.shape[1]))[real])

    return Batches(_shuffled((train.lengths - 1).clamp(0, max_length), batch_size, generator), make)


def _windows(train: Lists, batch_size: int, max_length: int, numbered: bool, generator: torch.Generator) -> Batches:
    """One row per window: each user's targets in windows of `max_length`.

    The first window of a user has a random length from 1 to `max_length`, so that the cuts move from epoch to epoch.
    """
    targets = (train.lengths - 1).clamp(min=0)  # (U,) number of targets: all items of a user but the first
    first = torch.randint(1, max_length + 1, (len(train),), generator=generator)  # (U,) length of the first window
    windows = (targets > 0) + ((targets - first).clamp(min=0) + max_length - 1) // max_length  # (U,) how many
    owner = torch.arange(len(train)).repeat_interleave(windows)  # (windows,) the user of each window
    number = torch.arange(owner.numel()) - (windows.cumsum(0) - windows)[owner]  # 0, 1, ... within a user
    end = first[owner] + number * max_length
    begin = (end - max_length).clamp(min=0)
    # `begin` and `end` count targets. Target 0 of a user is item 1 of the list, hence + 1.
    starts, lengths = train.offsets[owner] + 1 + begin, end.minimum(targets[owner]) - begin

    def make(rows: Tensor) -> Batch:
        columns = torch.arange(int(lengths[rows].max()))
        inside = columns < lengths[rows, None]
        index = torch.where(inside, starts[rows, None] + columns, 1)  # 1 and not 0, because index - 1 is read too
        history = torch.where(inside, train.items[index - 1], PADDING)
        places = index[inside]
        batch = Batch(owner[rows], history, train.items[places], every_position=True)
        return replace(batch, pair_ids=places) if numbered else batch

    return Batches(_shuffled(lengths, batch_size, generator), make)


def _prefixes(train: Lists, batch_size: int, max_length: int, numbered: bool, generator: torch.Generator) -> Batches:
    """One row per item that is not the first of its user: the items before it as the history, itself as the target."""
    users = train.users()
    before = torch.arange(users.numel()) - train.offsets[users]  # (n,) number of the user's items before each item
    targets = before.nonzero().squeeze(1)

    def make(rows: Tensor) -> Batch:
        lengths = before[rows].clamp(max=max_length)
        columns = torch.arange(int(lengths.max()))
        inside = columns < lengths[:, None]
        index = torch.where(inside, (rows - lengths)[:, None] + columns, 0)
        history = torch.where(inside, train.items[index], PADDING)
        return Batch(users[rows], history, train.items[rows], pair_ids=rows if numbered else None)

    return Batches(targets[torch.randperm(targets.numel(), generator=generator)].split(batch_size), make)


def _shuffled(positives: Tensor, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The row numbers of each batch: rows in random order, and a new batch for each further `batch_size` positives.

    Args:
        positives: (R,) number of positives of each row; rows without any are left out.
    """
    rows = torch.randperm(positives.numel(), generator=generator)
    rows = rows[positives[rows] > 0]
    # The k-th batch holds the rows with k * batch_size to (k + 1) * batch_size - 1 positives before them. A row with
    # more than batch_size positives makes the next numbers unused, not a batch of no rows.
    before = positives[rows].cumsum(0) - positives[rows]
    sizes = (before // batch_size).unique_consecutive(return_counts=True)[1]
    return rows.split(sizes.tolist())
