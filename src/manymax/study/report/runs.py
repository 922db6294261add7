"""Runs as the report sees them: read from run folders, or from files of kept runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.agenda import never_started, read_agenda
from manymax.study.record_files import KEPT_SUFFIX, Array, KeptRun, read_runs
from manymax.study.records import (
    EPOCHS,
    RECORD,
    SETTINGS_FILE,
    USER_METRICS,
    Record,
    checked_file,
    read_probe,
    read_record,
    read_table,
)
from manymax.study.run_options import LATER_OPTIONS, flat

CHECKED_METRIC = "ndcg@20"  # read from every run at once, so that a damaged file is known from the beginning


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its record, and where its curves, its probe and the metrics of its users are read from.

    A run is read from its run folder, or from a line of a file of kept runs (`kept`), which has no users. With both,
    curves and probe are those of the line, and the users those of the folder.
    """

    record: Record
    folder: Path | None = None
    kept: KeptRun | None = None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run by name; an option that an older record does not know has the value it had then."""
        return {**LATER_OPTIONS, **flat(self.record.settings)}

    @property
    def name(self) -> str:
        """What the run is called in tables: the name of its folder, which in a study is the hash of its settings."""
        return self.record.hash if self.folder is None else self.folder.name

    @property
    def identity(self) -> str:
        """Tells the run from other runs, and from an earlier run of the same settings."""
        return identity(self.record.hash, self.record.test)

    @cached_property
    def epochs(self) -> dict[str, Array]:
        """{column: values}, one value per evaluated epoch; empty where no curve was written."""
        columns = self._epoch_columns()
        evaluated = np.ones(len(next(iter(columns.values()), ())), dtype=bool)
        for name, values in columns.items():
            if "@" in name:  # epochs between two evaluations have no metrics
                evaluated &= np.isfinite(values)
        return {name: values[evaluated] for name, values in columns.items()}

    def _epoch_columns(self) -> dict[str, Array]:
        if self.kept is not None:
            return self.kept.columns()
        return {} if self.folder is None else _columns(checked_file(self.folder, self.record, EPOCHS))

    @cached_property
    def probe(self) -> Mapping[str, Any]:
        """What was measured of the trained model; empty where nothing was."""
        if self.kept is not None:
            return self.kept.probe
        return {} if self.folder is None else read_probe(self.folder)

    def users(self, metric: str) -> tuple[Array, Array] | None:
        """The ids and test metrics of the users with test items; None where nothing was written of them."""
        return None if self._users_file is None else _users(self._users_file, metric)

    @cached_property
    def _users_file(self) -> Path | None:
        """Checked once: a run is compared with many others."""
        return None if self.folder is None else checked_file(self.folder, self.record, USER_METRICS)


def identity(settings: str, test: Mapping[str, float | None]) -> str:
    """A run by the hash of its settings and a checksum of its outcome.

    >>> identity("2174958248289c92", {"ndcg@20": 0.25})
    '2174958248289c92-33b49402'
    """
    return f"{settings}-{zlib.crc32(json.dumps(test, sort_keys=True).encode()):08x}"


def _columns(path: Path, names: Sequence[str] | None = None) -> dict[str, Array]:
    if not path.is_file():
        return {}
    table = read_table(path)
    return {name: table[name].to_numpy() for name in names or table.column_names if name in table.column_names}


@lru_cache(maxsize=64)  # a run is compared with many others
def _users(path: Path, metric: str) -> tuple[Array, Array] | None:
    columns = _columns(path, ("user", metric))
    return (columns["user"], columns[metric]) if len(columns) == 2 else None


@dataclass(frozen=True)
class Study:
    """All runs below a folder: those with a record, those under way, and what cannot be read, with the reason.

    `never_started` is the number of planned runs that have no folder yet, `note` what the study file says to readers.
    `cautions` are those of the command that has made it, {kind: sentences}.
    """

    runs: tuple[Run, ...]
    title: str
    unfinished: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()
    never_started: int = 0
    note: str = ""
    cautions: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def done(self) -> list[Run]:
        """Those that ended well."""
        return [run for run in self.runs if run.record.status == "done"]

    @property
    def failed(self) -> list[Run]:
        """Those that did not."""
        return [run for run in self.runs if run.record.status not in ("done", "pruned")]


def read_study(source: Path) -> Study:
    """Read the runs of a study.

    Args:
        source: a folder with run folders below it, one run folder, a file of kept runs, or a folder of such files.
            Files of kept runs count only in a folder without run folders: raw data can be JSON Lines too.
    """
    if source.is_file() and source.suffix == KEPT_SUFFIX:
        return _read_files([source], source.stem)
    if not source.is_dir():
        raise ArgumentError(
            f"`folder` must be a folder with runs, made by `manymax study` or `train`, or a {KEPT_SUFFIX} file of kept "
            f"runs; got {str(source)!r}."
        )
    folders = sorted({path.parent for name in (RECORD, SETTINGS_FILE) for path in source.rglob(name)})
    if folders:
        study, agenda = _read_folders(folders, _title(source)), read_agenda(source)
        note, told = str(agenda.get("note", "")), agenda.get("cautions", {})
        return replace(study, never_started=never_started(source), note=note, cautions=told)
    files = sorted(source.glob(f"*{KEPT_SUFFIX}"))
    if not files:
        raise ArgumentError(
            f"`folder` must hold runs, made by `manymax study` or `train`; there are none in {str(source)!r}."
        )
    return _read_files(files, _title(source))


def _read_folders(folders: Iterable[Path], title: str) -> Study:
    runs, unfinished, unreadable = [], [], []
    for folder in folders:
        if not (folder / RECORD).exists():
            unfinished.append(folder)
            continue
        try:
            run = Run(read_record(folder), folder)
            _ = run.epochs, run.users(CHECKED_METRIC), run.probe  # an unreadable file is found here, not later
            runs.append(run)
        except ManymaxError as error:
            unreadable.append(str(error))
    return Study(tuple(runs), title, tuple(unfinished), tuple(unreadable))


def _read_files(files: Iterable[Path], title: str) -> Study:
    runs: list[Run] = []
    unreadable: list[str] = []
    for path in files:
        kept, damaged = read_runs(path)
        runs += [Run(each.record, kept=each) for each in kept]
        unreadable += damaged
    return Study(tuple(runs), title, unreadable=tuple(unreadable))


def _title(folder: Path) -> str:
    """What the study is called; the folder's name where nothing says so."""
    return str(read_agenda(folder).get("title") or folder.resolve().name)
