"""Gowalla: the lists that NGCF and LightGCN are evaluated on, and the check-ins that they were made from."""

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

PARTS = ("train", "test")
CHECKINS = re.compile(r".*checkins.*\.txt(\.gz)?", re.IGNORECASE)
CHECKIN = ["user", "time", "latitude", "longitude", "item"]
TERMS = "published by Stanford SNAP without a stated licence"
CITATION = "Cho, Myers and Leskovec, KDD 2011; the split: Wang et al., NGCF, SIGIR 2019"


def find_lists(path: Path) -> list[Path] | None:
    """train.txt and test.txt, if `path` is their folder or the first of them."""
    folder = path if path.is_dir() else path.parent
    if path != folder and path.name != "train.txt":
        return None
    paths = [folder / f"{part}.txt" for part in PARTS]
    return paths if all(map(Path.is_file, paths)) else None


def read_lists(paths: Sequence[Path]) -> Columns:
    """Lines `user item item ...`, one file for training and one for test; the order of a list is that of time."""
    users, items, parts, times = [], [], [], []
    for part, path in zip(PARTS, paths, strict=True):
        numbers, lengths = _read_lines(path)
        line_starts = np.cumsum(lengths) - lengths
        listed = np.ones(len(numbers), dtype=bool)
        listed[line_starts] = False
        users.append(np.repeat(numbers[line_starts], lengths - 1))
        items.append(numbers[listed])
        parts.append(np.full(len(items[-1]), part))
        times.append((np.arange(len(numbers)) - np.repeat(line_starts, lengths) - 1)[listed])
    arrays = {"user": users, "item": items, "split": parts, "time": times}
    names = ("user", "item", "split", "time")
    return Columns(
        {name: pa.chunked_array([np.concatenate(arrays[name])]) for name in names},
        {name: name for name in names},
        " and ".join(path.name for path in paths),
        notes=("times are places in a list, and count in each part by themselves",),
    )


def _read_lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of a file, and how many each line has."""
    lines = [line.split() for line in path.read_bytes().splitlines()]
    lines = [words for words in lines if words]
    if not lines:
        raise ArgumentError(f"{path.name} is empty.")
    words = [word for line in lines for word in line]
    if not all(map(_is_number, words)):
        _explain(path)
    return np.array(words).astype(np.int64), np.array(list(map(len, lines)))


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) < 19  # 64 bits


def _explain(path: Path) -> None:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        for place, word in enumerate(line.split(), 1):
            if not _is_number(word):
                text = word.decode(errors="replace")
                raise ArgumentError(
                    f"{path.name}, line {number}, column {place}: expected a number, as in `user item item ...` with "
                    f"spaces between; got {text[:40]!r}."
                )


def find_checkins(path: Path) -> list[Path] | None:
    """SNAP's file of check-ins, packed or not."""
    return [path] if path.is_file() and CHECKINS.fullmatch(path.name) else None


def read_checkins(paths: Sequence[Path]) -> Columns:
    """Lines `user time latitude longitude place`, with tabs between."""
    (path,) = paths
    if path.stat().st_size == 0:
        raise ArgumentError(f"{path.name} is empty.")
    columns = {role: role for role in ("user", "item", "time")}
    return read_delimited(path, path.name, "\t", CHECKIN, columns, quoted=False)


RELEASE = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/947ca2b3b1d2d3545b114145710cb06c4e57b3d2/data"
GOWALLA = Source(
    name="gowalla",
    title="Gowalla, 10-core with the split of NGCF and LightGCN: 29,858 users, 40,981 places (7 MB)",
    files=(
        File(f"{RELEASE}/gowalla/train.txt", "train.txt", "git:a27782bd7a1d4d0744148dc0460ea94da74763f2"),
        File(f"{RELEASE}/gowalla/test.txt", "test.txt", "git:9ed5af4b5d21511f33740b4e22e3852f45671800"),
    ),
    read=read_lists,
    presets={"paper-table": Filters(), "paper-text": Filters(k_core=10)},
    terms=TERMS,
    citation=CITATION,
)
GOWALLA_CHECKINS = Source(
    name="gowalla-checkins",
    title="Gowalla, all 6.4 million check-ins with their times (106 MB)",
    files=(
        File("https://snap.stanford.edu/data/loc-gowalla_totalCheckins.txt.gz", "loc-gowalla_totalCheckins.txt.gz"),
    ),
    read=read_checkins,
    presets={"paper-text": Filters(k_core=10)},
    terms=TERMS,
    citation=CITATION,
)
