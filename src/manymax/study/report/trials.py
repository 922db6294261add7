"""Trials: finished runs that differ in the seed alone, with a label for tables and figures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

import numpy as np

from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.backbones import BACKBONES
from manymax.study.metrics import METRICS
from manymax.study.record_files import Array
from manymax.study.records import Record
from manymax.study.report.labels import (
    DATA_SETTINGS,
    Settings,
    data_name,
    data_place,
    loss_label,
    telling,
    variant,
    varied_settings,
)
from manymax.study.report.runs import Run

TABLE_METRICS = ("ndcg", "precision", "recall", "regret")  # those that tables show, in this order
TABLE_CUTOFF = 20  # the cutoff of the metrics in tables, where a study has it

MOST_LABELS = 16  # lines of a data set and backbone; with more, a figure cannot be read
BATCHES_OF_OLD_RECORDS = "pairs"  # how batches were made before `batches` was an option


@dataclass(frozen=True, eq=False)
class Trial:
    """Finished runs that differ in the seed alone.

    data: the name of the data set, with those of its filters that vary in the study.
    backbone, loss: their names.
    label: the loss with as many of its varied settings as tell it from the other trials of that loss and backbone.
    lr: the learning rate; None for a solver that has none.
    runs: sorted by seed.
    varied: the settings that vary among the trials of the loss and backbone, with the values of this one.
    """

    data: str
    backbone: str
    loss: str
    label: str
    lr: float | None
    runs: tuple[Run, ...]
    varied: Settings

    @property
    def settings(self) -> Settings:
        """The settings of its runs; the seed is that of the first."""
        return self.runs[0].settings

    @property
    def place(self) -> tuple[str, str]:
        """The data and the backbone: trials of one place can be compared."""
        return self.data, self.backbone

    @property
    def batches(self) -> str | None:
        """How batches were made of (user, item) pairs; None for solvers without batches and for whole histories."""
        reads_histories = self.backbone in BACKBONES and BACKBONES[self.backbone].needs_history
        has_batches = self.lr is not None and not reads_histories
        return self.settings.get("batches", BATCHES_OF_OLD_RECORDS) if has_batches else None

    def values(self, metric: str, part: str = "test") -> list[float]:
        """The metric of each run that has it; `part` is "test" or "valid"."""
        found = (getattr(run.record, part).get(metric) for run in self.runs)
        return [value for value in found if value is not None]

    def mean(self, metric: str, part: str = "test") -> float | None:
        """The mean over seeds; None where no run has the metric."""
        return fmean(values) if (values := self.values(metric, part)) else None

    def spread(self, metric: str, part: str = "test") -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return stdev(values) if len(values := self.values(metric, part)) > 1 else None

    def average(self, figure: Callable[[Record], float | None]) -> float | None:
        """The mean over seeds of a number that `figure` reads from a record; None where no run has it."""
        values = [value for run in self.runs if (value := figure(run.record)) is not None]
        return fmean(values) if values else None

    @cached_property
    def curve(self) -> dict[str, Array]:
        """{column: means over seeds}, for the epochs that all seeds have reached; empty where no run has a curve."""
        curves = [run.epochs for run in self.runs if run.epochs]
        length = min((len(curve["epoch"]) for curve in curves), default=0)
        names = [name for name in (curves[0] if curves else ()) if all(name in curve for curve in curves)]
        return {name: np.mean([curve[name][:length] for curve in curves], axis=0) for name in names} if length else {}


def trials(finished: Sequence[Run]) -> list[Trial]:
    """Runs grouped by all settings but the seed, sorted by data, backbone, `FAMILY`, label and learning rate."""
    names = _data_names(finished)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in finished:
        groups[repr(sorted((key, value) for key, value in run.settings.items() if key != "seed"))].append(run)
    # Labels must tell the trials of a loss and backbone apart: tables and figures have one backbone each.
    siblings: dict[tuple[str, str], list[Settings]] = defaultdict(list)
    for group in groups.values():
        siblings[_loss_and_backbone(group)].append(group[0].settings)
    varied = {key: varied_settings(settings) for key, settings in siblings.items()}
    made = [_trial(group, names, varied[_loss_and_backbone(group)]) for group in groups.values()]
    return sorted(
        made, key=lambda t: (t.data, t.backbone, loss_position(t.loss), natural_sort_key(t.label), -(t.lr or 0))
    )


def _loss_and_backbone(group: list[Run]) -> tuple[str, str]:
    settings = group[0].settings
    return settings["loss"], settings["backbone"]


def _trial(group: list[Run], names: Mapping[tuple[str, str], str], siblings: Sequence[Settings]) -> Trial:
    """The trial of a group of runs.

    Args:
        group: the runs, which differ in the seed alone.
        names: of data sets.
        siblings: the varied settings of all trials of the loss and backbone, this one among them.
    """
    settings = group[0].settings
    by_gradient = settings.get("solver", "gradient") == "gradient"
    varied = {key: settings.get(key) for key in siblings[0]}
    return Trial(
        data=names[data_place(settings)],
        backbone=settings["backbone"],
        loss=settings["loss"],
        label=loss_label(settings["loss"], telling(varied, siblings)),
        lr=settings["lr"] if by_gradient else None,
        runs=tuple(sorted(group, key=lambda run: run.settings["seed"])),
        varied=varied,
    )


def loss_position(loss: str) -> int:
    """The place of a loss in tables: members as in `FAMILY`, then reference losses, then losses unknown to both."""
    names = [*FAMILY, *REFERENCE_LOSSES]
    return names.index(loss) if loss in names else len(names)


def natural_sort_key(text: str) -> list[tuple[int, float, str]]:
    """A key that sorts k=5 before k=10.

    >>> sorted(["k=10", "k=5"], key=natural_sort_key)
    ['k=5', 'k=10']
    """
    parts = text.replace("=", " ").replace(",", " ").replace(")", " ").split()
    return [(0, float(part), "") if _is_number(part) else (1, 0.0, part) for part in parts]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


# Names of data sets --------------------------------------------------------------------------------


def _data_names(runs: Iterable[Run]) -> dict[tuple[str, str], str]:
    """A name for the data of each backbone: that of the set, or its path if two sets share it, and varied filters."""
    sets = {data_place(run.settings): run.settings for run in runs}
    names = {}
    for key, settings in sets.items():
        name = data_name(settings)
        sources = {other["data"] for other in sets.values() if data_name(other) == name}
        same_source = [
            other for (_, backbone), other in sets.items() if (other["data"], backbone) == (settings["data"], key[1])
        ]
        filters = [k for k in DATA_SETTINGS if len({repr(other.get(k)) for other in same_source}) > 1]
        details = [f"{k}={settings[k]}" for k in filters if settings.get(k) is not None]
        unique = name if len(sources) == 1 else str(settings["data"])
        names[key] = unique + (f" ({', '.join(details)})" if details else "")
    return names


# Metrics, and the trial that is best by one --------------------------------------------------------


def is_sampled(loss: str) -> bool:
    """Whether a loss is a member of the family that draws negatives."""
    return loss in FAMILY and FAMILY[loss].kind == "sampled"


def metrics(made: Iterable[Trial]) -> list[str]:
    """The metrics that the trials have, the one that decides first.

    They are those of `TABLE_METRICS` at `TABLE_CUTOFF`, or else at their largest cutoff. Where all runs watched another
    metric (`monitor`), that one decides, and the others are taken at its cutoff.
    """
    runs = [run for trial in made for run in trial.runs]
    present = {name for run in runs for name in run.record.test}
    cutoffs = {int(name.rpartition("@")[2]) for name in present if "@" in name}
    watched = {run.settings.get("monitor") for run in runs}
    first = [name for name in watched if name in present] if len(watched) == 1 else []
    cutoff = TABLE_CUTOFF if TABLE_CUTOFF in cutoffs or not cutoffs else max(cutoffs)
    cutoff = int(first[0].rpartition("@")[2]) if first else cutoff
    found = (name for metric in TABLE_METRICS if (name := f"{metric}@{cutoff}") in present)
    return list(dict.fromkeys((*first, *found)))


def direction(metric: str) -> int:
    """1 where a higher value of a metric is better, -1 where a lower one is; 1 for a metric that is not in `METRICS`.

    >>> direction("ndcg@20"), direction("regret@20")
    (1, -1)
    """
    name = metric.partition("@")[0]
    return 1 if name not in METRICS or METRICS[name].higher_is_better else -1


def best_value(values: Iterable[float | None], metric: str) -> float | None:
    """The best of the values of a metric; None where there is none.

    >>> best_value([0.1, None, 0.3], "ndcg@20"), best_value([0.1, None, 0.3], "regret@20")
    (0.3, 0.1)
    """
    known = (value for value in values if value is not None)
    return max(known, key=lambda value: direction(metric) * value, default=None)


def at_best_rates(made: Iterable[Trial], metric: str) -> list[Trial]:
    """For each data set, backbone and label the trial at the learning rate that is best on the validation part.

    As in `chosen`, trials with more seeds go before those with fewer.
    """
    best: dict[tuple[str, str, str], Trial] = {}
    for trial in made:
        key = (*trial.place, trial.label)
        if key not in best or _standing(trial, metric) > _standing(best[key], metric):
            best[key] = trial
    return list(best.values())


def shown(made: Iterable[Trial], metric: str) -> list[Trial]:
    """The trials that figures and tables have a line for: one per label, as `at_best_rates` has them.

    On data where those are more than `MOST_LABELS`, as in a search, only the best of each loss (`chosen`).
    """
    made = list(made)
    found, counts = at_best_rates(made, metric), Counter(trial.place for trial in at_best_rates(made, metric))
    few = chosen(made, metric)
    return [trial for trial in found if counts[trial.place] <= MOST_LABELS] + [
        trial for trial in few if counts[trial.place] > MOST_LABELS
    ]


def chosen(made: Iterable[Trial], metric: str) -> list[Trial]:
    """For each data set, backbone and variant of a loss the trial that is best on the validation part.

    Of a loss whose trials have different numbers of seeds, those with the most count: a search runs its best settings
    with further seeds, and a single seed of any other may have been lucky.
    """
    best: dict[tuple[str, ...], Trial] = {}
    for trial in made:
        key = (*trial.place, variant(trial.settings))
        if key not in best or _standing(trial, metric) > _standing(best[key], metric):
            best[key] = trial
    return list(best.values())


def _standing(trial: Trial, metric: str) -> tuple[int, float]:
    return len(trial.runs), validation_merit(trial, metric)


def validation_merit(trial: Trial, metric: str) -> float:
    """A number that is higher the better a trial is on the validation part, whichever direction the metric has."""
    value = trial.mean(metric, "valid")
    return float("-inf") if value is None else direction(metric) * value
