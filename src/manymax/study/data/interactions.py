"""The data types of a study: `Interactions` (rows with vocabularies), `Lists` (one list per user) and `Split`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manymax.errors import ArgumentError

PADDING = -100  # fills padded lists of items; it is torch's ignore_index, so that a padded list can be a target

PARTS = ("train", "valid", "test")  # the parts of a split; `Interactions.parts` holds indices into it


@dataclass(frozen=True)
class Interactions:
    """Rows (user, item[, rating][, time][, part]) in the order of the file; users and items are numbered from 0.

    Args:
        users, items: (n,) int64 numbers; number i stands for entry i of `user_ids` or `item_ids`.
        user_ids, item_ids: (U,), (C,) the ids in the file.
        ratings: (n,) float32, or None if the source has none.
        times: (n,) int64, seconds or any number that grows with time, or None.
        parts: (n,) int8 indices into `PARTS` if the source comes with a split, or None.
        name: of the data set.
        card: the data card: what was done to the data so far, a dict with `step` and its figures for each step.
        item_titles: (C,) what the items are called, None for one without a title; None if the source has no titles.
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
    item_titles: np.ndarray[Any, Any] | None = None

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
        """The numbers of users, items and interactions, and the sparsity: 1 - distinct pairs / (U C)."""
        # A pair may be repeated: with all rows in place of distinct pairs the sparsity could be negative.
        cells, pairs = self.num_users * self.num_items, (self.users * self.num_items + self.items).unique().numel()
        return {
            "users": self.num_users,
            "items": self.num_items,
            "interactions": len(self),
            "sparsity": round(1 - pairs / cells, 6) if cells else 1.0,
        }

    def with_step(self, step: str, **figures: Any) -> Interactions:
        """The same rows with one more step on the card: its name, its figures, and the counts after it."""
        return replace(self, card=(*self.card, {"step": step, **figures, **self.counts()}))

    def rows(self, keep: Tensor) -> Interactions:
        """The rows where `keep` (n,) is true. Users and items without rows are dropped, and the others renumbered."""
        users, used_users = _renumber(self.users[keep], self.num_users)
        items, used_items = _renumber(self.items[keep], self.num_items)
        ratings, times, parts = (None if t is None else t[keep] for t in (self.ratings, self.times, self.parts))
        titles = None if self.item_titles is None else self.item_titles[used_items]
        ids = self.user_ids[used_users], self.item_ids[used_items]
        return Interactions(users, items, *ids, ratings, times, parts, self.name, self.card, titles)


def _renumber(numbers: Tensor, count: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """New numbers without gaps, in the same order, and which of the old numbers are used, (count,) bool."""
    used = numbers.bincount(minlength=count) > 0
    return (used.cumsum(0) - 1)[numbers], used.numpy()


@dataclass(frozen=True)
class Lists:
    """One list of item numbers per user, of any length: the list of user u is items[offsets[u]:offsets[u + 1]].

    Args:
        offsets: (U + 1,) int64, from 0.
        items: (n,) int64.
    """

    offsets: Tensor
    items: Tensor

    @classmethod
    def from_pairs(cls, users: Tensor, items: Tensor, num_users: int) -> Lists:
        """Group (user, item) pairs by user; the pairs of a user keep their order."""
        by_user = users.argsort(stable=True)
        offsets = torch.zeros(num_users + 1, dtype=torch.long)
        torch.cumsum(users.bincount(minlength=num_users), 0, out=offsets[1:])
        return cls(offsets, items[by_user])

    @property
    def lengths(self) -> Tensor:
        """(U,) the length of each list."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def users(self) -> Tensor:
        """(n,) the user of each entry of `items`."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)

    def padded(self, users: Tensor, length: int | None = None) -> Tensor:
        """The lists of some users as the rows of one tensor, padded at the end with -100.

        Args:
            users: (B,) int64.
            length: keep only the last `length` entries of each list, in their order; None keeps all.

        Returns:
            (B, P), where P is the length of the longest of these lists, at least 1.
        """
        if users.numel() and int(users.max()) >= len(self):
            raise ArgumentError(f"`users` must be below {len(self)}; got {int(users.max())}.")
        ends = self.offsets[users + 1]
        counts = self.lengths[users] if length is None else self.lengths[users].clamp(max=length)
        columns = torch.arange(max(1, int(counts.max())) if counts.numel() else 1)
        inside = columns < counts[:, None]
        # Places of the padding read entry 0, which exists unless all lists are empty, and are overwritten.
        index = torch.where(inside, (ends - counts)[:, None] + columns, 0)
        return torch.where(inside, self.items[index], PADDING) if self.items.numel() else index.fill_(PADDING)


@dataclass(frozen=True)
class Split:
    """Train, validation and test lists of the same users and items, each in time order if times are known."""

    train: Lists
    valid: Lists
    test: Lists
    num_items: int

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.train)

    def counts(self) -> Tensor:
        """(C,) how often each item occurs in training; popularity samplers and Huffman trees are built from it."""
        return self.train.items.bincount(minlength=self.num_items)
