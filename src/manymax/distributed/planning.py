"""What a step of a sharded head will cost: memory of a rank, bytes that it sends, seconds.

A rank does the work of a head over its C / R classes, and the ranks exchange sums: theory.cost counts the work, and
here are the messages. A sum over R ranks of b bytes goes round in a ring, in which every rank

    sends 2 (R - 1) / R b bytes in 2 (R - 1) messages:    seconds = 2 (R - 1) latency + 2 (R - 1) / R b / bandwidth

Rows are cut into blocks, each with its own exchanges. Members that are not sharded (trees) stay whole on every rank.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace

import torch

from manymax.engine.cost import DOUBLE, FLOAT, Cost, Machine, Shape, Traffic, Work
from manymax.engine.member import Member
from manymax.engine.ranks import Ranks
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.theory.cost import cost

PER_DRAW = Work(fresh=40, sorted=3)  # of each draw, on every rank: drawing it, and finding out who has it
PER_ENTRY = Work(streamed=6)  # of each score of an exact member: what the sums over ranks need goes over them again
DRAW = 64  # bytes of each draw, on every rank: its id, its log q, where it goes


@dataclass(frozen=True)
class Network:
    """How fast ranks talk: seconds until a message arrives, and bytes per second after that."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ArgumentError(f"`latency` must be seconds, at least 0; got {self.latency!r}.")
        if not self.bandwidth > 0:
            raise ArgumentError(f"`bandwidth` must be bytes per second, above 0; got {self.bandwidth!r}.")

    def seconds(self, traffic: Traffic, ranks: int) -> float:
        """Of all sums of a step."""
        return 2 * (ranks - 1) * self.latency * traffic.sums + traffic.sent(ranks) / self.bandwidth


@dataclass(frozen=True)
class Plan:
    """A step of one member on every rank.

    memory: bytes of class vectors, their gradient, the optimizer's numbers, buffers. sent: bytes.
    computing, exchanging: seconds; the optimizer's step is not in them. sharded: whether the classes are split.
    """

    member: str
    memory: float
    sent: float
    computing: float
    exchanging: float
    sharded: bool

    @property
    def seconds(self) -> float:
        """Of the step; nothing overlaps."""
        return self.computing + self.exchanging


def plan(member: str, shape: Shape, ranks: int, machine: Machine, network: Network, optimizer_states: int = 2) -> Plan:
    """Memory, bytes and seconds of a step of `manymax.distributed.ShardedHead` on each of `ranks` ranks.

    Args:
        member: a name of `FAMILY`.
        shape: the sizes of the whole step, all classes included.
        ranks: R.
        machine, network: what each rank can do, see `measure_machine` and `measure_network`.
        optimizer_states: floats that the optimizer keeps for each one of a class vector; 2 for Adam.

    Example:
        >>> shape = Shape(batch=1024, num_classes=10**9, dim=128)
        >>> ideal = Machine(flops=1e-13), Network(latency=1e-5, bandwidth=1e10)  # 10 TFLOP/s, 10 GB/s
        >>> row = plan("softmax", shape, 64, *ideal)
        >>> round(row.memory / 1e9), round(row.sent / 1e6, 1), round(row.computing, 2), round(row.exchanging, 3)
        (36, 1.1, 1.23, 0.043)
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= shape.num_classes:
        raise ArgumentError(f"`ranks` must be an integer from 1 to the number of classes; got {ranks!r}.")
    row = FAMILY[member]
    sharded = row.unsharded is None
    own, found = (_own(row, shape, ranks), traffic(row.name, shape, ranks)) if sharded else (shape, Traffic())
    step: Cost = cost(row.name, own)
    draws = shape.pairs * shape.num_negatives if row.kind == "sampled" and ranks > 1 else 0.0
    scores = own.table if row.kind == "exact" and ranks > 1 else 0.0
    work = step.work + draws * PER_DRAW + scores * PER_ENTRY
    memory = FLOAT * (1 + optimizer_states) * own.vectors + step.memory + draws * DRAW
    sent = found.sent(ranks) if ranks > 1 else 0.0
    exchanging = network.seconds(found, ranks) if ranks > 1 else 0.0
    return Plan(row.name, memory, sent, work.seconds(machine), exchanging, sharded)


def _own(member: Member, shape: Shape, ranks: int) -> Shape:
    """The step that the largest shard sees."""
    return replace(
        shape,
        num_classes=-(-shape.num_classes // ranks),
        support=None if shape.support is None else shape.support / ranks,
        positives=shape.positives if member.kind == "sampled" else shape.positives / ranks,
        num_negatives=-(-shape.num_negatives // ranks),
        num_candidates=-(-shape.num_candidates // ranks),
    )


def traffic(member: str, shape: Shape, ranks: int) -> Traffic:
    """The sums over the ranks of one step, backward included: one check, the member's own, and the queries' gradient.

    Example:
        >>> shape = Shape(batch=1000, num_classes=10**6, dim=64)
        >>> traffic("softmax", shape, 4).bytes / 1000  # per row: 24 bytes for the loss, 256 for the gradient, the check
        280.024
    """
    row = FAMILY[member]
    both_ends = Traffic(1, 3 * DOUBLE) + Traffic(1, FLOAT * shape.queries)
    own: Traffic = row.needed("traffic")(shape, ranks)
    return both_ends + own


def measure_network(ranks: Ranks, rounds: int = 30, megabytes: int = 4) -> Network:
    """Time small and large sums over the ranks, and take medians; the same answer on every rank.

    Args:
        ranks: at least 2 of them; all must call it.
        rounds: of each size.
        megabytes: of the large ones.
    """
    if ranks.size < 2:
        raise ArgumentError(f"`ranks` must be at least 2 to measure what is between them; got {ranks.size}.")
    small, large = torch.zeros(64, dtype=torch.float64), torch.zeros(megabytes << 18)

    def median(values: torch.Tensor, rounds: int) -> float:
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            ranks.sum(values)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    found = ranks.first(torch.tensor([median(small, rounds), median(large, rounds // 3)], dtype=torch.float64))
    quick, slow = found.tolist()
    sent = Traffic(1, FLOAT * large.numel()).sent(ranks.size)
    moving = max(slow - quick, 0.1 * slow)  # on a busy machine a small sum may well take as long as a large one
    return Network(quick / (2 * (ranks.size - 1)), sent / moving)
