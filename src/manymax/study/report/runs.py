"""Runs as the report sees them: read from their folders, and those that differ in the seed alone taken together."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from statistics import fmean, stdev
from typing import Any

import numpy as np

from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.backbones import BACKBONES
from manymax.study.files import read_json
from manymax.study.metrics import METRICS
from manymax.study.record_files import SUFFIX, KeptRun, read_runs
from manymax.study.records import (
    EPOCHS,
    PROBE,
    RECORD,
    SETTINGS,
    STUDY,
    USER_METRICS,
    Record,
    kept_file,
    read_record,
    read_table,
)
from manymax.study.run_options import flat

Array = np.ndarray[Any, np.dtype[Any]]

DATA_SETTINGS = ("columns", "size", "preset", "min_rating", "k_core", "split")
FIRST = ("ndcg", "precision", "recall", "regret")  # the metrics of the tables, in their order
CUTOFF = 20  # of the tables, where a study has it
CHECKED = "ndcg@20"

WATCHED = ("epochs", "patience", "eval_every")  # how long a run goes and how often one looks, not what is trained
LATER = {"computation": "blocks"}  # options that came after the first records were kept
FIRST_BATCHES = "pairs"  # how batches were made before that was an option


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
        return {**LATER, **flat(self.record.settings)}

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
        return {} if self.folder is None else _columns(self.folder / EPOCHS)

    @cached_property
    def probe(self) -> Mapping[str, Any]:
        """What was measured of the trained model; empty where nothing was."""
        if self.kept is not None:
            return self.kept.probe
        path = None if self.folder is None else self.folder / PROBE
        return read_json(path) if path is not None and path.is_file() else {}

    def users(self, metric: str) -> tuple[Array, Array] | None:
        """The ids and test metrics of the users with test items; None where nothing was written of them."""
        return None if self.folder is None else _users(kept_file(self.folder, USER_METRICS), metric)


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
    """All runs below a folder: those with a record, those under way, and what cannot be read, with the reason."""

    runs: tuple[Run, ...]
    title: str
    unfinished: tuple[Path, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def done(self) -> list[Run]:
        """Those that ended well."""
        return [run for run in self.runs if run.record.status == "done"]

    @property
    def failed(self) -> list[Run]:
        """Those that did not."""
        return [run for run in self.runs if run.record.status != "done"]


def read_study(source: Path) -> Study:
    """Read the runs of a study.

    Args:
        source: a folder with run folders below it, one run folder, a file of kept runs, or a folder of such files.
            Files of kept runs count only in a folder without run folders: raw data can be JSON Lines too.
    """
    if source.is_file() and source.suffix == SUFFIX:
        return _read_files([source], source.stem)
    if not source.is_dir():
        raise ArgumentError(
            f"`folder` must be a folder with runs, made by `manymax study` or `train`, or a {SUFFIX} file of kept runs;"
            f" got {str(source)!r}."
        )
    folders = sorted({path.parent for name in (RECORD, SETTINGS) for path in source.rglob(name)})
    if folders:
        return _read_folders(folders, _title(source))
    files = sorted(source.glob(f"*{SUFFIX}"))
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
            _ = run.epochs, run.users(CHECKED), run.probe  # what cannot be read is known from the beginning
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
    content = read_json(folder / STUDY) if (folder / STUDY).is_file() else {}
    return str(content.get("title") or folder.resolve().name) if isinstance(content, Mapping) else folder.name


@dataclass(frozen=True, eq=False)
class Trial:
    """Finished runs that differ in the seed alone.

    `data` names the set, with the filters that vary in the study; `varied` holds the settings of the loss that do, and
    `label` names the loss with as many of them as tell it from its other trials.
    """

    data: str
    backbone: str
    loss: str
    label: str
    lr: float | None
    runs: tuple[Run, ...]
    varied: Mapping[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of its runs; the seed is that of the first."""
        return self.runs[0].settings

    @property
    def place(self) -> tuple[str, str]:
        """Where it may be compared with others: the data and the backbone."""
        return self.data, self.backbone

    @property
    def batches(self) -> str | None:
        """How its batches were made; None where there are none, or none of pairs."""
        of_histories = self.backbone in BACKBONES and BACKBONES[self.backbone].needs_history
        made = self.lr is not None and not of_histories
        return self.settings.get("batches", FIRST_BATCHES) if made else None

    def values(self, metric: str, part: str = "test") -> list[float]:
        """The metric of each run that has it."""
        found = (getattr(run.record, part).get(metric) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, metric: str, part: str = "test") -> float | None:
        """The mean over seeds, None where no run has the metric."""
        return fmean(values) if (values := self.values(metric, part)) else None

    def spread(self, metric: str, part: str = "test") -> float | None:
        """The standard deviation over seeds, None below two."""
        return stdev(values) if len(values := self.values(metric, part)) > 1 else None

    def average(self, figure: Callable[[Record], float | None]) -> float | None:
        """The mean over seeds of a figure of the record, None where no run has it."""
        values = [value for run in self.runs if (value := figure(run.record)) is not None]
        return fmean(values) if values else None

    @cached_property
    def curve(self) -> dict[str, Array]:
        """The means over seeds of the epochs that all of them have reached; empty where a run has no curve."""
        curves = [run.epochs for run in self.runs if run.epochs]
        length = min((len(curve["epoch"]) for curve in curves), default=0)
        names = [name for name in (curves[0] if curves else ()) if all(name in curve for curve in curves)]
        return {name: np.mean([curve[name][:length] for curve in curves], axis=0) for name in names} if length else {}


def order(loss: str) -> int:
    """Where a loss stands: members as in `FAMILY`, then what they are compared with, then losses unknown to both."""
    names = [*FAMILY, *REFERENCE_LOSSES]
    return names.index(loss) if loss in names else len(names)


def is_sampled(loss: str) -> bool:
    """Whether a loss is a member of the family that draws negatives."""
    return loss in FAMILY and FAMILY[loss].kind == "sampled"


def trials(finished: Sequence[Run]) -> list[Trial]:
    """Runs grouped by all but the seed, in the order of data, backbone, `FAMILY`, label and learning rate."""
    names = _data_names(finished)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in finished:
        groups[repr(sorted((key, value) for key, value in run.settings.items() if key != "seed"))].append(run)
    kin: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for group in groups.values():
        kin[_family(group)].append(group[0].settings)
    varied = {family: _varied(settings) for family, settings in kin.items()}
    made = [_trial(group, names, varied[_family(group)]) for group in groups.values()]
    return sorted(made, key=lambda t: (t.data, t.backbone, order(t.loss), natural(t.label), -(t.lr or 0)))


def _family(group: list[Run]) -> tuple[str, str]:
    """Within which trials must have labels of their own: tables and figures have one backbone each."""
    settings = group[0].settings
    return settings["loss"], settings["backbone"]


def _trial(group: list[Run], names: Mapping[tuple[str, str], str], kin: Sequence[Mapping[str, Any]]) -> Trial:
    settings = group[0].settings
    by_gradient = settings.get("solver", "gradient") == "gradient"
    varied = {key: settings.get(key) for key in kin[0]}
    return Trial(
        data=names[_data_place(settings)],
        backbone=settings["backbone"],
        loss=settings["loss"],
        label=described(settings["loss"], _telling(varied, kin)),
        lr=settings["lr"] if by_gradient else None,
        runs=tuple(sorted(group, key=lambda run: run.settings["seed"])),
        varied=varied,
    )


def described(loss: str, details: Mapping[str, Any]) -> str:
    """A loss with some of its settings.

    >>> described("nce", {"num_negatives": 5, "pool": None})
    'nce (num_negatives=5)'
    """
    known = [f"{key}={value}" for key, value in details.items() if value is not None]
    return f"{loss} ({', '.join(known)})" if known else loss


def _varied(kin: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of the settings of one loss and backbone those that vary for the same data and have no place of their own.

    One that follows from those before it, as the batches do from the solver, tells nothing and is left out. De-biasing
    goes before the correction that it asks for, and the learning rate before how the runs were watched.
    """
    own = {"data", "name", "backbone", "loss", "lr", "seed", *DATA_SETTINGS, *WATCHED}
    varying = []
    told: list[tuple[str, ...]] = [_data_place(settings) for settings in kin]
    others = (key for settings in kin for key in settings if key not in own)
    for key in dict.fromkeys(("debias", *others, "lr", *WATCHED)):
        more = [(*parts, repr(settings.get(key))) for parts, settings in zip(told, kin, strict=True)]
        if len(set(more)) > len(set(told)):
            varying.append(key)
            told = more
    return [{key: settings.get(key) for key in varying if key != "lr"} for settings in kin]


def _telling(varied: Mapping[str, Any], kin: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings, in their order, that are needed to tell these from the others of the loss."""
    details = {}
    for key, value in varied.items():
        alike = [other for other in kin if other[key] == value]
        if len(alike) < len(kin):
            details[key] = value
        kin = alike
    return details


def _data_key(settings: Mapping[str, Any]) -> str:
    return repr([settings["data"], *(settings.get(key) for key in DATA_SETTINGS)])


def data_name(settings: Mapping[str, Any]) -> str:
    """What a data set is called: the name it was given, or the stem of its file."""
    return str(settings.get("name") or PurePath(settings["data"]).stem)


def _data_names(runs: Iterable[Run]) -> dict[tuple[str, str], str]:
    """A name for the data of each backbone: the set's own where that tells it from others, with filters that vary."""
    sets = {_data_place(run.settings): run.settings for run in runs}
    names = {}
    for key, settings in sets.items():
        called = data_name(settings)
        namesakes = {other["data"] for other in sets.values() if data_name(other) == called}
        same = [
            other for (_, backbone), other in sets.items() if (other["data"], backbone) == (settings["data"], key[1])
        ]
        filters = [k for k in DATA_SETTINGS if len({repr(other.get(k)) for other in same}) > 1]
        details = [f"{k}={settings[k]}" for k in filters if settings.get(k) is not None]
        base = called if len(namesakes) == 1 else str(settings["data"])
        names[key] = base + (f" ({', '.join(details)})" if details else "")
    return names


def _data_place(settings: Mapping[str, Any]) -> tuple[str, str]:
    return _data_key(settings), str(settings["backbone"])


def natural(text: str) -> list[tuple[int, float, str]]:
    """A key that sorts k=5 before k=10."""
    parts = text.replace("=", " ").replace(",", " ").replace(")", " ").split()
    return [(0, float(part), "") if _is_number(part) else (1, 0.0, part) for part in parts]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def metrics(some: Iterable[Trial]) -> list[str]:
    """The metrics of the tables that the trials have, at the usual cutoff or else their largest."""
    present = {name for trial in some for run in trial.runs for name in run.record.test}
    cutoffs = {int(name.rpartition("@")[2]) for name in present if "@" in name}
    cutoff = CUTOFF if CUTOFF in cutoffs or not cutoffs else max(cutoffs)
    return [name for first in FIRST if (name := f"{first}@{cutoff}") in present]


def direction(metric: str) -> int:
    """1 where more of a metric is better, -1 where less is; 1 of a metric that is not in `METRICS`.

    >>> direction("ndcg@20"), direction("regret@20")
    (1, -1)
    """
    name = metric.partition("@")[0]
    return 1 if name not in METRICS or METRICS[name].higher_is_better else -1


def chosen(some: Iterable[Trial], metric: str) -> list[Trial]:
    """For each data set, backbone and label the learning rate that is best on the validation part."""
    best: dict[tuple[str, str, str], Trial] = {}
    for trial in some:
        key = (*trial.place, trial.label)
        if key not in best or _valid(trial, metric) > _valid(best[key], metric):
            best[key] = trial
    return list(best.values())


def _valid(trial: Trial, metric: str) -> float:
    """The more, the better the trial is on the validation part."""
    value = trial.mean(metric, "valid")
    return float("-inf") if value is None else direction(metric) * value
