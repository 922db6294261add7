"""`manymax report`: a page, tables and figures from the records of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manymax.paper.page_sections import EXTRA, PUBLISHED
from manymax.study.report.page import report as write_report
from manymax.study.report.runs import read_study
from manymax.study.report.sinks import to_mlflow, to_tensorboard


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a study, or of one run.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/report if left out.")] = None,
    images: Annotated[bool, typer.Option(help="Write the figures as PNG and SVG too.")] = True,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write the runs for TensorBoard into this folder too.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="Log the runs to this MLflow server too.")] = None,
) -> None:
    """Write the report of a study: one page that needs no network, tables and figures.

    Tables are written as Markdown, CSV and LaTeX. Only records are read, so it can be done anywhere, at any time.

    \b
    Examples:
      manymax report studies/quick
      manymax report runs --out report --no-images
      manymax report studies/quick --tensorboard logs
    """
    if tensorboard is not None:
        typer.echo(f"tensorboard: {to_tensorboard(read_study(folder), tensorboard)} new runs in {tensorboard}")
    if mlflow is not None:
        typer.echo(f"mlflow: {to_mlflow(read_study(folder), mlflow)} new runs in {mlflow}")
    page = write_report(folder, out, images=images, extra=EXTRA, published=PUBLISHED)
    typer.echo(f"report: {page.resolve()}")
