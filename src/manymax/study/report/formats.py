"""A table of results, and how it is written: Markdown, CSV, LaTeX. (HTML is in the page's template.)"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "\n": " ",
    }
)
_MARKDOWN = str.maketrans({**{sign: f"\\{sign}" for sign in "\\`*_[]<>|"}, "\n": " "})


@dataclass(frozen=True)
class Cell:
    """A number with its spread over seeds, or a text.

    `best` marks the best of a method, `overall` the best of a column; `paper` is a number that some paper
    prints for the same settings; the cell reaches over `span` columns.
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
        spread = "" if self.spread is None else f" ± {figure(self.spread, self.digits)}"
        return figure(self.value, self.digits) + spread


@dataclass(frozen=True)
class ReportTable:
    """Rows under columns, whose headings have one level or several: ("ml-1m", "lr=0.001").

    Args:
        name: of its files.
        headers: headings of the leading columns, which hold names.
        columns: the other columns, a tuple of headings each.
        rows: (names, cells); the spans of the cells of a row add up to the number of columns.
    """

    name: str
    title: str
    headers: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
    note: str = ""

    def levels(self) -> list[list[tuple[str, int]]]:
        """Lines of headings, top first, each a list of (heading, number of columns below it)."""
        depth = max((len(column) for column in self.columns), default=1)
        lines = []
        for level in range(depth):
            groups = groupby(self.columns, key=lambda column: column[: level + 1])
            lines.append([(path[level] if level < len(path) else "", len(list(group))) for path, group in groups])
        return lines

    def heights(self) -> list[int]:
        """Over how many rows the first name of each row reaches; 0 where the row above has it."""
        names = [names[:1] for names, _ in self.rows]
        found: list[int] = []
        for _, group in groupby(names):
            length = len(list(group))
            found += [length, *[0] * (length - 1)]
        return found


def figure(value: float, digits: int = 4) -> str:
    """A number for a table.

    >>> figure(0.26614), figure(12.5, 1), figure(float("nan"))
    ('0.2661', '12.5', '-')
    """
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def escape(text: str) -> str:
    """Text as Markdown shows it, in one line."""
    return text.translate(_MARKDOWN)


def markdown(table: ReportTable) -> str:
    """GitHub's Markdown: **best of a method**, ***best of a column***, (a paper's number)."""
    headers = [*table.headers, *(" ".join(column) for column in table.columns)]
    lines = [[escape(head) for head in headers], ["---"] * len(headers)]
    for names, cells in table.rows:
        lines.append([*(escape(name) for name in names), *_spread_out(map(_markdown_cell, cells), cells, "")])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"\n\n{escape(table.note)}" if table.note else ""
    return f"## {escape(table.title)}\n\n{body}{note}\n"


def _markdown_cell(cell: Cell) -> str:
    stars = "***" if cell.overall else "**" if cell.best else ""
    paper = "" if cell.paper is None else f" ({figure(cell.paper, cell.digits)})"
    return f"{stars}{escape(str(cell))}{stars}{paper}"


def comma_separated(table: ReportTable) -> str:
    """CSV with full precision: a column for the mean, and further ones for spread and paper where there are any."""
    sides = [
        side for side in ("spread", "paper") if any(getattr(c, side) is not None for _, cs in table.rows for c in cs)
    ]
    headers = [" ".join((*column, side)).strip() for column in table.columns for side in ("", *sides)]
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow([*table.headers, *headers])
    for names, cells in table.rows:
        groups = ([cell.text if cell.value is None else repr(cell.value), *_sides(cell, sides)] for cell in cells)
        padded = _spread_out(groups, cells, [""] * (1 + len(sides)))
        write.writerow([*map(_no_formula, names), *(text for group in padded for text in group)])
    return out.getvalue()


def _sides(cell: Cell, sides: Iterable[str]) -> list[str]:
    values = (getattr(cell, side) for side in sides)
    return ["" if value is None else repr(value) for value in values]


def _no_formula(text: str) -> str:
    """Spreadsheets run what begins with these signs."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def latex(table: ReportTable) -> str:
    """A `tabular` for booktabs and xcolor: bold for the best of a method, blue for the best of a column."""
    last = max((level for level, _ in enumerate(table.levels())), default=0)
    lines = []
    for level, headings in enumerate(table.levels()):
        names = table.headers if level == last else [""] * len(table.headers)
        lines.append(
            [*(name.translate(LATEX) for name in names), *(_latex_span(h.translate(LATEX), n) for h, n in headings)]
        )
    head = " \\\\\n".join(" & ".join(line) for line in lines)
    body = " \\\\\n".join(
        " & ".join([*(n.translate(LATEX) for n in names), *map(_latex_cell, cells)]) for names, cells in table.rows
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
    text = str(cell).translate(LATEX)
    if cell.best or cell.overall:
        text = f"\\textbf{{{text}}}"
    if cell.overall:
        text = f"\\textcolor{{blue}}{{{text}}}"
    return _latex_span(text, cell.span)


def _latex_span(text: str, span: int) -> str:
    return text if span == 1 else f"\\multicolumn{{{span}}}{{c}}{{{text}}}"


def _spread_out(texts: Iterable[T], cells: Sequence[Cell], blank: T) -> Iterator[T]:
    """One text a column: a cell over several columns fills the first of them."""
    for text, cell in zip(texts, cells, strict=True):
        yield text
        yield from [blank] * (cell.span - 1)


FORMATS = {"md": markdown, "csv": comma_separated, "tex": latex}
