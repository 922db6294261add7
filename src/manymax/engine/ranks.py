"""The processes that share the work of a head, and which classes each of them holds.

A kernel completes its sums over the classes of a row through `Ranks`. Here is the case of one process, for which every
exchange is the identity; `manymax.distributed` has the case of many. A value is either local (every rank has a part of
it) or shared (every rank has all of it, the same numbers). Two functions lead from one to the other, and each is the
derivative of the other:

    total    local to shared: sum over the ranks; the gradient of the sum is every part's gradient
    spread   shared to local: nothing happens; the gradients of the uses on all ranks are added up

A formula that is written with the two gives every rank the gradients of its own class vectors in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class Ranks:
    """This process alone: the identity of every exchange. `manymax.distributed.ProcessRanks` is for several."""

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to, so that a kernel may take a shortcut."""
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, without derivative."""
        return values.detach()

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, without derivative; nan wins."""
        return values.detach()

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a local value, which makes it a shared one."""
        return values

    def spread(self, values: Tensor) -> Tensor:
        """A shared value for local use."""
        return values

    def first(self, values: Tensor) -> Tensor:
        """What the first rank has, of the same shape and dtype on every rank."""
        return values


ALONE = Ranks()


@dataclass(frozen=True)
class Shards:
    """Contiguous classes for each rank: rank r holds `sizes[r]` classes, from where rank r - 1 ends."""

    sizes: tuple[int, ...]
    ranks: Ranks = field(default=ALONE)

    @property
    def num_classes(self) -> int:
        """C."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Classes of this rank."""
        return self.sizes[self.ranks.rank]

    @property
    def start(self) -> int:
        """The first class of this rank."""
        return sum(self.sizes[: self.ranks.rank])

    @property
    def span(self) -> slice:
        """The classes of this rank."""
        return slice(self.start, self.start + self.size)

    def inside(self, ids: Tensor) -> Tensor:
        """Which ids this rank holds."""
        return (ids >= self.start) & (ids < self.start + self.size)

    def local(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Listed classes as this rank numbers them: those of other ranks become class 0 with weight 0."""
        if self.ranks.alone:
            return ids, weights
        inside = self.inside(ids)
        return torch.where(inside, ids - self.start, 0), torch.where(inside, weights, 0)


def columns(*values: Tensor) -> Tensor:
    """(n, values), in float64: sums of many numbers travel exactly enough for every dtype."""
    return torch.stack([value.double() for value in values], 1)
