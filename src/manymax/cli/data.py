"""`manymax data`: list data sets, fetch them, filter and split them, and print what was done."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from manymax.cli import console as display
from manymax.errors import ArgumentError
from manymax.study.data.card import CARD_HEADERS, CARD_SUFFIX, card_notes, card_rows, read_card
from manymax.study.data.download import Progress as ProgressCallback
from manymax.study.data.download import get as fetch_all
from manymax.study.data.load import cache, data_name
from manymax.study.data.prepare import prepare as prepare_data
from manymax.study.data.prepare import save
from manymax.study.data.sources import SOURCES, Source
from manymax.study.data.sources.table import parse_columns
from manymax.study.data.split import SPLITS
from manymax.study.plain_text import in_one_line

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print the same as JSON, for programs.")]


@data.callback()
def about() -> None:
    """List, fetch and prepare data sets.

    Training needs none of this for built-in data. Use it to download a public data set, or to see how many users, items
    and interactions filters leave before you train on a file of your own.

    \b
    Examples:
      manymax data list
      manymax data prepare planted-tiny
      manymax data card planted
    """


@data.command("list")
def list_sources(json: Json = False) -> None:
    """List the data sets that have a name.

    The column `status` says whether a data set is already on this machine. The names are what `manymax data get`,
    `manymax data prepare` and `--data` of `manymax train` take.

    \b
    Examples:
      manymax data list
      manymax data list --json
    """
    if json:
        display.put_json([_source_as_json(source) for source in SOURCES.values()])
        return
    rows = [
        [source.name, _status(source), ", ".join(source.presets) or "-", source.title] for source in SOURCES.values()
    ]
    console = display.open_console()
    display.put(console, display.table(["name", "status", "presets", "what it is"], rows))
    display.put(console, f"Downloads are kept in {cache()}; set $MANYMAX_CACHE to keep them in another folder.")
    display.put(console, "For your own data give the path of a CSV, TSV, JSON lines or Parquet file instead of a name.")


def _status(source: Source) -> str:
    paths = source.paths(cache())
    if not paths:
        return "built in"
    return "here" if all(path.is_file() for path in paths) else "not fetched"


def _source_as_json(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "aliases": list(source.aliases),
        "title": source.title,
        "status": _status(source),
        "presets": {name: filters._asdict() for name, filters in source.presets.items()},
        "files": [file.url for file in source.files],
        "terms": source.terms,
        "citation": source.citation,
    }


@data.command()
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `manymax data list`.")],
    folder: Annotated[Path | None, typer.Option(help="Keep the files in this folder instead of the cache.")] = None,
) -> None:
    """Download a data set from its publisher.

    Use it once before training on one of the public data sets. A download that was interrupted goes on where it
    stopped, and files that are already there are checked, not fetched again. The terms of use and the citation are
    printed.

    \b
    Examples:
      manymax data get ml-1m
    """
    source = SOURCES[name]
    console = display.open_console()
    if not source.files:
        display.put(console, f"{source.name} is made on this machine: there is nothing to fetch.")
        return
    with _progress() as report:
        sentences = fetch_all(source, folder or cache(), report)
    for sentence in sentences:
        display.put(console, sentence)
    display.put(console, f"Terms: {source.terms}")
    display.put(console, f"Please cite: {source.citation}")


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Progress bars on stderr, if that is a terminal; yields the callback that moves them."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = display.open_console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(in_one_line(file), total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield report


@data.command()
def prepare(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A data set of `manymax data list`, or the path of a file.")
    ],
    path: Annotated[
        Path | None, typer.Option("--from", help="A file that holds the data set NAME, if it is not in the cache.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Filters of the paper: paper-table (those behind its table) or paper-text (those in its text)."
        ),
    ] = None,
    min_rating: Annotated[float | None, typer.Option(help="Keep interactions with at least this rating.")] = None,
    k_core: Annotated[
        int | None,
        typer.Option(help="Keep users and items with at least this many interactions, repeatedly until none is below."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help=f"How to hold out test items: {', '.join(SPLITS)}. [default: given, else ratio]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of planted data.")] = 0,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of your own file: user=..,item=..,rating=..,time=..,split=..,title=..; what is left out is "
            "guessed, and none (time=none) leaves out one that would be."
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of your own file: latin-1, cp1252, utf-16, ...; UTF-8 if left out.")
    ] = None,
    date_format: Annotated[
        str | None, typer.Option(help="How your own file writes times, such as '%m/%d/%Y %H:%M'.")
    ] = None,
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Leave out rows without a user, an item or another value.")
    ] = False,
    size: Annotated[
        str | None, typer.Option(help="Size of planted data: tiny, small, medium, ml-1m or USERSxITEMSxMEAN.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the prepared table and its card; in the cache if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Filter and split a data set, and save it.

    The card that is printed and saved says what each step left. Use it to see what filters and a split do to your data
    before you train. `manymax train` and `manymax study` take the same options and prepare the data themselves, so that
    nothing has to be prepared in advance.

    \b
    Examples:
      manymax data prepare planted-tiny --k-core 5
      manymax data prepare planted --size 300x200x20 --split leave-one-out --json
    """
    prepared = prepare_data(
        path or name,
        columns=parse_columns(columns) if columns else None,
        encoding=encoding,
        date_format=date_format,
        drop_missing=drop_missing,
        preset=preset,
        min_rating=min_rating,
        k_core=k_core,
        split=split,
        seed=seed,
        size=size,
        name=name if path else None,
    )
    saved = save(prepared, out or _prepared_folder(prepared.interactions.name, None if path else name))
    _put_card(prepared.card, json)
    display.say(f"saved {saved} and its card", err=json)


@data.command()
def card(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A data set that was prepared, or the path of its table or card.")
    ],
    json: Json = False,
) -> None:
    """Print the card of a prepared data set.

    The card has the users, items and interactions after each step of the preparation. Use it to look up later how a
    data set was filtered and split.

    \b
    Examples:
      manymax data card planted
    """
    _put_card(read_card(_place_of_card(name)), json)


def _place_of_card(name: str) -> Path:
    """The folder or file that holds the card which is meant by a name or a path."""
    known = SOURCES[name].name if name in SOURCES else name
    path = Path(name)
    if not path.is_dir() and path.exists() and not name.endswith(CARD_SUFFIX):
        own = _prepared_folder(data_name(path), name)
        return own if own.is_dir() and not path.with_name(f"{path.stem}{CARD_SUFFIX}").exists() else path
    # A name may be that of a folder here and of prepared data: the latter is meant, if there is any.
    named = _prepared_folder(known)
    found = [named] if named.is_dir() else sorted((cache() / "prepared").glob(f"{glob.escape(known)}-{'[0-9a-f]' * 8}"))
    if len(found) > 1:
        cards = ", ".join(str(folder / f"{known}{CARD_SUFFIX}") for folder in found)
        raise ArgumentError(f"several files called {known!r} have a card: give the path of one, or of a card: {cards}.")
    if not found and not path.exists():
        raise ArgumentError(f"{name!r} has no data card yet: `manymax data prepare {name}` writes one.")
    return found[0] if found else path


def _prepared_folder(name: str, data: str | None = None) -> Path:
    """The folder in the cache for prepared data.

    Args:
        name: of the data set.
        data: the path that it was read from, if it was: two files of one name have folders of their own.
    """
    own_file = data is not None and data not in SOURCES and Path(data).exists()
    ending = f"-{hashlib.sha256(str(Path(data).resolve()).encode()).hexdigest()[:8]}" if data and own_file else ""
    return cache() / "prepared" / f"{name}{ending}"


def _put_card(steps: list[dict[str, Any]], json: bool) -> None:
    if json:
        display.put_json(steps)
        return
    console = display.open_console()
    display.put(console, display.table(CARD_HEADERS, card_rows(steps)))
    for note in card_notes(steps):
        display.put(console, f"note: {note}")
