"""MovieLens as GroupLens publishes it: `u.data` (100K) and `ratings.dat` (1M, 10M), in the zip or unpacked."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from manymax.errors import ArgumentError
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.study.data.sources.delimited import UNREADABLE, read_delimited

SEPARATORS = {"u.data": b"\t", "ratings.dat": b"::"}
HEADER = ["user", "item", "rating", "time"]
TERMS = "GroupLens: research use with acknowledgement; no redistribution, no commercial use without permission"
CITATION = "Harper and Konstan 2015, doi 10.1145/2827872"


def find(path: Path) -> list[Path] | None:
    """The archive, or the file with the ratings; None if there is none at `path`."""
    if path.is_dir():
        return next(([path / name] for name in SEPARATORS if (path / name).is_file()), None)
    return [path] if path.suffix == ".zip" or path.name in SEPARATORS else None


def read(paths: Sequence[Path]) -> Columns:
    """Users, items, ratings and times."""
    (path,) = paths
    name, content = _unpack(path) if path.suffix == ".zip" else (path.name, path.read_bytes())
    if not content:
        raise ArgumentError(f"{name} is empty.")
    # The reader knows separators of one character; a doubled colon has no other use in these files.
    content = content.replace(SEPARATORS[Path(name).name], b"\t")
    return read_delimited(content, name, "\t", HEADER, {role: role for role in HEADER}, quoted=False)


def _unpack(path: Path) -> tuple[str, bytes]:
    """Name and content of the file with the ratings; it is read in memory, nothing is written."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.rpartition("/")[2] in SEPARATORS]
            if not members:
                raise ArgumentError(f"{path.name} holds no {' or '.join(SEPARATORS)}: it is no MovieLens archive.")
            return members[0], archive.read(members[0])
    except (zipfile.BadZipFile, RuntimeError, *UNREADABLE) as error:  # encrypted, or packed in an unknown way
        raise ArgumentError(f"{path.name} cannot be unpacked: {error}. Fetch it again.") from None


def _file(name: str, md5: str) -> File:
    return File(f"https://files.grouplens.org/datasets/movielens/{name}", name, f"md5:{md5}")


ML_100K = Source(
    name="ml-100k",
    title="MovieLens 100K: 943 users, 1,682 films, ratings 1 to 5 (5 MB)",
    files=(_file("ml-100k.zip", "0e33842e24a9c977be4e0107933c0723"),),
    read=read,
    terms=TERMS,
    citation=CITATION,
    aliases=("movielens-100k",),
)
ML_1M = Source(
    name="ml-1m",
    title="MovieLens 1M: 6,040 users, 3,706 films, ratings 1 to 5 (6 MB)",
    files=(_file("ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906"),),
    read=read,
    presets={"paper-table": Filters(min_rating=3, k_core=5), "paper-text": Filters(min_rating=3, k_core=10)},
    terms=TERMS,
    citation=CITATION,
    aliases=("movielens-1m",),
)
