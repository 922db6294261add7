"""How soon a trial reaches its best values, and what it costs in time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manymax.study.record_files import Array
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.tables import rate
from manymax.study.report.trials import Trial, direction, metrics, shown

NEAR_BEST = 0.95  # share of its own best validation value at which a run counts as having arrived


def cost(trials: Sequence[Trial]) -> ReportTable:
    """Table of the time and memory that each trial took."""
    names = metrics(trials)
    rows = []
    for trial in shown(trials, names[0]) if names else []:
        epochs = trial.average(lambda r: float(r.epochs)) or 0
        training = trial.average(lambda r: r.seconds.get("training"))
        evaluation = trial.average(lambda r: r.seconds.get("evaluation"))
        total = trial.average(lambda r: sum(r.seconds.values()))
        headers = (trial.data, trial.backbone, trial.label, rate(trial.lr))
        cells = (
            Cell(epochs, digits=1),
            Cell(trial.average(lambda r: float(r.best_epoch)), digits=1, text="-"),
            Cell(training / epochs if training is not None and epochs else None, digits=3, text="-"),
            Cell(evaluation / epochs if evaluation is not None and epochs else None, digits=3, text="-"),
            Cell(arrival(trial, names[0], "seconds_train"), digits=1, text="-"),
            Cell(total, digits=1, text="-"),
            Cell(trial.average(lambda r: r.training_memory_mb), digits=0, text="-"),
            Cell(trial.average(lambda r: r.peak_memory_mb), digits=0, text="-"),
        )
        rows.append((headers, cells))
    return ReportTable(
        name="cost",
        title="Cost",
        headers=("data", "backbone", "loss", "rate"),
        columns=(
            ("epochs",),
            ("best epoch",),
            ("training s / epoch",),
            ("evaluation s / epoch",),
            (f"training s to {NEAR_BEST:.0%} of own best",),
            ("total s",),
            ("training memory MB",),
            ("peak memory MB",),
        ),
        rows=tuple(rows),
        note="Training memory is what training took beside data and model, peak memory that of the process. Runs that"
        " shared the machine with others took longer than alone.",
    )


def arrival(trial: Trial, metric: str, column: str, goal: float | None = None) -> float | None:
    """Where the validation curve first reaches `goal`; None if it never does.

    Args:
        trial: whose curve is looked at.
        metric: of the curve.
        column: the unit of the answer: "epoch", or "seconds_train" for seconds of training.
        goal: a value of the metric; if None, 95 % of the best value of the curve (its best value / 95 % for a metric
            of which less is better).
    """
    curve = trial.curve
    if metric not in curve or column not in curve:
        return None
    sign = direction(metric)
    goal = NEAR_BEST**sign * _best(curve[metric], metric) if goal is None else goal
    reached = sign * curve[metric] >= sign * goal
    return float(curve[column][reached.argmax()]) if reached.any() else None


def _best(curve: Array, metric: str) -> float:
    return float(curve.max() if direction(metric) > 0 else curve.min())


PACE_COLUMNS = tuple(
    (name,)
    for name in (
        "epochs",
        "best epoch",
        "longest wait",
        "s to the best",
        f"epoch at {NEAR_BEST:.0%} of it",
        "training s / epoch",
    )
)
LONGEST_WAIT_NOTE = (
    "Longest wait: the most epochs from one best value to the next; with less patience early stopping would have ended"
    " the run there."
)


def pace(trial: Trial, metric: str) -> tuple[Cell, ...]:
    """The cells of a trial below the headers `PACE_COLUMNS`."""
    curve = trial.curve.get(metric)
    values = (
        (trial.average(lambda r: float(r.epochs)), 1),
        (trial.average(lambda r: float(r.best_epoch)), 1),
        (longest_wait(trial, metric), 0),
        (None if curve is None else arrival(trial, metric, "seconds_train", _best(curve, metric)), 1),
        (arrival(trial, metric, "epoch"), 1),
        (epoch_seconds(trial), 2),
    )
    return tuple(Cell(value, text="-", digits=digits) for value, digits in values)


def longest_wait(trial: Trial, metric: str) -> float | None:
    """The largest number of epochs between a best value of the curve and the next better one."""
    curve = trial.curve
    if metric not in curve or "epoch" not in curve:
        return None
    best = np.maximum.accumulate(direction(metric) * curve[metric])
    rises = np.append(True, best[1:] > best[:-1])
    return float(np.diff(curve["epoch"][rises], prepend=0).max())


def epoch_seconds(trial: Trial) -> float | None:
    """Seconds of training per epoch."""
    return trial.average(lambda r: r.seconds["training"] / r.epochs if r.epochs and "training" in r.seconds else None)
