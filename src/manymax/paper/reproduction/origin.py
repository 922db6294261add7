"""The sections on data, on how the runs were made, and on what the paper has and we have not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from manymax.paper.numbers import DATA, MAIN_METRIC, NUMBERS, PaperNumber
from manymax.paper.paper_columns import with_paper_name
from manymax.paper.printed import PAPER_NAMES, matching
from manymax.paper.reproduction.collected import Collected
from manymax.paper.reproduction.markup import NOT_ENOUGH, subsection
from manymax.study.report import tables
from manymax.study.report.formats import Cell, ReportTable, escape
from manymax.study.report.labels import data_name
from manymax.study.report.runs import Run
from manymax.study.report.trials import Trial


def data(made: Sequence[Trial]) -> Iterator[str]:
    """The sizes of our data sets and of the paper's, and the data cards."""
    yield "## Data\n"
    table = tables.data_sets(made)
    if not table.rows:
        yield f"{NOT_ENOUGH}: no set has been used.\n"
        return
    yield subsection(replace(table, title="After the filters"))
    rows = tuple(
        ((name,), tuple(Cell(text=text) for text in (f"{d.users:,}", f"{d.items:,}", f"{d.interactions:,}", d.note)))
        for name, d in DATA.items()
    )
    columns = (("users",), ("items",), ("interactions",), ("what fits these counts",))
    aliases = "; ".join(f"{file} is compared with the paper's {name}" for file, name in PAPER_NAMES.items())
    note = f"Where a set is not available in the form that fits the paper's counts, another stands for it: {aliases}."
    yield subsection(ReportTable("", "As the paper prints them", ("data",), columns, rows, note))
    for card in tables.cards(made):
        yield subsection(card)


def how_it_was_run(collected: Collected) -> Iterator[str]:
    """Hours by study, versions, machines and back ends."""
    yield "## How it was run\n"
    runs = list({run.record.hash: run for each in collected.studies.values() for run in each}.values())
    if not runs:
        yield f"{NOT_ENOUGH}: there is no record.\n"
        return
    rows = [((name,), _hours(each)) for name, each in collected.studies.items()]
    if len(rows) > 1:
        rows.append((("all, each run once",), _hours(runs)))
    columns = (("runs",), ("hours",), ("of them training",))
    yield subsection(ReportTable("", "Hours", ("study",), columns, tuple(rows)))
    for what in ("versions", "machine"):
        seen = {", ".join(f"{k} {v}" for k, v in getattr(run.record, what).items()) for run in runs}
        yield "\n".join(f"- {what}: {escape(each)}" for each in sorted(seen)) + "\n"
    if backends := {run.record.backend for run in runs if run.record.backend is not None}:  # none in version 0.1.0
        yield f"- back ends: {escape(', '.join(sorted(backends)))}\n"


def _hours(runs: Sequence[Run]) -> tuple[Cell, ...]:
    total = sum(sum(run.record.seconds.values()) for run in runs)
    training = sum(run.record.seconds.get("training", 0.0) for run in runs)
    return Cell(text=str(len(runs))), Cell(total / 3600, digits=2), Cell(training / 3600, digits=2)


def missing(made: Sequence[Trial], collected: Collected) -> Iterator[str]:
    """The paper's numbers that we have no runs for, runs that findings do not know yet, and runs that failed."""
    yield "## What is missing\n"
    lines = list(_missing_numbers(made))
    known = {run.record.hash for run in collected.done}
    if gone := collected.decided - known:
        lines.append(f"- The findings rest on {len(gone)} runs that are no longer among the records.")
    if new := known - collected.decided:
        lines.append(f"- {len(new)} runs have not been looked at for the findings yet.")
    lines += [
        f"- {escape(_run_name(run))}: {run.record.status}." for run in collected.runs if run.record.status != "done"
    ]
    yield "\n".join(lines or ["Nothing."]) + "\n"


def _run_name(run: Run) -> str:
    s = run.settings
    return ", ".join((data_name(s), s["backbone"], s["loss"], tables.rate(s.get("lr")), f"seed {s['seed']}"))


def _missing_numbers(made: Sequence[Trial]) -> Iterator[str]:
    """For each data set and backbone of the paper, the losses without a run, then the settings of the other losses."""
    matched = {number for trial in made for number in matching(with_paper_name(trial), MAIN_METRIC)}
    places: dict[str, dict[str, list[PaperNumber]]] = {}
    for number in NUMBERS:
        if number.metric == MAIN_METRIC:
            place = places.setdefault(f"{number.data}, {number.backbone}", {})
            place.setdefault(number.loss, []).append(number)
    for name, losses in places.items():
        lacking = [loss for loss, numbers in losses.items() if not any(number in matched for number in numbers)]
        if lacking:
            what = "none yet" if len(lacking) == len(losses) else f"without {', '.join(lacking)}"
            yield f"- {name}: {NOT_ENOUGH.lower()}, {what}."
        settings = {
            loss: [f"{key}={value}" for n in numbers if n not in matched for key, value in n.setting.items()]
            for loss, numbers in losses.items()
            if loss not in lacking
        }
        if any(settings.values()):
            text = "; ".join(f"{loss} {', '.join(values)}" for loss, values in settings.items() if values)
            yield f"- {name}: not run of the paper's settings: {text}."
