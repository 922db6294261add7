"""Own data: CSV, TSV or Parquet, with columns that are named or guessed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.study.data.sources.columns import ROLES, Columns
from manymax.study.data.sources.delimited import SEPARATORS, UNREADABLE, Text, open_bytes, read_delimited

# Names that are understood, the better ones first; letters and digits count, their case does not.
GUESSES = {
    "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid", "sessionid"),
    "item": ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin", "trackid", "locationid", "bookid"),
    "rating": ("rating", "score", "stars", "overall"),
    "time": ("timestamp", "time", "datetime", "date", "ts", "unixreviewtime", "position"),
    "split": ("split",),
}
TEXT = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".inter": "\t"}  # the usual separator of each
SUFFIXES = (*TEXT, ".parquet")


def suffix(path: Path) -> str:
    """The suffix that tells the format: `.csv` of ratings.csv.gz too."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def find(path: Path) -> list[Path] | None:
    """The files of a table at `path`; None if it is something else."""
    return [path] if path.is_file() and suffix(path) in SUFFIXES else None


def read(paths: Sequence[Path], columns: Mapping[str, str] | None = None) -> Columns:
    """Read a table.

    Args:
        paths: of one file.
        columns: {role: name of its column}, roles as in `ROLES`; the other roles are guessed. Where all are positions
            counted from 1, a text is taken to have no header.
    """
    (path,) = paths
    for role in columns or {}:
        check_choice("columns", role, ROLES)
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    return (_read_parquet if suffix(path) == ".parquet" else _read_text)(path, columns or {})


def parse_columns(text: str) -> dict[str, str]:
    """Columns as they are given in a command.

    >>> parse_columns("user=customer,item=sku")
    {'user': 'customer', 'item': 'sku'}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(role.strip() and name.strip() for role, _, name in pairs):
        raise ArgumentError(f"`columns` must look like user=NAME,item=NAME; got {text!r}.")
    return {role.strip(): name.strip() for role, _, name in pairs}


def _read_parquet(path: Path, columns: Mapping[str, str]) -> Columns:
    try:
        roles = assign(parquet.read_schema(path).names, columns, path.name)
        table = parquet.read_table(path, columns=list(dict.fromkeys(roles.values())))
    except (pa.ArrowException, OSError) as error:
        raise ArgumentError(f"{path.name} cannot be read as Parquet: {error}") from None
    return Columns({role: table.column(name) for role, name in roles.items()}, roles, path.name, notes=_notes(roles))


def _read_text(path: Path, columns: Mapping[str, str]) -> Columns:
    first, separator = _first_line(path)
    try:
        header = next(csv.reader([first], delimiter=separator))
    except csv.Error as error:
        raise ArgumentError(f"{path.name}, line 1: {error}. Are its lines ended in the usual way?") from None
    if columns and all(name.isdecimal() and name not in header for name in columns.values()):
        roles = _positions(columns, len(header), path.name)
        return read_delimited(path, path.name, separator, [str(i + 1) for i in range(len(header))], roles)
    roles = assign(header, columns, f"{path.name}, line 1")
    found = read_delimited(path, path.name, separator, header, roles, skip=1)
    return Columns(found.arrays, found.names, found.file, found.explain, _notes(roles))


def _first_line(path: Path) -> tuple[str, str]:
    """The first line and the separator that it uses."""
    try:
        with open_bytes(path) as stream:
            line = stream.readline()
        first = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        Text(path, path.name, TEXT[suffix(path)], [], {}, 0, False).explain()
        raise
    except UNREADABLE as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}. Is it complete?") from None
    usual = TEXT[suffix(path)]
    for separator in (usual, *SEPARATORS):
        if separator in first:
            return first, separator
    raise ArgumentError(
        f"{path.name}, line 1: expected columns separated by {', '.join(SEPARATORS.values())}; got {first[:80]!r}."
    )


def _positions(columns: Mapping[str, str], count: int, file: str) -> dict[str, str]:
    for role, place in columns.items():
        if not 1 <= int(place) <= count:
            raise ArgumentError(f"{file}, line 1: `columns` says {role}={place}, but there are {count} columns.")
    _need(columns, [str(i + 1) for i in range(count)], file)
    return {role: str(int(place)) for role, place in columns.items()}


def assign(header: Sequence[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """Which column has which role: as `columns` says, the rest by their names.

    >>> assign(["userId", "movieId", "rating", "note"], {}, "ratings.csv")
    {'user': 'userId', 'item': 'movieId', 'rating': 'rating'}
    """
    plain = {_plain(name): name for name in reversed(header)}
    roles = {role: plain[guess] for role in ROLES for guess in reversed(GUESSES[role]) if guess in plain}
    for role, name in columns.items():
        if name not in header:
            raise ArgumentError(f"{where}: {unknown_name(f'column for {role}', name, header)}")
    roles = {role: columns.get(role, roles.get(role, "")) for role in ROLES if role in columns or role in roles}
    _need(roles, header, where)
    for role, name in roles.items():
        if list(header).count(name) > 1:
            raise ArgumentError(f"{where}: two columns are called {name!r}, which is the {role}. Rename one.")
    return roles


def _plain(name: str) -> str:
    """Letters and digits of a name; what RecBole writes after a colon is a type."""
    return "".join(filter(str.isalnum, name.partition(":")[0].lower()))


def _need(roles: Mapping[str, str], header: Sequence[str], where: str) -> None:
    for role in ("user", "item"):
        if role not in roles:
            raise ArgumentError(
                f"{where}: no column for the {role} among {', '.join(map(repr, header))}. Name the columns: "
                "--columns user=NAME,item=NAME; in a text without a header by their places: --columns user=1,item=2."
            )


def _notes(roles: Mapping[str, str]) -> tuple[str, ...]:
    if "split" in roles and _plain(roles.get("time", "")) == "position":
        return (f"{roles['time']!r} is taken as time; positions may count in each part by themselves",)
    return ()
