"""Prediction of what a training step of a sharded head costs: memory per rank, bytes that a rank sends, seconds.

Each of R ranks does the work of a head over its C / R classes, and the ranks add up sums over the classes of a row.
`manymax.theory.cost` counts the work; this module adds the exchanges. A sum of b bytes over R ranks goes round in a
ring, in which every rank sends 2 (R - 1) messages of b / R bytes:

    bytes sent by a rank   2 (R - 1) / R b
    seconds                2 (R - 1) latency + 2 (R - 1) / R b / bandwidth

The rows of a step are cut into blocks, and each block has exchanges of its own. Members that cannot be sharded (trees)
are kept whole on every rank and exchange nothing.
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
from manymax.ops.arguments import checked
from manymax.theory.cost import cost

# Work beyond that of a head on one process; benchmarks/scale.py compares the predictions with measured steps.
# For each drawn negative, on every rank (all ranks draw the same ones): drawing it and finding the rank that holds it.
PER_DRAW_ON_RANKS = Work(fresh=40, sorted=3)
# For each score of an exact member: a kernel stops at each sum over the ranks and goes over the scores again after it,
# in plain torch with several operations, in a native kernel with one.
PER_SCORE_ON_RANKS, PER_NATIVE_SCORE_ON_RANKS = Work(streamed=6), Work(streamed=3)
# Bytes for each drawn negative, on every rank: its id, its log q and its place among the negatives of the rank.
DRAW_BYTES = 64


@checked
@dataclass(frozen=True)
class Network:
    """Speed of the exchanges between ranks.

    latency: seconds until a message arrives. bandwidth: bytes per second that a rank can send.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ArgumentError(f"`latency` must be seconds, at least 0; got {self.latency!r}.")
        if not self.bandwidth > 0:
            raise ArgumentError(f"`bandwidth` must be bytes per second, above 0; got {self.bandwidth!r}.")

    def seconds(self, traffic: Traffic, ranks: int) -> float:
        """Seconds of all sums over the ranks of a step."""
        # Sums follow one another: a kernel needs the result of one before it can start the next, so latencies add up.
        return 2 * (ranks - 1) * self.latency * traffic.sums + traffic.sent(ranks) / self.bandwidth


@dataclass(frozen=True)
class Plan:
    """Predicted cost of one step of a member, for each rank.

    member: its name.
    memory: bytes of the class vectors, their gradient, the state of the optimizer, and buffers.
    sent: bytes that the rank sends.
    computing, exchanging: seconds of the two parts of the step; the optimizer's own step is in neither.
    sharded: whether the classes are split over the ranks; otherwise every rank holds and computes all of them.
    """

    member: str
    memory: float
    sent: float
    computing: float
    exchanging: float
    sharded: bool

    @property
    def seconds(self) -> float:
        """Seconds of the step: computing and exchanging take turns, nothing overlaps."""
        return self.computing + self.exchanging


@checked(least={"optimizer_states": 0})
def plan(member: str, shape: Shape, ranks: int, machine: Machine, network: Network, optimizer_states: int = 2) -> Plan:
    """Memory, bytes and seconds of a step of `manymax.distributed.ShardedHead` on each of `ranks` ranks.

    Args:
        member: a name in `FAMILY`.
        shape: the sizes of the whole step, with the classes of all ranks.
        ranks: R, at most the number of classes.
        machine: speed of each rank, see `manymax.theory.cost.measure_machine`.
        network: speed of the exchanges, see `measure_network`.
        optimizer_states: floats that the optimizer keeps for each float of a class vector; 2 for Adam.

    Returns:
        The prediction for the rank with the largest shard.

    Example: a billion classes on 64 ranks.
        >>> shape = Shape(batch=1024, num_classes=10**9, dim=128)
        >>> ideal = Machine(flops=1e-13), Network(latency=1e-5, bandwidth=1e10)  # 10 TFLOP/s, 10 GB/s
        >>> row = plan("softmax", shape, 64, *ideal)
        >>> round(row.memory / 1e9), round(row.sent / 1e6, 1), round(row.computing, 2), round(row.exchanging, 3)
        (36, 1.1, 1.23, 0.043)
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= shape.num_classes:
        raise ArgumentError(f"`ranks` must be an integer from 1 to the number of classes; got {ranks!r}.")
    row = FAMILY[member]
    sharded = row.unsharded is None  # the field holds the reason why a member cannot be sharded
    if sharded:
        shard, exchanges = _largest_shard(row, shape, ranks), traffic(row.name, shape, ranks)
    else:
        shard, exchanges = shape, Traffic()
    step: Cost = cost(row.name, shard, machine.way)
    # Every rank draws the negatives of all rows, whoever holds them: draws are not divided by the number of ranks.
    draws = shape.pairs * shape.num_negatives if row.kind == "sampled" and ranks > 1 else 0.0
    scores = shard.table if row.kind == "exact" and ranks > 1 else 0.0
    per_score = PER_NATIVE_SCORE_ON_RANKS if machine.native and row.native else PER_SCORE_ON_RANKS
    work = step.work + draws * PER_DRAW_ON_RANKS + scores * per_score
    # `step.memory` holds the gradient of the class vectors; the vectors and the optimizer's numbers come on top.
    memory = FLOAT * (1 + optimizer_states) * shard.vectors + step.memory + draws * DRAW_BYTES
    # One rank skips every exchange, although a member's `traffic` counts them for any number of ranks.
    sent = exchanges.sent(ranks) if ranks > 1 else 0.0
    exchanging = network.seconds(exchanges, ranks) if ranks > 1 else 0.0
    return Plan(row.name, memory, sent, work.seconds(machine), exchanging, sharded)


def _largest_shard(member: Member, shape: Shape, ranks: int) -> Shape:
    """The sizes of the step that the rank with the largest shard sees: it is the one that the others wait for."""
    # Classes, supports and negatives are taken to be spread evenly. A sampled member handles every positive on every
    # rank (each compares it with its own negatives); an exact one looks up only those that are in its shard.
    return replace(
        shape,
        num_classes=-(-shape.num_classes // ranks),
        support=None if shape.support is None else shape.support / ranks,
        positives=shape.positives if member.kind == "sampled" else shape.positives / ranks,
        num_negatives=-(-shape.num_negatives // ranks),
        num_candidates=-(-shape.num_candidates // ranks),
    )


@checked
def traffic(member: str, shape: Shape, ranks: int) -> Traffic:
    """Number and bytes of the sums over the ranks in one step, forward and backward.

    They are the check of the arguments, the sums of the member's kernel, and the gradient of the queries.

    Args:
        member: a name in `FAMILY`.
        shape: the sizes of the whole step, with the classes of all ranks.
        ranks: R.

    Example: per row 24 bytes for the loss and 256 for the gradient of the query; once 24 bytes for the check.
        >>> shape = Shape(batch=1000, num_classes=10**6, dim=64)
        >>> traffic("softmax", shape, 4).bytes / 1000
        280.024
    """
    row = FAMILY[member]
    # `ProcessRanks.agree` sends three float64 numbers before the forward pass. In the backward pass each rank has the
    # gradient of the queries through its own classes only, and `spread` adds these (N, d) tables up. Gradients of the
    # class vectors stay where they are.
    check, query_gradient = Traffic(1, 3 * DOUBLE), Traffic(1, FLOAT * shape.queries)
    kernel: Traffic = row.needed("traffic")(shape, ranks)
    return check + query_gradient + kernel


def measure_network(ranks: Ranks, rounds: int = 30, megabytes: int = 4) -> Network:
    """Latency and bandwidth between the ranks, from the median times of small and of large sums.

    Args:
        ranks: at least 2 ranks, all of which must call this function.
        rounds: how often the small sum is timed; the large one is timed a third as often.
        megabytes: size of the large sum, in MiB of float32.

    Returns:
        The network as rank 0 measured it, the same on every rank.
    """
    if ranks.size < 2:
        raise ArgumentError(f"`ranks` must be at least 2 to measure what is between them; got {ranks.size}.")
    # 512 bytes take as long as their messages need to arrive; 2^18 float32 numbers are one MiB.
    small, large = torch.zeros(64, dtype=torch.float64), torch.zeros(megabytes << 18)

    def median(values: torch.Tensor, rounds: int) -> float:
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            ranks.sum(values)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first round opens connections and warms up caches

    # Measured times differ from rank to rank. All take those of rank 0, so that they make the same plans from them.
    measured = torch.tensor([median(small, rounds), median(large, rounds // 3)], dtype=torch.float64)
    small_seconds, large_seconds = ranks.first(measured).tolist()
    sent = Traffic(1, FLOAT * large.numel()).sent(ranks.size)
    # The large sum pays the latency too. On a busy machine a small sum may well take as long as a large one: the
    # difference, which could be 0 or negative, is not trusted below a tenth of the time.
    moving = max(large_seconds - small_seconds, 0.1 * large_seconds)
    return Network(small_seconds / (2 * (ranks.size - 1)), sent / moving)
