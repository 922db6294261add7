"""Readers of raw data, one module per publisher or format; each turns files into `Columns`.

`SOURCES` is the table of data sets that have a name, `RAW_FORMATS` the list of formats that a file can have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from manymax.study.data.sources import amazon, gowalla, movielens, table
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.table import Table

PLANTED_SOURCE = Source(
    name="planted",
    title="drawn from a known p(item | user), so that regret is known; also planted-tiny, -small, -medium, -ml-1m",
)
SOURCES: Table[Source] = Table(
    "data set",
    PLANTED_SOURCE,
    movielens.ML_100K,
    movielens.ML_1M,
    gowalla.GOWALLA,
    gowalla.GOWALLA_CHECKINS,
    amazon.ELECTRONICS,
    amazon.ELECTRONICS_RATINGS,
)


class RawFormat(NamedTuple):
    """A format of raw data.

    find: from a path to the files of this format there; None if there are none.
    read: from these files to their columns.
    """

    find: Callable[[Path], list[Path] | None]
    read: Callable[..., Columns]


# The first format that finds files is taken. Plain tables come last, because any text file could be one.
RAW_FORMATS = (
    RawFormat(movielens.find, movielens.read),
    RawFormat(gowalla.find_lists, gowalla.read_lists),
    RawFormat(gowalla.find_checkins, gowalla.read_checkins),
    RawFormat(amazon.find_reviews, amazon.read_reviews),
    RawFormat(amazon.find_ratings, amazon.read_ratings),
    RawFormat(table.find, table.read),
)

__all__ = ["RAW_FORMATS", "SOURCES", "Columns", "File", "Filters", "RawFormat", "Source"]
