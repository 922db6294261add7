"""One file per raw format; each turns files into `Columns`. `SOURCES` are the sets by name, `FORMATS` the readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from manymax.study.data.sources import amazon, gowalla, movielens, table
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.table import Table

PLANTED = Source(
    name="planted",
    title="drawn from a known p(item | user), so that regret is known; also planted-tiny, -small, -medium, -ml-1m",
)
SOURCES: Table[Source] = Table(
    "data set",
    PLANTED,
    movielens.ML_100K,
    movielens.ML_1M,
    gowalla.GOWALLA,
    gowalla.GOWALLA_CHECKINS,
    amazon.ELECTRONICS,
    amazon.ELECTRONICS_RATINGS,
)


class Format(NamedTuple):
    """How files look: `find` says which files at a path are of this format (None: none are), `read` reads them."""

    find: Callable[[Path], list[Path] | None]
    read: Callable[..., Columns]


# The first that finds something is taken; own tables come last, because any text could be one.
FORMATS = (
    Format(movielens.find, movielens.read),
    Format(gowalla.find_lists, gowalla.read_lists),
    Format(gowalla.find_checkins, gowalla.read_checkins),
    Format(amazon.find_reviews, amazon.read_reviews),
    Format(amazon.find_ratings, amazon.read_ratings),
    Format(table.find, table.read),
)

__all__ = ["FORMATS", "SOURCES", "Columns", "File", "Filters", "Format", "Source"]
