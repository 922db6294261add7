"""`manymax report`: a page, tables and figures from the records of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manymax.study.report import report as write_report


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a study, or of one run.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/report if left out.")] = None,
    images: Annotated[bool, typer.Option(help="Write the figures as PNG and SVG too.")] = True,
) -> None:
    """Write the report of a study: one page that needs no network, tables and figures.

    Tables are written as Markdown, CSV and LaTeX. Only records are read, so it can be done anywhere, at any time.

    \b
    Examples:
      manymax report studies/quick
      manymax report runs --out report --no-images
    """
    typer.echo(f"report: {write_report(folder, out, images=images).resolve()}")
