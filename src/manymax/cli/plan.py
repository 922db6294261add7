"""`manymax plan`: predict memory, traffic and time of a step whose classes are split over ranks."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

from manymax.cli import console as display
from manymax.cli.advise import read_machine
from manymax.distributed import Network, Plan, measure_network
from manymax.distributed import plan as plan_step
from manymax.distributed.collectives import ProcessRanks
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.theory.cost import Machine, Shape, measure_machine

PLAN_HEADERS = ("member", "memory of a rank", "sent by a rank", "computing", "exchanging", "step", "")
PROCESS_TIMEOUT = timedelta(minutes=5)  # for processes that measure the network to find each other


def plan(
    classes: Annotated[str, typer.Option(help="The number of classes, C; may be written as 1e9.")],
    ranks: Annotated[int, typer.Option(help="The number of processes that the classes are split over, R.")],
    dim: Annotated[int, typer.Option(help="Size of the queries and class vectors, d.")] = 128,
    batch: Annotated[int, typer.Option(help="Rows of a step, N; every rank sees the same rows.")] = 1024,
    positives: Annotated[float, typer.Option(help="Labels per row, on average.")] = 1.0,
    num_negatives: Annotated[int, typer.Option(help="k, negatives per row of the sampled members.")] = 100,
    support: Annotated[
        float | None, typer.Option(help="Classes to which a sparse map gives a positive probability, on average.")
    ] = 100.0,
    optimizer_states: Annotated[
        int, typer.Option(help="Numbers that the optimizer keeps for each weight: 2 for Adam, 0 for plain SGD.")
    ] = 2,
    latency: Annotated[
        float | None, typer.Option(metavar="US", help="Microseconds that a message takes between two ranks.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Bandwidth between two ranks, in GB per second.")
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(help="File with the output of an earlier --json: take its machine instead of measuring this one."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the predictions and what they rest on as JSON.")] = False,
) -> None:
    """Predict the cost of a step whose classes are split over ranks.

    The table has memory, bytes sent and time of a training step for every loss. Use it before you rent machines, when
    the class vectors do not fit on one. The speed of the processor is measured here, and so is the network, between two
    processes of this machine. Give --latency and --bandwidth for another network, or start the command with torchrun to
    measure between the ranks that it starts.

    \b
    Examples:
      manymax plan --classes 1e9 --dim 128 --ranks 64
      manymax plan --classes 1e9 --ranks 64 --latency 20 --bandwidth 12 --json
      torchrun --nproc-per-node 4 -m manymax plan --classes 1e7 --ranks 4
    """
    shape = Shape(
        batch=batch,
        num_classes=_whole_number("--classes", classes),
        dim=dim,
        positives=positives,
        num_negatives=num_negatives,
        support=support,
    )
    network, prints = _network(latency, bandwidth)
    if not prints:
        return
    speed = measure_machine(dim=dim) if machine is None else read_machine(machine)
    rows = [plan_step(name, shape, ranks, speed, network, optimizer_states) for name in FAMILY]
    if json:
        display.put_json(_plan_as_json(shape, ranks, speed, network, rows))
        return
    console = display.open_console()
    display.put(console, display.table(PLAN_HEADERS, map(_row, rows)))
    display.put(
        console,
        f"{1e6 * network.latency:.3g} us and {network.bandwidth / 1e9:.3g} GB/s between ranks; float32. The memory"
        " includes the optimizer's numbers; the time does not include the optimizer's step.",
    )


def _whole_number(name: str, text: str) -> int:
    """The whole number that `text` means; powers of ten may be written with an e.

    >>> _whole_number("--classes", "1e9")
    1000000000
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # fails the check below, which has the message
    if not 1 <= value < 2**53 or value != int(value):  # from 2^53 on a float does not hold every whole number
        raise ArgumentError(f"`{name}` must be a whole number of at least 1, like 40981 or 1e9; got {text!r}.")
    return int(value)


def _network(latency: float | None, bandwidth: float | None) -> tuple[Network, bool]:
    """The network between the ranks, given or measured, and whether this process is the one that prints."""
    if (latency is None) != (bandwidth is None):
        raise ArgumentError("`--latency` and `--bandwidth` belong together: give both, or neither to measure them.")
    if latency is not None and bandwidth is not None:
        return Network(latency / 1e6, 1e9 * bandwidth), int(os.environ.get("RANK", "0")) == 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=PROCESS_TIMEOUT)
        try:
            return measure_network(ProcessRanks()), dist.get_rank() == 0
        finally:
            dist.destroy_process_group()
    return local_network(), True


def local_network() -> Network:
    """Measure the network between two processes of this machine."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        started = [context.Process(target=_measure, args=(rank, folder, answers), daemon=True) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise ArgumentError(
                "the network cannot be measured: two processes of this machine cannot reach each other (their errors"
                " are above). Give `--latency` and `--bandwidth`."
            )
        return Network(*answers.get())


def _measure(rank: int, folder: str, answers: Any) -> None:
    """What each of the two processes runs; rank 0 puts the result into the queue `answers`."""
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=PROCESS_TIMEOUT)
    network = measure_network(ProcessRanks())
    if rank == 0:
        answers.put((network.latency, network.bandwidth))
    dist.destroy_process_group()


def _row(row: Plan) -> list[str]:
    return [
        row.member,
        _bytes(row.memory),
        _bytes(row.sent),
        _seconds(row.computing),
        _seconds(row.exchanging),
        _seconds(row.seconds),
        "" if row.sharded else "whole on every rank",
    ]


def _bytes(count: float) -> str:
    """A number of bytes in the unit that keeps the number short.

    >>> _bytes(36.2e9), _bytes(1048.0), _bytes(0.0)
    ('36.2 GB', '1.05 kB', '0 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _plan_as_json(shape: Shape, ranks: int, machine: Machine, network: Network, rows: list[Plan]) -> dict[str, Any]:
    return {
        "shape": asdict(shape),
        "ranks": ranks,
        "machine": asdict(machine),
        "network": asdict(network),
        "members": [asdict(row) | {"seconds": row.seconds} for row in rows],
    }
