"""The tables of the report, made from the trials of a study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from manymax.members import BASELINE
from manymax.study.metrics import METRICS
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.labels import loss_label, run_labels
from manymax.study.report.runs import Run, Study
from manymax.study.report.sections import Published
from manymax.study.report.trials import (
    Trial,
    at_best_rates,
    chosen,
    direction,
    is_sampled,
    loss_position,
    metrics,
    natural_sort_key,
    validation_merit,
)

EMPTY_CELL = Cell(text="")
POPULARITY = "popularity"
MARKS_NOTE = (
    "Bold: the learning rate of a method that is best on the validation part. Blue: the method that is best there. "
)


def short(metric: str) -> str:
    """The name of a metric as the header of a column.

    >>> short("ndcg@20"), short("regret@20")
    ('N@20', 'regret@20')
    """
    name, _, cutoff = metric.partition("@")
    known = METRICS[name].short if name in METRICS else ""
    return f"{known or name}@{cutoff}"


def rate(lr: float | None) -> str:
    """A learning rate as the header of a column; None is a method that is solved without one."""
    return "no lr" if lr is None else f"lr={lr:g}"


def results(trials: Sequence[Trial], backbone: str, published: Published | None = None) -> ReportTable:
    """The results with one backbone: a row per method and metric, a column per data set and learning rate.

    What has no learning rate stands in a column of its own: a solver without one, and the ranking by popularity.
    """
    own = [trial for trial in trials if trial.backbone == backbone]
    names, rates, labels = metrics(own), _rates(own), _labels(own)
    found = {
        (data, metric): _data_set_cells(own, data, rates[data], labels, metric, published)
        for data in rates
        for metric in names
    }
    rows = [
        ((label, short(metric)), tuple(cell for data in rates for cell in found[data, metric][label]))
        for label in [*labels, POPULARITY]
        for metric in names
        if any(cell.value is not None for data in rates for cell in found[data, metric][label])
    ]
    noted = published.note if published is not None and any(cell.paper for _, cells in rows for cell in cells) else ""
    return ReportTable(
        name=f"results_{backbone}",
        title=f"Results on the test part: {backbone}",
        headers=("loss", "metric"),
        columns=tuple((data, rate(lr)) for data in rates for lr in rates[data]),
        rows=tuple(rows),
        note=seeds_note(own) + MARKS_NOTE + noted,
    )


def seeds_note(trials: Iterable[Trial]) -> str:
    """The sentence of a note that says over how many seeds the means are."""
    counts = sorted({len(trial.runs) for trial in trials})
    if max(counts, default=1) == 1:
        return "One seed. "
    return f"Mean ± standard deviation over {' to '.join(dict.fromkeys(map(str, (counts[0], counts[-1]))))} seeds. "


def _data_set_cells(
    trials: Sequence[Trial],
    data: str,
    rates: Sequence[float | None],
    labels: Sequence[str],
    metric: str,
    published: Published | None,
) -> dict[str, list[Cell]]:
    """{label: cells} of one data set and metric, with the choices of the validation part marked; popularity last."""
    here = [trial for trial in trials if trial.data == data]
    deciding = metrics(trials)[0]
    best = at_best_rates(here, deciding)
    overall = max(chosen(here, deciding), key=lambda trial: validation_merit(trial, deciding), default=None)
    found: dict[str, list[Cell]] = {}
    for label in labels:
        by_rate = {trial.lr: trial for trial in here if trial.label == label}
        found[label] = [
            replace(
                _with_published(by_rate[lr], metric, published),
                best=len(by_rate) > 1 and by_rate[lr] in best,
                overall=by_rate[lr] is overall,
            )
            if lr in by_rate
            else EMPTY_CELL
            for lr in rates
        ]
    popular = Cell(popularity_mean(here, metric), text="-")
    return found | {POPULARITY: [popular if lr is None else EMPTY_CELL for lr in rates]}


def _rates(trials: Iterable[Trial]) -> dict[str, list[float | None]]:
    """The learning rates on each data set, largest first, then None if something has none."""
    found: dict[str, set[float]] = defaultdict(set)
    without = set()
    for trial in trials:
        found[trial.data] |= {trial.lr} if trial.lr is not None else set()
        if trial.lr is None or any(run.record.popularity for run in trial.runs):
            without.add(trial.data)
    return {data: [*sorted(rates, reverse=True), *([None] if data in without else [])] for data, rates in found.items()}


def _labels(trials: Iterable[Trial]) -> list[str]:
    """The labels of the trials, in the order of the family."""
    labels = {trial.label: trial.loss for trial in trials}
    return sorted(labels, key=lambda label: (loss_position(labels[label]), natural_sort_key(label)))


def measured(trial: Trial, metric: str) -> Cell:
    """The mean of a metric on the test part, with its spread over seeds."""
    return Cell(trial.mean(metric), trial.spread(metric), text="-")


def _with_published(trial: Trial, metric: str, published: Published | None) -> Cell:
    return replace(measured(trial, metric), paper=None if published is None else published.value(trial, metric))


def _marked(cells: Sequence[Cell], metric: str) -> list[Cell]:
    """The cells of a row, those with the best value marked."""
    values = [cell.value for cell in cells if cell.value is not None]
    best = (max if direction(metric) > 0 else min)(values, default=None)
    return [replace(cell, best=True) if best is not None and cell.value == best else cell for cell in cells]


def popularity_mean(trials: Iterable[Trial], metric: str) -> float | None:
    """The mean over seeds of a metric of the ranking by popularity; None where no run has it."""
    runs = {run.settings["seed"]: run for trial in trials for run in trial.runs}
    values = [value for run in runs.values() if (value := run.record.popularity.get(metric)) is not None]
    return fmean(values) if values else None


def sweep(
    trials: Sequence[Trial],
    setting: str,
    fixed: Mapping[str, Any],
    title: str,
    published: Published | None = None,
) -> ReportTable | None:
    """The metrics of sampled losses for the values of one setting; None where no loss has two values of it.

    There is a row per data set, backbone and loss, and a column per metric and value.

    Args:
        trials: of the study.
        setting: the name of the setting, such as "num_negatives".
        fixed: {name: value} of settings that a trial must have to be taken.
        title: of the table.
        published: published numbers to print beside ours.
    """
    swept = points(trials, setting, fixed)
    values = sorted({value for line in swept.values() for value in line}, key=sortable)
    names = [name for name in metrics(trials) if direction(name) > 0]
    if len(values) < 2:
        return None
    rows = []
    for headers, line in swept.items():
        cells = []
        for metric in names:
            row = [_with_published(line[value], metric, published) if value in line else EMPTY_CELL for value in values]
            cells += _marked(row, metric)
        rows.append((headers, tuple(cells)))
    return ReportTable(
        name=f"sweep_{setting}",
        title=title,
        headers=("data", "backbone", "loss"),
        columns=tuple(
            (short(metric), f"k={value}" if isinstance(value, int) else value) for metric in names for value in values
        ),
        rows=tuple(rows),
        note="Each loss has the learning rate that is best for it on the validation part. Bold: the best of a row.",
    )


def points(
    trials: Sequence[Trial], setting: str, fixed: Mapping[str, Any]
) -> dict[tuple[str, str, str], dict[Any, Trial]]:
    """{(data, backbone, loss): {value of the setting: the trial with the best learning rate}}.

    Only sampled losses are taken, with settings as in `fixed`, and only lines with at least two values.
    """
    names = metrics(trials)
    lines: dict[tuple[str, str, str], dict[Any, Trial]] = defaultdict(dict)
    for trial in at_best_rates(trials, names[0]) if names else []:
        settings = trial.settings
        if is_sampled(trial.loss) and all(settings.get(k) == v for k, v in fixed.items()):
            others = {key: value for key, value in trial.varied.items() if key not in (setting, *fixed)}
            lines[(*trial.place, loss_label(trial.loss, others))].setdefault(settings.get(setting), trial)
    return {place: line for place, line in lines.items() if len(line) > 1}


def sortable(value: Any) -> tuple[bool, bool, Any]:
    """A sorting key: numbers come before names, and "uniform" before other names."""
    return isinstance(value, str), value != "uniform", value


def approximations(trials: Sequence[Trial]) -> ReportTable:
    """Predicted, exact and measured bias and variance of the sampled losses, on the scores of trained models."""
    rows = []
    for trial in at_best_rates(trials, (metrics(trials) or [""])[0]):
        for row in trial.runs[0].probe.get("approximations", ()) if trial.loss == BASELINE.name else ():
            headers = (*trial.place, f"{row['member']} {row['correction'] or ''}".strip(), str(row["num_negatives"]))
            cells = [Cell(row[f"{how}_{what}"]) for what in ("bias", "variance") for how in ("predicted", "exact")]
            drawn = [Cell(row[f"measured_{what}"], row[f"measured_{what}_error"]) for what in ("bias", "variance")]
            rows.append((headers, (*cells[:2], drawn[0], *cells[2:], drawn[1], Cell(text=f"{row['in_range']:.0%}"))))
    hows = ("predicted", "exact", "measured")
    return ReportTable(
        name="approximations",
        title="Bias and variance of the sampled losses",
        headers=("data", "backbone", "loss", "k"),
        columns=(*((what, how) for what in ("bias", "variance") for how in hows), ("Delta method", "in range")),
        rows=tuple(rows),
        note="Measured: by Monte Carlo, ± the standard error of the mean. In range: the share of users for whom the "
        "prediction of the Delta method is expected to be off by at most a tenth.",
    )


def data_sets(trials: Sequence[Trial]) -> ReportTable:
    """The size of each data set after its filters."""
    sizes = ("users", "items", "train", "valid", "test")
    rows = []
    for headers, trial in _by_split(trials).items():
        recorded = trial.runs[0].record.sizes
        rows.append((headers, tuple(Cell(text=f"{recorded[name]:,}" if name in recorded else "-") for name in sizes)))
    return ReportTable("data", "Data sets", ("data", "split"), tuple((name,) for name in sizes), tuple(rows))


def _by_split(trials: Sequence[Trial]) -> dict[tuple[str, str], Trial]:
    """The first trial of each data set and kind of split."""
    found: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        found.setdefault((trial.data, _split(trial)), trial)
    return found


def _split(trial: Trial) -> str:
    """How the data were split: by the setting or, where that is left out, by what the data card says."""
    done = [step["split"] for step in trial.runs[0].record.card if "split" in step]
    return str(trial.settings.get("split") or (done or ["ratio"])[-1])


def not_done(study: Study) -> ReportTable:
    """Table of the runs that failed, diverged or were stopped, with the reason."""
    names = _run_names(study)
    rows = [(names[run.identity], (_reason(run),)) for run in study.failed]
    return ReportTable("not_done", "Runs without a result", RUN_HEADERS, (("reason",),), tuple(rows))


def _reason(run: Run) -> Cell:
    return Cell(text=run.record.reason or "no reason was recorded")


RUN_HEADERS = ("data", "backbone", "loss", "rate", "seed", "status", "run")


def _run_names(study: Study) -> dict[str, tuple[str, ...]]:
    """{run: the leading cells of its row}: data, backbone, loss with what tells it apart, rate, seed and status."""
    labels = run_labels([run.settings for run in study.runs])
    found: dict[str, tuple[str, ...]] = {}
    for run, label in zip(study.runs, labels, strict=True):
        s = run.settings
        lr = s.get("lr") if s.get("solver", "gradient") == "gradient" else None
        cells = (str(s.get("name") or s["data"]), s["backbone"], label, rate(lr), str(s["seed"]))
        found[run.identity] = (*cells, run.record.status, run.name)
    return found


def all_runs(study: Study) -> ReportTable:
    """Table of every run with every test metric."""
    metric_names = sorted({name for run in study.runs for name in run.record.test}, key=natural_sort_key)
    names = _run_names(study)
    rows = [
        (names[run.identity], tuple(Cell(run.record.test.get(name), text="-") for name in metric_names))
        for run in study.runs
    ]
    return ReportTable("runs", "All runs", RUN_HEADERS, tuple((short(name),) for name in metric_names), tuple(rows))


def cards(trials: Sequence[Trial]) -> list[ReportTable]:
    """A table per data set with its data card: the steps of its preparation, and what each left."""
    made = []
    for index, ((data, split), trial) in enumerate(_by_split(trials).items()):
        card = trial.runs[0].record.card
        names = list(dict.fromkeys(name for step in card for name in step if name != "step"))
        rows = [((str(step.get("step", "")),), tuple(_card_cell(step.get(name)) for name in names)) for step in card]
        title, columns = f"Data card: {data}, {split}", tuple((name,) for name in names)
        made.append(ReportTable(f"card_{index}", title, ("step",), columns, tuple(rows)))
    return [table for table in made if table.rows]


def _card_cell(value: Any) -> Cell:
    if isinstance(value, int) and not isinstance(value, bool):
        return Cell(text=f"{value:,}")
    if isinstance(value, float):
        return Cell(text=f"{value:.6g}")
    return Cell(text="" if value is None else str(value))
