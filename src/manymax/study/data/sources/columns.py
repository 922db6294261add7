"""`Columns`: the columns of a file as a reader found them, and their conversion to `Interactions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.study.data.interactions import PARTS, Interactions

ROLES = ("user", "item", "rating", "time", "split")  # what a column can hold
# Words of a split column, as indices into `PARTS`.
PART_NAMES = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


@dataclass(frozen=True)
class Columns:
    """The columns of a file, by role.

    Args:
        arrays: {"user": ..., "item": ...[, "rating": ...][, "time": ...][, "split": ...]}, all of one length.
        names: the names of the columns in the file, by role.
        file: the name of the file, for messages.
        explain: called when a value is wrong. It reads the file again, slowly, and raises an error that names the line;
            it returns only if it finds nothing wrong, or if the format has no lines.
        notes: remarks for the card.
    """

    arrays: dict[str, pa.ChunkedArray]
    names: dict[str, str]
    file: str
    explain: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()

    def interactions(self, name: str) -> Interactions:
        """Number users and items in the order in which they first appear; check and convert the other columns.

        Raises:
            ArgumentError: a value is missing or of the wrong kind; the error names the file, line or row, and column.
        """
        if not len(self.arrays["user"]):
            raise ArgumentError(f"{self.file} has no interactions. Is it complete?")
        users, user_ids = self._numbered("user")
        items, item_ids = self._numbered("item")
        ratings, times, parts = (self._optional(role) for role in ("rating", "time", "split"))
        return Interactions(users, items, user_ids, item_ids, ratings, times, parts, name)

    def _numbered(self, role: str) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """The numbers of a column of ids, (n,) int64, and the id of each number."""
        column = self.arrays[role]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())  # plain strings have 32-bit offsets, which limits a column to 2 GB
        if not (pa.types.is_integer(column.type) or pa.types.is_large_string(column.type)):
            raise ArgumentError(
                f"{self.file}, column {self._name(role)}: ids must be integers or text; got {column.type}."
            )
        empty = pc.equal(column, "") if pa.types.is_large_string(column.type) else None
        self._refuse(
            role, column.is_null() if empty is None else pc.or_(column.is_null(), empty.fill_null(True)), column
        )
        encoded = column.combine_chunks().dictionary_encode()
        try:
            ids = encoded.dictionary.to_numpy(zero_copy_only=False)
        except pa.ArrowException:  # the CSV and JSON readers do not check that text is UTF-8
            self.explain()
            raise ArgumentError(f"{self.file}, column {self._name(role)}: an id is not UTF-8.") from None
        return torch.from_numpy(encoded.indices.to_numpy().astype(np.int64)), ids

    def _optional(self, role: str) -> Tensor | None:
        if role not in self.arrays:
            return None
        convert = {"rating": self._rating, "time": self._time, "split": self._part}[role]
        return torch.from_numpy(convert(self.arrays[role]))

    def _rating(self, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            self._fail("rating", 0, column)
        numbers = column.cast(pa.float32(), safe=False)
        self._refuse("rating", pc.invert(pc.is_finite(numbers)).fill_null(True), column)
        return numbers.to_numpy().copy()

    def _time(self, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
        self._refuse("time", column.is_null(nan_is_null=True), column)
        if pa.types.is_floating(column.type):
            # Rounding to integers would make ties of fractions of a second: replace each time by its rank instead.
            return np.unique(column.to_numpy(), return_inverse=True)[1].astype(np.int64)
        if pa.types.is_date32(column.type):
            column = column.cast(pa.int32())
        if not (pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type)):
            self._fail("time", 0, column)
        return column.cast(pa.int64()).to_numpy().copy()

    def _part(self, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
        encoded = column.combine_chunks().cast(pa.string()).dictionary_encode()
        # One part per distinct word; the entry after the last is for missing values.
        part_of_word = np.array([PART_NAMES.get(str(v).lower(), -1) for v in encoded.dictionary.to_pylist()] + [-1])
        parts = part_of_word[encoded.indices.fill_null(len(part_of_word) - 1).to_numpy()]
        self._refuse("split", pa.array(parts < 0), column)
        return parts.astype(np.int8)

    def _name(self, role: str) -> str:
        return repr(self.names.get(role, role))

    def _refuse(self, role: str, wrong: pa.Array | pa.ChunkedArray, column: pa.ChunkedArray) -> None:
        """Raise an error for the first row where `wrong` is true, if there is one."""
        row = pc.index(wrong, True).as_py()
        if row >= 0:
            self._fail(role, row, column)

    def _fail(self, role: str, row: int, column: pa.ChunkedArray) -> NoReturn:
        self.explain()  # raises a better error if the format has lines
        value = column[row].as_py()
        raise ArgumentError(f"{self.file}, row {row + 1}, column {self._name(role)}: {complaint(role, value)}")


def complaint(role: str, value: object) -> str:
    """The message for a value that is wrong in its role.

    >>> complaint("rating", "good")
    "a rating must be a number; got 'good'."
    """
    wanted = {
        "user": "a user id must not be empty",
        "item": "an item id must not be empty",
        "rating": "a rating must be a number",
        "time": "a time must be a number or a date like 2010-10-19T23:55:27Z, and the same kind in all lines",
        "split": f"a split must be {', '.join(map(repr, PARTS[:-1]))} or {PARTS[-1]!r}",
    }[role]
    return f"{wanted}; got {'nothing' if value in (None, '') else repr(value)}."
