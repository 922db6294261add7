"""Studies on a cluster: dask.distributed takes runs to its workers.

A worker starts a process for each run, as the local engine does, and answers with its exit code; all else is in the
run's folder, which must be on a file system that the workers share. So a run has its memory, its signals and its random
numbers to itself, a worker of n threads does n runs at a time, and a worker that dies takes its runs with it: their
locks end with them, dask gives them to another worker, and they go on from their checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.sweep import PAUSE, SAVING, Job, work

VERSION = metadata.version("manymax")
REACHING = 10.0  # seconds to find the cluster, and a worker in it
KILLED = -9  # what stands for the exit code of a run whose workers died again and again


class DaskEngine:
    """A cluster of dask.distributed, for the time of a `with` block.

    Args:
        address: of its scheduler, like "tcp://host:8786"; None starts a cluster of processes of this machine.
        workers: runs at a time; as many as the workers have threads, or this machine cores, if None.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        try:
            import distributed
        except ModuleNotFoundError as missing:
            raise ManymaxError(
                f'`engine` dask needs `{missing.name}`. Install it with: pip install "manymax[cluster]"'
            ) from None
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters here is told by the records
        self.distributed, self.workers = distributed, workers
        self.stopping = f"manymax-stop-{uuid.uuid4().hex}"
        self._open = contextlib.ExitStack()
        try:
            self.client = self._connect(address)
        except BaseException:
            self._open.close()
            raise

    def _connect(self, address: str | None) -> Any:
        if address is None:
            cluster = self.distributed.LocalCluster(
                n_workers=self.workers or os.cpu_count() or 1,
                threads_per_worker=1,
                memory_limit=0,
                dashboard_address=None,
                silence_logs=logging.CRITICAL,
            )
            address = self._open.enter_context(cluster).scheduler_address
        try:
            comm = self.distributed.comm  # a client of an unknown scheme would complain again when it is collected
            comm.registry.get_backend(comm.parse_address(address)[0])
            client = self._open.enter_context(self.distributed.Client(address, timeout=REACHING))
            client.wait_for_workers(1, timeout=REACHING)
        except (OSError, ValueError, self.distributed.TimeoutError) as error:
            raise ManymaxError(
                f"`address` {address}: no cluster with a worker answers there within {REACHING:.0f} s ({error})."
                " Start `dask scheduler` and `dask worker ADDRESS`, or leave it out for processes of this machine."
            ) from None
        return client

    def __enter__(self) -> DaskEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def slots(self) -> int:
        """As many as there are threads now: workers come and go."""
        threads = sum(self.client.nthreads().values())
        return threads if self.workers is None else min(threads, self.workers)

    def start(self, job: Job, checkpoint_seconds: float) -> Any:
        """Hand the run to the cluster."""
        task = {
            "version": VERSION,
            "settings": job.config.nested(),
            "folder": str(job.folder.resolve()),
            "checkpoint_seconds": checkpoint_seconds,
        }
        return self.client.submit(perform, task, os.getcwd(), self.stopping, pure=False)

    def ended(self, started: Sequence[Any]) -> Iterator[tuple[Any, int | None]]:
        """Runs whose workers have answered."""
        with contextlib.suppress(self.distributed.TimeoutError):
            self.distributed.wait([*started], timeout=PAUSE, return_when="FIRST_COMPLETED")
        for future in started:
            if future.done():
                yield future, self._code(future)

    def _code(self, future: Any) -> int | None:
        if future.status == "finished":
            return int(future.result())
        if future.status != "error":
            raise ManymaxError("the cluster is gone. Finished runs are kept; the same command goes on from there.")
        error = future.exception()
        if isinstance(error, self.distributed.KilledWorker):
            return KILLED
        raise ManymaxError(f"a worker of the cluster cannot do runs: {error}") from None

    def stop(self, started: Sequence[Any]) -> None:
        """Let the workers ask their runs to end, and wait until they have."""
        if not started:
            return
        with contextlib.suppress(OSError, self.distributed.TimeoutError):
            self.distributed.Event(self.stopping, client=self.client).set()
            self.distributed.wait([*started], timeout=SAVING + 10 * PAUSE)


def perform(task: dict[str, Any], place: str, stopping: str) -> int:
    """On a worker: a run in a process of its own; its exit code.

    Args:
        task: for `_main`.
        place: the working directory of the study, from which paths to data count.
        stopping: name of the event that ends all runs of the study.
    """
    if task["version"] != VERSION:
        raise ManymaxError(f"{socket.gethostname()} has manymax {VERSION}, the study {task['version']}.")
    if not (study := Path(task["folder"]).parent).is_dir():
        raise ManymaxError(f"{socket.gethostname()} has no {study}: the folder must be on a shared file system.")
    process = subprocess.Popen(
        [sys.executable, "-m", "manymax.study.engines_dask"],
        stdin=subprocess.PIPE,
        text=True,
        cwd=place if Path(place).is_dir() else None,
        start_new_session=True,  # Ctrl-C goes to the study alone, which asks each run once to stop
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    try:
        while process.poll() is None and not _told_to_stop(stopping):
            pass
    finally:
        _end(process)
    return process.returncode


def _told_to_stop(stopping: str) -> bool:
    """Wait a moment for the event; a scheduler that is gone says the same."""
    import distributed

    try:
        return bool(distributed.Event(stopping).wait(timeout=PAUSE))
    except Exception:
        return True


def _end(process: subprocess.Popen[str]) -> None:
    """Let a run that is still under way save itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=SAVING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _main() -> None:
    """The process of a run; the task is the first line of its input, and its end is the end of the worker."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_worker, daemon=True).start()
    work(RunConfig(**task["settings"]), Path(task["folder"]), task["checkpoint_seconds"])


def _die_with_worker() -> None:
    """A run without its worker would hold the lock against the next one."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _main()
