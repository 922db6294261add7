"""The table types of the laboratory: interactions with vocabularies, ragged lists, a split into three parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manymax.errors import ArgumentError

PADDING = -100  # torch's ignore_index, so that padded lists are targets as they are

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Interactions:
    """Rows (user, item[, rating][, time][, part]) with users and items numbered from 0, in the order of the file.

    Args:
        users, items: (n,) int64, ids below the length of their vocabulary.
        user_ids, item_ids: (U,), (C,) the publisher's ids; entry i is what number i was called.
        ratings: (n,) float32, or None where the source has none.
        times: (n,) int64, seconds or any number that grows with time, or None.
        parts: (n,) int8 index into `PARTS` where the source comes with a split, or None.
        name: of the set.
        card: what happened to the data so far: a list of steps, each a dict with `step` and its figures.
    """

    users: Tensor
    items: Tensor
    user_ids: np.ndarray[Any, Any]
    item_ids: np.ndarray[Any, Any]
    ratings: Tensor | None = None
    times: Tensor | None = None
    parts: Tensor | None = None
    name: str = ""
    card: tuple[dict[str, Any], ...] = ()

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """C, the number of classes."""
        return len(self.item_ids)

    def __len__(self) -> int:
        return self.users.numel()

    def counts(self) -> dict[str, Any]:
        """Users, items, interactions, and the sparsity 1 - n / (U C)."""
        cells = self.num_users * self.num_items
        return {
            "users": self.num_users,
            "items": self.num_items,
            "interactions": len(self),
            "sparsity": round(1 - len(self) / cells, 6) if cells else 1.0,
        }

    def with_step(self, step: str, **figures: Any) -> Interactions:
        """The same rows; the card says that `step` was taken and what is there now."""
        return replace(self, card=(*self.card, {"step": step, **figures, **self.counts()}))

    def rows(self, keep: Tensor) -> Interactions:
        """The rows where `keep` (n,) is true; users and items that have none left lose their number."""
        users, user_ids = _renumber(self.users[keep], self.user_ids)
        items, item_ids = _renumber(self.items[keep], self.item_ids)
        ratings, times, parts = (None if t is None else t[keep] for t in (self.ratings, self.times, self.parts))
        return Interactions(users, items, user_ids, item_ids, ratings, times, parts, self.name, self.card)


def _renumber(numbers: Tensor, ids: np.ndarray[Any, Any]) -> tuple[Tensor, np.ndarray[Any, Any]]:
    used = numbers.bincount(minlength=len(ids)) > 0
    return (used.cumsum(0) - 1)[numbers], ids[used.numpy()]


@dataclass(frozen=True)
class Lists:
    """One list of item ids per user, of any length: list u is items[offsets[u]:offsets[u + 1]].

    Args:
        offsets: (U + 1,) int64, from 0.
        items: (n,) int64.
    """

    offsets: Tensor
    items: Tensor

    @classmethod
    def from_pairs(cls, users: Tensor, items: Tensor, num_users: int) -> Lists:
        """Group (user, item) pairs by user; the pairs of a user keep their order."""
        order = users.argsort(stable=True)
        offsets = torch.zeros(num_users + 1, dtype=torch.long)
        torch.cumsum(users.bincount(minlength=num_users), 0, out=offsets[1:])
        return cls(offsets, items[order])

    @property
    def lengths(self) -> Tensor:
        """(U,) how long each list is."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def users(self) -> Tensor:
        """(n,) the user of each entry of `items`."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)

    def padded(self, users: Tensor, length: int | None = None) -> Tensor:
        """The lists of some users as one table, padded at the end with -100.

        Args:
            users: (B,) int64.
            length: keep only the last `length` entries of each list, in their order.

        Returns:
            (B, P) with P the longest of these lists, at least 1.
        """
        if users.numel() and int(users.max()) >= len(self):
            raise ArgumentError(f"`users` must be below {len(self)}; got {int(users.max())}.")
        ends = self.offsets[users + 1]
        counts = self.lengths[users] if length is None else self.lengths[users].clamp(max=length)
        columns = torch.arange(max(1, int(counts.max())) if counts.numel() else 1)
        inside = columns < counts[:, None]
        index = torch.where(inside, (ends - counts)[:, None] + columns, 0)
        return torch.where(inside, self.items[index], PADDING) if self.items.numel() else index.fill_(PADDING)


@dataclass(frozen=True)
class Split:
    """Train, validation and test lists over the same users and items, each in time order where time is known."""

    train: Lists
    valid: Lists
    test: Lists
    num_items: int

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.train)

    def counts(self) -> Tensor:
        """(C,) how often each item occurs in training: what popularity and trees are made of."""
        return self.train.items.bincount(minlength=self.num_items)
