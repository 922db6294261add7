"""Four processes, of which the first 1, 2, 3 or 4 run a job together, as a process group of that size."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
PATIENCE = 60  # seconds that a rank waits for the others: a loaded machine is not a fault


def serve(rank: int, rendezvous: str, connection: Connection) -> None:
    """Run jobs until there are no more: (ranks, job, arguments) in, (error or None, result) out."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=patience)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in range(1, WORLD + 1)}
    while (request := connection.recv()) is not None:
        ranks, job, arguments = request
        try:
            answer = (None, job(groups[ranks], *arguments))
        except Exception:
            answer = (traceback.format_exc(), None)
        connection.send(answer)
    dist.destroy_process_group()


class Pool:
    """The processes: started at the first job, and again after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        self.starts += 1
        context, rendezvous = mp.get_context("spawn"), f"file://{self.folder}/rendezvous{self.starts}"
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, rendezvous, there), daemon=True)
            process.start()
            self.processes.append(process)
            self.connections.append(here)

    def run(self, ranks: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `job(group, *arguments)` returned on each of the first `ranks` ranks; fails if one of them did."""
        if not self.processes:
            self.start()
        for connection in self.connections[:ranks]:
            connection.send((ranks, job, arguments))
        answers = []
        for rank, connection in enumerate(self.connections[:ranks]):
            if not connection.poll(2 * PATIENCE):
                self.stop()
                raise AssertionError(f"rank {rank} of {ranks} does not answer")
            answers.append(connection.recv())
        errors = [f"rank {rank} of {ranks}: {error}" for rank, (error, _) in enumerate(answers) if error]
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        self.processes, self.connections = [], []
