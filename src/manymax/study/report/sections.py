"""The parts of a report's page: sections with tables, figures and cards.

A caller can add sections of its own (`Extra`), and published numbers beside ours in the tables (`Published`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manymax.study.report.drawing import Figure
from manymax.study.report.formats import ReportTable
from manymax.study.report.trials import Trial


@dataclass(frozen=True)
class Card:
    """A box on the page with a statement and a verdict on it; rule and cases behind the verdict are folded away.

    Args:
        title: the statement.
        verdict: "confirmed" is shown in green and "contradicted" in red, any other word in yellow.
        remark: further words in the line of the verdict.
        missing: what is missing for a verdict, one line each.
        rule: how the verdict is reached.
        cases: (whose cases these are, the cases); a case is (whether it supports the statement, None if that is open;
            why).
    """

    title: str
    verdict: str
    remark: str = ""
    missing: tuple[str, ...] = ()
    rule: str = ""
    cases: tuple[tuple[str, tuple[tuple[bool | None, str], ...]], ...] = ()

    @property
    def count(self) -> int:
        """The number of cases of the study itself, which come first in `cases`."""
        return len(self.cases[0][1]) if self.cases else 0


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        id: the anchor of the section in the page.
        title: its headline.
        text: a paragraph below the headline.
        cards, figures, tables: its content, shown in this order.
        missing: sentences about what is not there and what to do about it.
        folded: whether the reader has to open each table with a click.
    """

    id: str
    title: str
    text: str = ""
    cards: tuple[Card, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    missing: tuple[str, ...] = ()
    folded: bool = False

    @property
    def has_content(self) -> bool:
        """Whether there is anything but words."""
        return bool(self.cards or self.figures or self.tables)


# A section that a caller adds to the page: made from the trials of the study; None where they are about something else.
Extra = Callable[[Sequence[Trial]], Section | None]


@dataclass(frozen=True)
class Published:
    """Published numbers to print beside ours in the tables of results.

    Args:
        value: from a trial and the name of a metric to the published number; None where there is none.
        note: the sentence below a table with such numbers that says where they stand and who published them.
    """

    value: Callable[[Trial, str], float | None]
    note: str
