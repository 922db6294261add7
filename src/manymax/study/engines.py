"""Engines, which do the runs of a study, and the process that does one run.

Each run has a process of its own, so that its memory, signals and threads are its own. The process reports through its
folder (`record.json`, `probe.json`) and its exit code:

    0                  the run has ended; its record says how
    EXIT_BUSY          another process holds the folder of the run
    EXIT_UNWRITABLE    nothing can be written to the folder, for example because the disk is full
    any other          the process has died, for example because memory ran out
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, cast

from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.files import FolderBusy, locked
from manymax.study.probe import probe
from manymax.study.records import RECORD, Record, new_record, read_record, write_record
from manymax.study.run import run
from manymax.study.trials import Pruning, read_rules

POLL_SECONDS = 0.5  # how long an engine waits for a run to end, and how long a busy run waits for the next attempt
STOP_SECONDS = 60.0  # how long a run that is asked to stop may take to save itself
EXIT_BUSY, EXIT_UNWRITABLE = 75, 73  # EX_TEMPFAIL and EX_CANTCREAT of sysexits.h
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Job:
    """A run of a study that is waiting or under way.

    attempts: how often its process has been started; back to 0 when another process held the folder.
    not_before: time of `time.monotonic` before which it is not started again.
    """

    config: RunConfig
    folder: Path
    attempts: int = 0
    not_before: float = 0.0


class Engine(Protocol):
    """Does the runs of a study, several at a time, each in a process of its own that calls `do_run`."""

    @property
    def slots(self) -> int:
        """How many runs it can do at a time."""

    def start(self, job: Job, checkpoint_seconds: float) -> Hashable:
        """Start a run; returns a handle that identifies it from now on."""

    def ended(self, started: Sequence[Any]) -> Iterable[tuple[Any, int | None]]:
        """(handle, exit code) of those runs that have ended; waits up to `POLL_SECONDS` if none has."""

    def stop(self, started: Sequence[Any]) -> None:
        """Ask these runs to save a checkpoint and end, and wait until they have."""


class LocalEngine:
    """Does each run in a process of this machine.

    Args:
        workers: number of runs at a time; the number of cores if None.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.slots = workers or os.cpu_count() or 1

    def start(self, job: Job, checkpoint_seconds: float) -> BaseProcess:
        """Start a process for the run; it is the handle."""
        args = (job.config, job.folder, checkpoint_seconds)
        process = _context().Process(target=_process_main, args=args, daemon=False)
        process.start()
        return process

    def ended(self, started: Sequence[BaseProcess]) -> Iterator[tuple[BaseProcess, int | None]]:
        """The processes that have ended, with their exit codes."""
        sentinels = {process.sentinel: process for process in started}
        for sentinel in wait(list(sentinels), timeout=POLL_SECONDS):
            process = sentinels[cast(int, sentinel)]
            process.join()
            yield process, process.exitcode

    def stop(self, started: Sequence[BaseProcess]) -> None:
        """Send SIGTERM to the processes; kill those that have not ended after `STOP_SECONDS`."""
        for process in started:  # first to all of them, so that they save at the same time
            process.terminate()
        for process in started:
            process.join(timeout=STOP_SECONDS)
            if process.is_alive():
                process.kill()


def _context() -> SpawnContext | ForkServerContext:
    """How processes are started: forked from a server process that has imported torch already, which takes seconds.

    A fork of this process itself would inherit the state of torch's threads, which does not survive a fork.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["manymax.study.probe"])  # imports all that a run needs
    return context


def _process_main(config: RunConfig, folder: Path, checkpoint_seconds: float) -> None:
    """The main function of a process of `LocalEngine`."""
    if hasattr(os, "setsid"):
        # A session of its own: Ctrl-C in a terminal then reaches the study only, which sends one SIGTERM to each run.
        # With both signals, a run would take the second one for a request to end at once, without a checkpoint.
        os.setsid()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    do_run(config, folder, checkpoint_seconds)


def _exit_with_parent() -> None:
    """Wait until the process of the study has ended, and end this process at once.

    A run that outlives its study would hold the lock of its folder, and a study started again could not continue it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def do_run(config: RunConfig, folder: Path, checkpoint_seconds: float) -> None:
    """Do one run and probe its model, as the main work of a process: an error becomes a record and an exit code."""
    try:
        _remove_unfinished_record(folder)
        try:
            rules = read_rules(folder)
            pruning = None if rules is None else Pruning(rules)
            record = run(config, folder, checkpoint_seconds=checkpoint_seconds, progress=pruning)
            if record.status == "done" and rules is None:  # of a search, only what it was made for is of interest
                probe(folder)
        except ManymaxError as error:
            _handle_error(config, folder, error, str(error))
        except Exception as error:
            _handle_error(config, folder, error, f"{type(error).__name__}: {error}")
    except FolderBusy:
        sys.exit(EXIT_BUSY)
    except (OSError, ManymaxError):  # the folder cannot be locked, or the failure cannot be recorded
        sys.exit(EXIT_UNWRITABLE)


def final_record(folder: Path) -> Record | None:
    """The record of a run that need not be done again; None if there is none."""
    record = read_record(folder) if (folder / RECORD).exists() else None
    return record if record is not None and record.final else None


def _remove_unfinished_record(folder: Path) -> None:
    """Remove the record of an earlier attempt that failed or was stopped.

    If this attempt dies without a record, the study must not take the old record for its outcome.
    """
    with locked(folder):
        if final_record(folder) is None:
            (folder / RECORD).unlink(missing_ok=True)


def _handle_error(config: RunConfig, folder: Path, error: Exception, reason: str) -> None:
    """Record the failure of a run, unless the cause is outside of the run and concerns the whole study."""
    if isinstance(error, FolderBusy):
        raise error
    if _is_unwritable(error, folder):
        sys.exit(EXIT_UNWRITABLE)
    record_failure(config, folder, reason)


def _is_unwritable(error: BaseException | None, folder: Path) -> bool:
    """Whether an error, or one of its causes, says that nothing can be written to the folder any more."""
    while error is not None:
        closed = isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS
        if closed and str(getattr(error, "filename", "")).startswith(str(folder)):
            return True
        # pyarrow and safetensors raise errors of their own without an errno: the system's words are in their message.
        if any(os.strerror(code) in str(error) for code in DISK_FULL_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def record_failure(config: RunConfig, folder: Path, reason: str) -> None:
    """Write a record with status "failed" for a run that could not write one itself."""
    with locked(folder):
        if not (folder / RECORD).exists():
            write_record(folder, new_record(config, "failed", reason=reason))
