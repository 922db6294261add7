"""The sections on method comparisons: studies beside the paper's questions, one section each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manymax.paper.method_comparisons import METHOD_COMPARISONS
from manymax.paper.numbers import PAPER_METRICS
from manymax.paper.reproduction.collected import RESULTS, Collected
from manymax.paper.reproduction.markup import NOT_ENOUGH, image, without_title
from manymax.study.record_files import KEPT_SUFFIX
from manymax.study.report.drawing import Figure
from manymax.study.report.trials import Trial


def method_comparisons(collected: Collected) -> Iterator[str]:
    """A table, and a figure if it has one, of each method comparison."""
    for name, comparison in METHOD_COMPARISONS.items():
        yield f"## {comparison.title}\n"
        compared = collected.compared_trials(name)
        table = comparison.table(compared, PAPER_METRICS)
        if table:
            yield without_title(table)
        else:
            file = RESULTS / f"{name}{KEPT_SUFFIX}"
            yield f"{NOT_ENOUGH}: needed are runs that differ in {comparison.options_text}, in `{file}`.\n"
        if figure := _figure(name, compared):
            yield image(figure)


def comparison_figures(collected: Collected) -> list[Figure]:
    """The figures of all method comparisons."""
    drawn = (_figure(name, collected.compared_trials(name)) for name in METHOD_COMPARISONS)
    return [figure for figure in drawn if figure is not None]


def _figure(name: str, compared: Sequence[Trial]) -> Figure | None:
    """The figure of a method comparison; None where it has none, or where there is nothing to show."""
    make_figure = METHOD_COMPARISONS[name].draw
    figure = make_figure(compared) if make_figure else None
    return figure if figure and figure.panels else None
