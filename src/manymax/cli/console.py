"""How things look in a terminal, and as plain text where there is none."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000  # columns


def open_console() -> Console:
    """A console for stdout that prints text as it is: formulas are full of brackets and colons."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where only ASCII is known, a Greek letter becomes a ?
    return Console(markup=False, emoji=False, highlight=False)


def natural_width(console: Console, renderable: RenderableType) -> int:
    """The columns that `renderable` takes when nothing is wrapped."""
    return Measurement.get(console, console.options.update(max_width=UNBOUNDED), renderable).maximum


def put(console: Console, renderable: RenderableType) -> None:
    """Print; where there is no terminal, nothing is wrapped or padded: a row stays one line."""
    if console.is_terminal:
        console.print(renderable)
        return
    console.width = natural_width(console, renderable)
    with console.capture() as captured:
        console.print(renderable)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def put_json(content: Any) -> None:
    """Print for machines."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table with one line of headings."""
    look = Table(*headings, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for row in rows:
        look.add_row(*row)
    return look


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is said of them, indented; long text wraps in its own column."""
    look = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    look.add_column(style="bold", no_wrap=True)
    look.add_column(overflow="fold")
    for row in rows:
        look.add_row(*row)
    return look
