"""`Columns`: the columns of a file as a reader found them, and their conversion to `Interactions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.study.data.interactions import PARTS, Interactions
from manymax.study.data.sources.times import fitting_formats, iso_times, seconds, written_times
from manymax.study.data.sources.values import (
    MISSING_WORDS,
    Array,
    Converted,
    Mask,
    encode,
    is_missing,
    plain,
    title_of_each,
    to_ids,
    to_titles,
    whole_numbers,
)

ROLES = ("user", "item", "rating", "time", "split", "title")  # what a column can hold; the title is that of the item
# Words of a split column, as indices into `PARTS`.
PART_NAMES = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
NONE = "none"  # in place of the name of a column: leave out the column that would be guessed
FORMAT_EXAMPLE = "%m/%d/%Y %H:%M"


@dataclass(frozen=True)
class Columns:
    """The columns of a file, by role.

    Args:
        arrays: {"user": ..., "item": ..., and any of "rating", "time", "split" and "title"}, all of one length.
        names: the names of the columns in the file, by role.
        file: the name of the file, for messages.
        explain: called when a value is wrong, with whether values may be missing. It reads the file again, slowly, and
            raises an error that names the line; it returns only if it finds nothing wrong, or if the format has no
            lines.
        notes: remarks for the card.
        date_format: how times are written that are text, in the letters of `datetime.strptime`; None if unknown.
    """

    arrays: dict[str, pa.ChunkedArray]
    names: dict[str, str]
    file: str
    explain: Callable[[bool], None] = lambda allow_missing: None
    notes: tuple[str, ...] = ()
    date_format: str | None = None

    def interactions(self, name: str, *, drop_missing: bool = False, **figures: Any) -> Interactions:
        """Number users and items in the order in which they first appear; check and convert the other columns.

        Args:
            name: of the data set.
            drop_missing: leave out rows in which a value is missing; the card counts them.
            figures: for the first step of the card.

        Raises:
            ArgumentError: a value is missing or of the wrong kind; the error names the file, line or row, and column.
        """
        if not len(self.arrays["user"]):
            raise ArgumentError(f"{self.file} has no interactions. Is it complete?")
        found = {role: self._converted(role) for role in ROLES if role in self.arrays}
        missing = {role: each.missing for role, each in found.items() if each.missing.any()}
        if missing and not drop_missing:
            self._refuse_missing(missing)
        every = _interactions(name, found)
        complete = torch.from_numpy(~np.logical_or.reduce(list(missing.values()))) if missing else None
        kept = every if complete is None else every.rows(complete)
        notes = [*self.notes, *self._remarks(found)]
        # The first step counts the rows of the file, and the users and items that are named there at all.
        raw = figures | {**every.counts(), "sparsity": kept.counts()["sparsity"]} | _note(notes)
        kept = replace(kept, card=({"step": "raw", **raw},))
        if complete is None:
            return kept
        counts = {f"without_{role}": int(mask.sum()) for role, mask in missing.items()}
        return kept.with_step("missing", removed=len(every) - len(kept), **counts)

    def _converted(self, role: str) -> Converted:
        column = plain(self.arrays[role])
        convert = {"rating": self._rating, "time": self._time, "split": self._part}
        if role in convert:
            return convert[role](column)
        if role == "title":
            return to_titles(*self._encoded(role, column.cast(pa.large_string())))
        try:
            if pa.types.is_floating(column.type):
                column = whole_numbers(column)
        except ArgumentError as error:
            raise ArgumentError(f"{self.file}, column {self._name(role)}: {error}") from None
        if not (pa.types.is_integer(column.type) or pa.types.is_large_string(column.type) or _is_empty(column)):
            raise ArgumentError(
                f"{self.file}, column {self._name(role)}: ids must be integers or text; got {column.type}."
            )
        return to_ids(*self._encoded(role, column))

    def _encoded(self, role: str, column: pa.ChunkedArray) -> tuple[Array, pa.Array]:
        try:
            return encode(column)
        except pa.ArrowException:
            self.explain(True)
            raise ArgumentError(f"{self.file}, column {self._name(role)}: a value is not UTF-8.") from None

    def _rating(self, column: pa.ChunkedArray) -> Converted:
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or _is_empty(column)):
            self._fail("rating", 0, column)
        numbers = column.cast(pa.float32(), safe=False)
        missing = numbers.is_null(nan_is_null=True)
        infinite = pc.invert(pc.or_kleene(pc.is_finite(numbers), missing))
        if (row := pc.index(infinite, True).as_py()) >= 0:
            self._fail("rating", row, column)
        return Converted(numbers.fill_null(0.0).to_numpy().copy(), missing.to_numpy())

    def _time(self, column: pa.ChunkedArray) -> Converted:
        if pa.types.is_large_string(column.type):
            return self._written_time(column)
        missing = column.is_null(nan_is_null=True).to_numpy()
        if pa.types.is_floating(column.type):
            # Rounding to integers would make ties of fractions of a second: replace each time by its rank instead.
            ranks = np.unique(column.fill_null(0.0).to_numpy(), return_inverse=True)[1]
            return Converted(ranks.astype(np.int64), missing)
        if pa.types.is_date32(column.type):
            column = column.cast(pa.int32())
        if not (pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type) or _is_empty(column)):
            self._fail("time", 0, column)
        return Converted(column.cast(pa.int64()).fill_null(0).to_numpy().copy(), missing)

    def _written_time(self, column: pa.ChunkedArray) -> Converted:
        """Times that are text, in the format `date_format`."""
        numbers, values = self._encoded("time", column)
        texts, absent = values.to_pylist(), is_missing(values)
        missing = np.append(absent, True)[numbers]
        if self.date_format is not None:
            times, unread = seconds(texts, self.date_format)
        elif (iso := iso_times(pc.if_else(pa.array(absent), None, values))) is not None:
            times, unread = iso, np.zeros_like(absent)
        else:
            self._fail("time", int(missing.argmin()), column, ways_to_read(texts))
        wrong = np.append(unread, False)[numbers] & ~missing
        if wrong.any():
            self._fail("time", int(wrong.argmax()), column)
        return Converted(np.append(times, 0)[numbers], missing)

    def _part(self, column: pa.ChunkedArray) -> Converted:
        numbers, words = self._encoded("split", column.cast(pa.large_string()))
        missing = np.append(is_missing(words), True)[numbers]
        parts = np.array([PART_NAMES.get(word.lower(), -1) for word in words.to_pylist()] + [0])[numbers]
        wrong = (parts < 0) & ~missing
        if wrong.any():
            self._fail("split", int(wrong.argmax()), column)
        return Converted(np.maximum(parts, 0).astype(np.int8), missing)

    def _remarks(self, found: dict[str, Converted]) -> list[str]:
        """What is worth a remark on the card."""
        remarks = [f"{self._name(role)}: {each.note}" for role, each in found.items() if each.note]
        if "rating" in found and (below := int((found["rating"].values < 0).sum())):
            remarks.append(f"{self._name('rating')}: {below:,} values are below 0, which `min_rating` can leave out")
        return remarks

    def _name(self, role: str) -> str:
        return repr(self.names.get(role, role))

    def _refuse_missing(self, missing: dict[str, Mask]) -> NoReturn:
        """Raise an error for the first row in which a value is missing; it says in how many one is."""
        role = min(missing, key=lambda each: int(missing[each].argmax()))
        counts = ", ".join(f"{int(mask.sum()):,} without {with_article(each)}" for each, mask in missing.items())
        hint = f"Of {len(missing[role]):,} rows there are {counts}: leave them out by {offer('drop_missing', 'true')}"
        if role in ("rating", "time", "split"):
            hint += f", or {do_without(role)}"
        self._fail(role, int(missing[role].argmax()), self.arrays[role], f"{hint}.", allow_missing=False)

    def _fail(
        self, role: str, row: int, column: pa.ChunkedArray, hint: str = "", *, allow_missing: bool = True
    ) -> NoReturn:
        """Raise the error for a value; `hint` says what to do about it."""
        value = column[row].as_py()
        message = f"{self.file}, row {row + 1}, column {self._name(role)}: "
        message += complaint(role, value, self.date_format)
        try:
            self.explain(allow_missing)  # raises a better error if the format has lines
        except ArgumentError as error:
            message = str(error)
        raise ArgumentError(message if hint in message else f"{message} {hint}")


def _interactions(name: str, found: dict[str, Converted]) -> Interactions:
    users, items = found["user"], found["item"]
    assert users.words is not None
    assert items.words is not None

    def optional(role: str) -> Tensor | None:
        return torch.from_numpy(found[role].values) if role in found else None

    return Interactions(
        torch.from_numpy(users.values),
        torch.from_numpy(items.values),
        users.words,
        items.words,
        ratings=optional("rating"),
        times=optional("time"),
        parts=optional("split"),
        name=name,
        item_titles=title_of_each(items, found["title"]) if "title" in found else None,
    )


def _note(notes: list[str]) -> dict[str, str]:
    return {"note": "; ".join(notes)} if notes else {}


def _is_empty(column: pa.ChunkedArray) -> bool:
    """Whether there is no value in the whole column, so that its type is unknown."""
    return bool(pa.types.is_null(column.type))


def complaint(role: str, value: object, date_format: str | None = None) -> str:
    """The message for a value that is wrong in its role.

    >>> complaint("rating", "good")
    "a rating must be a number; got 'good'."
    """
    missing = isinstance(value, float) and math.isnan(value)
    missing |= value is None or (isinstance(value, str) and value.strip() in MISSING_WORDS)
    wanted = {
        "user": "a user id must not be empty" if missing else "user ids must be all text or all numbers",
        "item": "an item id must not be empty" if missing else "item ids must be all text or all numbers",
        "rating": "a rating must be a number",
        "time": "a time must be a number or a date like 2010-10-19T23:55:27Z, and the same kind in all lines",
        "split": f"a split must be {', '.join(map(repr, PARTS[:-1]))} or {PARTS[-1]!r}",
    }[role]
    if role == "time" and date_format is not None:
        wanted = f"a time must be written as `date_format` {date_format!r} says"
    return f"{wanted}; got {'nothing' if value in (None, '') else repr(value)}."


def offer(setting: str, value: str) -> str:
    """How to give a setting of the data on the command line, for error messages.

    >>> offer("encoding", "latin-1"), offer("drop_missing", "true")
    ('--encoding latin-1 (in a study: --set encoding=latin-1)', '--drop-missing (in a study: --set drop_missing=true)')
    """
    quote = "'" if " " in value else ""
    option = f"--{setting.replace('_', '-')}" + ("" if value == "true" else f" {quote}{value}{quote}")
    return f"{option} (in a study: --set {quote}{setting}={value}{quote})"


def with_article(role: str) -> str:
    """'a user', 'an item'."""
    return f"{'an' if role == 'item' else 'a'} {role}"


def do_without(role: str) -> str:
    """How to leave out a column that may have been guessed.

    >>> do_without("time")
    'do without a time: add time=none to --columns (in a study: to --set columns=)'
    """
    return f"do without {with_article(role)}: add {role}={NONE} to --columns (in a study: to --set columns=)"


def ways_to_read(values: Iterable[object]) -> str:
    """What to do about times that are text: the formats that read all of them, or how to give one."""
    formats = fitting_formats(written_times(values))
    known = " or ".join(offer("date_format", each) for each in formats[:2])
    if len(formats) > 1:
        advice = f"Several formats read all of them; say which is meant: {known}."
    elif formats:
        advice = f"This reads all of them: {known}."
    else:
        advice = f"Say how they are written, for example {offer('date_format', FORMAT_EXAMPLE)} for 12/31/2010 8:26."
    return f"{advice} Or {do_without('time')}."
