"""The sections on question 3 (epochs and seconds), and on gradients, bias and variance at trained models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manymax.paper.numbers import MAIN_METRIC
from manymax.paper.reproduction.markup import NOT_ENOUGH, image, subsection
from manymax.paper.selection import question_1, tuned
from manymax.study.report import figures, pace, tables
from manymax.study.report.drawing import Figure
from manymax.study.report.formats import ReportTable
from manymax.study.report.trials import Trial


def convergence(made: Sequence[Trial]) -> Iterator[str]:
    """Question 3: a table of epochs and seconds, and the curves."""
    yield "## Question 3: epochs and seconds\n"
    rows = tuple(
        ((*trial.place, trial.label, tables.rate(trial.lr)), pace.pace(trial, MAIN_METRIC))
        for trial in tuned(question_1(made))
    )
    if not rows:
        yield f"{NOT_ENOUGH}: none has finished.\n"
        return
    seconds = "Seconds are of training alone. Runs that shared the machine with others are slower than alone."
    note, headers = f"{seconds} {pace.LONGEST_WAIT_NOTE}", ("data", "backbone", "loss", "rate")
    yield subsection(ReportTable("", "How soon, and how long", headers, pace.PACE_COLUMNS, rows, note))
    for figure in curve_figures(made):
        yield image(figure)


def curve_figures(made: Sequence[Trial]) -> list[Figure]:
    """The validation metric against epochs and against seconds; what has nothing to show is left out."""
    answering = tuned(question_1(made))
    axes = (("epoch", "epoch"), ("seconds_train", "training seconds"))
    drawn = [figures.curves(answering, column, unit) for column, unit in axes]
    return [figure for figure in drawn if figure.panels]


def trained_models(made: Sequence[Trial]) -> Iterator[str]:
    """What was measured at trained models: heat maps, bias and variance."""
    yield "## At the trained models: gradients, bias and variance\n"
    drawn = probe_figures(made)
    if not drawn:
        yield f"{NOT_ENOUGH}: no model of an exact loss has been probed.\n"
    for figure in drawn:
        yield image(figure)
    table = tables.approximations(tuned(question_1(made)))
    if table.rows:
        yield subsection(table)


def probe_figures(made: Sequence[Trial]) -> list[Figure]:
    """The figures of what was measured at trained models; what has nothing to show is left out."""
    answering = tuned(question_1(made))
    heat_maps = (figures.heat_maps(answering, what) for what in ("gradients", "jacobian"))
    return [figure for figure in (*heat_maps, figures.bias_variance(answering)) if figure.panels]
