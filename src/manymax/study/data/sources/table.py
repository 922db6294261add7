"""Reader of the caller's own tables: CSV, TSV or Parquet, with columns that are named or guessed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.study.data.sources.columns import ROLES, Columns
from manymax.study.data.sources.delimited import SEPARATOR_NAMES, UNREADABLE, LineChecker, open_bytes, read_delimited

# Names of columns by which a role is guessed, preferred ones first; compared by letters and digits, in lower case.
GUESSES = {
    "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid", "sessionid"),
    "item": ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin", "trackid", "locationid", "bookid"),
    "rating": ("rating", "score", "stars", "overall"),
    "time": ("timestamp", "time", "datetime", "date", "ts", "unixreviewtime", "position"),
    "split": ("split",),
}
USUAL_SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".inter": "\t"}  # of texts by suffix; tried first
TABLE_SUFFIXES = (*USUAL_SEPARATORS, ".parquet")


def suffix(path: Path) -> str:
    """The suffix that tells the format, in lower case: `.csv` for ratings.csv and for ratings.csv.gz."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def find(path: Path) -> list[Path] | None:
    """[path] if there is a table at `path`, else None."""
    return [path] if path.is_file() and suffix(path) in TABLE_SUFFIXES else None


def read(paths: Sequence[Path], columns: Mapping[str, str] | None = None) -> Columns:
    """Read a table.

    Args:
        paths: the path of one file.
        columns: {role: name of its column} for some of `ROLES`; the other roles are guessed. If all names are places
            counted from 1 ("1", "2", ...), a text is taken to have no line of names.
    """
    (path,) = paths
    for role in columns or {}:
        check_choice("columns", role, ROLES)
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    return (_read_parquet if suffix(path) == ".parquet" else _read_text)(path, columns or {})


def parse_columns(text: str) -> dict[str, str]:
    """{role: name of its column} from the text of a command-line option.

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
        raise ArgumentError(f"{path.name}, line 1: {error}. Lines must end with \\n or \\r\\n.") from None
    # Numbers that are not names of columns are places: the first line is then an interaction like the others.
    if columns and all(name.isdecimal() and name not in header for name in columns.values()):
        roles = _by_place(columns, len(header), path.name)
        return read_delimited(path, path.name, separator, [str(i + 1) for i in range(len(header))], roles)
    roles = assign(header, columns, f"{path.name}, line 1")
    found = read_delimited(path, path.name, separator, header, roles, skip=1)
    return Columns(found.arrays, found.names, found.file, found.explain, _notes(roles))


def _first_line(path: Path) -> tuple[str, str]:
    """The first line of a text and the separator that it uses."""
    try:
        with open_bytes(path) as stream:
            line = stream.readline()
        first = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        LineChecker(path, path.name, USUAL_SEPARATORS[suffix(path)], [], {}, 0, False).explain()  # names the byte
        raise
    except UNREADABLE as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}. Is it complete?") from None
    usual = USUAL_SEPARATORS[suffix(path)]
    for separator in (usual, *SEPARATOR_NAMES):
        if separator in first:
            return first, separator
    raise ArgumentError(
        f"{path.name}, line 1: expected columns separated by {', '.join(SEPARATOR_NAMES.values())}; got {first[:80]!r}."
    )


def _by_place(columns: Mapping[str, str], count: int, file: str) -> dict[str, str]:
    """Columns that are given by their places in a text without names; its columns are then named "1", "2", ..."""
    for role, place in columns.items():
        if not 1 <= int(place) <= count:
            raise ArgumentError(f"{file}, line 1: `columns` says {role}={place}, but there are {count} columns.")
    _need(columns, [str(i + 1) for i in range(count)], file)
    return {role: str(int(place)) for role, place in columns.items()}


def assign(header: Sequence[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """{role: name of its column}: as `columns` says, and for the other roles guessed from the names of the columns.

    Args:
        header: names of all columns.
        columns: the roles that are given.
        where: the file and line, for messages.

    >>> assign(["userId", "movieId", "rating", "note"], {}, "ratings.csv")
    {'user': 'userId', 'item': 'movieId', 'rating': 'rating'}
    """
    # Both in reverse, so that the first of equal names and the best guess overwrite the others.
    plain = {_plain(name): name for name in reversed(header)}
    roles = {role: plain[guess] for role in ROLES for guess in reversed(GUESSES[role]) if guess in plain}
    for role, name in columns.items():
        if name not in header:
            raise ArgumentError(f"{where}: {unknown_name(f'column for {role}', name, header)}")
    roles = {role: columns.get(role, roles.get(role, "")) for role in ROLES if role in columns or role in roles}
    _need(roles, header, where)
    for role, name in roles.items():
        if list(header).count(name) > 1:
            raise ArgumentError(f"{where}: two columns are called {name!r}, the column of the {role}. Rename one.")
    return roles


def _plain(name: str) -> str:
    """The letters and digits of a name in lower case, without ":type", which RecBole writes after a name."""
    return "".join(filter(str.isalnum, name.partition(":")[0].lower()))


def _need(roles: Mapping[str, str], header: Sequence[str], where: str) -> None:
    """Raise an error if there is no column for the user or the item."""
    for role in ("user", "item"):
        if role not in roles:
            raise ArgumentError(
                f"{where}: no column for the {role} among {', '.join(map(repr, header))}. Name the columns: "
                "--columns user=NAME,item=NAME; in a text without a line of names give their places: --columns "
                "user=1,item=2."
            )


def _notes(roles: Mapping[str, str]) -> tuple[str, ...]:
    # Data sets with a split often number the items of each part from 0: the order across parts is then wrong.
    if "split" in roles and _plain(roles.get("time", "")) == "position":
        return (f"{roles['time']!r} is taken as time; positions may count in each part by themselves",)
    return ()
