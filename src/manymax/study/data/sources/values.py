"""Columns of text or numbers as arrays: ids and titles by number, and which values are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from manymax.errors import ArgumentError

# What programs write for a missing value. The list is that of pandas, whose users expect these words to be no ids.
MISSING_WORDS = (
    *("", "#N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null", "-nan", "-NaN"),
)
WHOLE_NUMBER = r"^-?[0-9]+(\.0+)?$"  # 17850, and 17850.0 as it is written where an id was kept as a fraction

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Converted:
    """A column as numbers.

    values: (n,); what stands at a missing place has no meaning.
    missing: (n,) whether the file has no value there.
    words: what the numbers 0, 1, ... stand for, in a column of ids or titles.
    note: what is worth a remark on the card; empty if nothing is.
    """

    values: Array
    missing: Mask
    words: Array | None = None
    note: str = ""


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without dictionaries, and text with 64-bit offsets: those of 32 bits limit a column to 2 GB."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column


def encode(column: pa.ChunkedArray) -> tuple[Array, pa.Array]:
    """The distinct values in the order in which they first appear, and the number of each row; -1 for null.

    Raises:
        pa.ArrowInvalid: a value is no UTF-8, which the readers of CSV and JSON do not check.
    """
    encoded = column.combine_chunks().dictionary_encode()
    encoded.dictionary.validate(full=True)
    return encoded.indices.fill_null(-1).to_numpy().astype(np.int64), encoded.dictionary


def is_missing(values: pa.Array) -> Mask:
    """Which values are blank, or words for a missing value."""
    if not pa.types.is_large_string(values.type):
        return np.zeros(len(values), np.bool_)
    found: Mask = pc.is_in(pc.utf8_trim_whitespace(values), pa.array(MISSING_WORDS, values.type)).to_numpy(False)
    return found


def to_ids(numbers: Array, values: pa.Array) -> Converted:
    """Numbers of ids without those that are missing, from what `encode` returns."""
    absent, note = is_missing(values), ""
    if pa.types.is_large_string(values.type) and (shorter := _without_fractions(values, absent)) is not None:
        note = f"{pc.filter(values, pc.match_substring(values, '.'))[0]} and the like are read as whole numbers"
        again = shorter.dictionary_encode()  # 17850 and 17850.0 are one id now
        numbers = np.append(again.indices.to_numpy(), -1)[numbers]
        values, absent = again.dictionary, is_missing(again.dictionary)
    # An id that is missing gets no number, and those after it move up. The last place is for null, whose number is -1.
    place = np.append(np.where(absent, -1, np.cumsum(~absent) - 1), -1)
    numbers = place[numbers]
    return Converted(np.maximum(numbers, 0), numbers < 0, values.to_numpy(zero_copy_only=False)[~absent], note)


def _without_fractions(values: pa.Array, absent: Mask) -> pa.Array | None:
    """The values with 17850 for 17850.0; None unless all of them are whole numbers and some are written so."""
    whole = pc.match_substring_regex(values, WHOLE_NUMBER).to_numpy(False) | absent
    fractions = pc.match_substring(values, ".").to_numpy(False)
    return pc.replace_substring_regex(values, r"\.0+$", "") if whole.all() and fractions.any() else None


def whole_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Ids that are stored as fractions, as pandas does where some are missing, as integers; nan becomes null."""
    column = pc.if_else(pc.is_nan(column), None, column)
    row = pc.index(pc.not_equal(column, pc.floor(column)).fill_null(False), True).as_py()
    if row >= 0:
        raise ArgumentError(f"ids must be integers or text; got {column[row].as_py()} in row {row + 1}.")
    return column.cast(pa.int64())


def to_titles(numbers: Array, values: pa.Array) -> Converted:
    """Numbers of titles, -1 for none; no row counts as incomplete without a title."""
    numbers = np.where(np.append(is_missing(values), True)[numbers], -1, numbers)
    return Converted(numbers, np.zeros(len(numbers), np.bool_), values.to_numpy(zero_copy_only=False))


def title_of_each(items: Converted, titles: Converted) -> Array:
    """(C,) the title that each item has most often, of equally frequent ones the first; None where it has none."""
    assert items.words is not None
    assert titles.words is not None
    known = ~items.missing & (titles.values >= 0)
    pairs = items.values[known] * len(titles.words) + titles.values[known]
    distinct, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    # Sorted so that the pair to take of each item comes last, where it overwrites the others.
    order = np.lexsort((-first, counts))
    found = np.full(len(items.words), None, dtype=object)
    found[distinct[order] // len(titles.words)] = titles.words[distinct[order] % len(titles.words)]
    return found
