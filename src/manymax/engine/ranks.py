"""The processes (ranks) that share the work of a head, and which classes (shard) each of them holds.

A kernel completes its sums over the classes of a row through `Ranks`. Here is the case of one process, for which every
exchange is the identity; `manymax.distributed` has the case of many. A value is either local (every rank has a part of
it) or shared (every rank has all of it, the same numbers). Two functions lead from one to the other, and the backward
of each is the other:

    total    local to shared: the sum over the ranks; each part gets the gradient of the sum
    spread   shared to local: the value stays as it is; the gradients of its uses on all ranks are summed

A formula that is written with the two gives every rank the whole gradient of its own class vectors, and all ranks the
same whole gradient of what they share, such as the queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class Ranks:
    """One process alone: every exchange is the identity. `manymax.distributed.ProcessRanks` is for several.

    All ranks must make the same exchanges in the same order: one that leaves out an exchange lets the others wait.
    """

    rank: int = 0  # the number of this process
    size: int = 1  # how many there are

    @property
    def alone(self) -> bool:
        """Whether this is the only process, so that a kernel may take a shortcut that sees all classes of a row."""
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, without derivative: for kernels, which compute their gradients themselves."""
        return values.detach()  # also alone, so that nobody comes to rely on a gradient that other ranks would not get

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, without derivative; nan if any rank has nan."""
        return values.detach()

    # `total` and `spread` have a derivative, unlike `sum` and `maximum`: losses that are left to autograd use them.
    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a local value, which makes it a shared one; with derivative."""
        return values

    def spread(self, values: Tensor) -> Tensor:
        """A shared value for use with the classes of this rank; with derivative, the sum over the ranks."""
        return values

    def first(self, values: Tensor) -> Tensor:
        """The values of the first rank on every rank; shape and dtype must be the same on all."""
        return values


# The ranks of every head that was not told otherwise.
ALONE = Ranks()


@dataclass(frozen=True)
class Shards:
    """Which classes each rank holds: rank r has `sizes[r]` contiguous ones, beginning where those of rank r - 1 end.

    Contiguous, so that a global id becomes a local one by a subtraction, and a shard is a slice of rows.
    """

    sizes: tuple[int, ...]  # every rank knows those of all: they decide together how to cut the rows into blocks
    ranks: Ranks = field(default=ALONE)

    @property
    def num_classes(self) -> int:
        """C."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """The number of classes of this rank."""
        return self.sizes[self.ranks.rank]

    @property
    def start(self) -> int:
        """The first class of this rank."""
        return sum(self.sizes[: self.ranks.rank])

    @property
    def span(self) -> slice:
        """The classes of this rank, as a slice of all classes."""
        return slice(self.start, self.start + self.size)

    def inside(self, ids: Tensor) -> Tensor:
        """Which of the ids (global, of any shape) this rank holds, as a bool tensor of that shape."""
        return (ids >= self.start) & (ids < self.start + self.size)

    def local(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Listed classes as this rank numbers them; those of other ranks become class 0 with weight 0.

        Class 0 is as good as any: with weight 0 it adds nothing, and shapes are the same on all ranks.
        """
        if self.ranks.alone:  # no pass over the ids of a large batch for nothing
            return ids, weights
        inside = self.inside(ids)
        return torch.where(inside, ids - self.start, 0), torch.where(inside, weights, 0)


def columns(*values: Tensor) -> Tensor:
    """The values, (n,) each, as columns of one float64 tensor (n, number of values), to be summed over the ranks.

    One exchange for all of them, because an exchange costs mostly its latency. In float64, so that the order in which
    ranks are added up does not show in float32 results.
    """
    return torch.stack([value.double() for value in values], 1)
