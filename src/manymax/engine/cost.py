"""What a training step costs, in counts: the sizes of a step, the kinds of work, the bytes that ranks exchange.

A member states its cost as a function from the sizes of a step to a `Cost`, and what its shards exchange as a function
to a `Traffic`. Here are the building blocks of such functions. Counts are independent of a machine;
`manymax.theory.cost` measures what a machine takes for one of each kind and turns counts into seconds.

A step can be computed in three ways, which cost differently: by heads on the native back end, by heads in plain torch,
and by autograd on full tables.

The kinds of work and the constants are few, and rounded: benchmarks/advisor.py compares predictions with measured
steps, and asks for the right order of losses and for times within a factor of 2. It is a model to choose with, no
simulator. engine/sampled_cost.py has the members that draw negatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from manymax.engine.options import PAD, HeadOptions
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked

Way = Literal["native", "torch", "plain"]  # heads on either back end; autograd on full (N, C) tables

FLOAT, DOUBLE = 4, 8  # bytes; the sums of kernels travel between ranks in float64
PER_STEP = 250  # calls of torch in a step that has next to nothing to compute: checks, targets, autograd
NEAR, FAR = 1 << 20, 1 << 27  # bytes: a table of 1 MB is in the processor's cache, one of 128 MB is not
# Bytes of a tensor from which on its memory goes back to the operating system when it is freed (the C library's limit):
# smaller ones are given memory that was in use before.
KEPT = 1 << 25
MARKED = 2 * FLOAT  # bytes of a maximum over ranks: the number, and a mark that says whether it is nan
SEARCH_STEPS = 8  # exchanges of a search for a threshold over ranks: about 6 steps, and some for a start


@checked
@dataclass(frozen=True)
class Shape:
    """The sizes of a step.

    batch, num_classes, dim: N, C, d.
    positives: P, the average number of positives of a row.
    num_negatives: k, negatives that a sampled member draws for each positive.
    shared: whether the k negatives are drawn once for all positives instead.
    num_candidates: M, classes that are scored for each positive to choose its negatives among them; 0 for none.
    support: m, the average number of classes that a sparse map gives a probability above 0; None for all classes.
    path: L, the mean length of a path of the tree; None for that of a tree of equal counts.
    sparse_grad: whether a member that draws negatives gives the gradient of the class vectors as a row-sparse tensor,
        as the keyword of its head says.
    """

    batch: int
    num_classes: int
    dim: int
    positives: float = 1.0
    num_negatives: int = 100
    shared: bool = False
    num_candidates: int = 0
    support: float | None = None
    path: float | None = None
    sparse_grad: bool = False

    def __post_init__(self) -> None:
        # A bool is an int in Python: `num_classes=True` is a mistake, not a 1.
        for name, least in (("batch", 1), ("num_classes", 1), ("dim", 1), ("num_negatives", 1), ("num_candidates", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"`{name}` must be an integer of at least {least}; got {value!r}.")
        for name in ("positives", "support", "path"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ArgumentError(f"`{name}` must be a finite number of at least 0; got {value!r}.")

    @property
    def pairs(self) -> float:
        """N P, the number of positives: the rows of sampled members and of the tree, which take them one by one."""
        return self.batch * self.positives

    @property
    def table(self) -> float:
        """N C, the number of scores."""
        return float(self.batch * self.num_classes)

    @property
    def vectors(self) -> float:
        """C d, the numbers in all class vectors."""
        return float(self.num_classes * self.dim)

    @property
    def queries(self) -> float:
        """N d, the numbers in all queries."""
        return float(self.batch * self.dim)


@dataclass(frozen=True)
class Work:
    """How much work of each kind there is.

    flops: of matrix products.
    streamed: numbers read and written in a pass over main memory.
    exponentials: entries that a softmax goes over.
    passes: entries read and written in a pass that stays in the processor's cache.
    fresh: numbers written to memory that is used for the first time. The operating system hands out memory page by page
        when it is first written to, which takes about as long as the product that fills it.
    near, far: numbers gathered from a table in cache, and from one in main memory.
    sorted: integers sorted.
    calls: of torch functions, each of which takes microseconds even for a single number.
    """

    flops: float = 0.0
    streamed: float = 0.0
    exponentials: float = 0.0
    passes: float = 0.0
    fresh: float = 0.0
    near: float = 0.0
    far: float = 0.0
    sorted: float = 0.0
    calls: float = 0.0

    # The result is `Work` even of two machines: a sum of seconds per unit would be no machine.
    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __rmul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, f.name) for f in fields(Work)))

    def seconds(self, machine: Machine) -> float:
        """Seconds on a machine: the sum over the kinds of amount x seconds per unit.

        Nothing is taken to overlap: a step is a sequence of torch calls, each of them bound by one kind of work.
        """
        return sum(getattr(self, f.name) * getattr(machine, f.name) for f in fields(Work))


@dataclass(frozen=True)
class Machine(Work):
    """Seconds that a machine takes for one unit of each kind of work, and the back end that it has.

    The kinds are the fields of `Work`.
    native: whether heads run on the native back end there. It has no kind of work of its own: its loops are vectorised
        as those of torch are, so that a pass of it is counted as one of torch's.
    """

    native: bool = False

    @property
    def way(self) -> Way:
        """How heads compute on this machine."""
        return "native" if self.native else "torch"

    def __post_init__(self) -> None:
        if not isinstance(self.native, bool):
            raise ArgumentError(f"`machine.native` must be true or false; got {self.native!r}.")
        for f in fields(Work):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ArgumentError(f"`machine.{f.name}` must be seconds, at least 0; got {value!r}.")


@dataclass(frozen=True)
class Cost:
    """The cost of one step.

    work: what takes time.
    product_floats: numbers read and written by the matrix products.
    parameters: numbers in the class vectors that are touched; an upper bound where they are drawn.
    memory: bytes at the peak beyond queries and class vectors: buffers, and the gradients of both.
    """

    work: Work
    product_floats: float
    parameters: float
    memory: float

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products."""
        return self.work.flops

    @property
    def bytes(self) -> float:
        """Bytes read and written, in cache or not."""
        w = self.work
        # A pass reads an entry and writes it; the other kinds touch a number once.
        both_ways = w.streamed + w.exponentials + w.passes
        return FLOAT * (self.product_floats + 2 * both_ways + w.fresh + w.near + w.far + w.sorted)


@dataclass(frozen=True)
class Traffic:
    """What the ranks exchange in a step: the number of sums over the ranks, and the bytes of all of them.

    Both count: a small sum costs the latency of the network, a large one its bandwidth.
    """

    sums: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sums + other.sums, self.bytes + other.bytes)

    def sent(self, ranks: int) -> float:
        """Bytes that each of `ranks` ranks sends."""
        # A sum around a ring: (ranks - 1) / ranks of the bytes to add up, and as many to hand the result around.
        return 2 * (ranks - 1) / ranks * self.bytes


# cost(shape, way, **settings): from the sizes, the way of computing and the settings of a member to the cost.
CostOf = Callable[..., Cost]
# From the sizes and the number of ranks to what the ranks exchange.
TrafficOf = Callable[[Shape, int], Traffic]


# Exact members -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryCost:
    """What an exact member does with its scores, counted in its kernel and rounded to fit benchmarks/advisor.py.

    entry: work for each score, products not included.
    calls: of torch functions, for each block.
    tables: how many tables of the size of a block are held besides the block itself.
    plain: how many (N, C) tables autograd holds at its peak.
    each: whether the kernel goes over the scores once for each positive.
    """

    entry: Work
    calls: float
    tables: float = 0.0
    plain: float = 0.0
    each: bool = False

    def over(self, shape: Shape) -> Work:
        """The work on all scores."""
        return shape.table * (max(1.0, shape.positives) if self.each else 1.0) * self.entry


@dataclass(frozen=True)
class NativeCost:
    """What the native kernel of an exact member does with its scores, while a row of them is in cache.

    row: work for each score, whatever the support is.
    search: more of it, for each score of a row in which many classes can be in the support: its threshold is searched
        for over the whole row.
    each: work for each score of such a row and each positive.
    entry: work for each entry of a sparse gradient.
    """

    row: Work
    search: Work = Work()
    each: Work = Work()
    entry: Work = Work()

    def over(self, shape: Shape, support: float) -> Work:
        """The work on all scores."""
        # A kernel looks at the maximum of each group of 64 classes first. Groups without a class of the support are not
        # looked at again, and from one group in four on that has one the whole row is: about one class in 256.
        wide = min(1.0, 256 * support / shape.num_classes)
        return shape.table * (self.row + wide * (self.search + max(1.0, shape.positives) * self.each))


# For each entry of a sparse gradient in plain torch. The large number is no mistake: an entry brings a group of 16
# candidates with it, which goes through all of Newton's steps in float64, and rows are padded to the one with the most
# candidates.
PER_SPARSE_ENTRY = Work(passes=5000, sorted=4)
# Classes for each entry of a gradient up to which it is kept as entries: ops/simplex.py and engine/rows.h.
TORCH_SPARSE, NATIVE_SPARSE = 16, 6
NATIVE_CALLS = 100  # calls of torch around the native kernel of a block: arguments, checks, losses


def exact_cost(dense: EntryCost, sparse: EntryCost | None = None, native: NativeCost | None = None) -> CostOf:
    """The cost of a member that sees all scores, as a function of the sizes.

    With a dense gradient g there are three products over all classes: x W' for the scores, g W and g' x for the
    gradients. With a sparse one there is only the first.

    Args:
        dense: what the kernel does in plain torch where the gradient has an entry for every class.
        sparse: what it does in plain torch where few classes have one; None for a member whose gradients are never
            sparse.
        native: what its native kernel does; None for a member that has none.
    """

    def cost(shape: Shape, way: Way, **settings: object) -> Cost:
        support = float(shape.num_classes) if shape.support is None else shape.support
        by_native = native is not None and way == "native"
        most = shape.num_classes / (NATIVE_SPARSE if by_native else TORCH_SPARSE)
        entries = shape.batch * (support + shape.positives)
        # Autograd never has a sparse gradient.
        few = sparse is not None and support <= most and way != "plain"
        if by_native and native is not None:
            return _native_cost(native, shape, support, entries if few else None)
        if few and sparse is not None:
            return _sparse_cost(sparse, shape, entries)
        block = block_entries(shape)
        plain = way == "plain"
        tables = dense.plain * shape.table if plain else (1 + dense.tables) * block
        # Autograd writes a new table for about every second operation. A head writes its one buffer again and again.
        new = written(shape.table, 2 * dense.plain) if plain else written(block)
        work = dense.over(shape) + new + written(shape.vectors)
        work += Work(
            flops=6 * shape.table * shape.dim,  # three products, a multiplication and an addition each
            calls=PER_STEP + dense.calls * (1 if plain else shape.table / block),
        )
        return of_tables(work, 3, shape, tables)

    return cost


def _native_cost(kernel: NativeCost, shape: Shape, support: float, entries: float | None) -> Cost:
    """The cost on the native back end, with a sparse gradient of so many entries or, if None, with a dense one."""
    block = block_entries(shape)
    work = kernel.over(shape, support) + written(block) + written(shape.vectors)
    work += Work(calls=PER_STEP + NATIVE_CALLS * shape.table / block)
    if entries is None:
        return of_tables(work + Work(flops=6 * shape.table * shape.dim), 3, shape, block)
    # Added where they are, without a sort. The entries of a range of classes are added while its gradients are in
    # cache, where a loop over a vector takes a third of what torch takes to gather it.
    work += Work(flops=2 * shape.table * shape.dim + 4 * entries * shape.dim, near=entries * shape.dim / 3)
    work += gather(shape.num_classes, shape.dim, entries) + entries * kernel.entry
    return of_tables(work, 1, shape, block)  # the entries take the place of the scores


def _sparse_cost(kernel: EntryCost, shape: Shape, entries: float) -> Cost:
    """The cost in plain torch with a sparse gradient of so many entries: the scores are the one product left."""
    block = block_entries(shape)
    # Each entry reads a class vector for the gradient of its query, and a query for the gradient of its class vector.
    gathered = gather(shape.num_classes, shape.dim, entries) + gather(shape.batch, shape.dim, entries)
    work = kernel.over(shape) + entries * PER_SPARSE_ENTRY + gathered + written(block) + written(shape.vectors)
    work += Work(
        flops=2 * shape.table * shape.dim + 4 * entries * shape.dim,
        calls=PER_STEP + kernel.calls * shape.table / block,
    )
    # An entry is a row and a class of 8 bytes each and a value, and is copied when it is sorted: about 6 floats.
    return of_tables(work, 1, shape, (1 + kernel.tables) * block + 6 * entries)


def exact_traffic(sums: float, row: float, each: float = 0.0) -> TrafficOf:
    """What an exact member's ranks exchange: `sums` sums per block, of `row` bytes per row and `each` per positive."""

    def traffic(shape: Shape, ranks: int) -> Traffic:
        # More ranks have fewer classes each, so that blocks have more rows and there are fewer exchanges.
        padded = -(-shape.num_classes // ranks // PAD) * PAD
        blocks = -(-shape.batch // HeadOptions().rows(padded))  # each of them exchanges sums of its own
        return Traffic(sums * blocks, (row + each * shape.positives) * shape.batch)

    return traffic


def block_entries(shape: Shape) -> float:
    """The number of scores of a block, under the default options."""
    return float(min(shape.batch, HeadOptions().rows(shape.num_classes)) * shape.num_classes)


def of_tables(work: Work, products: int, shape: Shape, tables: float) -> Cost:
    """The cost of a step from its work.

    Args:
        work: what takes time.
        products: the number of products with all class vectors.
        shape: the sizes.
        tables: numbers in the tables that are held at the peak.
    """
    blocks = shape.table / block_entries(shape)
    # A product reads or writes all scores and queries once, but all class vectors once for every block.
    moved = products * (shape.table + shape.vectors * blocks + shape.queries)
    return Cost(work, moved, shape.vectors, FLOAT * (tables + shape.vectors + shape.queries))


def written(numbers: float, tensors: float = 1.0) -> Work:
    """The work of writing `tensors` new tensors of so many numbers each."""
    if FLOAT * numbers >= KEPT:
        return Work(fresh=tensors * numbers)
    return Work(streamed=tensors * numbers / 2)  # half of a pass, which reads and writes


def gather(rows: float, dim: int, count: float) -> Work:
    """The work of reading `count` vectors of `dim` numbers at random places of a table of `rows` vectors."""
    size = FLOAT * rows * dim
    # The larger the table, the fewer of its vectors are in cache: none is far at 1 MB, all at 128 MB, and in between
    # the share grows with the logarithm of the size.
    far = min(1.0, max(0.0, math.log(size / NEAR) / math.log(FAR / NEAR)))
    return Work(near=(1 - far) * count * dim, far=far * count * dim)
