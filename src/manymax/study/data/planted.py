"""Planted data: interactions drawn from a p(item | user) that is known, so that the best ranking is known too."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from manymax.errors import ArgumentError, unknown_name
from manymax.study.data.interactions import Interactions
from manymax.study.seeds import generator

DIM = 4  # of the planted vectors
STRENGTH = 3.0  # standard deviation of a planted score: how much users differ in taste
ZIPF = 0.8  # exponent of the popularity
SPREAD = 0.6  # standard deviation of the log of a user's number of interactions
SHORTEST = 5  # interactions of a user
YEAR = 365 * 24 * 3600
SCORES_AT_A_TIME = 1 << 22  # entries of a block of scores


class Size(NamedTuple):
    """How much is planted: users, items, mean number of interactions of a user."""

    users: int
    items: int
    mean: int


SIZES = {
    "tiny": Size(200, 150, 20),
    "small": Size(1_000, 500, 30),
    "medium": Size(6_000, 500, 25),
    "ml-1m": Size(6_040, 3_416, 138),
}
# Early stopping counts epochs: one must have steps enough to leave the plateau that every model begins on. With the
# usual batches of 2048 this size has 58.
DEFAULT = "medium"


@dataclass(frozen=True)
class PlantedLaw:
    """The planted law

        p(j | u) = softmax_j(<u, v_j> + b_j)

    Args:
        users: (U, d).
        items: (C, d).
        offsets: (C,) log popularity.
    """

    users: Tensor
    items: Tensor
    offsets: Tensor

    def log_probs(self, users: Tensor) -> Tensor:
        """(B, C) log p(item | user) for users (B,)."""
        return torch.addmm(self.offsets, self.users[users], self.items.T).log_softmax(-1)

    def probs(self, users: Tensor) -> Tensor:
        """(B, C) p(item | user) for users (B,); call it for blocks of users."""
        return self.log_probs(users).exp()

    def among(self, user_ids: np.ndarray[Any, Any], item_ids: np.ndarray[Any, Any]) -> PlantedLaw:
        """The law of some users given that the item is one of `item_ids`, in the order of these ids."""
        users, items = torch.from_numpy(user_ids), torch.from_numpy(item_ids)
        return PlantedLaw(self.users[users], self.items[items], self.offsets[items])


def parse_size(size: str) -> Size:
    """A size by name or as USERSxITEMSxMEAN.

    >>> parse_size("500x300x20")
    Size(users=500, items=300, mean=20)
    """
    if size in SIZES:
        return SIZES[size]
    numbers = re.fullmatch(r"(\d+)x(\d+)x(\d+)", size)
    if numbers is None:
        raise unknown_name("size", size, [*SIZES, "USERSxITEMSxMEAN, such as 500x300x20"])
    users, items, mean = map(int, numbers.groups())
    if users < 1 or mean < SHORTEST or items < 2 * mean:
        raise ArgumentError(
            f"`size` must have at least 1 user, {SHORTEST} interactions a user and twice as many items; got {size!r}."
        )
    return Size(users, items, mean)


def plant(size: str = DEFAULT, seed: int = 0) -> tuple[Interactions, PlantedLaw]:
    """Draw a world and the interactions of its users.

        u ~ N(0, I),  v_j ~ N(0, STRENGTH^2 / d I),  b_j = -ZIPF log rank_j - |v_j|^2 / 2

    The last term makes E_u e^{<u, v_j> + b_j} = rank_j^-ZIPF: popularity is Zipf's. Each user draws items from
    p(. | u) one after another without repetition (by Gumbel noise, all at once), and that is their order in time: given
    what came before, the next item is drawn from p among the rest. So ranking the unseen by p is best, whether the
    test items are the last ones or a random choice.

    Args:
        size: a key of `SIZES`, or USERSxITEMSxMEAN.
        seed: of everything.

    Returns:
        the interactions, with times, and the law of all users and items; an item that nobody drew has no number, and
        `item_ids` says which those are that have one.

    >>> interactions, truth = plant("tiny", seed=0)
    >>> interactions.num_users, truth.probs(torch.arange(3)).sum(-1).round(decimals=4)
    (200, tensor([1., 1., 1.]))
    """
    num_users, num_items, mean = parse_size(size)
    rng = generator(seed, "planted")
    truth = _law(num_users, num_items, rng)
    lengths = _lengths(num_users, num_items, mean, rng)
    users = torch.arange(num_users).repeat_interleave(lengths)
    items = _draw(truth, lengths, rng)
    drawn = items.bincount(minlength=num_items) > 0
    numbers = drawn.cumsum(0) - 1
    times = _times(lengths, rng)
    everyone, kept = np.arange(num_users), drawn.nonzero()[:, 0].numpy()
    interactions = Interactions(users, numbers[items], everyone, kept, times=times, name="planted")
    return interactions.with_step("raw", data="planted", size=size, seed=seed), truth


def _law(num_users: int, num_items: int, rng: torch.Generator) -> PlantedLaw:
    users = torch.randn(num_users, DIM, generator=rng)
    items = torch.randn(num_items, DIM, generator=rng) * (STRENGTH / math.sqrt(DIM))
    ranks = torch.randperm(num_items, generator=rng) + 1
    return PlantedLaw(users, items, -ZIPF * ranks.log() - items.square().sum(-1) / 2)


def _lengths(num_users: int, num_items: int, mean: int, rng: torch.Generator) -> Tensor:
    """(U,) log-normal numbers of interactions, so that few users have many."""
    logs = torch.randn(num_users, generator=rng) * SPREAD + math.log(mean) - SPREAD**2 / 2
    return logs.exp().round().long().clamp(SHORTEST, num_items // 2)


def _draw(truth: PlantedLaw, lengths: Tensor, rng: torch.Generator) -> Tensor:
    """(n,) items of user 0 in the order of drawing, then of user 1, ...: the largest of log p + Gumbel noise."""
    rows = max(1, SCORES_AT_A_TIME // truth.offsets.numel())
    drawn = []
    for users in torch.arange(lengths.numel()).split(rows):
        scores = truth.log_probs(users)
        noise = torch.empty_like(scores).exponential_(generator=rng).log_()
        longest = int(lengths[users].max())
        items = (scores - noise).topk(longest, dim=-1).indices
        drawn.append(items[torch.arange(longest) < lengths[users, None]])
    return torch.cat(drawn)


def _times(lengths: Tensor, rng: torch.Generator) -> Tensor:
    """(n,) seconds: each user begins within a year, then waits a day on average."""
    starts = torch.rand(lengths.numel(), generator=rng) * YEAR
    gaps = 1 + (torch.empty(int(lengths.sum())).exponential_(generator=rng) * 24 * 3600).long()
    waited = gaps.cumsum(0)
    first = lengths.cumsum(0) - lengths
    return starts.long().repeat_interleave(lengths) + waited - waited[first].repeat_interleave(lengths)
