"""What a training step costs, in counts: the sizes of a step, the kinds of work, the bytes that ranks exchange.

A member states its cost as a function from the sizes of a step to a `Cost`, and what its shards exchange as a function
to a `Traffic`. Here are the building blocks of such functions. Counts are independent of a machine;
`manymax.theory.cost` measures what a machine takes for one of each kind and turns counts into seconds.

The kinds of work and the constants are few, and rounded: benchmarks/advisor.py compares predictions with measured
steps, and asks for the right order of losses and for times within a factor of 2. It is a model to choose with, no
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from manymax.engine.options import PAD, HeadOptions
from manymax.errors import ArgumentError
from manymax.ops.selected_scores import table_is_cheaper

FLOAT, DOUBLE = 4, 8  # bytes; the sums of kernels travel between ranks in float64
PER_STEP = 250  # calls of torch in a step that has next to nothing to compute: checks, targets, autograd
NEAR, FAR = 1 << 20, 1 << 27  # bytes: a table of 1 MB is in the processor's cache, one of 128 MB is not
MARKED = 2 * FLOAT  # bytes of a maximum over ranks: the number, and a mark that says whether it is nan
SEARCH_STEPS = 8  # exchanges of a search for a threshold over ranks: about 6 steps, and some for a start
GENERATOR = 5056  # bytes of the state of torch's CPU generator, which the first rank sends to the others


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
    """Seconds that a machine takes for one unit of each kind of work; the fields are those of `Work`."""

    def __post_init__(self) -> None:
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


# From the sizes to the cost. The bool is True for the plain way, autograd on full tables, and False for that of heads.
CostOf = Callable[[Shape, bool], Cost]
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


# For each entry of a sparse gradient. The large number is no mistake: an entry brings a group of 16 candidates with it,
# which goes through all of Newton's steps in float64, and rows are padded to the one with the most candidates.
PER_SPARSE_ENTRY = Work(passes=5000, sorted=4)
PER_SCORE = Work(fresh=4)  # for each score of a sampled step: tensors of the loss and of its gradient
PER_DRAW = Work(sorted=0.5)  # for each class vector that is read by its id: drawing the id, sorting its gradients


def exact_cost(dense: EntryCost, sparse: EntryCost | None = None) -> CostOf:
    """The cost of a member that sees all scores, as a function of the sizes.

    With a dense gradient g there are three products over all classes: x W' for the scores, g W and g' x for the
    gradients. With a sparse one there is only the first.

    Args:
        dense: what the kernel does where the gradient has an entry for every class.
        sparse: what it does where at most one class in 16 has one; None for a member whose gradients are never sparse.
    """

    def cost(shape: Shape, plain: bool) -> Cost:
        support = shape.num_classes if shape.support is None else shape.support
        # One in 16 is where ops/simplex.py stops listing candidates. Autograd never has a sparse gradient.
        if sparse is not None and support <= shape.num_classes / 16 and not plain:
            return _sparse_cost(sparse, shape, shape.batch * (support + shape.positives))
        block = block_entries(shape)
        tables = dense.plain * shape.table if plain else (1 + dense.tables) * block
        # Autograd writes a new table for about every second operation. A head writes its one buffer again and again.
        fresh = 2 * tables if plain else block
        work = dense.over(shape) + Work(
            flops=6 * shape.table * shape.dim,  # three products, a multiplication and an addition each
            fresh=fresh + shape.vectors,
            calls=PER_STEP + dense.calls * (1 if plain else shape.table / block),
        )
        return of_tables(work, 3, shape, tables)

    return cost


def _sparse_cost(kernel: EntryCost, shape: Shape, entries: float) -> Cost:
    """The cost with a sparse gradient of so many entries: the scores are the only product with all class vectors."""
    block = block_entries(shape)
    # Each entry reads a class vector for the gradient of its query, and a query for the gradient of its class vector.
    gathered = gather(shape.num_classes, shape.dim, entries) + gather(shape.batch, shape.dim, entries)
    work = kernel.over(shape) + entries * PER_SPARSE_ENTRY + gathered
    work += Work(
        flops=2 * shape.table * shape.dim + 4 * entries * shape.dim,
        fresh=block + shape.vectors,
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


def gather(rows: float, dim: int, count: float) -> Work:
    """The work of reading `count` vectors of `dim` numbers at random places of a table of `rows` vectors."""
    size = FLOAT * rows * dim
    # The larger the table, the fewer of its vectors are in cache: none is far at 1 MB, all at 128 MB, and in between
    # the share grows with the logarithm of the size.
    far = min(1.0, max(0.0, math.log(size / NEAR) / math.log(FAR / NEAR)))
    return Work(near=(1 - far) * count * dim, far=far * count * dim)


# Sampled members ---------------------------------------------------------------------------------


def sampled_cost(shape: Shape, plain: bool) -> Cost:
    """The cost of a loss on drawn scores: one positive and k negatives for each pair of a query and a positive."""
    # Class vectors that are read one by one. Shared negatives are read once for all pairs and multiplied as a matrix.
    own = shape.pairs if shape.shared else shape.pairs * (shape.num_negatives + 1)
    scores = shape.pairs * (shape.num_negatives + 1)
    rows = _distinct_vectors(shape, shape.num_negatives)
    # The two products of the gradients; and the calls of drawing, sorting and summing, whatever the sizes are.
    work = scores * PER_SCORE + Work(flops=4 * scores * shape.dim, calls=PER_STEP + 700)
    # The third product, that of the scores. Of draws per row `_scoring` counts it, in one of its two ways.
    if plain or shape.shared:
        work += Work(flops=2 * scores * shape.dim)
    if plain:  # autograd keeps the gathered vectors, and a gradient for each, which are never summed by class
        held = 12 * scores + 2 * own * shape.dim  # a dozen tensors of the shape of the scores, in loss and gradient
        work += gather(shape.num_classes, shape.dim, own) + Work(fresh=2 * own * shape.dim)
    else:  # class vectors are read for the scores and again for the gradient of queries; queries for the other gradient
        held = 12 * scores + rows * shape.dim
        work += own * PER_DRAW + Work(fresh=rows * shape.dim)
        work += gather(shape.num_classes, shape.dim, own) + gather(shape.batch, shape.dim, own)
        work += gather(shape.num_classes, shape.dim, own) if shape.shared else _scoring(shape, own)
    work += _choosing(shape)
    touched = _distinct_vectors(shape, max(shape.num_negatives, shape.num_candidates)) * shape.dim
    return Cost(work, 3 * (own * shape.dim + scores), touched, FLOAT * (held + shape.queries))


def _distinct_vectors(shape: Shape, per_positive: int) -> float:
    """The number of different class vectors among positives and `per_positive` draws for each, at most."""
    drawn = per_positive if shape.shared else shape.pairs * per_positive
    return min(float(shape.num_classes), shape.pairs + drawn)


def _choosing(shape: Shape) -> Work:
    """The work of scoring M candidates for each positive and taking the best of them, without gradients."""
    scored = shape.pairs * shape.num_candidates
    work = Work(passes=10 * scored)  # a topk of each row
    if shape.shared:
        return work + Work(flops=2 * scored * shape.dim) + gather(shape.num_classes, shape.dim, shape.num_candidates)
    return work + _scoring(shape, scored)


def _scoring(shape: Shape, count: float) -> Work:
    """The work of `count` scores in all: from a table of all scores where that is cheaper, or one by one."""
    # The same rule as in the computation itself, so that the prediction follows its choice.
    if table_is_cheaper(shape.batch, shape.num_classes, int(count)):
        return Work(flops=2 * shape.table * shape.dim, fresh=shape.table, near=4 * count)
    return gather(shape.num_classes, shape.dim, count) + Work(flops=2 * count * shape.dim)


def sampled_traffic(sums: float, row: float) -> TrafficOf:
    """What a sampled member's ranks exchange: `sums` sums of `row` bytes per pair, and the scores of candidates."""

    def traffic(shape: Shape, ranks: int) -> Traffic:
        candidates = shape.num_candidates
        # The state of the generator is broadcast once per step, which sends half as many bytes as a sum.
        total = sums + (candidates > 0) + 0.5
        return Traffic(total, (row + candidates * FLOAT) * shape.pairs + GENERATOR / 2)

    return traffic
