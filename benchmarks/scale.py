"""Steps of sharded heads against what `manymax plan` predicts: seconds, bytes sent and memory, on ranks of one machine.

    python benchmarks/scale.py              2 ranks, N = 1024, C = 10^4 ... 10^6: some minutes on 2 cores
    python benchmarks/scale.py --quick      N = 256, C up to 10^5
    python benchmarks/scale.py --ranks 4    more ranks; they should have a core each

A rank is a process that holds a part of the classes; every rank has one thread. Machine and network are measured first,
by all ranks at the same time, because that is how the steps run. Bar: no time, no number of bytes and no memory is off
by more than a factor of 2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import environment, interleave, median, parser, peak_mb, scores_like, write, write_between_marks

import manymax
from manymax.distributed import ShardedHead, measure_network, plan
from manymax.distributed.collectives import ProcessRanks
from manymax.theory.cost import Shape, measure_machine

DIM, LARGEST_FACTOR = 64, 2.0
LEAST_MB = 16  # a smaller peak is mostly rounding of the allocator and is not compared
HEADS = {
    "softmax": manymax.LinearSoftmaxLoss,
    "sparsemax": manymax.LinearSparsemaxLoss,
    "entmax": manymax.LinearEntmaxLoss,
    "rankmax": manymax.LinearRankmaxLoss,
    "taylor_softmax": manymax.LinearTaylorSoftmaxLoss,
    "sampled_softmax": manymax.LinearSampledSoftmaxLoss,
    "nce": manymax.LinearNCELoss,
    "rg": manymax.LinearRGLoss,
}


def exchanged_bytes(run: Callable[[], object]) -> float:
    """Bytes of all tensors that a step sums over the ranks, and half of those that it broadcasts.

    On R ranks each sends 2 (R - 1) / R times that: a broadcast sends half as much as a sum.
    """
    total = 0.0

    def counting(call: Callable[..., Any], share: float) -> Callable[..., Any]:
        def wrapper(values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal total
            total += share * values.numel() * values.element_size()
            return call(values, *arguments, **options)

        return wrapper

    shares = {"all_reduce": 1.0, "broadcast": 0.5}
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), share) for name, share in shares.items()}):
        run()
    return total


def support_of(member: str, queries: torch.Tensor, vectors: torch.Tensor, target: torch.Tensor) -> float | None:
    """Average number of classes that a sparse map keeps, on 32 of the rows; None for other members."""
    row = manymax.FAMILY[member]
    if not row.sparse:
        return None
    scores = queries[:32] @ vectors.T
    if member == "rankmax":
        return float((manymax.rankmax(scores, target[:32]) > 0).sum(1).double().mean())
    return float((getattr(manymax, member)(scores) > 0).sum(1).double().mean())


def step(
    member: str, regime: str, rows: int, classes: int
) -> tuple[Callable[[], object], Callable[[], None], float | None]:
    """A function that runs one step of the sharded head, one that frees its gradients, and the support of its map."""
    queries, vectors, target = scores_like(regime, rows, classes, DIM)
    sampled = manymax.FAMILY[member].kind == "sampled"
    head = ShardedHead(HEADS[member](None, classes, **({"sparse_grad": True} if sampled else {})))
    support = support_of(member, queries, vectors, target)
    start, stop = head.span.tolist()
    own = vectors[start:stop].clone().requires_grad_()
    queries.requires_grad_()

    def free_gradients() -> None:
        own.grad = queries.grad = None

    def run() -> None:
        free_gradients()
        head(queries, target, own).backward()

    return run, free_gradients, support


def rank_main(rank: int, rendezvous: str, arguments: argparse.Namespace, answers: Any) -> None:
    """The program of a rank: measures the machine, then runs and predicts every step; rank 0 sends the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=arguments.ranks)
    ranks = ProcessRanks()
    machine, network = measure_machine(1.0 if arguments.quick else 4.0, DIM), measure_network(ranks)
    rows = 256 if arguments.quick else 1024
    found = []
    for classes in (10_000, 100_000) if arguments.quick else (10_000, 100_000, 1_000_000):
        for member in HEADS:
            for regime in ("trained", "fresh") if manymax.FAMILY[member].sparse else ("trained",):
                run, free_gradients, support = step(member, regime, rows, classes)
                times = interleave({"": run}, arguments.rounds)[""]
                exchanged = exchanged_bytes(run)
                free_gradients()  # they would count as memory that was in use before the step
                peak = peak_mb(run)
                shape = Shape(batch=rows, num_classes=classes, dim=DIM, support=support)
                row = plan(member, shape, ranks.size, machine, network, optimizer_states=0)
                share = 2 * (ranks.size - 1) / ranks.size
                vectors = 4e-6 * DIM * -(-classes // ranks.size)  # MB of class vectors, in use before the step
                found.append(
                    {
                        "member": member,
                        "regime": regime,
                        "classes": classes,
                        "seconds": [row.seconds, median(times)],
                        "sent_kb": [row.sent / 1e3, share * exchanged / 1e3],
                        "peak_mb": [row.memory / 1e6 - vectors, peak],
                        "exchanging_share": row.exchanging / row.seconds,
                    }
                )
    if rank == 0:
        answers.put({"machine": asdict(machine), "network": asdict(network), "batch": rows, "rows": found})
    dist.destroy_process_group()


def ratio(pair: list[float | None]) -> float | None:
    """Predicted over measured; None where either is missing."""
    predicted, measured = pair
    return None if not measured or predicted is None else predicted / measured


def within(value: float | None) -> bool:
    """Whether a ratio meets the bar; one that could not be measured counts as met."""
    return value is None or 1 / LARGEST_FACTOR <= value <= LARGEST_FACTOR


def report(figures: dict[str, Any], ranks: int) -> tuple[list[str], int]:
    """A table of measured figures and of predicted over measured, and how many rows miss the bar."""
    network, off = figures["network"], 0
    lines = [
        "| member | scores | C | step, ms | time | sent, kB | bytes | peak, MB | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures["rows"]:
        ratios = {name: ratio(row[name]) for name in ("seconds", "sent_kb", "peak_mb")}
        if (row["peak_mb"][1] or 0) < LEAST_MB:
            ratios["peak_mb"] = None
        off += not all(within(value) for value in ratios.values())
        cells = [row["member"], row["regime"], f"{row['classes']:,}"]
        for name, digits in (("seconds", 1), ("sent_kb", 0), ("peak_mb", 0)):
            measured = (1e3 if name == "seconds" else 1) * (row[name][1] or 0)
            cells += [f"{measured:.{digits}f}", "-" if ratios[name] is None else f"{ratios[name]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    link = f"{1e6 * network['latency']:.0f} us, {network['bandwidth'] / 1e9:.2g} GB/s between them"
    rows = figures["rows"]
    lines += [
        "",
        f"{ranks} ranks, {link}, N = {figures['batch']}, d = {DIM}; {len(rows) - off} of {len(rows)} steps within 2.",
    ]
    return lines, off


def main() -> int:
    """Start the ranks and print the table; the exit code is 1 if the bar was missed."""
    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    made.add_argument("--page", metavar="FILE", help="write the table between the marks of this page")
    arguments = made.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers, rendezvous = context.SimpleQueue(), (Path(folder) / "rendezvous").as_uri()
        started = [
            context.Process(target=rank_main, args=(rank, rendezvous, arguments, answers))
            for rank in range(arguments.ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            return 1
        figures = answers.get()
    lines, off = report(figures, arguments.ranks)
    print("\n".join(lines))
    if arguments.page:
        write_between_marks(Path(arguments.page), "scale", lines)
    if arguments.json:
        write(arguments.json, figures | {"environment": environment(arguments)})
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
