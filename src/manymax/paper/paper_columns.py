"""Ours beside what the paper prints for the same data, backbone and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manymax.paper.numbers import LEARNING_RATES, PAPER_METRICS, PaperNumber
from manymax.paper.printed import paper_name, printed
from manymax.paper.selection import METRIC
from manymax.study.report import tables
from manymax.study.report.formats import Cell, ReportTable, escape
from manymax.study.report.trials import Trial

LARGE = 5.0  # percent: a difference that needs a cause


def of_the_paper(trial: Trial) -> dict[str, PaperNumber]:
    """{metric: what the paper prints} for the trial's data, backbone, loss and negatives, at its best rate by N@20."""
    here = as_in_the_paper(trial)
    rates = (None,) if trial.lr is None else LEARNING_RATES["lr"]
    found = [
        {metric: number for metric in PAPER_METRICS if (number := printed(replace(here, lr=rate), metric)) is not None}
        for rate in rates
    ]
    return max((each for each in found if METRIC in each), key=lambda each: each[METRIC].value, default={})


def as_in_the_paper(trial: Trial) -> Trial:
    """The trial on data with the paper's name."""
    run = trial.runs[0]
    settings = {**run.settings, "name": paper_name(trial)}
    return replace(trial, runs=(replace(run, record=run.record.model_copy(update={"settings": settings})),))


def difference(trial: Trial, metric: str) -> float | None:
    """How far ours is from the paper's, in percent of the paper's."""
    number, ours = of_the_paper(trial).get(metric), trial.mean(metric)
    return None if number is None or ours is None else 100 * (ours / number.value - 1)


def beside(title: str, rows: Sequence[Trial], note: str = "") -> ReportTable:
    """Ours with the paper's in brackets, and the difference; the best of a metric is marked."""
    best = {metric: max((trial.mean(metric) or 0.0 for trial in rows), default=0.0) for metric in PAPER_METRICS}
    lines = []
    for trial in rows:
        numbers = of_the_paper(trial)
        theirs = numbers[METRIC].setting.get("lr", "not stated") if numbers else ""
        lr = "" if trial.lr is None else f"{trial.lr:g}"
        headers = (trial.label, trial.batches or "", lr, str(theirs), str(len(trial.runs)))
        lines.append((headers, tuple(cell for metric in PAPER_METRICS for cell in _pair(trial, metric, best[metric]))))
    columns = tuple(column for metric in PAPER_METRICS for column in ((tables.short(metric),), ("difference, %",)))
    return ReportTable("", title, ("loss", "batches", "lr", "the paper's lr", "seeds"), columns, tuple(lines), note)


def _pair(trial: Trial, metric: str, best: float) -> tuple[Cell, Cell]:
    number, ours, percent = of_the_paper(trial).get(metric), trial.mean(metric), difference(trial, metric)
    value = Cell(ours, trial.spread(metric), "-", best=ours == best, paper=number.value if number else None)
    return value, Cell(text="" if percent is None else _signed(percent))


def far(trial: Trial) -> str:
    """One line on a trial that is far from the paper's number in any metric; empty for one that is near."""
    percents = {
        metric: p for metric in PAPER_METRICS if (p := difference(trial, metric)) is not None and abs(p) > LARGE
    }
    if not percents:
        return ""
    by = ", ".join(f"{tables.short(metric)} {_signed(percent)} %" for metric, percent in percents.items())
    return f"- {escape(', '.join((*trial.place, trial.label)))}: {by}.{_same_rate(trial)}"


def _same_rate(trial: Trial) -> str:
    """What the paper prints at the rate of the trial, where that is not its best."""
    best, here = of_the_paper(trial).get(METRIC), printed(as_in_the_paper(trial), METRIC)
    if best is None or here is None or here.setting == best.setting:
        return ""
    percent = _signed(100 * ((trial.mean(METRIC) or 0.0) / here.value - 1))
    return f" At {tables.rate(trial.lr)} the paper prints {tables.short(METRIC)} {here.value:.4f} ({percent} %)."


def _signed(percent: float) -> str:
    """With its sign, but for zero.

    >>> _signed(-10.42), _signed(-0.01), _signed(3.0)
    ('-10.4', '0.0', '+3.0')
    """
    rounded = round(percent, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"
