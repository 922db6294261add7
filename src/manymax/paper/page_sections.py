"""The sections on the paper in the report of a study: its findings, judged by the study's runs, and its numbers.

The report itself (`manymax.study.report.page`) knows nothing of the paper. The commands `manymax report` and `manymax
study` hand it `PAPER_SECTIONS` and `PUBLISHED_NUMBERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from manymax.paper.findings import FindingCase, Judgement, judge
from manymax.paper.printed import printed
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.sections import Card, Extra, Published, Section
from manymax.study.report.tables import measured, rate, short
from manymax.study.report.trials import Trial, metrics

FOLDED_ROWS = 30  # a longer table of numbers is folded away: it is not the main thing of the page
# Marked as safe because it is fixed text: otherwise its apostrophe would be escaped in the page.
BY_THE_PAPER = Markup("by the paper's own tables: ")


def about_the_paper(made: Sequence[Trial]) -> bool:
    """Whether some trials have the paper's filters, or settings for which it prints a number."""
    return any(trial.settings.get("preset") for trial in made) or bool(numbers(made).rows)


def only_there(build: Callable[[Sequence[Trial]], Section]) -> Extra:
    """A section that a page has only where its study is about the paper."""
    return lambda made: build(made) if about_the_paper(made) else None


def findings(made: Sequence[Trial]) -> Section:
    """The section on the findings: a card each, with the verdict of the trials and that of the paper's own tables."""
    text = (
        "The paper's findings, each decided by a fixed rule from the runs of this study, and from the paper's tables."
    )
    return Section("findings", "The paper's findings", text, cards=tuple(map(_card, judge(made))))


def _card(judged: Judgement) -> Card:
    return Card(
        title=f"{judged.finding.number}. {judged.finding.claim}",
        verdict=judged.verdict,
        remark=BY_THE_PAPER + (judged.printed_verdict if judged.printed else "nothing printed"),
        missing=tuple(judged.missing),
        rule=judged.finding.rule,
        cases=(("Our runs", _case_lines(judged.cases)), ("The paper's tables", _case_lines(judged.printed))),
    )


def _case_lines(cases: Iterable[FindingCase]) -> tuple[tuple[bool | None, str], ...]:
    return tuple((case.supports, f"{case.name}: {case.why}") for case in cases)


def against_the_paper(made: Sequence[Trial]) -> Section:
    """The section on the numbers: ours beside those that the paper prints."""
    table = numbers(made)
    gap = "No run has the data, backbone, loss and settings of a printed number (ml-1m, gowalla, electronics)."
    missing = () if table.rows else (gap,)
    found = (table,) if table.rows else ()
    return Section("paper", "The paper's numbers", tables=found, missing=missing, folded=len(table.rows) > FOLDED_ROWS)


def numbers(trials: Iterable[Trial]) -> ReportTable:
    """A table with a row for every number of ours for which the paper prints one."""
    rows = []
    for trial in trials:
        for metric in metrics([trial]):
            number, ours = printed(trial, metric), trial.mean(metric)
            if number is None or ours is None:
                continue
            headers = (trial.data, trial.backbone, trial.label, rate(trial.lr), short(metric), number.table)
            difference = Cell(100 * (ours / number.value - 1), digits=1)
            state = Cell(text="; ".join(filter(None, (number.status, number.note))))
            rows.append((headers, (measured(trial, metric), Cell(number.value), difference, state)))
    return ReportTable(
        name="paper",
        title="The paper's numbers beside ours",
        headers=("data", "backbone", "loss", "rate", "metric", "table"),
        columns=(("ours",), ("paper",), ("difference, %",), ("status",)),
        rows=tuple(rows),
    )


def _printed_value(trial: Trial, metric: str) -> float | None:
    number = printed(trial, metric)
    return None if number is None else number.value


PAPER_SECTIONS = (only_there(against_the_paper), only_there(findings))
PUBLISHED_NUMBERS = Published(_printed_value, "Small or in brackets: what the paper prints.")
