"""Packed files that strangers made: bombs, members whose names lead elsewhere, lines without an end."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from manymax.errors import ArgumentError
from manymax.study.data.sources import movielens, packed
from manymax.study.data.sources.delimited import LONGEST_LINE, text_lines
from tests.study.data.reading import read

ROWS = b"".join(b"%d,%d\n" % (user, user % 7) for user in range(50))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small files reach."""
    monkeypatch.setattr(packed, "ALWAYS_ALLOWED", 1000)
    monkeypatch.setattr(packed, "MOST_GROWTH", 20)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz", "ml.zip"])
def test_a_bomb_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "ml.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-1m/ratings.dat", b"1::1::5::1\n" * 100_000)
    else:
        line, head = (b"1,1\n", b"user,item\n") if "csv" in name else (b'{"user": 1, "item": 1}\n', b"")
        path.write_bytes(gzip.compress(head + line * 100_000))
    with pytest.raises(ArgumentError, match=rf"{name} has .* and unpacks to more than .*: that is no table"):
        read(path)


@pytest.mark.usefixtures("strict")
def test_a_table_that_is_packed_well_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"user,item\n" + ROWS * 10))
    assert len(read(path).users) == 500


def test_a_line_without_an_end_is_not_read_as_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"user,item\n" + b"1" * (LONGEST_LINE + 1)))
    with pytest.raises(ArgumentError, match="has a line of more than 16,777,216 letters"):
        list(text_lines(path, path.name))
    with pytest.raises(ArgumentError, match=r"a\.csv\.gz"):
        read(path)


def test_names_in_an_archive_lead_nowhere(tmp_path: Path) -> None:
    """A member is read by its name, and none is unpacked to the place that its name says."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = folder / "ml.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped.txt", "escaped")
        archive.writestr("../../ratings.dat", b"1::1::5::1\n2::1::5::1\n")
        archive.writestr("/tmp/absolute/ratings.dat", b"3::1::5::1\n")
    assert len(movielens.read([path]).arrays["user"]) == 2
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/b", "a/b/ml.zip"]


UNPACK = """
import resource, sys
from pathlib import Path
from manymax.errors import ArgumentError
from tests.study.data.reading import read
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read(Path(sys.argv[1]))
except ArgumentError as error:
    print(error, file=sys.stderr)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.extras
def test_a_bomb_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Of the 1.3 GB that come out of 1.3 MB, hardly more than the 0.27 GB are looked at that any file may have."""
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wb", compresslevel=6) as stream:
        stream.write(b"user,item\n")
        for _ in range(80):
            stream.write(b"1234567,1234567\n" * 1_000_000)
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", UNPACK, str(path)],
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "that is no table" in result.stderr
    assert int(result.stdout) < 2_500_000, "kilobytes more than before"
