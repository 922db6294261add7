"""Small tables and how tests read them."""

from __future__ import annotations

from pathlib import Path

from manymax.study.data.interactions import Interactions
from manymax.study.data.load import load

ROWS = [("ann", "x1", 4.5, 100), ("bob", "x1", 3.0, 50), ("ann", "x2", 1.0, 75)]


def read(path: Path, **options) -> Interactions:
    """The interactions of a file."""
    return load(path, **options).interactions


def rows(data: Interactions) -> list[tuple]:
    """(user id, item id[, rating][, time]) of each interaction."""
    columns = [data.user_ids[data.users.numpy()], data.item_ids[data.items.numpy()]]
    columns += [values.numpy() for values in (data.ratings, data.times) if values is not None]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def text(separator: str = ",", header: str | None = "user,item,rating,time", quote: str = "") -> str:
    """`ROWS` as text, with a line of names unless `header` is None."""
    lines = [separator.join(f"{quote}{value}{quote}" for value in row) for row in ROWS]
    return "\n".join([header.replace(",", separator), *lines] if header else lines) + "\n"
