"""`manymax records` and `manymax reproduction`: keep the records of runs, and write the page that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manymax.errors import ArgumentError
from manymax.paper import reproduction as pages
from manymax.study.report import collect


def records(
    folders: Annotated[list[Path], typer.Argument(help="Folders of studies or of runs.")],
    into: Annotated[Path, typer.Option(help="Where the copies go, such as results/study/NAME.")],
) -> None:
    """Copy the records and curves of finished runs: no weights, no users, no paths of this machine."""
    copies = collect.collect(folders, into)
    typer.echo(f"{len(copies)} runs in {into}")


def reproduction(
    root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path(),
    runs: Annotated[list[Path] | None, typer.Option(help="Original runs, to judge the findings anew.")] = None,
) -> None:
    """Write docs/reproduction.md and its figures from results/study.

    The findings need tests over users, whose rows are not among the records: name the folders of the original runs
    by --runs when records have been added. What earlier tests said of other runs is kept.
    """
    if not (root / "docs").is_dir():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with docs in it; got {str(root)!r}.")
    for path in pages.write(root, runs or ()):
        typer.echo(f"wrote {path.relative_to(root)}")
