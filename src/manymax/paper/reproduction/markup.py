"""What the sections of the page share: tables and figures in Markdown, and trials by data set and backbone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from manymax.study.report.drawing import Figure
from manymax.study.report.formats import ReportTable, escape, markdown
from manymax.study.report.trials import Trial

FIGURES, FIGURE_PREFIX = Path("docs/figures"), "reproduction_"  # folder and beginning of the names of figures
NOT_ENOUGH = "Not enough runs"


def subsection(table: ReportTable) -> str:
    """A table as a section of the third level."""
    return f"#{markdown(table)}"


def without_title(table: ReportTable) -> str:
    """A table without its headline."""
    return markdown(table).partition("\n\n")[2]


def image(figure: Figure) -> str:
    """A figure with its title and note below it."""
    link = f"{FIGURES.name}/{FIGURE_PREFIX}{figure.name}.svg"
    return f"![{escape(figure.title)}]({link})\n\n{escape(figure.title)}. {escape(figure.note)}\n"


def by_place(made: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """{(data, backbone): trials}, in the order of the trials."""
    places: dict[tuple[str, str], list[Trial]] = {}
    for trial in made:
        places.setdefault(trial.place, []).append(trial)
    return places
