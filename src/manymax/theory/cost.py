"""What a training step costs, before it is run: flops, bytes, parameters touched, memory and seconds.

A step is the loss of N queries with P positives each, and its gradients to queries (N, d) and class vectors (C, d);
the optimizer is not in it. Table 4 of the paper, with what it leaves out (d, P, the three products of a dense step):

    member                          flops              entries           class vectors touched
    softmax, Taylor-softmax         6 N C d            N C               C
    sparse maps, support m > C/16   6 N C d            N C, no sort      C
    sparse maps, support m          2 N C d + 4 N m d  N C, no sort      C
    sampled softmax, NCE            6 N P (k + 1) d    N P (k + 1)       at most N P (k + 1)
      ... shared negatives          6 N P (k + 1) d    N P (k + 1)       at most N P + k
      ... chosen among M            + 2 N P M d        + N P M           at most N P (M + 1)
      ... if N C is small           2 N C d instead of 2 N P (k + 1) d, and of 2 N P M d
    hierarchical softmax            6 N P L d          N P L             at most N P L, L: mean length of a path
    RG                              (4 C + 6 N) d^2    C d               C

Seconds are such counts times what the machine takes for one of each, which `measure_machine` finds in a few seconds.
"blocked" is the way of manymax's heads, "plain" that of autograd on full tables.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import embedding_bag

from manymax.engine.member import Member
from manymax.errors import ArgumentError, check_choice
from manymax.members import FAMILY
from manymax.members.hierarchical_softmax.loss import mean_code_length
from manymax.ops.picked import table_is_cheaper

WAYS = ("blocked", "plain")
FLOAT = 4  # bytes
BLOCK = 1 << 23  # scores that a head holds at a time, as long as they are 64 rows at least
PER_STEP = 250  # calls of a step that has next to nothing to do: checks, targets, autograd
NEAR, FAR = 1 << 20, 1 << 27  # bytes of a table that is in cache, and of one that is not


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


def cost(member: str, shape: Shape, way: str = "blocked") -> Cost:
    """Flops, bytes, parameters touched and memory of one step of a member.

    Args:
        member: a name of `FAMILY`.
        shape: the sizes.
        way: "blocked", as manymax's heads compute; or "plain", autograd on full tables.

    Example:
        >>> shape = Shape(batch=2048, num_classes=40_400, dim=64, num_negatives=100)
        >>> cost("softmax", shape).flops / cost("ssm", shape).flops  # C / (k + 1)
        400.0
    """
    check_choice("way", way, WAYS)
    row = FAMILY[member]
    return _KINDS[row.kind](row, shape, way == "plain")


def predict_seconds(member: str, shape: Shape, machine: Machine, way: str = "blocked") -> float:
    """Seconds of one step on a machine; arguments as in `cost`.

    Example:
        >>> ideal = Machine(flops=1e-11)  # 100 GFLOP/s, and nothing else takes any time
        >>> predict_seconds("softmax", Shape(batch=1000, num_classes=10_000, dim=50), ideal)
        0.03
    """
    return cost(member, shape, way).work.seconds(machine)


@dataclass(frozen=True)
class Kernel:
    """What an exact member does with its scores.

    entry: work for each entry of the table, products not included.
    tables: of the size of a block that are held besides the block itself.
    calls: for each block.
    plain: full tables held by autograd at its peak.
    each: whether it goes over the entries once for each positive.
    """

    entry: Work
    tables: float
    calls: float
    plain: float = 0.0
    each: bool = False

    def over(self, shape: Shape) -> Work:
        """The work for all entries of the table."""
        return shape.table * (max(1.0, shape.positives) if self.each else 1.0) * self.entry


# Counted in the heads' kernels and in ops.simplex, and rounded to fit benchmarks/advisor.py. A member that is not named
# here is taken for softmax, or, where its map is sparse, for entmax.
DENSE = {
    "softmax": Kernel(Work(exponentials=1), tables=0, plain=2.5, calls=150),
    "taylor_softmax": Kernel(Work(passes=50), tables=0, plain=8, calls=200),
    "rankmax": Kernel(Work(streamed=8), tables=0, plain=5.5, calls=150, each=True),
    "entmax": Kernel(Work(streamed=2, passes=40), tables=0, plain=2.2, calls=500),
}
SPARSE = {
    "rankmax": Kernel(Work(streamed=3), tables=0.1, calls=500),
    "entmax": Kernel(Work(streamed=0.5, passes=1), tables=0.1, calls=900),
}
# Of each entry of a sparse gradient: its group of 16 candidates goes through Newton's steps in float64, and rows are
# padded to the one with the most.
PER_ENTRY = Work(passes=5000, sorted=4)
PER_SCORE = Work(fresh=4)  # of each score of a sampled step: loss and gradient
PER_DRAW = Work(sorted=0.5)  # of each class that is picked by its id: drawing it, and sorting what it gets


def is_sparse(member: Member) -> bool:
    """Whether the map gives some classes exactly 0: it then keeps the order of the scores weakly."""
    return member.facts.order is not None and member.facts.order.value == "weak"


def _exact(member: Member, shape: Shape, plain: bool) -> Cost:
    support = shape.num_classes if shape.support is None else shape.support
    if is_sparse(member) and support <= shape.num_classes / 16 and not plain:
        return _few(member, shape, shape.batch * (support + shape.positives))
    kernel = DENSE.get(member.name, DENSE["entmax" if is_sparse(member) else "softmax"])
    block = _block(shape)
    tables = kernel.plain * shape.table if plain else (1 + kernel.tables) * block
    fresh = 2 * tables if plain else block  # a table is written anew for about every second operation
    work = kernel.over(shape) + Work(
        flops=6 * shape.table * shape.dim,
        fresh=fresh + shape.vectors,
        calls=PER_STEP + kernel.calls * (1 if plain else shape.table / block),
    )
    return _of_tables(work, 3, shape, tables)


def _few(member: Member, shape: Shape, entries: float) -> Cost:
    """A sparse gradient: the scores are the only product with all class vectors."""
    kernel = SPARSE.get(member.name, SPARSE["entmax"])
    block = _block(shape)
    gathered = _gather(shape.num_classes, shape.dim, entries) + _gather(shape.batch, shape.dim, entries)
    work = kernel.over(shape) + entries * PER_ENTRY + gathered
    work += Work(
        flops=2 * shape.table * shape.dim + 4 * entries * shape.dim,
        fresh=block + shape.vectors,
        calls=PER_STEP + kernel.calls * shape.table / block,
    )
    return _of_tables(work, 1, shape, (1 + kernel.tables) * block + 6 * entries)


def _block(shape: Shape) -> float:
    """Entries of a block of scores."""
    rows = min(1024, max(64, BLOCK // shape.num_classes // 64 * 64))
    return float(min(shape.batch, rows) * shape.num_classes)


def _of_tables(work: Work, products: int, shape: Shape, tables: float) -> Cost:
    blocks = shape.table / _block(shape)
    moved = products * (shape.table + shape.vectors * blocks + shape.queries)
    return Cost(work, moved, shape.vectors, FLOAT * (tables + shape.vectors + shape.queries))


def _gather(rows: float, dim: int, count: float) -> Work:
    """`count` vectors from a table of `rows`: the larger the table, the fewer of them are in cache."""
    size = FLOAT * rows * dim
    far = min(1.0, max(0.0, math.log(size / NEAR) / math.log(FAR / NEAR)))
    return Work(near=(1 - far) * count * dim, far=far * count * dim)


def _sampled(member: Member, shape: Shape, plain: bool) -> Cost:
    own = shape.pairs if shape.shared else shape.pairs * (shape.num_negatives + 1)  # vectors gathered one by one
    scores = shape.pairs * (shape.num_negatives + 1)
    rows = _picked(shape, shape.num_negatives)
    work = scores * PER_SCORE + Work(flops=4 * scores * shape.dim, calls=PER_STEP + 700)
    if plain or shape.shared:
        work += Work(flops=2 * scores * shape.dim)
    if plain:  # picked vectors are kept, and so is a gradient for each, which nobody sums up
        held = 12 * scores + 2 * own * shape.dim
        work += _gather(shape.num_classes, shape.dim, own) + Work(fresh=2 * own * shape.dim)
    else:  # after the scores, class vectors are picked for the gradient to queries, and queries for theirs
        held = 12 * scores + rows * shape.dim
        work += own * PER_DRAW + Work(fresh=rows * shape.dim)
        work += _gather(shape.num_classes, shape.dim, own) + _gather(shape.batch, shape.dim, own)
        work += _gather(shape.num_classes, shape.dim, own) if shape.shared else _picking_scores(shape, own)
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
        return work + Work(flops=2 * scored * shape.dim) + _gather(shape.num_classes, shape.dim, shape.num_candidates)
    return work + _picking_scores(shape, scored)


def _picking_scores(shape: Shape, count: float) -> Work:
    """`count` scores in all, from a table of all scores where that is cheaper, or one by one."""
    if table_is_cheaper(shape.batch, shape.num_classes, int(count)):
        return Work(flops=2 * shape.table * shape.dim, fresh=shape.table, near=4 * count)
    return _gather(shape.num_classes, shape.dim, count) + Work(flops=2 * count * shape.dim)


def _tree(member: Member, shape: Shape, plain: bool) -> Cost:
    length = mean_code_length(shape.num_classes) if shape.path is None else shape.path
    nodes = shape.pairs * length
    work = _gather(shape.num_classes, shape.dim, nodes) + Work(
        flops=6 * nodes * shape.dim, fresh=3 * nodes * shape.dim, passes=40 * nodes, calls=PER_STEP + 600
    )
    rows = min(float(shape.num_classes), nodes)
    return Cost(work, 3 * nodes * shape.dim, rows * shape.dim, FLOAT * (3 * nodes * shape.dim + shape.queries))


def _quadratic(member: Member, shape: Shape, plain: bool) -> Cost:
    if plain:
        work = Work(flops=6 * shape.table * shape.dim, fresh=22 * shape.table + shape.vectors, calls=PER_STEP)
        return _of_tables(work, 3, shape, 6 * shape.table)
    products = (2 * shape.num_classes + 3 * shape.batch) * float(shape.dim)  # the Gram matrix and its gradient
    work = Work(flops=2 * products * shape.dim, fresh=4 * shape.vectors, calls=PER_STEP + 200)
    work += _gather(shape.num_classes, shape.dim, 2 * shape.pairs)
    return Cost(work, products, shape.vectors, FLOAT * (2 * shape.vectors + 4 * shape.queries))


_KINDS: dict[str, Callable[[Member, Shape, bool], Cost]] = {
    "exact": _exact,
    "sampled": _sampled,
    "tree": _tree,
    "quadratic": _quadratic,
}


def measure_machine(seconds: float = 3.0, dim: int = 64) -> Machine:
    """Time small pieces of each kind of work on this processor, in turns, and take medians.

    Args:
        seconds: to spend, about; each piece runs three times at least.
        dim: d, which decides how well a product with class vectors uses the processor.

    Returns:
        the machine. Threads are as torch has them.
    """
    if not 0 < seconds < math.inf:
        raise ArgumentError(f"`seconds` must be a finite number above 0; got {seconds!r}.")
    begin = time.perf_counter()
    probes = _probes(dim)
    times: dict[str, list[float]] = {name: [] for name in probes}
    rounds = 0
    while rounds < 4 or time.perf_counter() - begin < seconds:
        for name, (run, count) in probes.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / count)
        rounds += 1
    return Machine(**{name: statistics.median(found[1:]) for name, found in times.items()})


def _probes(dim: int) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> (a piece of work, how much of that kind it is)."""
    rows, classes, ids = 128, 1 << 15, 1 << 14
    queries, vectors, scores = torch.randn(rows, dim), torch.randn(classes, dim), torch.randn(rows, classes)
    gradient, big, cached = torch.zeros(classes, dim), torch.zeros(1 << 23), torch.randn(1 << 18)
    keys, one = torch.randint(1 << 20, (1 << 16,), dtype=torch.int32), torch.zeros(1)

    def products() -> object:
        torch.mm(queries, vectors.T, out=scores)
        gradient.addmm_(scores.T, queries)
        return scores @ vectors

    return {
        "flops": (products, 6 * rows * dim * classes),
        "streamed": (lambda: big.add_(1), big.numel()),
        "exponentials": (lambda: torch.softmax(scores, 1, out=scores), scores.numel()),
        "passes": (lambda: [cached.clamp_(min=-1) for _ in range(8)], 8 * cached.numel()),
        "fresh": (lambda: torch.empty(1 << 23).zero_(), 1 << 23),
        "near": (_picking(NEAR, dim, ids), ids * dim),
        "far": (_picking(FAR, dim, ids), ids * dim),
        "sorted": (lambda: keys.argsort(stable=True), len(keys)),
        "calls": (lambda: [one + 1 for _ in range(500)], 500),
    }


def _picking(size: int, dim: int, count: int) -> Callable[[], object]:
    """Weighted sums of vectors from a table of `size` bytes; other ones each time, or they would be in cache."""
    table = torch.zeros(max(1, size // (FLOAT * dim)), dim)
    weights, offsets = torch.ones(count), torch.arange(0, count, 64)

    def run() -> object:
        ids = torch.randint(len(table), (count,))
        return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights)

    return run
