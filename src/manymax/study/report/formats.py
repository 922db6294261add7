"""`ReportTable`, a table of results, and its text as Markdown, CSV and LaTeX (page.html has the HTML)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from manymax.study.plain_text import in_lines

T = TypeVar("T")

LATEX_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "\n": " ",
    }
)
MARKDOWN_ESCAPES = str.maketrans({**{sign: f"\\{sign}" for sign in "\\`*_[]<>|"}, "\n": " "})


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a number, perhaps with its spread over seeds, or a text.

    Args:
        value: the number; None for a cell with text.
        spread: its standard deviation over seeds.
        text: what is shown where there is no number.
        best: whether it is the best of its method, printed in bold.
        overall: whether it is the best of all methods, printed in blue.
        paper: the number that a paper prints for the same settings.
        span: how many columns the cell reaches over.
        digits: digits after the decimal point.
    """

    value: float | None = None
    spread: float | None = None
    text: str = ""
    best: bool = False
    overall: bool = False
    paper: float | None = None
    span: int = 1
    digits: int = 4

    def __str__(self) -> str:
        if self.value is None:
            return self.text
        spread = "" if self.spread is None else f" ± {number_text(self.spread, self.digits)}"
        return number_text(self.value, self.digits) + spread


@dataclass(frozen=True)
class ReportTable:
    """A table whose leading columns hold names and whose other columns hold cells.

    Args:
        name: what its files are called, without a suffix.
        title: the line above the table.
        headers: headers of the leading columns.
        columns: headers of the other columns; each is a tuple with one entry per level, like ("ml-1m", "lr=0.001").
        rows: (names, cells) of each row; the spans of the cells add up to the number of columns.
        note: the sentences below the table.
    """

    name: str
    title: str
    headers: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
    note: str = ""

    def levels(self) -> list[list[tuple[str, int]]]:
        """The lines of column headers, top first, each a list of (header, number of columns below it)."""
        depth = max((len(column) for column in self.columns), default=1)
        lines = []
        for level in range(depth):
            groups = groupby(self.columns, key=lambda column: column[: level + 1])
            lines.append([(path[level] if level < len(path) else "", len(list(group))) for path, group in groups])
        return lines

    def heights(self) -> list[int]:
        """For each row, over how many rows its first name reaches; 0 where it continues the row above."""
        names = [names[:1] for names, _ in self.rows]
        found: list[int] = []
        for _, group in groupby(names):
            length = len(list(group))
            found += [length, *[0] * (length - 1)]
        return found


def number_text(value: float, digits: int = 4) -> str:
    """A number as a table shows it; a dash for nan and infinity.

    >>> number_text(0.26614), number_text(12.5, 1), number_text(float("nan"))
    ('0.2661', '12.5', '-')
    """
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def escape(text: str) -> str:
    """`text` in one line, with control characters as text and the signs escaped that Markdown takes for formatting."""
    return in_lines(text).translate(MARKDOWN_ESCAPES)


def markdown(table: ReportTable) -> str:
    """The table as GitHub's Markdown: **best of a method**, ***best of a data set***, (a paper's number)."""
    headers = [*table.headers, *(" ".join(column) for column in table.columns)]
    lines = [[escape(head) for head in headers], ["---"] * len(headers)]
    for names, cells in table.rows:
        lines.append([*(escape(name) for name in names), *_spread_out(map(_markdown_cell, cells), cells, "")])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"\n\n{escape(table.note)}" if table.note else ""
    return f"## {escape(table.title)}\n\n{body}{note}\n"


def _markdown_cell(cell: Cell) -> str:
    stars = "***" if cell.overall else "**" if cell.best else ""
    paper = "" if cell.paper is None else f" ({number_text(cell.paper, cell.digits)})"
    return f"{stars}{escape(str(cell))}{stars}{paper}"


def comma_separated(table: ReportTable) -> str:
    """The table as CSV with full precision, each column followed by one for the spread and one for the paper's number.

    These further columns are left out where no cell of the table has such a number.
    """
    extras = [
        extra for extra in ("spread", "paper") if any(getattr(c, extra) is not None for _, cs in table.rows for c in cs)
    ]
    headers = [" ".join((*column, extra)).strip() for column in table.columns for extra in ("", *extras)]
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow([*table.headers, *headers])
    for names, cells in table.rows:
        groups = ([cell.text if cell.value is None else repr(cell.value), *_extras(cell, extras)] for cell in cells)
        padded = _spread_out(groups, cells, [""] * (1 + len(extras)))
        write.writerow([*map(_no_formula, names), *(text for group in padded for text in group)])
    return out.getvalue()


def _extras(cell: Cell, extras: Iterable[str]) -> list[str]:
    values = (getattr(cell, extra) for extra in extras)
    return ["" if value is None else repr(value) for value in values]


def _no_formula(text: str) -> str:
    """`text`, quoted if a spreadsheet would run it as a formula: names come from data, which may be hostile."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def latex(table: ReportTable) -> str:
    """The table as a LaTeX `tabular` (booktabs, xcolor): bold is the best of a method, blue that of a data set."""
    last = max((level for level, _ in enumerate(table.levels())), default=0)
    lines = []
    for level, headers in enumerate(table.levels()):
        names = table.headers if level == last else [""] * len(table.headers)
        lines.append(
            [
                *(name.translate(LATEX_ESCAPES) for name in names),
                *(_latex_span(h.translate(LATEX_ESCAPES), n) for h, n in headers),
            ]
        )
    head = " \\\\\n".join(" & ".join(line) for line in lines)
    body = " \\\\\n".join(
        " & ".join([*(n.translate(LATEX_ESCAPES) for n in names), *map(_latex_cell, cells)])
        for names, cells in table.rows
    )
    shape = "l" * len(table.headers) + "c" * len(table.columns)
    return "\n".join(
        [
            f"% {table.title}".replace("\n", " "),
            f"\\begin{{tabular}}{{{shape}}}",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
            *([f"{body} \\\\"] if table.rows else []),
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _latex_cell(cell: Cell) -> str:
    text = str(cell).translate(LATEX_ESCAPES)
    if cell.best or cell.overall:
        text = f"\\textbf{{{text}}}"
    if cell.overall:
        text = f"\\textcolor{{blue}}{{{text}}}"
    return _latex_span(text, cell.span)


def _latex_span(text: str, span: int) -> str:
    return text if span == 1 else f"\\multicolumn{{{span}}}{{c}}{{{text}}}"


def _spread_out(texts: Iterable[T], cells: Sequence[Cell], blank: T) -> Iterator[T]:
    """One text per column: a cell that reaches over several columns fills the first, and the others get `blank`."""
    for text, cell in zip(texts, cells, strict=True):
        yield text
        yield from [blank] * (cell.span - 1)


TABLE_WRITERS = {"md": markdown, "csv": comma_separated, "tex": latex}
