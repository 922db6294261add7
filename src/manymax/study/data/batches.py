"""Batches: what a backbone needs to make queries, and the target of each query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """Rows of a step.

    Args:
        users: (B,) int64.
        history: (B, T) item ids in time order, padded at the end with -100; None for backbones that know users by id.
        target: what the head gets: one positive for each query, (B,), or several, (B, P) padded with -100 or grouped;
            with `every_position` (N,), one for each entry of the history; None in evaluation.
        every_position: whether each of the N entries of the history makes a query, row after row and without
            the padding, or each row makes one, at its end.
    """

    users: Tensor
    history: Tensor | None = None
    target: Tensor | Target | None = None
    every_position: bool = False


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, each made when it is asked for.

    Args:
        rows: of each batch.
        make: a batch from its rows.
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
    """What batches depend on: a backbone that reads histories, or one that knows users by id."""

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
    generator: torch.Generator,
) -> Batches:
    """One epoch over the training part, in random order.

    Whatever the rows are, a batch holds `batch_size` positives: exactly, or, where a row has several, whole rows until
    there are so many. Positives of one user are grouped in one row, which has the loss of separate pairs (see
    `group_pairs`).

    Args:
        split: whose training part is used.
        backbone: says whether it needs histories.
        batch_size: positives of a batch.
        batches: without histories: "pairs", (user, item) pairs drawn without regard to users; "users", all pairs
            of a user at once; "chunks", in between: `chunk` random pairs of a user at once.
        chunk: pairs of a user that stay together in "chunks": a row of scores serves them all.
        positions: with histories: "all", one row a user with the latest `max_length` items, each the target of those
            before it; "windows", the whole history of a user in rows of `max_length` items, cut anew in each epoch;
            "prefix", one row for each item, whose history are the up to `max_length` items before it.
        max_length: of a history.
        generator: of the order.

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
        return makers[positions](split.train, batch_size, max_length, generator)
    if batches == "users":
        return _users(split.train, batch_size, generator)
    return _pairs(split.train, batch_size, 1 if batches == "pairs" else chunk, generator)


def _pairs(train: Lists, batch_size: int, chunk: int, generator: torch.Generator) -> Batches:
    users = train.users()

    def make(rows: Tensor) -> Batch:
        distinct, target = group_pairs(users[rows], train.items[rows])
        return Batch(distinct, target=target)

    order = torch.randperm(users.numel(), generator=generator)
    if chunk > 1:
        order = _in_chunks(train, order, chunk, generator)
    return Batches(order.split(batch_size), make)


def _in_chunks(train: Lists, order: Tensor, chunk: int, generator: torch.Generator) -> Tensor:
    """`order` (n,) with the pairs of each user cut into chunks, and the chunks in random order.

    Numbers are sorted by numpy, which is several times faster, and chunks are laid out without any sorting.
    """
    count = order.numel()
    place = torch.empty_like(order)
    place[order] = torch.arange(count)
    keys = np.sort((train.users() * count + place).numpy())  # by user, each user's pairs in random order
    by_user = order[torch.from_numpy(keys) % count]
    chunks = (train.lengths + chunk - 1) // chunk  # (U,) of each user
    owner = torch.arange(len(train)).repeat_interleave(chunks)
    starts = train.offsets[owner] + chunk * (torch.arange(owner.numel()) - (chunks.cumsum(0) - chunks)[owner])
    lengths = (train.offsets[owner + 1] - starts).clamp(max=chunk)
    shuffled = torch.empty_like(owner)
    shuffled[torch.randperm(owner.numel(), generator=generator)] = torch.arange(owner.numel())
    starts, lengths = starts[shuffled], lengths[shuffled]
    skipped = starts - (lengths.cumsum(0) - lengths)  # from a place in the new order to the one by user
    return by_user[torch.arange(count) + skipped.repeat_interleave(lengths)]


def _users(train: Lists, batch_size: int, generator: torch.Generator) -> Batches:
    def make(users: Tensor) -> Batch:
        table = train.padded(users)
        row, column = (table != PADDING).nonzero(as_tuple=True)
        distinct, target = group_pairs(users[row], table[row, column])
        return Batch(distinct, target=target)

    return Batches(_shuffled(train.lengths, batch_size, generator), make)


def _sequences(train: Lists, batch_size: int, max_length: int, generator: torch.Generator) -> Batches:
    def make(users: Tensor) -> Batch:
        items = train.padded(users, max_length + 1)
        target = items[:, 1:]
        real = target != PADDING
        return Batch(users, torch.where(real, items[:, :-1], PADDING), target[real], every_position=True)

    return Batches(_shuffled((train.lengths - 1).clamp(0, max_length), batch_size, generator), make)


def _windows(train: Lists, batch_size: int, max_length: int, generator: torch.Generator) -> Batches:
    """A user's targets in runs of `max_length`; the first run is of 1 to `max_length`, so that cuts move."""
    targets = (train.lengths - 1).clamp(min=0)  # (U,): all items of a user but the first
    first = torch.randint(1, max_length + 1, (len(train),), generator=generator)
    windows = (targets > 0) + ((targets - first).clamp(min=0) + max_length - 1) // max_length
    owner = torch.arange(len(train)).repeat_interleave(windows)
    number = torch.arange(owner.numel()) - (windows.cumsum(0) - windows)[owner]
    end = first[owner] + number * max_length
    begin = (end - max_length).clamp(min=0)
    starts, lengths = train.offsets[owner] + 1 + begin, end.minimum(targets[owner]) - begin

    def make(rows: Tensor) -> Batch:
        columns = torch.arange(int(lengths[rows].max()))
        inside = columns < lengths[rows, None]
        index = torch.where(inside, starts[rows, None] + columns, 1)
        history = torch.where(inside, train.items[index - 1], PADDING)
        return Batch(owner[rows], history, train.items[index[inside]], every_position=True)

    return Batches(_shuffled(lengths, batch_size, generator), make)


def _prefixes(train: Lists, batch_size: int, max_length: int, generator: torch.Generator) -> Batches:
    users = train.users()
    before = torch.arange(users.numel()) - train.offsets[users]  # items of the same user before each
    targets = before.nonzero().squeeze(1)

    def make(rows: Tensor) -> Batch:
        lengths = before[rows].clamp(max=max_length)
        columns = torch.arange(int(lengths.max()))
        inside = columns < lengths[:, None]
        index = torch.where(inside, (rows - lengths)[:, None] + columns, 0)
        return Batch(users[rows], torch.where(inside, train.items[index], PADDING), train.items[rows])

    return Batches(targets[torch.randperm(targets.numel(), generator=generator)].split(batch_size), make)


def _shuffled(positives: Tensor, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Rows with any positives (R,) in random order, cut where another `batch_size` positives are full."""
    rows = torch.randperm(positives.numel(), generator=generator)
    rows = rows[positives[rows] > 0]
    before = positives[rows].cumsum(0) - positives[rows]
    sizes = (before // batch_size).unique_consecutive(return_counts=True)[1]
    return rows.split(sizes.tolist())
