"""Tables of the caller: CSV, TSV and Parquet in many forms are read, with columns that are guessed or named."""

from __future__ import annotations

import gzip
from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from manymax.errors import ArgumentError
from manymax.study.data.sources.table import assign, parse_columns
from tests.study.data.reading import ROWS, read, rows, text


class TestText:
    @pytest.mark.parametrize(
        ("name", "content", "columns"),
        [
            ("a.csv", text(), None),
            ("a.CSV", text(), None),
            ("a.csv", text().rstrip("\n"), None),
            ("a.csv", text().replace("\n", "\r\n"), None),
            ("a.csv", "\ufeff" + text(), None),
            ("a.csv", "\ufeff" + text(), "user=user"),
            ("a.csv", text(quote='"'), None),
            ("a.csv", text(";"), None),
            ("a.csv", text("|"), None),
            ("a.csv", text("\t"), None),
            ("a.tsv", text("\t"), None),
            ("a.tsv", text(","), None),
            ("a.txt", text("\t"), None),
            ("a.inter", text("\t", "user_id:token,item_id:token,rating:float,timestamp:float"), None),
            ("a.csv", text(header="userId,movieId,Rating,Timestamp"), None),
            ("a.csv", text(header="who,what,stars,when"), "user=who,item=what,time=when"),
            ("a.csv", text(header=None), "user=1,item=2,rating=3,time=4"),
            ("a.csv", text() + "\n\n", None),
        ],
    )
    def test_the_same_rows_in_many_forms(self, tmp_path: Path, name: str, content: str, columns: str | None) -> None:
        path = tmp_path / name
        path.write_bytes(content.encode())
        assert rows(read(path, columns=parse_columns(columns) if columns else None)) == ROWS

    def test_packed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv.gz"
        path.write_bytes(gzip.compress(text().encode()))
        data = read(path)
        assert rows(data) == ROWS
        assert data.name == "a"

    def test_ids_stay_as_they_are_written(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text('user,item\n007,1\n7,1.0\n x ,"a,b"\n1e3,"say ""hi""\nthere"\n日本,ü\n')
        assert rows(read(path)) == [
            ("007", "1"),
            ("7", "1.0"),
            (" x ", "a,b"),
            ("1e3", 'say "hi"\nthere'),
            ("日本", "ü"),
        ]

    def test_other_columns_may_hold_anything(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes('user,item,title\n1,2,caf\xe9\n1,3,""\n'.encode("latin-1"))
        assert rows(read(path)) == [("1", "2"), ("1", "3")]

    @pytest.mark.parametrize(
        ("times", "order"),
        [
            (["2010-10-19T23:55:27Z", "2010-10-18T22:17:43Z"], [1, 0]),
            (["2010-10-19 23:55:27", "2010-10-19 23:55:28"], [0, 1]),
            (["2010-10-19", "2009-10-19"], [1, 0]),
            (["1.25", "1.5", "1.125"], [2, 0, 1]),
            (["1e3", "999"], [1, 0]),
            (["-5", "-7"], [1, 0]),
        ],
    )
    def test_times_grow_with_time(self, tmp_path: Path, times: list[str], order: list[int]) -> None:
        path = tmp_path / "a.csv"
        path.write_text("\n".join(["user,item,time", *(f"u,{i},{time}" for i, time in enumerate(times))]))
        data = read(path)
        assert data.times is not None
        assert data.times.argsort().tolist() == order

    def test_a_split(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("user,item,split\na,1,train\na,2,Validation\na,3,test\nb,1,val\n")
        data = read(path)
        assert data.parts is not None
        assert data.parts.tolist() == [0, 1, 2, 1]

    def test_many_blocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ids keep one number over all blocks of a file."""
        monkeypatch.setattr("manymax.study.data.sources.delimited.BYTES_PER_CHUNK", 1 << 10)
        rng = np.random.default_rng(0)
        pairs = rng.integers(0, 50, (2_000, 2)).tolist()
        path = tmp_path / "a.csv"
        path.write_text("user,item,text\n" + "".join(f'{u},{i},"one\n,two"\n' for u, i in pairs))
        assert rows(read(path)) == [(str(u), str(i)) for u, i in pairs]


class TestParquet:
    def write(self, path: Path, **columns) -> Path:
        parquet.write_table(pa.table(columns), path)
        return path

    @pytest.mark.parametrize(
        ("ids", "times"),
        [
            (pa.int32(), pa.int64()),
            (pa.uint8(), pa.float64()),
            (pa.string(), pa.int16()),
            (pa.large_string(), pa.timestamp("ns")),
            (pa.dictionary(pa.int32(), pa.string()), pa.timestamp("s", "UTC")),
            (pa.string_view(), pa.date32()),
        ],
    )
    def test_types(self, tmp_path: Path, ids: pa.DataType, times: pa.DataType) -> None:
        moments = [2, 1, 3]
        if pa.types.is_timestamp(times):
            moments = [datetime(2020, 1, day, tzinfo=timezone.utc) for day in moments]
        elif pa.types.is_date(times):
            moments = [date(2020, 1, day) for day in moments]
        names = [7, 9, 7] if pa.types.is_integer(ids) else ["7", "9", "7"]
        path = self.write(
            tmp_path / "a.parquet", user=pa.array(names, ids), item=[1, 2, 3], ts=pa.array(moments, times)
        )
        data = read(path)
        assert data.user_ids.tolist() == names[:2]
        assert data.users.tolist() == [0, 1, 0]
        assert data.times is not None
        assert data.times.argsort().tolist() == [1, 0, 2]
        assert data.ratings is None

    def test_names_are_guessed_and_given(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path / "a.parquet",
            item=[5, 6],
            user=[1, 1],
            position=[1, 0],
            split=["train", "test"],
            part=["valid"] * 2,
        )
        data = read(path)
        assert data.parts is not None
        assert data.times is not None
        assert (data.parts.tolist(), data.times.tolist()) == ([0, 2], [1, 0])
        assert "positions may count in each part" in data.card[0]["note"]
        other = read(path, columns={"split": "part"})
        assert other.parts is not None
        assert other.parts.tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            (
                {"user": [1, None], "item": [1, 2]},
                "a.parquet, row 2, column 'user': a user id must not be empty; got nothing",
            ),
            ({"user": ["a", ""], "item": [1, 2]}, "a.parquet, row 2, column 'user'"),
            ({"user": [1.0, 2.5], "item": [1, 2]}, "column 'user': ids must be integers or text; got 2.5 in row 2"),
            (
                {"user": [1], "item": [1], "rating": ["good"]},
                "row 1, column 'rating': a rating must be a number; got 'good'",
            ),
            ({"user": [1], "item": [1], "rating": [float("nan")]}, "row 1, column 'rating'"),
            ({"user": [1, 2], "item": [1, 1], "time": [1, None]}, "row 2, column 'time'"),
            ({"user": [1], "item": [1], "time": ["now"]}, "row 1, column 'time': a time must be a number or a date"),
            ({"user": [1, 2], "item": [1, 1], "split": ["train", "tset"]}, "row 2, column 'split': .* got 'tset'"),
            (
                {"user": [1], "item": [1], "split": pa.array([None], pa.string())},
                "row 1, column 'split': .* got nothing",
            ),
            ({"user": [1], "thing": [1]}, "a.parquet: no column for the item among 'user', 'thing'"),
            ({"user": pa.array([], pa.int64()), "item": pa.array([], pa.int64())}, "a.parquet has no interactions"),
        ],
    )
    def test_faults(self, tmp_path: Path, columns: dict, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            read(self.write(tmp_path / "a.parquet", **columns))

    def test_no_parquet_at_all(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        path.write_text("user,item\n")
        with pytest.raises(ArgumentError, match=r"a.parquet cannot be read as Parquet"):
            read(path)


def test_the_better_name_is_taken() -> None:
    header = ["uid", "user_id", "date", "timestamp", "item", "product_id"]
    assert assign(header, {}, "a") == {"user": "user_id", "item": "item", "time": "timestamp"}
    assert assign(header, {"user": "uid"}, "a")["user"] == "uid"


@pytest.mark.parametrize("given", ["user", "user=", "=a", "user=a,,item=b"])
def test_columns_that_cannot_be_understood(given: str) -> None:
    with pytest.raises(ArgumentError, match="`columns` must look like user=NAME,item=NAME"):
        parse_columns(given)
