"""Steps of sharded heads against what `manymax plan` predicts: seconds, bytes sent and memory, on ranks of one machine.

    python benchmarks/scale.py              2 ranks, N = 1024, C = 10^4 ... 10^6: some minutes on 2 cores
    python benchmarks/scale.py --quick      N = 256, C up to 10^5
    python benchmarks/scale.py --ranks 4    more ranks; they should have a core each

Every rank has one thread. Machine and network are measured first, by all ranks at the same time, as they will run. Bar:
no time, no number of bytes and no memory is off by more than a factor of 2.
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
from measure import environment, interleave, median, parser, peak_mb, scores_like, write

import manymax
from manymax.distributed import ShardedHead, measure_network, plan
from manymax.distributed.collectives import Ranks
from manymax.theory.cost import Shape, is_sparse, measure_machine

DIM, FACTOR = 64, 2.0
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


def counted(run: Callable[[], object]) -> float:
    """Bytes that the sums and broadcasts of a step hold; a rank sends 2 (R - 1) / R times that."""
    held = [0.0]

    def counting(call: Callable[..., Any], share: float) -> Callable[..., Any]:
        def wrapper(values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            held[0] += share * values.numel() * values.element_size()
            return call(values, *arguments, **options)

        return wrapper

    shares = {"all_reduce": 1.0, "broadcast": 0.5}
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), share) for name, share in shares.items()}):
        run()
    return held[0]


def support_of(member: str, queries: torch.Tensor, vectors: torch.Tensor, target: torch.Tensor) -> float | None:
    """Classes that a sparse map keeps, on average over some rows."""
    row = manymax.FAMILY[member]
    if not is_sparse(row):
        return None
    scores = queries[:32] @ vectors.T
    if member == "rankmax":
        return float((manymax.rankmax(scores, target[:32]) > 0).sum(1).double().mean())
    return float((getattr(manymax, member)(scores) > 0).sum(1).double().mean())


def step(member: str, regime: str, rows: int, classes: int) -> tuple[Callable[[], object], float | None]:
    """One step of the sharded head, and the support of its map."""
    queries, vectors, target = scores_like(regime, rows, classes, DIM)
    sampled = manymax.FAMILY[member].kind == "sampled"
    head = ShardedHead(HEADS[member](None, classes, **({"sparse": True} if sampled else {})))
    support = support_of(member, queries, vectors, target)
    start, stop = head.span.tolist()
    own = vectors[start:stop].clone().requires_grad_()
    queries.requires_grad_()

    def run() -> None:
        own.grad = queries.grad = None
        head(queries, target, own).backward()

    return run, support


def rank_main(rank: int, rendezvous: str, arguments: argparse.Namespace, answers: Any) -> None:
    """Measure, run and predict every case; the first rank answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=arguments.ranks)
    ranks = Ranks()
    machine, network = measure_machine(1.0 if arguments.quick else 4.0, DIM), measure_network(ranks)
    rows = 256 if arguments.quick else 1024
    found = []
    for classes in (10_000, 100_000) if arguments.quick else (10_000, 100_000, 1_000_000):
        for member in HEADS:
            for regime in ("trained", "fresh") if is_sparse(manymax.FAMILY[member]) else ("trained",):
                run, support = step(member, regime, rows, classes)
                times = interleave({"": run}, arguments.rounds)[""]
                held, peak = counted(run), peak_mb(run)
                shape = Shape(batch=rows, num_classes=classes, dim=DIM, support=support)
                row = plan(member, shape, ranks.size, machine, network, optimizer_states=0)
                share = 2 * (ranks.size - 1) / ranks.size
                vectors = 4e-6 * DIM * -(-classes // ranks.size)  # MB that are there before the step
                found.append(
                    {
                        "member": member,
                        "regime": regime,
                        "classes": classes,
                        "seconds": [row.seconds, median(times)],
                        "sent_kb": [row.sent / 1e3, share * held / 1e3],
                        "peak_mb": [row.memory / 1e6 - vectors, peak],
                        "exchanging_share": row.exchanging / row.seconds,
                    }
                )
    if rank == 0:
        answers.put({"machine": asdict(machine), "network": asdict(network), "rows": found})
    dist.destroy_process_group()


def ratio(pair: list[float | None]) -> float | None:
    """Predicted over measured."""
    predicted, measured = pair
    return None if not measured or predicted is None else predicted / measured


def within(value: float | None) -> bool:
    """Whether a ratio meets the bar; what could not be measured does."""
    return value is None or 1 / FACTOR <= value <= FACTOR


def main() -> int:
    """Start the ranks, print the table, and say whether the bar is met."""
    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    arguments = made.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers, rendezvous = context.Queue(), (Path(folder) / "rendezvous").as_uri()
        started = [
            context.Process(target=rank_main, args=(rank, rendezvous, arguments, answers))
            for rank in range(arguments.ranks)
        ]
        for process in started:
            process.start()
        record = answers.get()
        for process in started:
            process.join()
    network = record["network"]
    print(f"{arguments.ranks} ranks, {1e6 * network['latency']:.0f} us, {network['bandwidth'] / 1e9:.2f} GB/s")
    print(f"{'member':18}{'regime':9}{'classes':>10}{'ms':>10}{'predicted':>11}{'kB':>9}{'/':>6}{'MB':>9}{'/':>6}")
    off = 0
    for row in record["rows"]:
        ratios = {name: ratio(row[name]) for name in ("seconds", "sent_kb", "peak_mb")}
        small = (row["peak_mb"][1] or 0) < 4  # MB: nothing but the allocator's pages
        off += not all(within(value) for name, value in ratios.items() if not (name == "peak_mb" and small))
        texts = {name: "-" if value is None else f"{value:.2f}" for name, value in ratios.items()}
        print(
            f"{row['member']:18}{row['regime']:9}{row['classes']:>10,}{1e3 * row['seconds'][1]:>10.1f}"
            f"{texts['seconds']:>11}{row['sent_kb'][1]:>9.0f}{texts['sent_kb']:>6}"
            f"{row['peak_mb'][1] or 0:>9.1f}{texts['peak_mb']:>6}"
        )
    print(f"{off} of {len(record['rows'])} off by more than {FACTOR:g}")
    if arguments.json:
        write(arguments.json, record | {"environment": environment(arguments)})
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
