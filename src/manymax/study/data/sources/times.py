"""Times that are written as text: parsing by a format, and the formats that read all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import islice, product

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from manymax.study.data.sources.values import MISSING_WORDS

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
SHORT_YEARS = ("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%d-%b-%y")
DAYS = (
    *SHORT_YEARS,
    *(day.replace("%y", "%Y") for day in SHORT_YEARS),
    *("%Y/%m/%d", "%Y.%m.%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p", " %H:%M:%S.%f")


def is_format(date_format: str) -> bool:
    """Whether a text is a format in which a time can be written and read."""
    try:
        datetime.strptime(EPOCH.strftime(date_format), date_format)
    except (ValueError, re.error):  # an unknown letter, or one that comes twice
        return False
    return "%" in date_format.replace("%%", "")


def moment(text: str, date_format: str) -> datetime | None:
    """The time that a text stands for, in UTC where it has no zone; None if it does not have the format."""
    try:
        found = datetime.strptime(text, date_format)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def seconds(texts: Sequence[str], date_format: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The times as numbers that grow with time, and which of the texts do not have the format; (n,) each.

    Numbers are seconds, or microseconds where the format has fractions of a second. Python parses about 100,000 texts
    per second, and refuses the 30th of February, which faster parsers turn into the 2nd of March.
    """
    moments = [moment(text, date_format) for text in texts]
    unit = timedelta(microseconds=1) if "%f" in date_format else timedelta(seconds=1)
    numbers = np.array([0 if each is None else (each - EPOCH) // unit for each in moments], np.int64)
    return numbers, np.array([each is None for each in moments], np.bool_)


def iso_times(texts: pa.Array) -> npt.NDArray[np.int64] | None:
    """ISO dates with or without a time of day as microseconds, 0 for null; None if a text is something else.

    >>> iso_times(pa.array(["1970-01-02", "1970-01-01 00:00:01", None])).tolist()
    [86400000000, 1000000, 0]
    """
    for zone in (None, "UTC"):  # all of them without a zone, or all with one
        try:
            moments = texts.cast(pa.timestamp("us", zone))
        except pa.ArrowException:
            continue
        found: npt.NDArray[np.int64] = moments.cast(pa.int64()).fill_null(0).to_numpy()
        return found
    return None


def fitting_formats(texts: Sequence[str]) -> list[str]:
    """The common formats that all of these texts have.

    >>> fitting_formats(["12/1/2010 8:26", "12/13/2010 17:00"])
    ['%m/%d/%Y %H:%M']
    >>> fitting_formats(["1.2.10", "3.4.10"])
    ['%d.%m.%y']
    """
    return [each for each in _formats() if texts and all(moment(text, each) is not None for text in texts)]


def written_times(values: Iterable[object], at_most: int = 100_000) -> list[str]:
    """The distinct texts among the first values of a column, without those that stand for a missing value."""
    texts = dict.fromkeys(islice((value for value in values if isinstance(value, str)), at_most))
    return [text for text in texts if text.strip() not in MISSING_WORDS]


def _formats() -> Iterator[str]:
    yield from (f"{day}{clock}" for day, clock in product(DAYS, CLOCKS))
    yield "%a %b %d %H:%M:%S %Y"
