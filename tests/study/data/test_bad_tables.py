"""Errors in the text of a table name the file, the line and the column."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.data.load import load

HEADER = "user,item,rating,time,split\n"
GOOD = "a,x,5,1,train\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "own.csv is empty"),
        (HEADER, "own.csv has no interactions"),
        ("user\na\n", "own.csv, line 1: expected columns separated by commas, tabs, semicolons, bars; got 'user'"),
        ("user::item\na::b\n", "own.csv, line 1: expected columns separated"),
        ("user item rating\na b 5\n", "own.csv, line 1: expected columns separated"),
        ("\nuser,item\na,b\n", "own.csv, line 1: expected columns separated"),
        ("usr,item\na,b\n", "own.csv, line 1: no column for the user among 'usr', 'item'. Name the columns: --columns"),
        ("user,thing\na,b\n", "own.csv, line 1: no column for the item among 'user', 'thing'"),
        ("user,item,user\na,b,c\n", "own.csv, line 1: two columns are called 'user'"),
        (
            HEADER + GOOD + "a,y,good,1,train\n",
            "own.csv, line 3, column 'rating': a rating must be a number; got 'good'",
        ),
        (HEADER + "a,y,,1,train\n", "own.csv, line 2, column 'rating': a rating must be a number; got nothing"),
        (HEADER + GOOD * 3 + "a,y,nan,1,train\n", "own.csv, line 5, column 'rating': .* got 'nan'"),
        (HEADER + GOOD + "a,y,inf,1,train\n", "own.csv, line 3, column 'rating': .* got 'inf'"),
        (HEADER + '"a","y","4,5",1,train\n', "own.csv, line 2, column 'rating': .* got '4,5'"),
        (HEADER + GOOD + ",y,5,1,train\n", "own.csv, line 3, column 'user': a user id must not be empty; got nothing"),
        (HEADER + GOOD + 'a,"",5,1,train\n', "own.csv, line 3, column 'item': an item id must not be empty"),
        (HEADER + GOOD + "a,y,5,soon,train\n", "own.csv, line 3, column 'time': .* got 'soon'"),
        (HEADER + GOOD + "a,y,5,,train\n", "own.csv, line 3, column 'time': .* got nothing"),
        (HEADER + GOOD + "a,y,5,2010-10-19,train\n", "own.csv, line 3, column 'time': .* the same kind in all lines"),
        (HEADER + "a,y,5,2010-10-19,train\n" + GOOD, "own.csv, line 3, column 'time': .* got '1'"),
        (HEADER + GOOD + "a,y,5,1,trian\n", "own.csv, line 3, column 'split': a split must be .* got 'trian'"),
        (HEADER + GOOD + "a,y,5,1\n", "own.csv, line 3: expected 5 columns, got 4"),
        (HEADER + GOOD + "a,y,5,1,train,more\n", "own.csv, line 3: expected 5 columns, got 6"),
        (HEADER + GOOD + '"a,y,5,1,train\n', "own.csv, line 3: expected 5 columns, got 1"),
        (HEADER + '"a\nb",y,5,1,train\n"c\n",y,x,1,train\n', "own.csv, line 5, column 'rating'"),
        (HEADER + "\n\n" + "a,y,bad,1,train\n", "own.csv, line 4, column 'rating': .* got 'bad'"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_line_and_column(tmp_path: Path, content: str, message: str, packed: bool) -> None:
    path = tmp_path / ("own.csv.gz" if packed and content else "own.csv")
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    with pytest.raises(ArgumentError, match=message.replace("own.csv", path.name)) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            (HEADER + GOOD + "b\xe9,y,5,1,train\n").encode("latin-1"),
            "line 3, column 'user': .* not UTF-8. As latin-1 it is 'bé': --encoding latin-1",
        ),
        (
            (HEADER + GOOD + "b,€,5,1,train\n").encode("cp1252"),
            "line 3, column 'item': .* not UTF-8. As cp1252 it is '€': --encoding cp1252",
        ),
        ("us\xe9r,item\na,b\n".encode("latin-1"), "line 1: .* not UTF-8. As latin-1 it is 'usér,item'"),
        ((HEADER + GOOD).encode("utf-16"), "line 1: .* not UTF-8. As utf-16 it is 'user,item': --encoding utf-16"),
    ],
)
def test_encoding(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=f"own.csv, {message}"):
        load(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": "usr"}, "own.csv, line 1: unknown column for user 'usr': did you mean 'user'"),
        ({"usr": "user"}, "`columns` must be one of 'user', 'item', 'rating', 'time', 'split', 'title'; got 'usr'"),
        ({"user": "1", "item": "9"}, "own.csv, line 1: `columns` says item=9, but there are 5 columns"),
        ({"user": "0", "item": "1"}, "own.csv, line 1: `columns` says user=0"),
        ({"user": "1"}, "own.csv: no column for the item among '1', '2'|own.csv, line 1: no column for the item"),
    ],
)
def test_columns(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(HEADER + GOOD)
    with pytest.raises(ManymaxError, match=message):
        load(path, columns=columns)


def test_a_packed_file_that_broke_off(tmp_path: Path) -> None:
    path = tmp_path / "own.csv.gz"
    content = gzip.compress((HEADER + "".join(f"u{i},x,5,1,train\n" for i in range(9999))).encode())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArgumentError, match=r"own.csv.gz cannot be read: .* Is it complete"):
        load(path)
    path.write_text("not packed")
    with pytest.raises(ArgumentError, match=r"own.csv.gz cannot be read: .* Is it complete"):
        load(path)


def test_a_fault_far_down_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manymax.study.data.sources.delimited.BYTES_PER_CHUNK", 1 << 10)
    path = tmp_path / "own.csv"
    path.write_text(HEADER + GOOD * 5000 + "a,y,x,1,train\n" + GOOD * 5000)
    with pytest.raises(ArgumentError, match=r"own.csv, line 5002, column 'rating'"):
        load(path)


@pytest.mark.parametrize("name", ["own.csv.gz", "ml-1m.zip"])
def test_packed_files_that_are_damaged(tmp_path: Path, name: str) -> None:
    """A wrong byte in the middle is an error of zlib and not of the operating system."""
    path, lines = tmp_path / name, b"".join(b"%d,%d\n" % (i * i, i) for i in range(300))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"user,item\n" + lines))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-1m/ratings.dat", lines)
    content = bytearray(path.read_bytes())
    content[70:80] = bytes(10)
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=f"{name} cannot be (read|unpacked)"):
        load(path)


def test_lines_that_end_with_a_carriage_return_only(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_bytes(b"user,item\ra,b\rc,d\r")
    with pytest.raises(ArgumentError, match=r"own\.csv, line 1: .* Lines must end with"):
        load(tmp_path / "own.csv")
