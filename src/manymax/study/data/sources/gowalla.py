"""Gowalla: the lists that NGCF and LightGCN were evaluated on, and the check-ins from which these lists were made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from manymax.errors import ArgumentError
from manymax.study.data.sources.base import File, Filters, Source
from manymax.study.data.sources.columns import Columns
from manymax.study.data.sources.delimited import read_delimited

LIST_PARTS = ("train", "test")  # the lists come without a validation part
CHECKINS_FILE = re.compile(r".*checkins.*\.txt(\.gz)?", re.IGNORECASE)
CHECKIN_COLUMNS = ["user", "time", "latitude", "longitude", "item"]
GOWALLA_TERMS = "published by Stanford SNAP without a stated licence"
GOWALLA_CITATION = "Cho, Myers and Leskovec, KDD 2011; the split: Wang et al., NGCF, SIGIR 2019"


def find_lists(path: Path) -> list[Path] | None:
    """The files train.txt and test.txt, if `path` is their folder or train.txt."""
    folder = path if path.is_dir() else path.parent
    if path != folder and path.name != "train.txt":
        return None
    paths = [folder / f"{part}.txt" for part in LIST_PARTS]
    return paths if all(map(Path.is_file, paths)) else None


def read_lists(paths: Sequence[Path]) -> Columns:
    """Read lines `user item item ...`, one file for training and one for test.

    The items of a line are taken to be in time order: the time of an item is its place in the line.
    """
    users, items, parts, times = [], [], [], []
    for part, path in zip(LIST_PARTS, paths, strict=True):
        numbers, lengths = _read_lines(path)
        line_starts = np.cumsum(lengths) - lengths
        is_item = np.ones(len(numbers), dtype=bool)
        is_item[line_starts] = False  # the first number of a line is the user
        users.append(np.repeat(numbers[line_starts], lengths - 1))
        items.append(numbers[is_item])
        parts.append(np.full(len(items[-1]), part))
        times.append((np.arange(len(numbers)) - np.repeat(line_starts, lengths) - 1)[is_item])
    arrays = {"user": users, "item": items, "split": parts, "time": times}
    names = ("user", "item", "split", "time")
    return Columns(
        {name: pa.chunked_array([np.concatenate(arrays[name])]) for name in names},
        {name: name for name in names},
        " and ".join(path.name for path in paths),
        notes=("times are places in a list, and count in each part by themselves",),
    )


def _read_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of a file, (n,), and how many numbers each line has; empty lines are skipped."""
    lines = [line.split() for line in path.read_bytes().splitlines()]
    lines = [words for words in lines if words]
    if not lines:
        raise ArgumentError(f"{path.name} is empty.")
    words = [word for line in lines for word in line]
    if not all(map(_is_number, words)):
        _explain(path)
    return np.array(words).astype(np.int64), np.array(list(map(len, lines)))


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) < 19  # up to 18 digits surely fit into 64 bits


def _explain(path: Path) -> None:
    """Raise an error for the first word of a file that is not a number."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        for place, word in enumerate(line.split(), 1):
            if not _is_number(word):
                text = word.decode(errors="replace")
                raise ArgumentError(
                    f"{path.name}, line {number}, column {place}: expected a number, as in `user item item ...` with "
                    f"spaces between; got {text[:40]!r}."
                )


def find_checkins(path: Path) -> list[Path] | None:
    """The file of check-ins as SNAP publishes it, compressed or not."""
    return [path] if path.is_file() and CHECKINS_FILE.fullmatch(path.name) else None


def read_checkins(paths: Sequence[Path]) -> Columns:
    """Read lines `user time latitude longitude place`, separated by tabs."""
    (path,) = paths
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    columns = {role: role for role in ("user", "item", "time")}
    return read_delimited(path, path.name, "\t", CHECKIN_COLUMNS, columns, quoted=False)


LISTS_URL = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/947ca2b3b1d2d3545b114145710cb06c4e57b3d2/data"
GOWALLA = Source(
    name="gowalla",
    title="Gowalla, 10-core with the split of NGCF and LightGCN: 29,858 users, 40,981 places (7 MB)",
    files=(
        File(f"{LISTS_URL}/gowalla/train.txt", "train.txt", "git:a27782bd7a1d4d0744148dc0460ea94da74763f2"),
        File(f"{LISTS_URL}/gowalla/test.txt", "test.txt", "git:9ed5af4b5d21511f33740b4e22e3852f45671800"),
    ),
    read=read_lists,
    presets={"paper-table": Filters(), "paper-text": Filters(k_core=10)},
    terms=GOWALLA_TERMS,
    citation=GOWALLA_CITATION,
)
GOWALLA_CHECKINS = Source(
    name="gowalla-checkins",
    title="Gowalla, all 6.4 million check-ins with their times (106 MB)",
    files=(
        File("https://snap.stanford.edu/data/loc-gowalla_totalCheckins.txt.gz", "loc-gowalla_totalCheckins.txt.gz"),
    ),
    read=read_checkins,
    presets={"paper-text": Filters(k_core=10)},
    terms=GOWALLA_TERMS,
    citation=GOWALLA_CITATION,
)
