"""Our numbers with the paper's for the same data, backbone and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manymax.paper.numbers import LEARNING_RATES, MAIN_METRIC, PAPER_METRICS, PaperNumber
from manymax.paper.printed import paper_name, printed
from manymax.study.report import tables
from manymax.study.report.formats import Cell, ReportTable, escape
from manymax.study.report.trials import Trial, best_value, direction

LARGE_DIFFERENCE = 5.0  # percent; a larger difference needs a cause


def paper_numbers(trial: Trial) -> dict[str, PaperNumber]:
    """{metric: number} that the paper prints for the data, backbone, loss and negatives of a trial.

    They are those of the paper's best learning rate by N@20, whatever the rate of the trial; empty if there are none.
    """
    named = with_paper_name(trial)
    rates = (None,) if trial.lr is None else LEARNING_RATES["lr"]
    found = [
        {metric: number for metric in PAPER_METRICS if (number := printed(replace(named, lr=rate), metric)) is not None}
        for rate in rates
    ]
    complete = (numbers for numbers in found if MAIN_METRIC in numbers)
    return max(complete, key=lambda numbers: direction(MAIN_METRIC) * numbers[MAIN_METRIC].value, default={})


def with_paper_name(trial: Trial) -> Trial:
    """The trial with the paper's name for its data, so that the paper's numbers for that data are found."""
    run = trial.runs[0]
    settings = {**run.settings, "name": paper_name(trial)}
    return replace(trial, runs=(replace(run, record=run.record.model_copy(update={"settings": settings})),))


def difference(trial: Trial, metric: str) -> float | None:
    """Ours minus the paper's, in percent of the paper's; None where one of them is missing."""
    number, ours = paper_numbers(trial).get(metric), trial.mean(metric)
    return None if number is None or ours is None else 100 * (ours / number.value - 1)


def comparison_table(title: str, rows: Sequence[Trial], note: str = "") -> ReportTable:
    """A row per trial: ours with the paper's in brackets, and the difference; the best of each metric is marked."""
    best = {metric: best_value((trial.mean(metric) for trial in rows), metric) for metric in PAPER_METRICS}
    lines = []
    for trial in rows:
        numbers = paper_numbers(trial)
        paper_lr = numbers[MAIN_METRIC].setting.get("lr", "not stated") if numbers else ""
        lr = "" if trial.lr is None else f"{trial.lr:g}"
        headers = (trial.label, trial.batches or "", lr, str(paper_lr), str(len(trial.runs)))
        cells = tuple(cell for metric in PAPER_METRICS for cell in _value_and_difference(trial, metric, best[metric]))
        lines.append((headers, cells))
    columns = tuple(column for metric in PAPER_METRICS for column in ((tables.short(metric),), ("difference, %",)))
    return ReportTable("", title, ("loss", "batches", "lr", "the paper's lr", "seeds"), columns, tuple(lines), note)


def _value_and_difference(trial: Trial, metric: str, best: float | None) -> tuple[Cell, Cell]:
    number, ours, percent = paper_numbers(trial).get(metric), trial.mean(metric), difference(trial, metric)
    is_best = ours is not None and ours == best
    value = Cell(ours, trial.spread(metric), "-", best=is_best, paper=number.value if number else None)
    return value, Cell(text="" if percent is None else _signed(percent))


def large_difference_line(trial: Trial) -> str:
    """A line in Markdown on a trial that differs much from the paper in any metric; empty for other trials."""
    percents = {
        metric: percent
        for metric in PAPER_METRICS
        if (percent := difference(trial, metric)) is not None and abs(percent) > LARGE_DIFFERENCE
    }
    if not percents:
        return ""
    by = ", ".join(f"{tables.short(metric)} {_signed(percent)} %" for metric, percent in percents.items())
    return f"- {escape(', '.join((*trial.place, trial.label)))}: {by}.{_at_same_rate(trial)}"


def _at_same_rate(trial: Trial) -> str:
    """A sentence on what the paper prints at the rate of the trial; empty where that is the paper's best rate."""
    best, same = paper_numbers(trial).get(MAIN_METRIC), printed(with_paper_name(trial), MAIN_METRIC)
    if best is None or same is None or same.setting == best.setting:
        return ""
    percent = _signed(100 * ((trial.mean(MAIN_METRIC) or 0.0) / same.value - 1))
    return f" At {tables.rate(trial.lr)} the paper prints {tables.short(MAIN_METRIC)} {same.value:.4f} ({percent} %)."


def _signed(percent: float) -> str:
    """A percentage with its sign; zero has none.

    >>> _signed(-10.42), _signed(-0.01), _signed(3.0)
    ('-10.4', '0.0', '+3.0')
    """
    rounded = round(percent, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"
