"""Text with one interaction a line and a separator between its columns."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import csv as arrow_csv

from manymax.errors import ArgumentError
from manymax.study.data.sources.columns import PART_NAMES, Columns, complaint

BYTES_PER_CHUNK = 1 << 24  # bytes that are parsed at a time; a line must be shorter
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


UNREADABLE = (OSError, EOFError, zlib.error)  # a file that is damaged, cut off or not to be opened


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading, unpacked if its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_delimited(
    content: Path | bytes,
    file: str,
    separator: str,
    header: Sequence[str],
    columns: Mapping[str, str],
    *,
    skip: int = 0,
    quoted: bool = True,
) -> Columns:
    """Read the columns that are asked for.

    Args:
        content: a path (of a .gz file too), or the bytes themselves.
        file: how messages call it.
        separator: one character.
        header: names of all columns, in their order.
        columns: {role: name of its column}.
        skip: lines before the first interaction: 1 where the header stands in the file.
        quoted: whether a column may stand in double quotes, with separators and line ends inside.

    Raises:
        ArgumentError: with file, line and column.
    """
    text = Text(content, file, separator, list(header), dict(columns), skip, quoted)
    types = {name: pa.large_string() for role, name in columns.items() if role in ("user", "item", "split")}
    types |= {name: pa.float64() for role, name in columns.items() if role == "rating"}
    try:
        with pa.input_stream(str(content) if isinstance(content, Path) else pa.BufferReader(content)) as stream:
            table = arrow_csv.read_csv(
                stream,
                arrow_csv.ReadOptions(column_names=text.header, skip_rows=skip, block_size=BYTES_PER_CHUNK),
                arrow_csv.ParseOptions(
                    delimiter=separator, quote_char='"' if quoted else False, newlines_in_values=quoted
                ),
                arrow_csv.ConvertOptions(column_types=types, include_columns=list(dict.fromkeys(columns.values()))),
            )
    except (pa.ArrowException, OSError) as error:
        text.explain()
        raise ArgumentError(f"{file} cannot be read: {error}") from None
    arrays = {role: table.column(name) for role, name in columns.items()}
    return Columns(arrays, text.columns, file, text.explain)


class Text:
    """A text again, line by line: slow, and only to say what is wrong and where.

    Args: as of `read_delimited`.
    """

    def __init__(
        self,
        content: Path | bytes,
        file: str,
        separator: str,
        header: list[str],
        columns: dict[str, str],
        skip: int,
        quoted: bool,
    ) -> None:
        self.content, self.file, self.separator, self.header = content, file, separator, header
        self.columns, self.skip, self.quoted = columns, skip, quoted
        self.kind_of_time: str | None = None

    def explain(self) -> None:
        """Raise an error for the first fault; return if there is none."""
        with contextlib.closing(self._lines()) as lines:  # a fault leaves them in the middle of the file
            reader = csv.reader(
                lines, delimiter=self.separator, quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
            )
            try:
                for number, fields in enumerate(reader):
                    if number >= self.skip and fields:
                        self._check(reader.line_num, fields)
            except csv.Error as error:
                self._fail(reader.line_num, f"{error}.")
            except UNREADABLE as error:
                raise ArgumentError(f"{self.file} cannot be read: {error}. Is it complete?") from None

    def _check(self, line: int, fields: list[str]) -> None:
        if len(fields) != len(self.header):
            self._fail(line, f"expected {len(self.header)} columns, got {len(fields)}.")
        for role, name in self.columns.items():
            value = fields[self.header.index(name)]
            if not self._fits(role, value):
                self._fail(line, complaint(role, value), name)

    def _fits(self, role: str, value: str) -> bool:
        if role == "time":
            kind = "number" if is_number(value) else "date" if is_date(value) else None
            self.kind_of_time = self.kind_of_time or kind  # that of the first line
            return kind is not None and kind == self.kind_of_time
        if role == "rating":
            return is_number(value)
        return value.lower() in PART_NAMES if role == "split" else value != ""

    def _lines(self) -> Generator[str, None, None]:
        stream = open_bytes(self.content) if isinstance(self.content, Path) else io.BytesIO(self.content)
        with stream:
            for number, line in enumerate(stream, 1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    self._fail(number, not_utf8(line, error), self._column(line, error.start))

    def _column(self, line: bytes, place: int) -> str | None:
        index = line[:place].count(self.separator.encode())
        return self.header[index] if index < len(self.header) else None

    def _fail(self, line: int, what: str, column: str | None = None) -> None:
        place = f"{self.file}, line {line}" + (f", column {column!r}" if column is not None else "")
        raise ArgumentError(f"{place}: {what}")


def not_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    """What to say of bytes that are no text."""
    guess = "UTF-16" if line.startswith(UTF16) else "perhaps Latin-1"
    return f"byte {error.start + 1} of the line is not UTF-8 ({guess}). Save the file as UTF-8."


def is_number(value: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def is_date(value: str) -> bool:
    """Whether a text is a date, with or without a time."""
    try:
        return bool(datetime.fromisoformat(value.replace("Z", "+00:00")))
    except ValueError:
        return False
