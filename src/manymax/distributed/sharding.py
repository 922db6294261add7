"""Which rank holds which classes: sizes of shards, and the rows of stored states that a shard is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from manymax.engine.ranks import Ranks, Shards
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked


@checked(least={"num_classes": 1, "ranks": 1})
def even_sizes(num_classes: int, ranks: int) -> tuple[int, ...]:
    """Sizes of `ranks` shards that differ by one class at most, the larger ones first.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    size, larger = divmod(num_classes, ranks)
    return tuple(size + (rank < larger) for rank in range(ranks))


def make_shards(num_classes: int, sizes: Sequence[int] | None, ranks: Ranks) -> Shards:
    """The shards of the given sizes, or of even sizes if `sizes` is None.

    Every rank must be given the same sizes: a rank learns from them where its own classes begin.
    """
    # A rank without classes would have to take part in every exchange with empty tables, whose maximum does not exist.
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


def local_shard(linear_weight: Any, shards: Shards) -> Tensor:
    """The rows of this rank of a DTensor (classes, d) that is sharded on dimension 0; gradients go back to the DTensor.

    Args:
        linear_weight: spread over the ranks of `shards`, in their order.
        shards: which classes each rank holds.
    """
    mesh, placements, classes = linear_weight.device_mesh, linear_weight.placements, linear_weight.shape[0]
    if mesh.ndim != 1 or type(placements[0]).__name__ != "Shard" or placements[0].dim != 0:
        raise ArgumentTypeError(
            "`linear_weight` must be a DTensor that is sharded on dimension 0 over one dimension of ranks, with the"
            f" placements (Shard(0),); got {tuple(placements)} over a mesh of shape {tuple(mesh.shape)}. Bring it"
            " there by `linear_weight.redistribute(mesh, [Shard(0)])`; over several dimensions of ranks pass the rows"
            " of this rank as a plain tensor."
        )
    ranks = shards.ranks
    if mesh.size() != ranks.size or mesh.get_local_rank() != ranks.rank:
        raise ArgumentError(
            f"`linear_weight` is spread over {mesh.size()} ranks, of which this is number {mesh.get_local_rank()}; the"
            f" head over {ranks.size}, of which this is number {ranks.rank}: build it with `group=mesh.get_group()`."
        )
    # As torch cuts it: all ranks but the last have equally many rows.
    size = -(-classes // ranks.size)
    sizes = tuple(min(size, max(0, classes - rank * size)) for rank in range(ranks.size))
    if sizes != shards.sizes:
        hint = f"build it with `sizes={sizes}`" if min(sizes) > 0 else "take fewer ranks: every one needs a class"
        raise ArgumentError(f"`linear_weight` has {sizes} classes on its ranks, and the head {shards.sizes}; {hint}.")
    local: Tensor = linear_weight.to_local()
    return local


def overlaps(shards: Shards, spans: Sequence[tuple[int, int]]) -> list[tuple[int, slice]]:
    """Where to find the classes of this rank among stored parts, each of which holds classes [start, stop).

    Args:
        shards: the classes of this rank.
        spans: (start, stop) of each part, in any order; parts may overlap.

    Returns:
        Pairs (index of a part, rows to take from it), in the order of the classes.
    """
    # `wanted` is the next class that has not been found. Parts are visited by their first class, and each adds the
    # piece from `wanted` to its end, so that overlapping parts contribute no class twice and a gap stays visible.
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
