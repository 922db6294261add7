"""Use of a finished run: recommendations for users by the ids of the data, and vectors for other systems."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, UnknownNameError
from manymax.study.backbones.base import Vectors
from manymax.study.config import RunConfig
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import Lists, Split
from manymax.study.evaluate import USERS_AT_A_TIME
from manymax.study.records import read_titles
from manymax.study.run import load_model
from manymax.study.train import Model


@dataclass(frozen=True)
class Served:
    """A trained model with the ids of its users and items.

    Inside, users and items are numbers from 0; `user_ids` and `item_ids` say what each number was called in the data.
    `known` are the items of each user in all three parts of the split, in time order. `item_titles` are what the items
    are called, None for one without a title; None if the data has no titles.
    """

    config: RunConfig
    model: Model
    user_ids: Sequence[Any]
    item_ids: Sequence[Any]
    split: Split
    known: Lists
    item_titles: Sequence[str | None] | None = None

    @classmethod
    def load(cls, folder: Path) -> Served:
        """Load the model from the folder of a finished run."""
        config, model, user_ids, item_ids, split = load_model(folder)
        lists = (split.train, split.valid, split.test)
        users, items = torch.cat([part.users() for part in lists]), torch.cat([part.items for part in lists])
        known = Lists.from_pairs(users, items, split.num_users)
        return cls(config, model, user_ids, item_ids, split, known, read_titles(folder))

    def number(self, user: str) -> int:
        """The number of the user with this id; ids that are integers in the data are given as text too.

        Where no id is written like this, one that is the same number is meant: 17850 finds 17850.0, and the other way
        round.
        """
        if (found := self._numbers.get(user)) is not None:
            return found
        names = list(self._numbers)
        if _is_number(user):
            same = [name for name in names if _is_number(name) and Decimal(name) == Decimal(user)]
            if len(same) == 1:
                return self._numbers[same[0]]
            if same:
                known = ", ".join(map(repr, same))
                raise ArgumentError(f"`user` {user!r} could be any of {known}: write it like one of them.")
        nearest = difflib.get_close_matches(user, names, n=1)
        hint = f" did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownNameError(
            f"unknown user {user!r}:{hint} The run knows {len(names):,} users, such as {names[0]!r}."
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each user, by the id as text."""
        return {str(name): number for number, name in enumerate(self.user_ids)}

    @torch.no_grad()
    def recommend(self, users: Tensor, top: int, *, seen: bool = False) -> tuple[Tensor, Tensor]:
        """The best items of some users.

        Args:
            users: (B,) user numbers.
            top: number of items per user.
            seen: whether items that a user has already may be recommended.

        Returns:
            Scores and item numbers, (B, top) each, best first. If fewer items are left for a user, the remaining
            scores are -inf and the numbers -100.
        """
        if not 1 <= top <= self.split.num_items:
            raise ArgumentError(f"`top` must be from 1 to the number of items, {self.split.num_items}; got {top}.")
        vectors = self.model.backbone.vectors()
        exclude = None if seen else self.known.padded(users)
        head = self.model.head
        return head.topk(self.queries(users, vectors), top, linear_weight=vectors.for_head(head), exclude=exclude)

    def queries(self, users: Tensor, vectors: Vectors) -> Tensor:
        """(B, d) the query vectors of users, from all items that are known of them."""
        backbone = self.model.backbone
        history = self.known.padded(users, backbone.max_length) if backbone.needs_history else None
        return backbone.queries(Batch(users, history), vectors)

    @torch.no_grad()
    def vectors(self) -> tuple[Tensor, Tensor]:
        """User vectors (U, d) and item vectors (C, d); their inner products are the scores."""
        vectors = self.model.backbone.vectors()
        if not self.model.head.takes_class_vectors:
            raise ArgumentError(
                f"loss {self.config.loss.name!r} scores by the nodes of a tree: there are no item vectors to export."
            )
        return torch.cat(list(self._all_queries(vectors))), vectors.items.detach()

    def _all_queries(self, vectors: Vectors) -> Iterator[Tensor]:
        for users in torch.arange(self.split.num_users).split(USERS_AT_A_TIME):
            yield self.queries(users, vectors)


def _is_number(text: str) -> bool:
    """Whether a text is a plain number, such as 17850 or 17850.0."""
    return re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) is not None
