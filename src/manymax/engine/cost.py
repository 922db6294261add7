"""What a training step costs, in counts: the sizes of a step, kinds of work, bytes that ranks exchange.

A member states its cost as a function from the sizes of a step to a `Cost`, and what its shards exchange as one to a
`Traffic`. Here are the pieces that such functions are made of; `manymax.theory.cost` turns counts into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from manymax.engine.options import PAD, HeadOptions
from manymax.errors import ArgumentError
from manymax.ops.selected_scores import table_is_cheaper

FLOAT, DOUBLE = 4, 8  # bytes; sums over ranks travel in float64
PER_STEP = 250  # calls of a step that has next to nothing to do: checks, targets, autograd
NEAR, FAR = 1 << 20, 1 << 27  # bytes of a table that is in cache, and of one that is not
MARKED = 2 * FLOAT  # bytes of a maximum over ranks, and whether it is nan
SEARCH_STEPS = 8  # of a threshold search over ranks
GENERATOR = 5056  # bytes of the state of torch's generator


@dataclass(frozen=True)
class Shape:
    """The sizes of a step.

    batch, num_classes, dim: N, C, d.
    positives: P, labels of a row on average.
    num_negatives: k, of the sampled members, drawn for each positive; or `shared`, once for all of them.
    num_candidates: M, scored for each positive to choose its negatives among them; 0 where nothing is scored.
    support: m, classes that a sparse map keeps on average; None for all of them.
    path: L, mean length of a path of the tree; None for that of equal counts.
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

    def __post_init__(self) -> None:
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
        """N P: rows of the sampled members and of the tree."""
        return self.batch * self.positives

    @property
    def table(self) -> float:
        """N C, the entries of the table of scores."""
        return float(self.batch * self.num_classes)

    @property
    def vectors(self) -> float:
        """C d, the floats of all class vectors."""
        return float(self.num_classes * self.dim)

    @property
    def queries(self) -> float:
        """N d."""
        return float(self.batch * self.dim)


@dataclass(frozen=True)
class Work:
    """How much there is to do of each kind.

    flops: of matrix products.
    streamed: floats read and written in a pass over memory.
    exponentials: entries that a softmax goes over.
    passes: entries read and written in a pass that stays in cache.
    fresh: floats of memory that are used for the first time.
    near, far: floats gathered from a table in cache, and from one that is not.
    sorted: integers sorted.
    calls: of torch.
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

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __rmul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, f.name) for f in fields(Work)))

    def seconds(self, machine: Machine) -> float:
        """sum over the kinds of how much there is times the seconds for one."""
        return sum(getattr(self, f.name) * getattr(machine, f.name) for f in fields(Work))


@dataclass(frozen=True)
class Machine(Work):
    """Seconds that a machine takes for one of each kind of work."""

    def __post_init__(self) -> None:
        for f in fields(Work):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ArgumentError(f"`machine.{f.name}` must be seconds, at least 0; got {value!r}.")


@dataclass(frozen=True)
class Cost:
    """The cost of one step.

    work: what takes its time.
    product_floats: read and written by its matrix products.
    parameters: floats of class vectors touched; at most that many, where they are drawn.
    memory: bytes at the peak above queries and class vectors: buffers, and the gradients to both.
    """

    work: Work
    product_floats: float
    parameters: float
    memory: float

    @property
    def flops(self) -> float:
        """Of the matrix products."""
        return self.work.flops

    @property
    def bytes(self) -> float:
        """Read and written, in cache or not."""
        w = self.work
        both_ways = w.streamed + w.exponentials + w.passes
        return FLOAT * (self.product_floats + 2 * both_ways + w.fresh + w.near + w.far + w.sorted)


@dataclass(frozen=True)
class Traffic:
    """What the ranks add up in a step: the number of sums over the ranks, and their bytes in all."""

    sums: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sums + other.sums, self.bytes + other.bytes)

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends."""
        return 2 * (ranks - 1) / ranks * self.bytes


CostOf = Callable[[Shape, bool], Cost]  # the sizes, and whether the plain way is meant: autograd on full tables
TrafficOf = Callable[[Shape, int], Traffic]  # the sizes, and the number of ranks


# Exact members -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryCost:
    """What an exact member does with its scores, counted in its kernel and rounded to fit benchmarks/advisor.py.

    entry: work for each entry of the table, products not included.
    calls: for each block.
    tables: of the size of a block that are held besides the block itself.
    plain: full tables held by autograd at its peak.
    each: whether it goes over the entries once for each positive.
    """

    entry: Work
    calls: float
    tables: float = 0.0
    plain: float = 0.0
    each: bool = False

    def over(self, shape: Shape) -> Work:
        """The work for all entries of the table."""
        return shape.table * (max(1.0, shape.positives) if self.each else 1.0) * self.entry


# Of each entry of a sparse gradient: its group of 16 candidates goes through Newton's steps in float64, and rows are
# padded to the one with the most.
PER_SPARSE_ENTRY = Work(passes=5000, sorted=4)
PER_SCORE = Work(fresh=4)  # of each score of a sampled step: loss and gradient
PER_DRAW = Work(sorted=0.5)  # of each class that is picked by its id: drawing it, and sorting what it gets


def exact_cost(dense: EntryCost, sparse: EntryCost | None = None) -> CostOf:
    """The cost of a member that sees all scores: three products with all class vectors.

    Args:
        dense: of a gradient with an entry for every class.
        sparse: of one with few entries, at most one class in 16, which leaves the scores as the only such product;
            None for a member that never has such a gradient.
    """

    def cost(shape: Shape, plain: bool) -> Cost:
        support = shape.num_classes if shape.support is None else shape.support
        if sparse is not None and support <= shape.num_classes / 16 and not plain:
            return _few(sparse, shape, shape.batch * (support + shape.positives))
        block = block_entries(shape)
        tables = dense.plain * shape.table if plain else (1 + dense.tables) * block
        fresh = 2 * tables if plain else block  # a table is written anew for about every second operation
        work = dense.over(shape) + Work(
            flops=6 * shape.table * shape.dim,
            fresh=fresh + shape.vectors,
            calls=PER_STEP + dense.calls * (1 if plain else shape.table / block),
        )
        return of_tables(work, 3, shape, tables)

    return cost


def _few(kernel: EntryCost, shape: Shape, entries: float) -> Cost:
    """A sparse gradient: the scores are the only product with all class vectors."""
    block = block_entries(shape)
    gathered = gather(shape.num_classes, shape.dim, entries) + gather(shape.batch, shape.dim, entries)
    work = kernel.over(shape) + entries * PER_SPARSE_ENTRY + gathered
    work += Work(
        flops=2 * shape.table * shape.dim + 4 * entries * shape.dim,
        fresh=block + shape.vectors,
        calls=PER_STEP + kernel.calls * shape.table / block,
    )
    return of_tables(work, 1, shape, (1 + kernel.tables) * block + 6 * entries)


def exact_traffic(sums: float, row: float, each: float = 0.0) -> TrafficOf:
    """The exchanges of a kernel: `sums` for each block of rows, of `row` bytes a row and `each` bytes a positive."""

    def traffic(shape: Shape, ranks: int) -> Traffic:
        padded = -(-shape.num_classes // ranks // PAD) * PAD
        blocks = -(-shape.batch // HeadOptions().rows(padded))
        return Traffic(sums * blocks, (row + each * shape.positives) * shape.batch)

    return traffic


def block_entries(shape: Shape) -> float:
    """Entries of a block of scores."""
    return float(min(shape.batch, HeadOptions().rows(shape.num_classes)) * shape.num_classes)


def of_tables(work: Work, products: int, shape: Shape, tables: float) -> Cost:
    """The cost of a step with so many products over all class vectors, and so many floats of tables held."""
    blocks = shape.table / block_entries(shape)
    moved = products * (shape.table + shape.vectors * blocks + shape.queries)
    return Cost(work, moved, shape.vectors, FLOAT * (tables + shape.vectors + shape.queries))


def gather(rows: float, dim: int, count: float) -> Work:
    """`count` vectors from a table of `rows`: the larger the table, the fewer of them are in cache."""
    size = FLOAT * rows * dim
    far = min(1.0, max(0.0, math.log(size / NEAR) / math.log(FAR / NEAR)))
    return Work(near=(1 - far) * count * dim, far=far * count * dim)


# Sampled members ---------------------------------------------------------------------------------


def sampled_cost(shape: Shape, plain: bool) -> Cost:
    """The cost of a loss on drawn scores: one positive and k negatives for each pair."""
    own = shape.pairs if shape.shared else shape.pairs * (shape.num_negatives + 1)  # vectors gathered one by one
    scores = shape.pairs * (shape.num_negatives + 1)
    rows = _picked(shape, shape.num_negatives)
    work = scores * PER_SCORE + Work(flops=4 * scores * shape.dim, calls=PER_STEP + 700)
    if plain or shape.shared:
        work += Work(flops=2 * scores * shape.dim)
    if plain:  # picked vectors are kept, and so is a gradient for each, which nobody sums up
        held = 12 * scores + 2 * own * shape.dim
        work += gather(shape.num_classes, shape.dim, own) + Work(fresh=2 * own * shape.dim)
    else:  # after the scores, class vectors are picked for the gradient to queries, and queries for theirs
        held = 12 * scores + rows * shape.dim
        work += own * PER_DRAW + Work(fresh=rows * shape.dim)
        work += gather(shape.num_classes, shape.dim, own) + gather(shape.batch, shape.dim, own)
        work += gather(shape.num_classes, shape.dim, own) if shape.shared else _picking_scores(shape, own)
    work += _choosing(shape)
    touched = _picked(shape, max(shape.num_negatives, shape.num_candidates)) * shape.dim
    return Cost(work, 3 * (own * shape.dim + scores), touched, FLOAT * (held + shape.queries))


def _picked(shape: Shape, per_positive: int) -> float:
    """Class vectors of the positives and of what is drawn for them, as many as can be different ones."""
    drawn = per_positive if shape.shared else shape.pairs * per_positive
    return min(float(shape.num_classes), shape.pairs + drawn)


def _choosing(shape: Shape) -> Work:
    """Scores of M candidates for each positive, and the best of them."""
    scored = shape.pairs * shape.num_candidates
    work = Work(passes=10 * scored)
    if shape.shared:
        return work + Work(flops=2 * scored * shape.dim) + gather(shape.num_classes, shape.dim, shape.num_candidates)
    return work + _picking_scores(shape, scored)


def _picking_scores(shape: Shape, count: float) -> Work:
    """`count` scores in all, from a table of all scores where that is cheaper, or one by one."""
    if table_is_cheaper(shape.batch, shape.num_classes, int(count)):
        return Work(flops=2 * shape.table * shape.dim, fresh=shape.table, near=4 * count)
    return gather(shape.num_classes, shape.dim, count) + Work(flops=2 * count * shape.dim)


def sampled_traffic(sums: float, row: float) -> TrafficOf:
    """The exchanges of a loss on drawn scores: `sums` of `row` bytes a pair, and one more of scored candidates."""

    def traffic(shape: Shape, ranks: int) -> Traffic:
        candidates = shape.num_candidates
        # the state of the generator goes out once; a broadcast sends half of what a sum does
        total = sums + (candidates > 0) + 0.5
        return Traffic(total, (row + candidates * FLOAT) * shape.pairs + GENERATOR / 2)

    return traffic
