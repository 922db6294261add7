"""The cost of a training step, predicted: flops, bytes, parameters touched, memory and seconds.

A step is the loss of N queries with P positives each, and its gradients to queries (N, d) and class vectors (C, d); the
optimizer is not included. The table follows Table 4 of the paper and adds what that leaves out: d, P, and the three
matrix products of a dense step (scores, gradient to queries, gradient to class vectors).

    member                          flops              entries           class vectors touched
    softmax, Taylor-softmax         6 N C d            N C               C
    sparse maps, support m > C/8    6 N C d            N C, no sort      C
    sparse maps, support m          2 N C d + 4 N m d  N C, no sort      C
    sampled softmax, NCE            6 N P (k + 1) d    N P (k + 1)       at most N P (k + 1)
      ... shared negatives          6 N P (k + 1) d    N P (k + 1)       at most N P + k
      ... chosen among M            + 2 N P M d        + N P M           at most N P (M + 1)
      ... if N C is small           2 N C d instead of 2 N P (k + 1) d, and of 2 N P M d
    hierarchical softmax            6 N P L d          N P L             at most N P L, L: mean length of a path
    RG                              (4 C + 6 N) d^2    C d               C

Seconds are the counts of each kind of work times the seconds that the machine takes for one unit of it, which
`measure_machine` finds in a few seconds. The way "blocked" is that of manymax's heads with their defaults, which score
a block of rows at a time, on the native back end where it is there and in plain torch elsewhere; "native" and "torch"
name one of the two. "plain" is autograd on full (N, C) tables. (In plain torch a support counts as small up to C/16.)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch.nn.functional import embedding_bag

from manymax.engine import native
from manymax.engine.cost import FAR, FLOAT, NEAR, Cost, Machine, Shape, Way, Work
from manymax.engine.native_library import resolve
from manymax.errors import ArgumentError, check_choice
from manymax.members import FAMILY
from manymax.ops.arguments import checked

__all__ = ["Cost", "Machine", "Shape", "Work", "cost", "measure_machine", "predict_seconds"]

WAYS = ("blocked", *get_args(Way))


@checked
def cost(member: str, shape: Shape, way: str = "blocked", **settings: Any) -> Cost:
    """Flops, bytes, parameters touched and memory of one step of a member.

    Args:
        member: name of a member in `FAMILY`.
        shape: the sizes of the step.
        way: "blocked", as manymax's heads compute here; "native" or "torch", as they do on that back end; or "plain",
            autograd on full tables.
        settings: of the member, such as `alpha`; the default of each if they are left out.

    Returns:
        The counts.

    Example:
        >>> shape = Shape(batch=2048, num_classes=40_400, dim=64, num_negatives=100)
        >>> cost("softmax", shape).flops / cost("ssm", shape).flops  # C / (k + 1)
        400.0
    """
    check_choice("way", way, WAYS)
    if way == "blocked":
        way = _machine_here().way
    row = FAMILY[member]
    for name in settings:
        row.setting(name)  # raises for a setting that the member has not got
    found: Cost = row.needed("cost")(shape, way, **settings)
    return found


def _machine_here() -> Machine:
    """This machine as far as it needs no measurement: whether heads run on the native back end."""
    return Machine(native=resolve("auto") is not None)


@checked
def predict_seconds(member: str, shape: Shape, machine: Machine, way: str = "blocked", **settings: Any) -> float:
    """Seconds of one step on a machine; arguments as in `cost`, but "blocked" is how heads compute on that machine.

    Example:
        >>> ideal = Machine(flops=1e-11)  # 100 GFLOP/s, and nothing else takes any time
        >>> predict_seconds("softmax", Shape(batch=1000, num_classes=10_000, dim=50), ideal)
        0.03
    """
    return cost(member, shape, machine.way if way == "blocked" else way, **settings).work.seconds(machine)


def measure_machine(seconds: float = 3.0, dim: int = 64, clock: Callable[[], float] = time.perf_counter) -> Machine:
    """Measure the seconds that this machine takes for one unit of each kind of work.

    Small probes of all kinds run in turns, so that a slow moment of the machine slows all of them; medians are taken.

    Args:
        seconds: time to spend, about; each probe is counted at least three times.
        dim: d, on which it depends how well a product with class vectors uses the processor.
        clock: tells the time in seconds. `time.process_time`, with one thread, measures a machine that others use too.

    Returns:
        Seconds per unit of each kind of work, with the number of threads that torch is set to; with one thread where
        that is faster, as on a machine whose cores are taken by other processes.
    """
    if not 0 < seconds < math.inf:
        raise ArgumentError(f"`seconds` must be a finite number above 0; got {seconds!r}.")
    probes, threads = _probes(dim), torch.get_num_threads()
    speeds = _time_probes(probes, seconds / 2, clock)
    # Several threads wait for each other at the end of every operation, and where another process has one of their
    # cores they wait for it, up to a thousand times as long as the operation takes. One thread, by its processor time,
    # waits for nobody: no kind of work is taken to be slower than that.
    torch.set_num_threads(1)
    try:
        alone = _time_probes(probes, seconds / 2, time.process_time)
    finally:
        torch.set_num_threads(threads)
    return Machine(**{name: min(speeds[name], alone[name]) for name in probes}, native=_machine_here().native)


def _time_probes(
    probes: dict[str, tuple[Callable[[], object], int]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds per unit of each probe, in turns for so many seconds."""
    begin = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in probes}
    rounds = 0
    while rounds < 4 or time.perf_counter() - begin < seconds:
        for name, (run, count) in probes.items():
            start = clock()
            run()
            times[name].append((clock() - start) / count)
        rounds += 1
    # The first run of each probe pays for fresh memory and cold caches and is not counted.
    return {name: statistics.median(measured[1:]) for name, measured in times.items()}


def _probes(dim: int) -> dict[str, tuple[Callable[[], object], int]]:
    """{kind of work: (a function that does some of it, how many units it does)}; kinds are the fields of `Work`."""
    rows, classes, ids = 128, 1 << 15, 1 << 14
    queries, vectors, scores = torch.randn(rows, dim), torch.randn(classes, dim), torch.randn(rows, classes)
    gradient, big, cached = torch.zeros(classes, dim), torch.zeros(1 << 23), torch.randn(1 << 18)
    keys, one, factors = torch.randint(1 << 20, (1 << 16,), dtype=torch.int32), torch.zeros(1), torch.ones(rows)
    level = resolve("auto")

    def products() -> object:
        """The products of a head with its defaults."""
        if level is not None and native.multiplies(level, queries, vectors):
            native.block_scores(level, queries, vectors, None, scores)
            return native.dense_gradients(level, scores, None, vectors, factors, queries, gradient, None, True)
        torch.mm(queries, vectors.T, out=scores)
        gradient.addmm_(scores.T, queries)
        return scores @ vectors

    return {
        "flops": (products, 6 * rows * dim * classes),
        "streamed": (lambda: big.add_(1), big.numel()),
        "exponentials": (lambda: torch.softmax(scores, 1, out=scores), scores.numel()),
        "passes": (lambda: [cached.clamp_(min=-1) for _ in range(8)], 8 * cached.numel()),
        "fresh": (lambda: torch.empty(1 << 23).zero_(), 1 << 23),
        "near": (_gather_probe(NEAR, dim, ids), ids * dim),
        "far": (_gather_probe(FAR, dim, ids), ids * dim),
        "sorted": (lambda: keys.argsort(stable=True), len(keys)),
        "calls": (lambda: [one + 1 for _ in range(500)], 500),
    }


def _gather_probe(size: int, dim: int, count: int) -> Callable[[], object]:
    """A function that gathers and sums `count` random vectors from a table of `size` bytes.

    Every call takes other vectors: those of the last call would still be in cache.
    """
    table = torch.zeros(max(1, size // (FLOAT * dim)), dim)
    weights, offsets = torch.ones(count), torch.arange(0, count, 64)

    def run() -> object:
        ids = torch.randint(len(table), (count,))
        return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights)

    return run
