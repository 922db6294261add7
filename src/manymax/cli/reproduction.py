"""`manymax records`, `reproduction` and `public`: keep the records of runs, and write the pages made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manymax.cli.console import say
from manymax.errors import ArgumentError
from manymax.study.report import collect


def records(
    folders: Annotated[list[Path], typer.Argument(help="Folders of studies or of runs, or files of kept runs.")],
    into: Annotated[Path, typer.Option(help="The file that they are added to, such as results/study/NAME.jsonl.")],
    without_curves: Annotated[
        bool, typer.Option("--without-curves", help="Keep outcomes alone; for the many trials of a search.")
    ] = False,
) -> None:
    """Add the records and curves of finished runs to a file that can be published.

    The file has one JSON line per run, without weights, users and paths of this machine; results/README.md describes
    it. A run of the same settings that is in the file already is replaced. Runs that were stopped or failed are left
    out.

    \b
    Examples:
      manymax records studies/mine --into results/study/mine.jsonl
      manymax report results/study/mine.jsonl
    """
    done = collect.collect(folders, into, curves=not without_curves)
    left_out = f"; {done.left_out} left out, which have not ended" if done.left_out else ""
    say(
        f"{len(done.kept)} runs in {into}: {len(done.new)} new, {len(done.replaced)} replaced{left_out}."
        f" The file holds {done.total}."
    )


def reproduction(
    root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path(),
    runs: Annotated[
        list[Path] | None, typer.Option(help="Folder with original runs, to decide the findings anew.")
    ] = None,
) -> None:
    """Write docs/reproduction.md and its figures from results/study.

    The paper's findings are decided by tests over users, who are not kept with the records. After adding records, name
    the folders of the original runs with --runs; what earlier tests said of other runs is kept.

    \b
    Examples:
      manymax reproduction
      manymax reproduction --runs studies/mine
    """
    if not (root / "docs").is_dir():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with docs in it; got {str(root)!r}.")
    from manymax.paper.reproduction import write  # draws figures; other commands need not wait for its import

    for path in write(root, runs or ()):
        say(f"wrote {path.relative_to(root)}")


def public(
    root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path(),
    runs: Annotated[
        list[Path] | None, typer.Option(help="Folder with original runs, to compare rows user by user anew.")
    ] = None,
) -> None:
    """Write docs/public_benchmark.md from results/public.

    Intervals need the test metrics of every user, who are not kept with the records. After adding records, name the
    folders of the original runs with --runs.

    \b
    Examples:
      manymax public
      manymax public --runs studies/irb_health
    """
    if not (root / "docs").is_dir():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with docs in it; got {str(root)!r}.")
    from manymax.paper.public import write  # reads all records; other commands need not wait for its import

    for path in write(root, runs or ()):
        say(f"wrote {path.relative_to(root)}")
