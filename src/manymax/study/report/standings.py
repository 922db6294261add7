"""The tables of the answer: the losses on each data set and backbone, best on the validation part first, and tests.

All of them are made from the contenders of `answer.py`, so that the loss that they mark is the one that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from manymax.members import BASELINE
from manymax.study.report.answer import Answer
from manymax.study.report.contenders import Contender
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.significance import SIGNIFICANCE_LEVEL, compare
from manymax.study.report.tables import POPULARITY, measured, popularity_mean, seeds_note, short
from manymax.study.report.trials import Trial, metrics

MEMORY_NOTE = "Memory is what training took beside data and model. "


def standing(answer: Answer, made: Sequence[Trial], name: str) -> ReportTable:
    """Table of one data set and backbone: a row per loss at its chosen settings, the loss to use first.

    Args:
        answer: of the data set and backbone.
        made: all trials there, of which popularity is taken.
        name: of the table's files.
    """
    names = metrics(made)
    memory = all(each.memory_mb is not None for each in answer.contenders)
    rows = [_row(answer, each, names, memory) for each in answer.contenders]
    popular = [Cell(popularity_mean(made, metric)) for metric in names]
    if any(cell.value is not None for cell in popular):
        blank = Cell(text="")
        cells = (blank, Cell(text="no training"), blank, *(replace(c, text="-") for c in popular), blank, blank, blank)
        rows.append(((POPULARITY,), cells))
    tests = tuple((f"test {short(metric)}",) for metric in names)
    return ReportTable(
        name=name,
        title=f"{answer.data}, {answer.backbone}",
        headers=("loss",),
        columns=(
            ("",),
            ("settings",),
            (f"validation {short(answer.metric)}",),
            *tests,
            (f"over {BASELINE.name} (95 % interval)",),
            ("training s",),
            ("memory MB" if memory else "peak memory MB",),
        ),
        rows=tuple(rows),
        note="Chosen on the validation part, settings and loss; measured on the test part. "
        + seeds_note(each.trial for each in answer.contenders)
        + (MEMORY_NOTE if memory else "Memory is that of the process. "),
    )


def _row(answer: Answer, each: Contender, names: Sequence[str], memory: bool) -> tuple[tuple[str], tuple[Cell, ...]]:
    """The row of a contender; that of the loss to use is marked."""
    first = each is answer.winner
    verdict = "to use" if first else "tied" if each.tied else "behind" if each.p is not None else ""
    gain = "(the reference)" if each is answer.baseline else "" if each.gain is None else str(each.gain)
    cells = (
        Cell(text=verdict, overall=first),
        Cell(text=each.settings_text),
        Cell(each.valid, text="-", overall=first),
        *(replace(measured(each.trial, metric), overall=first) for metric in names),
        Cell(text=gain, overall=first),
        Cell(each.seconds, text="-", digits=1),
        Cell(each.memory_mb if memory else each.peak_memory_mb, text="-", digits=0),
    )
    return (each.loss,), cells


def significance(found: Sequence[Answer]) -> ReportTable:
    """The loss to use on each data set and backbone against every other loss, tested in pairs."""
    names = list(dict.fromkeys(short(answer.metric) for answer in found))
    rows = [row for answer in found for row in _comparisons(answer)]
    return ReportTable(
        name="significance",
        title=f"Is the chosen loss better? {', '.join(names)} on the test part, in pairs",
        headers=("data", "backbone", "chosen", "other"),
        columns=(("difference",), ("in % of the chosen (95 % interval)",), ("users",), ("p, Wilcoxon",), ("p, Holm",)),
        rows=tuple(rows),
        note="Intervals, and p after Holm's correction for testing several losses, are over users and seeds, which both"
        " vary; Wilcoxon's test is over users, whose differences are averaged over seeds before. Bold: p below"
        f" {SIGNIFICANCE_LEVEL}; all others are tied with the chosen loss.",
    )


def _comparisons(answer: Answer) -> Iterator[tuple[tuple[str, ...], tuple[Cell, ...]]]:
    winner = answer.winner
    for other in answer.contenders[1:]:
        if other.behind is None or other.p is None:
            continue
        paired = compare(winner.trial, other.trial, answer.metric)
        difference = None if winner.test is None or other.test is None else winner.test - other.test
        cells = (
            Cell(difference if paired is None else paired.difference, digits=5),
            Cell(text=str(other.behind)),
            Cell(text=f"{other.behind.users:,}" if other.behind.users else "-"),
            Cell(text="-" if paired is None else p_text(paired.wilcoxon)),
            Cell(text=p_text(other.p), best=other.p < SIGNIFICANCE_LEVEL),
        )
        yield (answer.data, answer.backbone, winner.loss, other.loss), cells


def p_text(p: float) -> str:
    """A p-value for a table.

    >>> p_text(0.0312), p_text(1e-9)
    ('0.031', '< 1e-6')
    """
    return "< 1e-6" if p < 1e-6 else f"{p:.2g}"
