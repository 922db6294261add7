"""Doing a study: the runs of a list, by an engine, each in a folder named by the hash of its settings.

Finished runs are skipped, interrupted runs continue from their checkpoint, and a run that fails is recorded while the
others continue. Several processes, also on several machines, may work on one folder at a time: a run belongs to the
process that holds the lock of its folder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.agenda import StudyAgenda
from manymax.study.config import RunConfig
from manymax.study.engines import (
    EXIT_BUSY,
    EXIT_UNWRITABLE,
    POLL_SECONDS,
    Engine,
    Job,
    LocalEngine,
    final_record,
    record_failure,
)
from manymax.study.records import PROBE, RECORD, Record, read_record
from manymax.study.run import CHECKPOINT_SECONDS, check_data_files
from manymax.study.search import Searches
from manymax.study.trials import has_rules

MAX_ATTEMPTS = 3  # a run whose process has died this often is recorded as failed

OnRecord = Callable[["Outcome", Record], None]


@dataclass
class Outcome:
    """The result of a study so far: the records of its runs, in the order in which they ended; `total` runs in all.

    `found` is the number of those that were there already, and `on_record` was not told of.
    """

    total: int
    records: list[Record] = field(default_factory=list)
    found: int = 0

    def add(self, record: Record, on_record: OnRecord) -> None:
        """Add the record of a run that has ended, and tell `on_record`."""
        self.records.append(record)
        on_record(self, record)

    def add_found(self, record: Record) -> None:
        """Add the record of a run that had ended before."""
        self.records.append(record)
        self.found += 1

    def count(self, status: str) -> int:
        """The number of runs that ended with this status."""
        return sum(record.status == status for record in self.records)


def sweep(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    title: str = "",
    note: str = "",
    workers: int | None = None,
    engine: Engine | None = None,
    on_record: OnRecord = lambda outcome, record: None,
    on_poll: Callable[[Sequence[Job]], None] = lambda jobs: None,
    searches: Searches | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Outcome:
    """Do every run that is not finished yet.

    Args:
        configs: the runs.
        folder: of the study; the folder of a run in it is named by the hash of its settings.
        title, note: kept in the folder for the report.
        workers: number of processes of this machine at a time; the number of cores if None.
        engine: does the runs in place of processes of this machine.
        on_record: called with the record of each run that ends, not with those of runs that were finished before.
        on_poll: called about twice a second with the runs that are under way.
        searches: further runs, each of which is known when others have ended.
        checkpoint_seconds: least number of seconds between two checkpoints of a run.

    Returns:
        The records of all runs. An exception, such as a `KeyboardInterrupt`, stops the runs under way, which save a
        checkpoint, and is raised.
    """
    searched = 0 if searches is None else searches.total
    agenda = StudyAgenda(folder, title, note, [config.content_hash() for config in configs], searched)
    begun = [] if searches is None else searches.begin()
    waiting = deque(Job(config, folder / config.content_hash()) for config in (*configs, *begun))
    for job in waiting:  # before anything is started: data that has changed concerns the whole study
        if (record := final_record(job.folder)) is not None:
            check_data_files(job.config, record, job.folder)
    working: dict[Any, Job] = {}  # by the engine's handle
    outcome, engine = Outcome(len(configs) + searched), engine or LocalEngine(workers)

    def ended(record: Record, new: bool = True) -> None:
        following = [] if searches is None else searches.after(record)
        # Before what waits: a search that has begun comes to its end before another one begins.
        waiting.extendleft(Job(config, folder / config.content_hash()) for config in reversed(following))
        if new:
            outcome.add(record, on_record)
        else:
            outcome.add_found(record)

    try:
        while waiting or working:
            before = len(outcome.records)
            for job in _take_ready(waiting, engine.slots - len(working)):
                # Read again just before the start: another study in this folder may have finished the run.
                if (record := _complete_record(job.folder)) is None:
                    job.attempts += 1
                    working[engine.start(job, checkpoint_seconds)] = job
                else:
                    ended(record, new=False)
            if not working and len(outcome.records) > before:
                continue  # what was read may be followed by more, and nothing has to be waited for
            on_poll(list(working.values()))
            for started, code in engine.ended(list(working)):
                job = working.pop(started)
                if (record := _record_after(code, job)) is None:
                    waiting.appendleft(job)
                else:
                    ended(record)
    finally:
        engine.stop(list(working))
    agenda.whole()
    return outcome


def _take_ready(waiting: deque[Job], slots: int) -> Iterator[Job]:
    """Take up to `slots` jobs from the queue; jobs that must wait longer go to its end."""
    for _ in range(len(waiting)):
        if slots <= 0:
            return
        job = waiting.popleft()
        if job.not_before > time.monotonic():
            waiting.append(job)
            continue
        slots -= 1
        yield job


def _complete_record(folder: Path) -> Record | None:
    """The record of a run with nothing left to do; None for a trained model that has not been probed yet."""
    record = final_record(folder)
    probed = has_rules(folder) or (folder / PROBE).exists()
    return None if record is not None and record.status == "done" and not probed else record


def _record_after(code: int | None, job: Job) -> Record | None:
    """The record of a run whose process has ended with this code; None if the run is to be started again."""
    if code == EXIT_UNWRITABLE:
        raise _unwritable(job.folder.parent)
    if code == EXIT_BUSY:  # no failure of this run, so its attempts do not count
        job.attempts, job.not_before = 0, time.monotonic() + POLL_SECONDS
        return None
    recorded = (job.folder / RECORD).exists()
    if (code != 0 or not recorded) and job.attempts >= MAX_ATTEMPTS:
        try:
            record_failure(job.config, job.folder, f"its process ended with code {code}, {MAX_ATTEMPTS} times")
        except OSError:
            raise _unwritable(job.folder.parent) from None
    # No record: the process has died, and the next attempt continues from the checkpoint. A stopped run has saved one.
    record = read_record(job.folder) if (job.folder / RECORD).exists() else None
    return record if record is not None and record.status != "stopped" else None


def _unwritable(folder: Path) -> ManymaxError:
    return ManymaxError(
        f"{folder} cannot be written to: the disk is full, or writing is not permitted. Finished runs are kept; "
        "make room and start the study again."
    )
