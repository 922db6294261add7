"""Reader of text with one interaction per line and a separator between the columns (CSV, TSV and the like).

The text is parsed by pyarrow, which is fast but does not say which line is wrong. If it fails, `LineChecker` reads the
text again line by line to raise an error that names the line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import math
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as arrow_csv

from manymax.errors import ArgumentError
from manymax.study.data.sources.columns import PART_NAMES, Columns, complaint, offer, ways_to_read
from manymax.study.data.sources.packed import UNREADABLE, arrow_stream, open_bytes
from manymax.study.data.sources.times import moment
from manymax.study.data.sources.values import MISSING_WORDS

BYTES_PER_CHUNK = 1 << 24  # bytes that pyarrow parses at a time; a line must be shorter
SEPARATOR_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}  # in the order in which they are tried
EXCERPT = 20  # bytes of a long text that an error message shows
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # first bytes of a file in UTF-16
LONGEST_LINE = 1 << 24  # letters; a file without line ends must not be read as one text


def text_lines(content: Path | bytes, file: str, encoding: str | None = None) -> Generator[str, None, None]:
    """The lines of a text, each with its line end.

    Args:
        content: a path (.gz is decompressed), or the bytes themselves.
        file: the name of the file for messages.
        encoding: of the text. None for UTF-8: bytes that are none are then kept as surrogates, because they may be in
            columns that nobody reads; `is_utf8` and `not_utf8` take a text that has some.
    """
    name, errors = (encoding, "strict") if encoding else ("utf-8-sig", "surrogateescape")
    raw = open_bytes(content) if isinstance(content, Path) else io.BytesIO(content)
    with raw, io.TextIOWrapper(raw, name, errors, newline="\n") as lines:
        try:
            while line := lines.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE and not line.endswith("\n"):
                    raise ArgumentError(f"{file} has a line of more than {LONGEST_LINE:,} letters: that is no table.")
                yield line
        except UnicodeError as error:
            raise ArgumentError(f"{file} is not in `encoding` {encoding}: {error}.") from None


def read_delimited(
    content: Path | bytes,
    file: str,
    separator: str,
    header: Sequence[str],
    columns: Mapping[str, str],
    *,
    skip: int = 0,
    quoted: bool = True,
    encoding: str | None = None,
    date_format: str | None = None,
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
        encoding: of the text; None for UTF-8.
        date_format: how times are written, in the letters of `datetime.strptime`; None for numbers and ISO dates.

    Raises:
        ArgumentError: the text is wrong; the error names the file, the line and the column.
    """
    text = LineChecker(content, file, separator, list(header), dict(columns), skip, quoted, encoding, date_format)
    types = {name: pa.large_string() for role, name in columns.items() if role not in ("rating", "time")}
    types |= {name: pa.float64() for role, name in columns.items() if role == "rating"}
    if date_format is not None and "time" in columns:  # what it would be taken for otherwise: 20101201 is a number
        types[columns["time"]] = pa.large_string()
    try:
        with arrow_stream(content) if isinstance(content, Path) else pa.BufferReader(content) as stream:
            table = arrow_csv.read_csv(
                stream,
                arrow_csv.ReadOptions(
                    column_names=text.header, skip_rows=skip, block_size=BYTES_PER_CHUNK, encoding=encoding or "utf8"
                ),
                arrow_csv.ParseOptions(
                    delimiter=separator, quote_char='"' if quoted else False, newlines_in_values=quoted
                ),
                arrow_csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(dict.fromkeys(columns.values())),
                    null_values=MISSING_WORDS,
                ),
            )
    except (pa.ArrowException, UnicodeDecodeError, *UNREADABLE) as error:
        text.explain()
        raise ArgumentError(f"{file} cannot be read: {error}") from None
    arrays = {role: table.column(name) for role, name in columns.items()}
    return Columns(arrays, text.columns, file, text.explain, date_format=date_format)


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
        encoding: str | None = None,
        date_format: str | None = None,
    ) -> None:
        self.content, self.file, self.separator, self.header = content, file, separator, header
        self.columns, self.skip, self.quoted = columns, skip, quoted
        self.encoding, self.date_format = encoding, date_format
        self.kind_of_time: str | None = None

    def explain(self, allow_missing: bool = True) -> None:
        """Raise an `ArgumentError` for the first fault; return if there is none."""
        # Closed also if a fault is found in its middle.
        with contextlib.closing(text_lines(self.content, self.file, self.encoding)) as lines:
            reader = csv.reader(
                lines, delimiter=self.separator, quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
            )
            try:
                for number, fields in enumerate(reader):
                    if number >= self.skip and fields:
                        self._check(reader, fields, allow_missing)
            except csv.Error as error:
                self._fail(reader.line_num, f"{error}.")
            except UNREADABLE as error:
                raise ArgumentError(f"{self.file} cannot be read: {error}. Is it complete?") from None

    def _check(self, reader: Any, fields: list[str], allow_missing: bool) -> None:
        line = reader.line_num
        if len(fields) != len(self.header):
            self._fail(line, f"expected {len(self.header)} columns, got {len(fields)}.")
        for role, name in self.columns.items():
            place = self.header.index(name)
            value = fields[place]
            if not is_utf8(value):
                self._fail(line, not_utf8(value), name)
            fits = allow_missing if value.strip() in MISSING_WORDS else self._fits(role, value)
            if not fits and role == "time" and self.date_format is None and self.kind_of_time is None:
                others = (each[place] for each in reader if len(each) > place)
                self._fail(line, f"{complaint(role, value)} {ways_to_read(chain([value], others))}", name)
            if not fits and role != "title":
                self._fail(line, complaint(role, value, self.date_format), name)

    def _fits(self, role: str, value: str) -> bool:
        if role == "time" and self.date_format is not None:
            return moment(value, self.date_format) is not None
        if role == "time":
            kind = "number" if is_number(value) else "date" if is_date(value) else None
            self.kind_of_time = self.kind_of_time or kind  # the first line decides; the others must be of its kind
            return kind is not None and kind == self.kind_of_time
        if role == "rating":
            return is_number(value)
        return value.lower() in PART_NAMES if role == "split" else True

    def _fail(self, line: int, what: str, column: str | None = None) -> None:
        place = f"{self.file}, line {line}" + (f", column {column!r}" if column is not None else "")
        raise ArgumentError(f"{place}: {what}")


def is_utf8(text: str) -> bool:
    """Whether a text of `text_lines` was UTF-8 in the file."""
    return text.isascii() or not any(map(_is_surrogate, text))


def _is_surrogate(letter: str) -> bool:
    return "\udc80" <= letter <= "\udcff"


def not_utf8(text: str) -> str:
    """The message for a text of `text_lines` that is not UTF-8, with a guess of what it is.

    >>> print(not_utf8(bytes([99, 97, 102, 233]).decode("utf-8", "surrogateescape")))
    b'caf\\xe9' is not UTF-8. As latin-1 it is 'café': --encoding latin-1 (in a study: --set encoding=latin-1).
    """
    place = next(index for index, letter in enumerate(text) if _is_surrogate(letter))
    raw, part = (
        each.encode("utf-8", "surrogateescape")
        for each in (text, text[max(0, place - EXCERPT // 2) : place + EXCERPT // 2])
    )
    if raw.startswith(UTF16_MARKS):
        guess, part = "utf-16", raw[:EXCERPT]
    else:  # these bytes are control characters in Latin-1, and quotation marks and the euro in Windows' variant of it
        guess = "cp1252" if any(0x80 <= byte < 0xA0 for byte in raw) else "latin-1"
    return f"{part!r} is not UTF-8. As {guess} it is {part.decode(guess, 'replace')!r}: {offer('encoding', guess)}."


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
