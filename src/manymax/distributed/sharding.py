"""Which rank holds which classes, and a target as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manymax.distributed.collectives import Ranks
from manymax.engine.options import PAD, HeadOptions
from manymax.engine.row_target import RowTarget
from manymax.engine.target import Target
from manymax.errors import ArgumentError
from manymax.ops.checks import visible


def even_sizes(num_classes: int, ranks: int) -> tuple[int, ...]:
    """Sizes of `ranks` shards that differ by one class at most, the larger ones first.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    size, larger = divmod(num_classes, ranks)
    return tuple(size + (rank < larger) for rank in range(ranks))


@dataclass(frozen=True)
class Shards:
    """Contiguous classes for each rank: rank r holds `sizes[r]` classes, from where rank r - 1 ends."""

    sizes: tuple[int, ...]
    ranks: Ranks

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

    def in_blocks(self, options: HeadOptions) -> HeadOptions:
        """The options with the rows of a block written out: all ranks must cut the rows alike."""
        padded = -(-max(self.sizes) // PAD) * PAD
        return replace(options, block_rows=options.rows(padded))


def make_shards(num_classes: int, sizes: Sequence[int] | None, ranks: Ranks) -> Shards:
    """The given sizes, or even ones."""
    if num_classes < ranks.size:
        raise ArgumentError(
            f"`num_classes` must be at least the number of ranks, {ranks.size}, one class for each; got {num_classes}."
        )
    chosen = even_sizes(num_classes, ranks.size) if sizes is None else tuple(sizes)
    if len(chosen) != ranks.size or sum(chosen) != num_classes or min(chosen) < 1:
        raise ArgumentError(
            f"`sizes` must be {ranks.size} sizes of at least 1 with sum {num_classes}, one for each rank; got {chosen}."
        )
    return Shards(chosen, ranks)


def overlaps(shards: Shards, spans: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Where the classes of this rank are among stored parts that hold the classes [start, stop) each.

    Returns:
        (part, rows of that part) in the order of the classes.
    """
    wanted, stop, found = shards.span.start, shards.span.stop, []
    for part in sorted(range(len(spans)), key=lambda part: spans[part]):
        low, high = spans[part]
        if low <= wanted < min(high, stop):
            found.append((part, slice(wanted - low, min(high, stop) - low)))
            wanted = min(high, stop)
    if wanted < stop:
        raise ArgumentError(
            f"`states` must hold the classes {shards.span.start} to {stop - 1} of this rank; class {wanted} is in none."
        )
    return found


def local_target(
    read: Target, weight: Tensor | None, live: Tensor | None, shards: Shards, label_smoothing: float
) -> RowTarget:
    """The weights t of the classes of this rank, with the totals of all of them.

    Args:
        read: over all classes.
        weight: (C,) class weights.
        live: (classes of this rank,) which are not masked, or None.
        shards, label_smoothing: as in the head.
    """
    ids, weights, total = None, read.weights, read.weights.sum(1)
    if read.ids is None:
        weights = weights[:, shards.span]
    else:
        inside = shards.inside(read.ids)
        ids, weights = torch.where(inside, read.ids - shards.start, 0), torch.where(inside, weights, 0)
    if label_smoothing == 0:
        return RowTarget(ids, weights, None, None, total, None)
    class_weight = weights.new_ones(shards.size) if weight is None else weight[shards.span].to(weights.dtype)
    alive = torch.ones_like(class_weight) if live is None else live.to(weights.dtype)
    class_weight = class_weight * alive
    num_live, mass = shards.ranks.sum(torch.stack([alive.sum(), class_weight.sum()]).double()).to(weights.dtype)
    share = label_smoothing * read.count / num_live
    total = (1 - label_smoothing) * total + share * mass
    return RowTarget(ids, (1 - label_smoothing) * weights, share, class_weight, total, None)


def check_positives(read: Target, live: Tensor | None, shards: Shards) -> None:
    """Raise if a positive of this rank is masked."""
    if live is None or not visible(live):
        return
    if read.ids is None:
        masked = (read.weights[:, shards.span] != 0) & ~live
    else:
        inside = shards.inside(read.ids)
        masked = inside & (read.weights != 0) & ~live[torch.where(inside, read.ids - shards.start, 0)]
    if masked.any():
        raise ArgumentError("`target` names a class whose bias is -inf: a masked class cannot be a positive.")
