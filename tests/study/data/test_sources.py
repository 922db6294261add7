"""Every format is read: own tables in many dresses, and files as their publishers write them."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.data.interactions import Interactions
from manymax.study.data.load import cache, load
from manymax.study.data.sources import SOURCES
from manymax.study.data.sources.table import assign, parse_columns

ROWS = [("ann", "x1", 4.5, 100), ("bob", "x1", 3.0, 50), ("ann", "x2", 1.0, 75)]


def read(path: Path, **options) -> Interactions:
    return load(path, **options).interactions


def rows(data: Interactions) -> list[tuple]:
    columns = [data.user_ids[data.users.numpy()], data.item_ids[data.items.numpy()]]
    columns += [values.numpy() for values in (data.ratings, data.times) if values is not None]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def text(separator: str = ",", header: str | None = "user,item,rating,time", quote: str = "") -> str:
    lines = [separator.join(f"{quote}{value}{quote}" for value in row) for row in ROWS]
    return "\n".join([header.replace(",", separator), *lines] if header else lines) + "\n"


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
    def test_the_same_rows_in_many_dresses(self, tmp_path: Path, name: str, content: str, columns: str | None) -> None:
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
        path.write_text('user,item\n007,1\n7,1.0\n NA ,"a,b"\nnan,"say ""hi""\nthere"\n日本,ü\n')
        assert rows(read(path)) == [
            ("007", "1"),
            ("7", "1.0"),
            (" NA ", "a,b"),
            ("nan", 'say "hi"\nthere'),
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
            ({"user": [1.0, 2.0], "item": [1, 2]}, "column 'user': ids must be integers or text; got double"),
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


ML = [("1", "1193", 5.0, 978300760), ("1", "661", 3.0, 978302109), ("2", "1193", 4.0, 978298413)]


class TestMovieLens:
    def content(self, separator: str) -> str:
        return "".join(f"{u}{separator}{i}{separator}{r:g}{separator}{t}\n" for u, i, r, t in ML)

    @pytest.mark.parametrize(("name", "separator"), [("u.data", "\t"), ("ratings.dat", "::")])
    @pytest.mark.parametrize("packed", [True, False])
    def test_in_the_archive_and_unpacked(self, tmp_path: Path, name: str, separator: str, packed: bool) -> None:
        folder = tmp_path / "ml-1m"
        folder.mkdir()
        if packed:
            with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
                archive.writestr("ml-1m/README", "read me")
                archive.writestr(f"ml-1m/{name}", self.content(separator))
            assert rows(data := read(tmp_path / "ml-1m.zip")) == ML
        else:
            (folder / name).write_text(self.content(separator))
            assert rows(read(folder / name)) == ML
            assert rows(data := read(folder)) == ML
        assert data.name == "ml-1m"

    def test_a_named_set_is_read_from_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MANYMAX_CACHE", str(tmp_path))
        with pytest.raises(ArgumentError, match=r"ml-100k has not been downloaded .* `manymax data get ml-100k`"):
            load("ml-100k")
        (tmp_path / "ml-100k").mkdir()
        with zipfile.ZipFile(tmp_path / "ml-100k" / "ml-100k.zip", "w") as archive:
            archive.writestr("ml-100k/u.data", self.content("\t"))
        assert rows(load("movielens-100k").interactions) == ML
        monkeypatch.delenv("MANYMAX_CACHE")
        assert rows(load("ml-100k", folder=tmp_path).interactions) == ML

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("ratings.dat", b"", "ratings.dat is empty"),
            ("ratings.dat", b"1::2::3::4\n1::2::3\n", "ratings.dat, line 2: expected 4 columns, got 3"),
            ("ratings.dat", b"1::2::x::4\n", "ratings.dat, line 1, column 'rating': .* got 'x'"),
            ("u.data", b"1 2 3 4\n", "u.data, line 1: expected 4 columns, got 1"),
            ("ml.zip", b"PK no", "ml.zip cannot be unpacked: .* Download it again"),
        ],
    )
    def test_faults(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArgumentError, match=message):
            read(tmp_path / name)

    def test_another_archive(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("../../u.data.txt", "1")
        with pytest.raises(
            ArgumentError, match=r"a.zip is not a MovieLens archive: it does not contain u.data or ratings.dat"
        ):
            read(tmp_path / "a.zip")

    def test_nothing_is_written_by_an_archive_with_a_trick(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        with zipfile.ZipFile(tmp_path / "in" / "a.zip", "w") as archive:
            archive.writestr("../../u.data", self.content("\t"))
        assert rows(read(tmp_path / "in" / "a.zip")) == ML
        assert [p.name for p in tmp_path.rglob("*")] == ["in", "a.zip"]


class TestGowalla:
    def lists(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "train.txt").write_text("0 10 11 12\n1 10\n3 11 10 \n")
        (folder / "test.txt").write_text("0 13\n1\n3 12 14\n\n")
        return folder

    @pytest.mark.parametrize("named", ["", "train.txt"])
    def test_lists(self, tmp_path: Path, named: str) -> None:
        data = read(self.lists(tmp_path / "gowalla") / named)
        assert data.parts is not None
        found = [(u, i, t, p) for (u, i, t), p in zip(rows(data), data.parts.tolist(), strict=True)]
        train = [(0, 10, 0), (0, 11, 1), (0, 12, 2), (1, 10, 0), (3, 11, 0), (3, 10, 1)]
        test = [(0, 13, 0), (3, 12, 0), (3, 14, 1)]
        assert found == [(*row, 0) for row in train] + [(*row, 2) for row in test]

    def test_the_release_by_name(self, tmp_path: Path) -> None:
        self.lists(tmp_path / "gowalla")
        data = load("gowalla", folder=tmp_path).interactions
        assert len(data) == 9
        assert set(data.card[0]["files"]) == {"train.txt", "test.txt"}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "test.txt is empty"),
            ("0 1\n1,2\n", "test.txt, line 2, column 1: expected a number, .* got '1,2'"),
            ("0 1\n1 2 -3\n", "test.txt, line 2, column 3: .* got '-3'"),
            (f"0 1\n1 {10**30}\n", "test.txt, line 2, column 2"),
        ],
    )
    def test_faults(self, tmp_path: Path, content: str, message: str) -> None:
        folder = self.lists(tmp_path / "gowalla")
        (folder / "test.txt").write_text(content)
        with pytest.raises(ArgumentError, match=message):
            read(folder)

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_checkins(self, tmp_path: Path, suffix: str) -> None:
        lines = (
            "0\t2010-10-19T23:55:27Z\t30.2359091167\t-97.7951395833\t22847\n"
            "0\t2010-10-18T22:17:43Z\t30.2691029532\t-97.7493953705\t420315\n"
            "1\t2010-10-17T23:42:03Z\t30.2557309927\t-97.7633857727\t22847\n"
        )
        path = tmp_path / f"loc-gowalla_totalCheckins.txt{suffix}"
        path.write_bytes(gzip.compress(lines.encode()) if suffix else lines.encode())
        data = read(path)
        assert data.name == ("gowalla-checkins" if suffix else "loc-gowalla_totalCheckins")
        assert [row[:2] for row in rows(data)] == [("0", "22847"), ("0", "420315"), ("1", "22847")]
        assert data.times is not None
        seconds = [1287532527, 1287440263, 1287358923]
        assert (data.times - data.times[0]).tolist() == [second - seconds[0] for second in seconds]

    def test_checkins_with_a_fault(self, tmp_path: Path) -> None:
        path = tmp_path / "checkins.txt"
        path.write_text("0\t2010-10-19T23:55:27Z\t1\t2\t3\n0\tyesterday\t1\t2\t3\n")
        with pytest.raises(ArgumentError, match=r"checkins.txt, line 2, column 'time': .* got 'yesterday'"):
            read(path)


class TestAmazon:
    def review(self, user: str, item: str, stars: float, time: int, **more) -> str:
        names = {"reviewerID": user, "asin": item, "overall": stars, "unixReviewTime": time}
        return json.dumps(names | {"reviewText": "fine, \n really", "helpful": [0, 1]} | more)

    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_reviews(self, tmp_path: Path, suffix: str) -> None:
        content = "\n".join(self.review(*row) for row in ROWS).encode()
        path = tmp_path / f"reviews_Electronics_5.json{suffix}"
        path.write_bytes(gzip.compress(content) if suffix else content)
        data = read(path)
        assert rows(data) == ROWS
        assert data.name == ("electronics" if suffix else "reviews_Electronics_5")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{'reviewerID': 'a'}", "line 2: expected one JSON object per line"),
            ("[1]", "line 2: expected a JSON object with reviewerID"),
            (
                '{"asin": "b", "overall": 1, "unixReviewTime": 1}',
                "line 2: the field 'reviewerID' is missing. The line has asin",
            ),
            (
                '{"reviewerID": "", "asin": "b", "overall": 1, "unixReviewTime": 1}',
                "line 2, column 'reviewerID': .* nothing",
            ),
            (
                '{"reviewerID": "a", "asin": "b", "overall": "5", "unixReviewTime": 1}',
                "line 2, column 'overall': .* '5'",
            ),
            (
                '{"reviewerID": "a", "asin": "b", "overall": null, "unixReviewTime": 1}',
                "line 2, column 'overall': .* nothing",
            ),
            ('{"reviewerID": "a", "asin": "b\xff", "overall": 1, "unixReviewTime": 1}', "line 2: byte 31 .* not UTF-8"),
        ],
    )
    def test_faults(self, tmp_path: Path, line: str, message: str) -> None:
        path = tmp_path / "r.json"
        path.write_bytes(f"{self.review(*ROWS[0])}\n{line}\n".encode("latin-1"))
        with pytest.raises(ArgumentError, match=f"r.json, {message}"):
            read(path)

    @pytest.mark.parametrize("content", [gzip.compress(b"{}" * 999, mtime=0)[:-9], b"no gzip"])
    def test_a_broken_archive(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "r.json.gz"
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"r.json.gz cannot be read: .* Is it complete"):
            read(path)

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "r.json").touch()
        with pytest.raises(ArgumentError, match=r"r.json is empty"):
            read(tmp_path / "r.json")

    def test_ratings(self, tmp_path: Path) -> None:
        path = tmp_path / "ratings_Electronics.csv"
        path.write_text(text(header=None))
        data = read(path)
        assert rows(data) == ROWS
        assert data.name == "electronics-ratings"

    def test_own_ratings_with_a_header(self, tmp_path: Path) -> None:
        path = tmp_path / "ratings_mine.csv"
        path.write_text(text())
        assert rows(read(path)) == ROWS
        path.write_text(text(header=None))
        assert rows(read(path, columns={"user": "2", "item": "1"}))[0] == ("x1", "ann"), "named columns make it a table"


class TestWhatIsMeant:
    @pytest.mark.parametrize(
        ("data", "options", "message"),
        [
            ("ml-1n", {}, "unknown data set 'ml-1n': did you mean 'ml-1m'.* There is no file of that name either"),
            ("nowhere/a.csv", {}, "nowhere/a.csv does not exist"),
            ("a.csv", {}, "a.csv does not exist"),
            ("planted", {"columns": {"user": "a"}}, "`columns` is for tables of your own; the columns of planted"),
            ("ml-1m", {"size": "tiny"}, "`size` has a meaning for planted data only"),
            (
                "ml-1m",
                {"columns": {"user": "a"}},
                "`columns` is for tables of your own; the columns of ml-1m",
            ),
        ],
    )
    def test_faults(self, data: str, options: dict, message: str) -> None:
        with pytest.raises(ManymaxError, match=message):
            load(data, **options)

    def test_a_name_is_a_name_even_where_a_file_is_called_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("planted", "planted-tiny", "ml-1m"):
            (tmp_path / name).mkdir()
        assert load("planted-tiny").truth is not None
        with pytest.raises(ArgumentError, match=r"ml-1m has not been downloaded"):
            load("ml-1m", folder=tmp_path / "cache")
        with pytest.raises(ArgumentError, match=r"planted has no known format"):
            load("./planted")

    def test_unknown_formats(self, tmp_path: Path) -> None:
        (tmp_path / "a.xlsx").touch()
        for path in (tmp_path, tmp_path / "a.xlsx"):
            with pytest.raises(ArgumentError, match=r"has no known format: expected a table \(.csv, .tsv"):
                load(path)

    def test_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MANYMAX_CACHE", "/somewhere")
        assert cache() == Path("/somewhere")
        monkeypatch.delenv("MANYMAX_CACHE")
        assert cache().name == "manymax"

    def test_the_card_begins_with_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.csv.gz"
        path.write_bytes(gzip.compress(text().encode()))
        (step,) = read(path).card
        assert (step["step"], step["data"], step["interactions"]) == ("raw", "own", 3)
        (checksum,) = step["files"].values()
        assert len(checksum) == 64

    def test_every_source_has_what_a_user_needs(self) -> None:
        for source in SOURCES.values():
            assert source.title
            assert not source.files or (source.read and source.terms and source.citation)
            for file in source.files:
                assert file.url.startswith("https://")
                assert os.path.basename(file.url) == file.name
                assert file.checksum is None or file.checksum.partition(":")[0] in ("md5", "sha256", "git")
