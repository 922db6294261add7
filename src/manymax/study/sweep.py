"""A study: a grid of runs from a TOML file, done by an engine, each run in a folder named by its content.

Finished runs are skipped, interrupted ones go on from their checkpoint, a failed one is recorded and the others go on.
Several studies may work in one folder at a time: a run belongs to the process that holds its folder's lock.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manymax.errors import ArgumentError, ManymaxError, unknown_name
from manymax.study.config import RunConfig
from manymax.study.data.load import PLANTED
from manymax.study.files import FolderBusy, locked, write_json
from manymax.study.probe import probe
from manymax.study.records import PROBE, RECORD, STUDY, Record, new_record, read_record, write_record
from manymax.study.run import CHECKPOINT_SECONDS, check_files, run
from manymax.study.run_options import flattened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

QUICK = "quick.toml"
ATTEMPTS = 3  # a run whose process dies this often is given up
PAUSE = 0.5  # seconds before a run that another process holds is tried again
SAVING = 60.0  # seconds that a run has to save itself
BUSY, NO_ROOM = 75, 73  # exit codes of a run's process, as in sysexits.h
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StudyConfig(BaseModel):
    """A study file.

        title = "..."
        [settings]          # of every run
        epochs = 50
        [[grid]]            # every combination of the lists
        loss = ["softmax", "sparsemax"]
        lr = [1e-3, 1e-4]
        [[grid]]            # more runs, beside these
        loss = "rg"
        solver = "als"

    Keys of `settings` and `grid` are those of `RunConfig`, flat or nested (`loss.name = "entmax"` and
    `loss.alpha = [1.2, 1.5]`). A setting that has no effect beside the others (the
    learning rate of ALS) is left out, and combinations that are then the same are run once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field("", description="What the study is called.")
    settings: dict[str, Any] = Field({}, description="Settings of every run.")
    grid: list[dict[str, Any]] = Field([{}], description="Tables of settings; lists in them are combined.")

    def __init__(self, **content: Any) -> None:
        for name in content:
            if name not in type(self).model_fields:
                raise unknown_name("key of a study", name, type(self).model_fields)
        grid = content.get("grid", [{}])
        content["grid"] = [grid] if isinstance(grid, Mapping) else grid
        tables = [content.get("settings", {}), *content["grid"]]
        if not all(isinstance(table, Mapping) for table in tables):
            raise ArgumentError("`settings` and `grid` must be tables: [settings] and [[grid]].")
        content["settings"], *content["grid"] = map(flattened, tables)
        try:
            super().__init__(**content)
        except ValidationError as error:
            raise ArgumentError(" ".join(f"`{e['loc'][0]}`: {e['msg']}." for e in error.errors())) from None


def read_study_file(path: Path | None) -> StudyConfig:
    """The study of a TOML file; the built-in quick one if there is no path."""
    source = resources.files("manymax.study") / QUICK if path is None else path
    try:
        content = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the study file {source} cannot be read: {error}") from None
    return StudyConfig(**content)


def expand(study: StudyConfig, **overrides: Any) -> list[RunConfig]:
    """The runs of a study, each once, in the order of the file; `overrides` count more than the file.

    A combination that only the overrides make impossible (another loss for what ALS solves) is left out with a warning.

    >>> grid = [{"loss": ["softmax", "rg"], "lr": [1e-2, 1e-3]}, {"loss": "rg", "solver": "als", "lr": [1e-2, 1e-3]}]
    >>> [(run.loss.name, run.training.solver) for run in expand(StudyConfig(grid=grid))][-2:]
    [('rg', 'gradient'), ('rg', 'als')]
    """
    overrides = flattened(overrides)
    runs: dict[str, RunConfig] = {}
    refused: list[ArgumentError] = []
    for settings in _combinations(study):
        try:
            config = _config(settings | overrides)
        except ArgumentError as error:
            for alone in (settings, overrides):  # raises if one of them is wrong by itself
                _config(alone)
            refused.append(error)
        else:
            runs[config.content_hash()] = config
    if refused and not runs:
        raise refused[0]
    if refused:
        text = f"{len(refused)} of the file's combinations do not go with what was set, and are left out: {refused[0]}"
        warnings.warn(text, stacklevel=2)
    return list(runs.values())


def _combinations(study: StudyConfig) -> Iterator[dict[str, Any]]:
    # One thread a run, unless the file says otherwise: results must not depend on how many runs share the machine.
    common = {"threads": 1, **study.settings}
    for table in study.grid:
        axes = {name: values if isinstance(values, list) else [values] for name, values in table.items()}
        if empty := [name for name, values in axes.items() if not values]:
            raise ArgumentError(f"`{empty[0]}` in [[grid]] must list at least one value; got an empty list.")
        for values in product(*axes.values()):
            yield common | dict(zip(axes, values, strict=True))


def _config(settings: Mapping[str, Any]) -> RunConfig:
    if not PLANTED.fullmatch(str(settings.get("data", "planted"))):
        settings = {name: value for name, value in settings.items() if name != "size"}  # may be put to other data
    return RunConfig.trimmed(settings)


Hear = Callable[["Outcome", Record], None]


@dataclass
class Job:
    """A run of the study on its way."""

    config: RunConfig
    folder: Path
    attempts: int = 0
    not_before: float = 0.0


class Engine(Protocol):
    """What does runs, some at a time, each in a process of its own that calls `work`."""

    @property
    def slots(self) -> int:
        """How many runs at a time."""

    def start(self, job: Job, checkpoint_seconds: float) -> Hashable:
        """Begin a run; what it is called from now on."""

    def ended(self, started: Sequence[Any]) -> Iterable[tuple[Any, int | None]]:
        """Those that have ended, and the exit codes of their processes; waits for `PAUSE` if there is none."""

    def stop(self, started: Sequence[Any]) -> None:
        """Let these runs save themselves and end."""


@dataclass
class Outcome:
    """What became of the runs: the records of this study in the order in which they ended."""

    total: int
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record, hear: Hear) -> None:
        """Another run has ended."""
        self.records.append(record)
        hear(self, record)

    def count(self, status: str) -> int:
        """How many runs ended so."""
        return sum(record.status == status for record in self.records)


def sweep(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    title: str = "",
    workers: int | None = None,
    engine: Engine | None = None,
    hear: Hear = lambda outcome, record: None,
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Outcome:
    """Do every run that is not done yet.

    Args:
        configs: the runs.
        folder: of the study; a run's folder in it is named by the hash of its settings.
        title: kept in the folder for the report.
        workers: how many processes of this machine at a time; as many as there are cores if left out.
        engine: what does the runs instead of processes of this machine.
        hear: called with each record, also of runs that had ended before.
        watch: called about twice a second with the runs that are under way.
        checkpoint_seconds: at least this much time between two checkpoints of a run.

    Returns:
        What became of the runs. An interruption saves the runs under way, and is passed on.
    """
    _make(folder, title)
    waiting = deque(Job(config, folder / config.content_hash()) for config in configs)
    for job in waiting:
        if (record := _final(job.folder)) is not None:
            check_files(job.config, record, job.folder)
    working: dict[Any, Job] = {}
    outcome, engine = Outcome(len(waiting)), engine or LocalEngine(workers)
    try:
        while waiting or working:
            for job in _ready(waiting, engine.slots - len(working)):
                if (record := _over(job.folder)) is None:
                    job.attempts += 1
                    working[engine.start(job, checkpoint_seconds)] = job
                else:
                    outcome.add(record, hear)
            watch(list(working.values()))
            for started, code in engine.ended(list(working)):
                job = working.pop(started)
                if (record := _after(code, job)) is None:
                    waiting.appendleft(job)
                else:
                    outcome.add(record, hear)
    finally:
        engine.stop(list(working))
    return outcome


def _make(folder: Path, title: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if title:
            write_json(folder / STUDY, {"title": title})
    except OSError as error:
        raise ManymaxError(f"{folder} cannot be written to: {error.strerror}. Choose another folder.") from None


def _ready(waiting: deque[Job], slots: int) -> Iterator[Job]:
    """Take as many jobs as there is room for; those that must wait go to the end."""
    for _ in range(len(waiting)):
        if slots <= 0:
            return
        job = waiting.popleft()
        if job.not_before > time.monotonic():
            waiting.append(job)
            continue
        slots -= 1
        yield job


def _final(folder: Path) -> Record | None:
    """The record of a run that need not be done again."""
    record = read_record(folder) if (folder / RECORD).exists() else None
    return record if record is not None and record.final else None


def _over(folder: Path) -> Record | None:
    """The record of a run at which nothing is left to do: a finished one has been probed too."""
    record = _final(folder)
    return None if record is not None and record.status == "done" and not (folder / PROBE).exists() else record


class LocalEngine:
    """Processes of this machine.

    Args:
        workers: at a time; as many as there are cores if None.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.slots = workers or os.cpu_count() or 1

    def start(self, job: Job, checkpoint_seconds: float) -> BaseProcess:
        """Start a process."""
        process = _context().Process(target=_work, args=(job.config, job.folder, checkpoint_seconds), daemon=False)
        process.start()
        return process

    def ended(self, started: Sequence[BaseProcess]) -> Iterator[tuple[BaseProcess, int | None]]:
        """Processes that have ended."""
        sentinels = {process.sentinel: process for process in started}
        for sentinel in wait(list(sentinels), timeout=PAUSE):
            process = sentinels[cast(int, sentinel)]
            process.join()
            yield process, process.exitcode

    def stop(self, started: Sequence[BaseProcess]) -> None:
        """Ask all of them to end; those that have not within a minute are ended."""
        for process in started:
            process.terminate()
        for process in started:
            process.join(timeout=SAVING)
            if process.is_alive():
                process.kill()


def _context() -> SpawnContext | ForkServerContext:
    """A process for each run, so that its memory is its own; forked from a server that has imported torch already."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["manymax.study.probe"])
    return context


def _after(code: int | None, job: Job) -> Record | None:
    """What a process that has ended left: a record, or None where the run is to be taken up again."""
    if code == NO_ROOM:
        raise _unwritable(job.folder.parent)
    if code == BUSY:
        job.attempts, job.not_before = 0, time.monotonic() + PAUSE
        return None
    recorded = (job.folder / RECORD).exists()
    if (code != 0 or not recorded) and job.attempts >= ATTEMPTS:
        try:
            _record_failure(job.config, job.folder, f"its process ended with code {code}, {ATTEMPTS} times")
        except OSError:
            raise _unwritable(job.folder.parent) from None
    record = read_record(job.folder) if (job.folder / RECORD).exists() else None
    return record if record is not None and record.status != "stopped" else None


def _unwritable(folder: Path) -> ManymaxError:
    return ManymaxError(
        f"{folder} cannot be written to: the disk is full, or the folder is closed. Finished runs are kept; "
        "make room and start the study again."
    )


def _work(config: RunConfig, folder: Path, checkpoint_seconds: float) -> None:
    """What a process of this machine does: its work, and no more than its parent lives to see."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C goes to the parent alone, which asks each run once to stop
    threading.Thread(target=_die_with_parent, daemon=True).start()
    work(config, folder, checkpoint_seconds)


def work(config: RunConfig, folder: Path, checkpoint_seconds: float) -> None:
    """One run in a process of its own; what it has to say is in its record and in its exit code."""
    try:
        _forget(folder)
        try:
            record = run(config, folder, checkpoint_seconds=checkpoint_seconds)
            if record.status == "done":
                probe(folder)
        except ManymaxError as error:
            _fail(config, folder, error, str(error))
        except Exception as error:
            _fail(config, folder, error, f"{type(error).__name__}: {error}")
    except FolderBusy:
        sys.exit(BUSY)
    except (OSError, ManymaxError):  # the folder cannot be locked, or a failure not be recorded
        sys.exit(NO_ROOM)


def _forget(folder: Path) -> None:
    """Remove the record of an earlier attempt that failed or was stopped."""
    with locked(folder):
        if _final(folder) is None:
            (folder / RECORD).unlink(missing_ok=True)


def _fail(config: RunConfig, folder: Path, error: Exception, reason: str) -> None:
    if isinstance(error, FolderBusy):
        raise error
    if _no_room(error, folder):
        sys.exit(NO_ROOM)
    _record_failure(config, folder, reason)


def _die_with_parent() -> None:
    """A run without its study would hold the lock against the next one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _no_room(error: BaseException | None, folder: Path) -> bool:
    """Whether nothing can be written in the folder any more; other libraries tell of it in words."""
    while error is not None:
        closed = isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS
        if closed and str(getattr(error, "filename", "")).startswith(str(folder)):
            return True
        if any(os.strerror(code) in str(error) for code in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _record_failure(config: RunConfig, folder: Path, reason: str) -> None:
    """A record for a run that could not write one itself."""
    with locked(folder):
        if not (folder / RECORD).exists():
            write_record(folder, new_record(config, "failed", reason=reason))
