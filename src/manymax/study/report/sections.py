"""What a page is made of, and what a caller may add to it: sections of its own, and published numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manymax.study.report.drawing import Figure
from manymax.study.report.formats import ReportTable
from manymax.study.report.runs import Trial


@dataclass(frozen=True)
class Card:
    """A statement with its verdict; the rule and the cases that led to the verdict are folded away below it.

    Args:
        title: the statement.
        verdict: "confirmed" and "contradicted" have a colour of their own, any other one stands for open.
        remark: what stands behind the verdict in the same line.
        missing: what a verdict lacks, one line each.
        rule: how the verdict is reached.
        cases: (whose cases these are, the cases); a case says whether it supports the statement, or None for open,
            and why.
    """

    title: str
    verdict: str
    remark: str = ""
    missing: tuple[str, ...] = ()
    rule: str = ""
    cases: tuple[tuple[str, tuple[tuple[bool | None, str], ...]], ...] = ()

    @property
    def count(self) -> int:
        """How many cases there are of the first kind, which are those of the study itself."""
        return len(self.cases[0][1]) if self.cases else 0


@dataclass(frozen=True)
class Section:
    """A part of the page; `missing` says what is not there and what to do about it."""

    id: str
    title: str
    text: str = ""
    cards: tuple[Card, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    missing: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Extra:
    """A section that a caller adds to those of every page.

    Args:
        before: the id of the section that it stands before.
        build: makes it of the trials of the study.
    """

    before: str
    build: Callable[[Sequence[Trial]], Section]


@dataclass(frozen=True)
class Published:
    """Numbers that others have published, to stand beside ours in tables of results.

    Args:
        value: from a trial and the name of a metric to the published number; None where there is none.
        note: says below a table with such numbers where they stand and whose they are.
    """

    value: Callable[[Trial, str], float | None]
    note: str
