"""MovieLens, Gowalla and Amazon reviews are read from files as their publishers write them."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from manymax.errors import ArgumentError
from manymax.study.data.load import load
from tests.study.data.reading import ROWS, read, rows, text

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

    def test_an_archive_with_paths_outside_of_it_writes_nothing(self, tmp_path: Path) -> None:
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
            ('{"reviewerID": "a", "asin": "b\xff", "overall": 1, "unixReviewTime": 1}', "line 2: .* not UTF-8"),
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
