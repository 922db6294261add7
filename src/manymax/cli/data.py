"""`manymax data`: which data sets there are, fetching them, preparing them, and what was done to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from manymax.cli import console as look
from manymax.errors import ArgumentError
from manymax.study.data.card import HEADINGS, card_notes, card_rows, read_card
from manymax.study.data.download import Progress as Report
from manymax.study.data.download import get as fetch_all
from manymax.study.data.load import cache
from manymax.study.data.prepare import prepare as prepare_data
from manymax.study.data.prepare import save
from manymax.study.data.sources import SOURCES, Source
from manymax.study.data.sources.table import parse_columns
from manymax.study.data.split import SPLITS

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@data.callback()
def about() -> None:
    """Data sets: list, fetch, prepare, and the card that says what was done.

    \b
    Examples:
      manymax data list
      manymax data prepare planted-tiny
      manymax data card planted
    """


@data.command("list")
def list_sources(json: Json = False) -> None:
    """List the data sets that have a name.

    \b
    Examples:
      manymax data list
      manymax data list --json
    """
    records = [_record(source) for source in SOURCES.values()]
    if json:
        look.put_json(records)
        return
    rows = [
        [source.name, record["status"], ", ".join(source.presets) or "-", source.title]
        for source, record in zip(SOURCES.values(), records, strict=True)
    ]
    console = look.open_console()
    look.put(console, look.table(["name", "status", "presets", "what it is"], rows))
    look.put(console, f"Downloads are kept in {cache()}; $MANYMAX_CACHE names another folder.")
    look.put(console, "Own data: CSV, TSV or Parquet, by path.")


def _record(source: Source) -> dict[str, Any]:
    paths = source.paths(cache())
    there = "built in" if not paths else "here" if all(path.is_file() for path in paths) else "not fetched"
    return {
        "name": source.name,
        "aliases": list(source.aliases),
        "title": source.title,
        "status": there,
        "presets": {name: filters._asdict() for name, filters in source.presets.items()},
        "files": [file.url for file in source.files],
        "terms": source.terms,
        "citation": source.citation,
    }


@data.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `manymax data list`.")],
    folder: Annotated[Path | None, typer.Option(help="Keep the files here and not in the cache.")] = None,
) -> None:
    """Fetch a data set from its publisher; what broke off goes on where it was, what is there is checked.

    \b
    Examples:
      manymax data get ml-1m
    """
    source = SOURCES[name]
    console = look.open_console()
    if not source.files:
        look.put(console, f"{source.name} is made on this machine: there is nothing to fetch.")
        return
    with _progress() as report:
        sentences = fetch_all(source, folder or cache(), report)
    for sentence in sentences:
        look.put(console, sentence)
    look.put(console, f"Terms: {source.terms}")
    look.put(console, f"Please cite: {source.citation}")


@contextmanager
def _progress() -> Iterator[Report]:
    """Bars on stderr, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, markup=False)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield report


@data.command()
def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `manymax data list`, or a file.")],
    path: Annotated[Path | None, typer.Option("--from", help="A file that holds the data set NAME.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Filters as in the paper: paper-table (its table), paper-text (its text).")
    ] = None,
    min_rating: Annotated[float | None, typer.Option(help="Keep interactions with at least this rating.")] = None,
    k_core: Annotated[
        int | None, typer.Option(help="Keep users and items with at least this many interactions.")
    ] = None,
    split: Annotated[str | None, typer.Option(help=f"{', '.join(SPLITS)}; the data's own where it has one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split and of planted data.")] = 0,
    columns: Annotated[
        str | None, typer.Option(help="Columns of an own file: user=..,item=..,rating=..,time=..,split=..")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Of planted data: tiny, small, medium, ml-1m, USERSxITEMSxMEAN.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the prepared table and its card here.")] = None,
    json: Json = False,
) -> None:
    """Filter and split a data set; print its card, and save both.

    \b
    Examples:
      manymax data prepare planted-tiny --k-core 5
      manymax data prepare planted --size 300x200x20 --split leave-one-out --json
    """
    prepared = prepare_data(
        path or name,
        columns=parse_columns(columns) if columns else None,
        preset=preset,
        min_rating=min_rating,
        k_core=k_core,
        split=split,
        seed=seed,
        size=size,
        name=name if path else None,
    )
    saved = save(prepared, out or _prepared(prepared.interactions.name))
    _put_card(prepared.card, json)
    typer.echo(f"saved {saved} and its card", err=json)


@data.command()
def card(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A prepared data set, or the path of its table or card.")],
    json: Json = False,
) -> None:
    """Print the card of a data set that was prepared.

    \b
    Examples:
      manymax data card planted
    """
    named = _prepared(SOURCES[name].name if name in SOURCES else name)
    if not named.is_dir() and not Path(name).exists():
        raise ArgumentError(f"{name!r} has no data card yet: `manymax data prepare {name}` writes one.")
    _put_card(read_card(named if named.is_dir() else Path(name)), json)


def _prepared(name: str) -> Path:
    return cache() / "prepared" / name


def _put_card(steps: list[dict[str, Any]], json: bool) -> None:
    if json:
        look.put_json(steps)
        return
    console = look.open_console()
    look.put(console, look.table(HEADINGS, card_rows(steps)))
    for note in card_notes(steps):
        look.put(console, f"note: {note}")
