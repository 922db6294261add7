"""Planted data: interactions that are drawn from a known p(item | user), so that the best ranking is known too."""

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

PLANTED_DIM = 4  # size of the planted user and item vectors
STRENGTH = 3.0  # standard deviation of a planted score <u, v_j>: how much users differ in taste
ZIPF = 0.8  # exponent of the popularity: p(item of rank r) ~ r^-ZIPF
SPREAD = 0.6  # standard deviation of the log of a user's number of interactions
SHORTEST = 5  # least number of interactions of a user
YEAR = 365 * 24 * 3600  # seconds
SCORES_AT_A_TIME = 1 << 22  # most entries of a block of scores


class Size(NamedTuple):
    """The size of planted data: numbers of users and items, and the mean number of interactions per user."""

    users: int
    items: int
    mean: int


SIZES = {
    "tiny": Size(200, 150, 20),
    "small": Size(1_000, 500, 30),
    "medium": Size(6_000, 500, 25),
    "ml-1m": Size(6_040, 3_416, 138),
}
# Early stopping counts epochs, so an epoch must have enough steps to leave the plateau that every model begins on. With
# the default batch size of 2048, an epoch of this size has 58 steps.
DEFAULT_SIZE = "medium"


@dataclass(frozen=True)
class PlantedLaw:
    """The distribution that planted data is drawn from:

        p(j | u) = softmax_j(<u, v_j> + b_j)

    Args:
        users: (U, d) the vectors u.
        items: (C, d) the vectors v.
        offsets: (C,) b, which makes some items more popular than others.
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
            f"`size` must have at least 1 user, {SHORTEST} interactions per user and twice as many items; got {size!r}."
        )
    return Size(users, items, mean)


def plant(size: str = DEFAULT_SIZE, seed: int = 0, zipf: float = ZIPF) -> tuple[Interactions, PlantedLaw]:
    """Draw random user and item vectors, and the interactions of all users.

        u ~ N(0, I),  v_j ~ N(0, STRENGTH^2 / d I),  b_j = -zipf log rank_j - |v_j|^2 / 2

    The last term makes E_u e^{<u, v_j> + b_j} = rank_j^-zipf, so that the popularity of items follows Zipf's law. Each
    user draws items from p(. | u) one after another without repetition, and this is their order in time: given the
    items so far, the next one is drawn from p restricted to the other items. Ranking the unseen items by p is therefore
    optimal, whether the test items are the last ones or a random choice.

    Args:
        size: a key of `SIZES`, or USERSxITEMSxMEAN.
        seed: of all random numbers.
        zipf: the exponent of the popularity; 0 makes all items equally popular.

    Returns:
        The interactions, with times, and the law of all users and items. Items that no user drew are not in the
        interactions; `item_ids` of the interactions holds the numbers that the other items have in the law.

    >>> interactions, truth = plant("tiny", seed=0)
    >>> interactions.num_users, truth.probs(torch.arange(3)).sum(-1).round(decimals=4)
    (200, tensor([1., 1., 1.]))
    """
    num_users, num_items, mean = parse_size(size)
    rng = generator(seed, "planted")
    truth = _law(num_users, num_items, rng, zipf)
    lengths = _lengths(num_users, num_items, mean, rng)
    users = torch.arange(num_users).repeat_interleave(lengths)
    items = _draw(truth, lengths, rng)
    drawn = items.bincount(minlength=num_items) > 0
    numbers = drawn.cumsum(0) - 1  # numbers without gaps for the items that were drawn
    times = _times(lengths, rng)
    user_ids, item_ids = np.arange(num_users), drawn.nonzero()[:, 0].numpy()
    interactions = Interactions(users, numbers[items], user_ids, item_ids, times=times, name="planted")
    return interactions.with_step("raw", data="planted", size=size, seed=seed), truth


def _law(num_users: int, num_items: int, rng: torch.Generator, zipf: float = ZIPF) -> PlantedLaw:
    """Draw u, v and the ranks of popularity."""
    users = torch.randn(num_users, PLANTED_DIM, generator=rng)
    items = torch.randn(num_items, PLANTED_DIM, generator=rng) * (STRENGTH / math.sqrt(PLANTED_DIM))
    ranks = torch.randperm(num_items, generator=rng) + 1
    return PlantedLaw(users, items, -zipf * ranks.log() - items.square().sum(-1) / 2)


def _lengths(num_users: int, num_items: int, mean: int, rng: torch.Generator) -> Tensor:
    """(U,) the numbers of interactions of the users, log-normal: a few users have many."""
    # The mean of a log-normal variable is exp(mu + sigma^2 / 2); the last term makes it `mean`.
    logs = torch.randn(num_users, generator=rng) * SPREAD + math.log(mean) - SPREAD**2 / 2
    return logs.exp().round().long().clamp(SHORTEST, num_items // 2)


def _draw(truth: PlantedLaw, lengths: Tensor, rng: torch.Generator) -> Tensor:
    """(n,) the items of user 0 in the order of drawing, then those of user 1, and so on.

    Gumbel top-k trick: the k largest values of log p + Gumbel noise, in descending order, are distributed like k draws
    from p without replacement.
    """
    rows = max(1, SCORES_AT_A_TIME // truth.offsets.numel())
    drawn = []
    for users in torch.arange(lengths.numel()).split(rows):
        scores = truth.log_probs(users)
        noise = torch.empty_like(scores).exponential_(generator=rng).log_()  # minus the log of Exp(1) is Gumbel
        longest = int(lengths[users].max())
        items = (scores - noise).topk(longest, dim=-1).indices
        drawn.append(items[torch.arange(longest) < lengths[users, None]])
    return torch.cat(drawn)


def _times(lengths: Tensor, rng: torch.Generator) -> Tensor:
    """(n,) times in seconds: a user begins at a random time of a year, with a day between interactions on average."""
    starts = torch.rand(lengths.numel(), generator=rng) * YEAR
    gaps = 1 + (torch.empty(int(lengths.sum())).exponential_(generator=rng) * 24 * 3600).long()  # never 0: no ties
    elapsed = gaps.cumsum(0)  # over all users; what had elapsed at a user's first interaction is subtracted
    first = lengths.cumsum(0) - lengths
    return starts.long().repeat_interleave(lengths) + elapsed - elapsed[first].repeat_interleave(lengths)
