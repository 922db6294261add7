"""All printing of the commands: tables are laid out for a terminal, and one line per row in a file or a pipe.

Whatever is printed goes through here, so that control characters in names from data are shown and do nothing.
"""

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
from rich.text import Text

from manymax.study.plain_text import in_lines, in_one_line

UNWRAPPED_WIDTH = 10_000  # characters; wider than any table, so that rich wraps nothing


class PlainConsole(Console):
    """A console that prints strings as they are, with control characters as text."""

    def render_str(self, text: str, **more: Any) -> Text:
        """The text of a string; that of every cell of a table too."""
        return super().render_str(in_lines(text), **more)


def open_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console for stdout or stderr. It knows no markup of rich's, which would eat the brackets of formulas."""
    if not stderr and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where only ASCII is known, a Greek letter becomes a ?
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)


def say(text: str, *, err: bool = False) -> None:
    """Print lines on stdout, or on stderr."""
    typer.echo(in_lines(text), err=err)


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
        made.add_row(*map(in_one_line, row))
    return made


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """An indented list of (name, description) pairs; a long description wraps in its own column."""
    made = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*map(in_one_line, row))
    return made
