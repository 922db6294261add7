"""Reader of text with one interaction per line and a separator between the columns (CSV, TSV and the like).

The text is parsed by pyarrow, which is fast but does not say which line is wrong. If it fails, `LineChecker` reads the
text again line by line to raise an error that names the line.
"""

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

BYTES_PER_CHUNK = 1 << 24  # bytes that pyarrow parses at a time; a line must be shorter
SEPARATOR_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # in the order in which they are tried
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # first bytes of a file in UTF-16

UNREADABLE = (OSError, EOFError, zlib.error)  # errors for a file that is damaged, cut off or cannot be opened


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading; a file whose name ends in .gz is decompressed."""
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
    """Read some columns of a text.

    Args:
        content: a path (.gz is decompressed), or the bytes themselves.
        file: the name of the file for messages.
        separator: one character.
        header: names of all columns, in their order.
        columns: {role: name of its column} of the columns to read.
        skip: number of lines before the first interaction; 1 if the file has a line of names.
        quoted: whether a value may stand in double quotes, with separators and line ends inside.

    Raises:
        ArgumentError: the text is wrong; the error names the file, the line and the column.
    """
    text = LineChecker(content, file, separator, list(header), dict(columns), skip, quoted)
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


class LineChecker:
    """Reads a text line by line to find out what is wrong with it, and where; slow, so used only after an error.

    Args: those of `read_delimited`.
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
        """Raise an `ArgumentError` for the first fault; return if there is none."""
        with contextlib.closing(self._lines()) as lines:  # closes the file also if a fault is found in its middle
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
            self.kind_of_time = self.kind_of_time or kind  # the first line decides; the others must be of its kind
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
    """The message for a line that is not UTF-8, with a guess of what it is."""
    guess = "UTF-16" if line.startswith(UTF16_MARKS) else "perhaps Latin-1"
    return f"byte {error.start + 1} of the line is not UTF-8 ({guess}). Save the file as UTF-8."


def is_number(value: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def is_date(value: str) -> bool:
    """Whether a text is a date in ISO format, with or without a time of day."""
    try:
        return bool(datetime.fromisoformat(value.replace("Z", "+00:00")))
    except ValueError:
        return False
