"""Reader of the caller's own tables: CSV, TSV, JSON lines or Parquet, with columns that are named or guessed."""

from __future__ import annotations

import codecs
import contextlib
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from manymax.errors import ArgumentError, check_choice, unknown_name
from manymax.study.data.sources.columns import NONE, ROLES, Columns, offer
from manymax.study.data.sources.delimited import (
    SEPARATOR_NAMES,
    is_utf8,
    not_utf8,
    read_delimited,
    text_lines,
)
from manymax.study.data.sources.json_lines import first_objects, read_json_lines
from manymax.study.data.sources.packed import UNREADABLE
from manymax.study.data.sources.times import is_format

# Names of columns by which a role is guessed, preferred ones first; compared by letters and digits, in lower case.
GUESSES = {
    "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid", "sessionid"),
    "item": (
        *("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin", "trackid", "locationid", "bookid"),
        *("sku", "stockcode", "articleid", "productcode"),
    ),
    "rating": ("rating", "score", "stars", "overall"),
    "time": (
        *("timestamp", "time", "datetime", "date", "ts", "unixreviewtime", "position"),
        *("invoicedate", "orderdate", "purchasedate", "eventtime", "createdat"),
    ),
    "split": ("split",),
    "title": ("itemtitle", "itemname", "producttitle", "productname", "movietitle", "booktitle"),
}
USUAL_SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t", ".inter": "\t"}  # of texts by suffix; tried first
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TABLE_SUFFIXES = (*USUAL_SEPARATORS, *JSON_SUFFIXES, ".parquet")


@dataclass(frozen=True)
class TableOptions:
    """How the caller's own table is to be read.

    columns: {role: name of its column} for some of `ROLES`; the other roles are guessed. "none" leaves a role out. If
        all names are places counted from 1 ("1", "2", ...), a text is taken to have no line of names.
    encoding: of a text; None for UTF-8.
    date_format: how times are written that are text, in the letters of `datetime.strptime`; None for ISO dates.
    """

    columns: Mapping[str, str] | None = None
    encoding: str | None = None
    date_format: str | None = None

    def __post_init__(self) -> None:
        for role in self.columns or {}:
            check_choice("columns", role, ROLES)
        if self.encoding is not None:
            try:
                name = codecs.lookup(self.encoding).name
            except LookupError:
                raise ArgumentError(
                    "`encoding` must be one that Python knows, such as latin-1, cp1252 or utf-16; got "
                    f"{self.encoding!r}."
                ) from None
            # Arrow's reader takes away the mark at the beginning of UTF-8 by itself.
            object.__setattr__(self, "encoding", None if name in ("utf-8", "utf-8-sig") else name)
        if self.date_format is not None and not is_format(self.date_format):
            raise ArgumentError(
                "`date_format` must be made of the letters of Python's strptime, such as '%m/%d/%Y %H:%M' for "
                f"12/31/2010 8:26; got {self.date_format!r}."
            )

    @property
    def given(self) -> list[str]:
        """The names of the options that are set."""
        return [name for name in ("columns", "encoding", "date_format") if getattr(self, name)]


def suffix(path: Path) -> str:
    """The suffix that tells the format, in lower case: `.csv` for ratings.csv and for ratings.csv.gz."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def find(path: Path) -> list[Path] | None:
    """[path] if there is a table at `path`, else None."""
    return [path] if path.is_file() and suffix(path) in TABLE_SUFFIXES else None


def read(paths: Sequence[Path], options: TableOptions = TableOptions()) -> Columns:  # noqa: B008 (it is frozen)
    """Read a table, which is one file."""
    (path,) = paths
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    kind = suffix(path)
    if kind == ".parquet":
        return _read_parquet(path, options)
    return (_read_json if kind in JSON_SUFFIXES else _read_text)(path, options)


def parse_columns(text: str) -> dict[str, str]:
    """{role: name of its column} from the text of a command-line option.

    >>> parse_columns("user=customer,item=sku")
    {'user': 'customer', 'item': 'sku'}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(role.strip() and name.strip() for role, _, name in pairs):
        raise ArgumentError(f"`columns` must look like user=NAME,item=NAME; got {text!r}.")
    return {role.strip(): name.strip() for role, _, name in pairs}


def _read_parquet(path: Path, options: TableOptions) -> Columns:
    if options.encoding is not None:
        raise ArgumentError(f"`encoding` is for text, and {path.name} is Parquet, whose text is UTF-8. Leave it out.")
    try:
        roles = assign(parquet.read_schema(path).names, options.columns or {}, path.name)
        table = parquet.read_table(path, columns=list(dict.fromkeys(roles.values())))
    except (pa.ArrowException, OSError) as error:
        raise ArgumentError(f"{path.name} cannot be read as Parquet: {error}") from None
    arrays = {role: table.column(name) for role, name in roles.items()}
    return Columns(arrays, roles, path.name, notes=_notes(roles, options), date_format=options.date_format)


def _read_json(path: Path, options: TableOptions) -> Columns:
    names = dict.fromkeys(name for each in first_objects(path, options.encoding) for name in each)
    roles = assign(list(names), options.columns or {}, path.name)
    found = read_json_lines(path, roles, options.encoding, options.date_format)
    return replace(found, notes=_notes(roles, options))


def _read_text(path: Path, options: TableOptions) -> Columns:
    columns = options.columns or {}
    first, separator = _first_line(path, options.encoding)
    try:
        header = next(csv.reader([first], delimiter=separator))
    except csv.Error as error:
        raise ArgumentError(f"{path.name}, line 1: {error}. Lines must end with \\n or \\r\\n.") from None
    named = {role: name for role, name in columns.items() if name != NONE or NONE in header}
    # Numbers that are not names of columns are places: the first line is then an interaction like the others.
    by_place = bool(named) and all(name.isdecimal() and name not in header for name in named.values())
    if by_place:
        roles = _by_place(named, len(header), path.name)
        header = [str(i + 1) for i in range(len(header))]
    else:
        roles = assign(header, columns, f"{path.name}, line 1")
    found = read_delimited(
        path,
        path.name,
        separator,
        header,
        roles,
        skip=0 if by_place else 1,
        encoding=options.encoding,
        date_format=options.date_format,
    )
    return replace(found, notes=_notes(roles, options))


def _first_line(path: Path, encoding: str | None) -> tuple[str, str]:
    """The first line of a text and the separator that it uses."""
    try:
        with contextlib.closing(text_lines(path, path.name, encoding)) as lines:
            first = next(lines, "").rstrip("\r\n")
    except UNREADABLE as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}. Is it complete?") from None
    if not is_utf8(first):
        raise ArgumentError(f"{path.name}, line 1: {not_utf8(first)}")
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
        if name == NONE and NONE not in header:
            roles.pop(role, None)
        elif name not in header:
            raise ArgumentError(f"{where}: {unknown_name(f'column for {role}', name, header)}")
        else:
            roles[role] = name
    roles = {role: roles[role] for role in ROLES if role in roles}
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
                f"{offer('columns', 'user=NAME,item=NAME')}; in a text without a line of names give their places: "
                "--columns user=1,item=2."
            )


def _notes(roles: Mapping[str, str], options: TableOptions) -> tuple[str, ...]:
    given = options.columns or {}
    taken = ", ".join(f"{role} {name!r}" + ("" if role in given else " (guessed)") for role, name in roles.items())
    guessed = [role for role in roles if role not in given and role not in ("user", "item")]
    without = f" ({guessed[0]}=none in `columns` leaves it out)" if guessed else ""
    notes: tuple[str, ...] = (f"columns: {taken}{without}",)
    # Data sets with a split often number the items of each part from 0: the order across parts is then wrong.
    if "split" in roles and _plain(roles.get("time", "")) == "position":
        notes += (f"{roles['time']!r} is taken as time; positions may count in each part by themselves",)
    return notes
