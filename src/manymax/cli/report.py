"""`manymax report`: write a page, tables and figures from the records of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manymax.cli.console import say
from manymax.study.report import page as report_page
from manymax.study.report.runs import read_study
from manymax.study.report.sinks import to_mlflow, to_tensorboard


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a study or of a single run, or a file of kept runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; if left out FOLDER/report, or NAME_report for a file.")
    ] = None,
    images: Annotated[bool, typer.Option(help="Also write the figures as PNG and SVG files.")] = True,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write the runs into this folder, for TensorBoard.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="Also log the runs to this MLflow server.")] = None,
) -> None:
    """Write the report of a study: a page, tables and figures.

    The page is one HTML file that needs no network; tables are also written as Markdown, CSV and LaTeX. `manymax study`
    does this at its end. Use this command to write the page again, while runs are still under way, for runs of `manymax
    train`, or on another machine: only the records are read, never models or data.

    \b
    Examples:
      manymax report studies/quick
      manymax report runs --out report --no-images
      manymax report studies/quick --tensorboard logs
    """
    if tensorboard is not None:
        say(f"tensorboard: {to_tensorboard(read_study(folder), tensorboard)} new runs in {tensorboard}")
    if mlflow is not None:
        say(f"mlflow: {to_mlflow(read_study(folder), mlflow)} new runs in {mlflow}")
    page = write_report(folder, out, images=images)
    say(f"report: {page.resolve()}")


def write_report(folder: Path, out: Path | None = None, *, images: bool = True) -> Path:
    """Write the page of a study with the sections on the paper's findings and numbers; returns the path of the page.

    The report package knows nothing of the paper, so its sections and numbers are handed over here.
    """
    from manymax.paper.page_sections import (  # only a page needs it, not the command line
        PAPER_SECTIONS,
        PUBLISHED_NUMBERS,
    )

    return report_page.report(folder, out, images=images, extra=PAPER_SECTIONS, published=PUBLISHED_NUMBERS)
