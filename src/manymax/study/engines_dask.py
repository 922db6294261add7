"""Studies on a cluster: `DaskEngine` sends each run to a worker of dask.distributed.

A worker starts a process for each run, as the local engine does, and returns its exit code. Everything else is in the
folder of the run, which must be on a file system that all workers share. A run therefore has memory, signals and random
numbers of its own, and a worker of n threads does n runs at a time. When a worker dies, the processes of its runs end
too and their locks are released; dask gives the runs to another worker, which continues from their checkpoints.
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
from manymax.study.engines import POLL_SECONDS, STOP_SECONDS, Job, do_run

VERSION = metadata.version("manymax")
CONNECT_SECONDS = 10.0  # how long to wait for the scheduler, and then for a first worker
EXIT_KILLED = -9  # exit code that is reported for a run whose workers have died again and again


class DaskEngine:
    """Does runs on a cluster of dask.distributed; use it in a `with` block, which closes the connection.

    Args:
        address: of the scheduler, for example "tcp://host:8786"; None starts a cluster of processes of this machine.
        workers: number of runs at a time. If None: the number of threads of all workers; for a cluster of this machine
            the number of cores.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        try:
            import distributed
        except ModuleNotFoundError as missing:
            raise ManymaxError(
                f'`engine` dask needs `{missing.name}`. Install it with: pip install "manymax[cluster]"'
            ) from None
        # Failures of runs are in their records; dask's own messages about lost connections would bury them.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self.distributed, self.workers = distributed, workers
        self.stop_event = f"manymax-stop-{uuid.uuid4().hex}"  # name of the event that stops the runs of this study
        self._open = contextlib.ExitStack()
        try:
            self.client = self._connect(address)
        except BaseException:
            self._open.close()
            raise

    def _connect(self, address: str | None) -> Any:
        """A client of the cluster, with at least one worker."""
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
            # Check the scheme of the address ("tcp://") first: a half-made client of an unknown scheme would print a
            # second error when it is garbage collected.
            comm = self.distributed.comm
            comm.registry.get_backend(comm.parse_address(address)[0])
            client = self._open.enter_context(self.distributed.Client(address, timeout=CONNECT_SECONDS))
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except (OSError, ValueError, self.distributed.TimeoutError) as error:
            raise ManymaxError(
                f"`address` {address}: no cluster with a worker answers there within {CONNECT_SECONDS:.0f} s ({error})."
                " Start `dask scheduler` and `dask worker ADDRESS`, or leave `address` out to use processes of this"
                " machine."
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
        """The number of threads of all workers at this moment; workers may join and leave during a study."""
        threads = sum(self.client.nthreads().values())
        return threads if self.workers is None else min(threads, self.workers)

    def start(self, job: Job, checkpoint_seconds: float) -> Any:
        """Submit the run to the cluster; the handle is dask's future."""
        task = {
            "version": VERSION,
            "settings": job.config.nested(),
            "folder": str(job.folder.resolve()),
            "checkpoint_seconds": checkpoint_seconds,
        }
        # pure=False: equal tasks are not one task to dask, so a run that is started again is really done again.
        return self.client.submit(run_on_worker, task, os.getcwd(), self.stop_event, pure=False)

    def ended(self, started: Sequence[Any]) -> Iterator[tuple[Any, int | None]]:
        """The futures that are done, with the exit codes of their runs."""
        with contextlib.suppress(self.distributed.TimeoutError):
            self.distributed.wait([*started], timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
        for future in started:
            if future.done():
                yield future, self._exit_code(future)

    def _exit_code(self, future: Any) -> int | None:
        if future.status == "finished":
            return int(future.result())
        if future.status != "error":  # cancelled or lost, which happens when the scheduler ends
            raise ManymaxError(
                "the cluster does not answer any more. Finished runs are kept; the same command continues from there."
            )
        error = future.exception()
        if isinstance(error, self.distributed.KilledWorker):  # dask has tried several workers: this run kills them
            return EXIT_KILLED
        raise ManymaxError(f"a worker of the cluster cannot do runs: {error}") from None

    def stop(self, started: Sequence[Any]) -> None:
        """Set the event on which the workers stop their runs, and wait until these have saved themselves."""
        if not started:
            return
        with contextlib.suppress(OSError, self.distributed.TimeoutError):
            self.distributed.Event(self.stop_event, client=self.client).set()
            # Longer than a worker waits for its run, so that the worker's answer can still arrive.
            self.distributed.wait([*started], timeout=STOP_SECONDS + 10 * POLL_SECONDS)


def run_on_worker(task: dict[str, Any], working_directory: str, stop_event: str) -> int:
    """On a worker: do a run in a process of its own, and return its exit code.

    Args:
        task: what `_main` reads: version, settings, folder and checkpoint_seconds.
        working_directory: of the study; relative paths to data are relative to it.
        stop_event: name of the event that stops all runs of the study.
    """
    if task["version"] != VERSION:
        raise ManymaxError(
            f"{socket.gethostname()} has manymax {VERSION}, but the study was started with {task['version']}."
        )
    if not (study := Path(task["folder"]).parent).is_dir():
        raise ManymaxError(f"{socket.gethostname()} has no {study}: the folder must be on a shared file system.")
    process = subprocess.Popen(
        [sys.executable, "-m", "manymax.study.engines_dask"],
        stdin=subprocess.PIPE,
        text=True,
        cwd=working_directory if Path(working_directory).is_dir() else None,
        # Ctrl-C in a terminal then reaches the study only, which asks each run once to stop.
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()  # stdin stays open: its end tells the process that this worker has died
    try:
        while process.poll() is None and not _should_stop(stop_event):
            pass
    finally:
        _stop_process(process)
    return process.returncode


def _should_stop(stop_event: str) -> bool:
    """Wait up to `POLL_SECONDS` for the event; true as well if the scheduler does not answer: the study is over."""
    import distributed

    try:
        return bool(distributed.Event(stop_event).wait(timeout=POLL_SECONDS))
    except Exception:
        return True


def _stop_process(process: subprocess.Popen[str]) -> None:
    """Let a run that is still under way save a checkpoint and end; kill it if that takes longer than `STOP_SECONDS`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _main() -> None:
    """The main function of the process of a run; the first line of its standard input is the task as JSON."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_worker, daemon=True).start()
    do_run(RunConfig(**task["settings"]), Path(task["folder"]), task["checkpoint_seconds"])


def _exit_with_worker() -> None:
    """Wait for the end of standard input, which comes when the worker has died, and end this process at once.

    A run that outlives its worker would hold the lock of its folder, and the next worker could not continue it.
    """
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _main()
