"""Columns of a file, as a reader found them, and how they become `Interactions`."""

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

ROLES = ("user", "item", "rating", "time", "split")
PART_NAMES = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}


@dataclass(frozen=True)
class Columns:
    """What a file says, role by role.

    Args:
        arrays: {"user": ..., "item": ...[, "rating": ...][, "time": ...][, "split": ...]}, all of one length.
        names: what the columns are called in the file, by role.
        file: the name of the file, for messages.
        explain: called when a value cannot be used; raises an error that names the line, where the format has lines.
            It must not return unless it finds nothing wrong.
        notes: for the card.
    """

    arrays: dict[str, pa.ChunkedArray]
    names: dict[str, str]
    file: str
    explain: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()

    def interactions(self, name: str) -> Interactions:
        """Number users and items in the order in which they appear; check and convert the rest.

        Raises:
            ArgumentError: a value is missing or of the wrong kind; names file, line or row, and column.
        """
        if not len(self.arrays["user"]):
            raise ArgumentError(f"{self.file} holds no interactions. Is it complete?")
        users, user_ids = self._numbered("user")
        items, item_ids = self._numbered("item")
        ratings, times, parts = (self._optional(role) for role in ("rating", "time", "split"))
        return Interactions(users, items, user_ids, item_ids, ratings, times, parts, name)

    def _numbered(self, role: str) -> tuple[Tensor, np.ndarray[Any, Any]]:
        column = self.arrays[role]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())  # offsets of 64 bits: no limit of 2 GB
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
        except pa.ArrowException:  # some readers take any bytes for text
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
        if pa.types.is_floating(column.type):  # fractions of a second count: their order is kept as ranks
            return np.unique(column.to_numpy(), return_inverse=True)[1].astype(np.int64)
        if pa.types.is_date32(column.type):
            column = column.cast(pa.int32())
        if not (pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type)):
            self._fail("time", 0, column)
        return column.cast(pa.int64()).to_numpy().copy()

    def _part(self, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
        encoded = column.combine_chunks().cast(pa.string()).dictionary_encode()
        known = np.array([PART_NAMES.get(str(v).lower(), -1) for v in encoded.dictionary.to_pylist()] + [-1])
        parts = known[encoded.indices.fill_null(len(known) - 1).to_numpy()]
        self._refuse("split", pa.array(parts < 0), column)
        return parts.astype(np.int8)

    def _name(self, role: str) -> str:
        return repr(self.names.get(role, role))

    def _refuse(self, role: str, wrong: pa.Array | pa.ChunkedArray, column: pa.ChunkedArray) -> None:
        """Raise an error for the first row that is `wrong`, if there is one."""
        row = pc.index(wrong, True).as_py()
        if row >= 0:
            self._fail(role, row, column)

    def _fail(self, role: str, row: int, column: pa.ChunkedArray) -> NoReturn:
        self.explain()
        value = column[row].as_py()
        raise ArgumentError(f"{self.file}, row {row + 1}, column {self._name(role)}: {complaint(role, value)}")


def complaint(role: str, value: object) -> str:
    """What is wrong with a value.

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
