"""`manymax plan`: memory, bytes and seconds of a step whose classes are split over ranks."""

from __future__ import annotations

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

from manymax.cli import console as look
from manymax.cli.advise import read_machine
from manymax.distributed import Network, Plan, measure_network
from manymax.distributed import plan as plan_step
from manymax.distributed.collectives import ProcessRanks
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.theory.cost import Machine, Shape, measure_machine

HEADINGS = ("member", "memory of a rank", "sent by a rank", "computing", "exchanging", "step", "")
WAIT = timedelta(minutes=5)


def plan(
    classes: Annotated[str, typer.Option(help="The number of classes, C; 1e9 is understood.")],
    ranks: Annotated[int, typer.Option(help="ProcessRanks that the classes are split over, R.")],
    dim: Annotated[int, typer.Option(help="Size of queries and class vectors, d.")] = 128,
    batch: Annotated[int, typer.Option(help="Rows of a step, N, the same on every rank.")] = 1024,
    positives: Annotated[float, typer.Option(help="Labels of a row, on average.")] = 1.0,
    num_negatives: Annotated[int, typer.Option(help="k, of the sampled members.")] = 100,
    support: Annotated[float | None, typer.Option(help="Classes that a sparse map keeps, on average.")] = 100.0,
    optimizer_states: Annotated[int, typer.Option(help="Floats an optimizer keeps for each weight; Adam 2.")] = 2,
    latency: Annotated[float | None, typer.Option(metavar="US", help="Microseconds of a message.")] = None,
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", help="Of a link, in GB per second.")] = None,
    machine: Annotated[
        Path | None, typer.Option(help="The `machine` of an earlier --json; left out, it is measured.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Predict what a step costs each rank when the classes are split over ranks, for every member.

    \b
    Speed is measured here: that of the processor, and, unless --latency and --bandwidth say it, that between two
    processes of this machine. Started by torchrun it is measured between the ranks that it starts.

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
    network, speaks = _network(latency, bandwidth)
    if not speaks:
        return
    speed = measure_machine(dim=dim) if machine is None else read_machine(machine)
    rows = [plan_step(name, shape, ranks, speed, network, optimizer_states) for name in FAMILY]
    if json:
        look.put_json(_record(shape, ranks, speed, network, rows))
        return
    console = look.open_console()
    look.put(console, look.table(HEADINGS, map(_row, rows)))
    look.put(
        console,
        f"{1e6 * network.latency:.3g} us and {network.bandwidth / 1e9:.3g} GB/s between ranks; float32; the optimizer's"
        " numbers are in the memory, its step is not in the time.",
    )


def _whole_number(name: str, text: str) -> int:
    """The number that `text` means.

    >>> _whole_number("--classes", "1e9")
    1000000000
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not 1 <= value < 2**53 or value != int(value):
        raise ArgumentError(f"`{name}` must be a whole number of at least 1, like 40981 or 1e9; got {text!r}.")
    return int(value)


def _network(latency: float | None, bandwidth: float | None) -> tuple[Network, bool]:
    """What is between the ranks, and whether this process is the one to print."""
    if (latency is None) != (bandwidth is None):
        raise ArgumentError("`--latency` and `--bandwidth` belong together: give both, or neither to measure them.")
    if latency is not None and bandwidth is not None:
        return Network(latency / 1e6, 1e9 * bandwidth), int(os.environ.get("RANK", "0")) == 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=WAIT)
        try:
            return measure_network(ProcessRanks()), dist.get_rank() == 0
        finally:
            dist.destroy_process_group()
    return local_network(), True


def local_network() -> Network:
    """What is between two processes of this machine."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        started = [context.Process(target=_probe, args=(rank, folder, answers), daemon=True) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise ArgumentError(
                "two processes of this machine cannot talk to each other, as their errors say: give `--latency` and"
                " `--bandwidth`."
            )
        return Network(*answers.get())


def _probe(rank: int, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=WAIT)
    network = measure_network(ProcessRanks())
    if rank == 0:
        answers.put((network.latency, network.bandwidth))
    dist.destroy_process_group()


def _row(row: Plan) -> list[str]:
    return [
        row.member,
        _amount(row.memory),
        _amount(row.sent),
        _seconds(row.computing),
        _seconds(row.exchanging),
        _seconds(row.seconds),
        "" if row.sharded else "whole on every rank",
    ]


def _amount(count: float) -> str:
    """Bytes in the unit that suits them.

    >>> _amount(36.2e9), _amount(1048.0), _amount(0.0)
    ('36.2 GB', '1.05 kB', '0 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _record(shape: Shape, ranks: int, machine: Machine, network: Network, rows: list[Plan]) -> dict[str, Any]:
    return {
        "shape": asdict(shape),
        "ranks": ranks,
        "machine": asdict(machine),
        "network": asdict(network),
        "members": [asdict(row) | {"seconds": row.seconds} for row in rows],
    }
