"""Printing of tables and JSON: laid out for a terminal, one line per row where the output goes to a file or a pipe."""

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

UNWRAPPED_WIDTH = 10_000  # characters; wider than any table, so that rich wraps nothing


def open_console() -> Console:
    """A console for stdout. It prints text as it is, because rich's markup would eat the brackets of formulas."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where only ASCII is known, a Greek letter becomes a ?
    return Console(markup=False, emoji=False, highlight=False)


def natural_width(console: Console, renderable: RenderableType) -> int:
    """Width in characters that `renderable` takes when nothing is wrapped."""
    return Measurement.get(console, console.options.update(max_width=UNWRAPPED_WIDTH), renderable).maximum


def put(console: Console, renderable: RenderableType) -> None:
    """Print a text or a table; outside of a terminal nothing is wrapped or padded, so that a row stays one line."""
    if console.is_terminal:
        console.print(renderable)
        return
    console.width = natural_width(console, renderable)
    with console.capture() as captured:
        console.print(renderable)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def put_json(content: Any) -> None:
    """Print `content` as JSON, for programs."""
    typer.echo(json.dumps(content, indent=2, allow_nan=False))


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table with one line of headers."""
    made = Table(*headers, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """An indented list of (name, description) pairs; a long description wraps in its own column."""
    made = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
