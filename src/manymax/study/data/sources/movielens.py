"""MovieLens as GroupLens publishes it: `u.data` (100K) and `ratings.dat` (1M, 10M), in the zip archive or unpacked."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from manymax.errors import ArgumentError
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.study.data.sources.delimited import read_delimited
from manymax.study.data.sources.packed import UNREADABLE, check_size

RATINGS_FILES = {"u.data": b"\t", "ratings.dat": b"::"}  # {name of the file with the ratings: its separator}
MOVIELENS_COLUMNS = ["user", "item", "rating", "time"]  # of both files, in their order
MOVIELENS_TERMS = (
    "GroupLens: research use with acknowledgement; no redistribution, no commercial use without permission"
)
MOVIELENS_CITATION = "Harper and Konstan 2015, doi 10.1145/2827872"


def find(path: Path) -> list[Path] | None:
    """The zip archive, or the file with the ratings, at `path` or in the folder `path`; None if there is neither."""
    if path.is_dir():
        return next(([path / name] for name in RATINGS_FILES if (path / name).is_file()), None)
    return [path] if path.suffix == ".zip" or path.name in RATINGS_FILES else None


def read(paths: Sequence[Path]) -> Columns:
    """Read users, items, ratings and times."""
    (path,) = paths
    name, content = _unpack(path) if path.suffix == ".zip" else (path.name, path.read_bytes())
    if not content:
        raise ArgumentError(f"{name} is empty.")
    # pyarrow takes separators of one character only. "::" is nothing but a separator in these files, so replacing it
    # by a tab is safe.
    content = content.replace(RATINGS_FILES[Path(name).name], b"\t")
    columns = {role: role for role in MOVIELENS_COLUMNS}
    return read_delimited(content, name, "\t", MOVIELENS_COLUMNS, columns, quoted=False)


def _unpack(path: Path) -> tuple[str, bytes]:
    """Name and content of the file with the ratings in a zip archive, read into memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.rpartition("/")[2] in RATINGS_FILES]
            if not names:
                raise ArgumentError(
                    f"{path.name} is not a MovieLens archive: it does not contain {' or '.join(RATINGS_FILES)}."
                )
            found = archive.getinfo(names[0])
            check_size(path.name, found.compress_size, found.file_size)  # more than this is not read
            return names[0], archive.read(names[0])
    except (zipfile.BadZipFile, RuntimeError, *UNREADABLE) as error:  # RuntimeError: encrypted, or unknown compression
        raise ArgumentError(f"{path.name} cannot be unpacked: {error}. Download it again.") from None


def _file(name: str, md5: str) -> File:
    return File(f"https://files.grouplens.org/datasets/movielens/{name}", name, f"md5:{md5}")


ML_100K = Source(
    name="ml-100k",
    title="MovieLens 100K: 943 users, 1,682 films, ratings 1 to 5 (5 MB)",
    files=(_file("ml-100k.zip", "0e33842e24a9c977be4e0107933c0723"),),
    read=read,
    terms=MOVIELENS_TERMS,
    citation=MOVIELENS_CITATION,
    aliases=("movielens-100k",),
)
ML_1M = Source(
    name="ml-1m",
    title="MovieLens 1M: 6,040 users, 3,706 films, ratings 1 to 5 (6 MB)",
    files=(_file("ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906"),),
    read=read,
    presets={"paper-table": Filters(min_rating=3, k_core=5), "paper-text": Filters(min_rating=3, k_core=10)},
    terms=MOVIELENS_TERMS,
    citation=MOVIELENS_CITATION,
    aliases=("movielens-1m",),
)
