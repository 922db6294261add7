"""Reader of JSON lines: one object per line, with the values of an interaction as fields."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from manymax.errors import ArgumentError
from manymax.study.data.sources.columns import PART_NAMES, Columns, complaint, ways_to_read
from manymax.study.data.sources.delimited import (
    BYTES_PER_CHUNK,
    is_date,
    is_number,
    is_utf8,
    not_utf8,
    text_lines,
)
from manymax.study.data.sources.packed import UNREADABLE, arrow_stream
from manymax.study.data.sources.times import moment
from manymax.study.data.sources.values import MISSING_WORDS

LOOKED_AT = 1000  # lines from which the fields and their types are found out
JSON_TYPES = {str: pa.large_string(), int: pa.int64(), float: pa.float64()}


def first_objects(path: Path, encoding: str | None = None, at_most: int = LOOKED_AT) -> list[dict[str, Any]]:
    """The objects of the first lines, `at_most` so many.

    Raises:
        ArgumentError: one of these lines is no JSON object, or there is none.
    """
    reader = LineReader(path, {}, encoding)
    found = reader.first(at_most)
    if not found:
        raise ArgumentError(f"{path.name} is empty.")
    return found


def read_json_lines(
    path: Path, fields: Mapping[str, str], encoding: str | None = None, date_format: str | None = None
) -> Columns:
    """Read some fields of each line; others are ignored.

    Args:
        path: of the file; .gz is decompressed.
        fields: {role: name of its field}.
        encoding: of the text; None for UTF-8.
        date_format: how times are written, in the letters of `datetime.strptime`; None for numbers and ISO dates.
    """
    reader = LineReader(path, dict(fields), encoding, date_format)
    examples = reader.first(LOOKED_AT)
    types = {name: _type(role, [each.get(name) for each in examples]) for role, name in fields.items()}
    try:
        try:
            table = _read(path, types, encoding)
        except pa.ArrowException:  # a later line may have a fraction where the first ones have integers
            wider = {name: pa.float64() if pa.types.is_integer(kind) else kind for name, kind in types.items()}
            table = _read(path, wider, encoding)
    except (pa.ArrowException, UnicodeError, *UNREADABLE) as error:
        reader.explain()
        raise ArgumentError(f"{path.name} cannot be read: {error}") from None
    arrays = {role: table.column(name) for role, name in fields.items()}
    return Columns(arrays, dict(fields), path.name, reader.explain, date_format=date_format)


def _read(path: Path, types: dict[str, pa.DataType], encoding: str | None) -> pa.Table:
    with arrow_stream(path) as stream:
        return arrow_json.read_json(
            pa.transcoding_input_stream(stream, encoding, "utf8") if encoding else stream,
            arrow_json.ReadOptions(block_size=BYTES_PER_CHUNK),
            arrow_json.ParseOptions(explicit_schema=pa.schema(types.items()), unexpected_field_behavior="ignore"),
        )


def _type(role: str, examples: list[Any]) -> pa.DataType:
    """The type of a field: that of its values in the first lines."""
    kinds = {type(value) for value in examples if value is not None}
    if role == "rating" or {int, float} <= kinds:
        return pa.float64()
    return next((JSON_TYPES[kind] for kind in JSON_TYPES if kind in kinds), pa.large_string())


@dataclass
class LineReader:
    """Reads a file line by line, to find its fields, and after an error to find out what is wrong and where.

    Args: those of `read_json_lines`.
    """

    path: Path
    fields: dict[str, str]
    encoding: str | None = None
    date_format: str | None = None

    def first(self, count: int) -> list[dict[str, Any]]:
        """The objects of the first `count` lines."""
        with contextlib.closing(self.objects()) as objects:
            return [content for _, content in islice(objects, count)]

    def explain(self, allow_missing: bool = True) -> None:
        """Raise an `ArgumentError` for the first fault; return if there is none."""
        kinds: dict[str, type] = {}  # of the ids and times of the first line, which the others must share
        with contextlib.closing(self.objects()) as objects:
            for where, content in objects:
                for role, name in self.fields.items():
                    if name not in content and not allow_missing:
                        names = ", ".join(content)
                        raise ArgumentError(f"{where}: the field {name!r} is missing. The line has {names}.")
                    value = content.get(name)
                    missing = value is None or (isinstance(value, str) and value.strip() in MISSING_WORDS)
                    fits = allow_missing if missing else self._fits(role, value, kinds)
                    if fits or role == "title":
                        continue
                    message = f"{where}, column {name!r}: {complaint(role, value, self.date_format)}"
                    if role == "time" and isinstance(value, str) and not missing and self.date_format is None:
                        message += f" {ways_to_read(chain([value], (each.get(name) for _, each in objects)))}"
                    raise ArgumentError(message)

    def objects(self) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """(file and line, content) of each line that is not blank."""
        try:
            with contextlib.closing(text_lines(self.path, self.path.name, self.encoding)) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        where = f"{self.path.name}, line {number}"
                        yield where, self._parsed(where, line)
        except UNREADABLE as error:
            raise ArgumentError(f"{self.path.name} cannot be read: {error}. Is it complete?") from None

    def _parsed(self, where: str, line: str) -> dict[str, Any]:
        if not is_utf8(line):
            raise ArgumentError(f"{where}: {not_utf8(line)}")
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ArgumentError(f"{where}: expected one JSON object per line; {error}.") from None
        if not isinstance(content, dict):
            names = f" with {', '.join(self.fields.values())}" if self.fields else ""
            raise ArgumentError(f"{where}: expected a JSON object{names}.")
        return content

    def _fits(self, role: str, value: object, kinds: dict[str, type]) -> bool:
        if role == "rating":
            return isinstance(value, int | float) and not isinstance(value, bool) and is_number(str(value))
        if role == "split":
            return isinstance(value, str) and value.lower() in PART_NAMES
        if role == "time" and isinstance(value, str):
            return is_date(value) if self.date_format is None else moment(value, self.date_format) is not None
        kind = str if isinstance(value, str) else int
        same = kinds.setdefault(role, kind) is kind
        return same and isinstance(value, str | int | float) and not isinstance(value, bool)
