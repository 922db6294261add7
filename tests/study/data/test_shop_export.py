"""Data as shops export it: missing customers, returns, other encodings and dates, and the way out of each."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from manymax.errors import ArgumentError
from manymax.study.data.card import card_notes, card_rows
from manymax.study.data.interactions import Interactions
from manymax.study.data.prepare import prepare, save
from manymax.study.data.sources.times import fitting_formats
from tests.study.data.reading import read, rows
from tests.study.data.shop import COLUMNS, DATE_FORMAT, HEADER, READABLE, write_shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop") / "shop.csv")


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="latin-1", newline="") as file:
        return list(csv.DictReader(file))


def table(path: Path, *lines: str, header: str = "user,item", encoding: str = "utf-8") -> Path:
    path.write_bytes("\n".join([header, *lines, ""]).encode(encoding))
    return path


def test_each_error_on_the_way_offers_the_next_step(shop: Path) -> None:
    """From the first command to prepared data by doing what the last message says."""
    steps = [
        ({"columns": COLUMNS}, "--date-format '%m/%d/%Y %H:%M' (in a study: --set 'date_format=%m/%d/%Y %H:%M')"),
        ({"date_format": DATE_FORMAT}, "--encoding latin-1 (in a study: --set encoding=latin-1)"),
        ({"encoding": "latin-1"}, "--drop-missing (in a study: --set drop_missing=true)"),
    ]
    options: dict = {}
    for given, offered in steps:
        options |= given
        with pytest.raises(ArgumentError) as caught:
            prepare(shop, **options)
        assert offered in str(caught.value)
        assert str(caught.value).startswith("shop.csv, line ")
    assert prepare(shop, **options, drop_missing=True).split.num_items == 30


class TestMissing:
    def test_rows_are_dropped_and_counted(self, shop: Path) -> None:
        lines = lines_of(shop)
        guests = sum(not line["CustomerID"] for line in lines)
        card = prepare(shop, **READABLE).card
        assert [step["step"] for step in card[:2]] == ["raw", "missing"]
        assert (card[0]["interactions"], card[1]["interactions"]) == (len(lines), len(lines) - guests)
        assert (card[1]["removed"], card[1]["without_user"]) == (guests, guests)
        assert card_rows(card)[1][0] == f"complete rows; {guests} without a user"

    def test_every_role_is_counted_by_itself(self, tmp_path: Path) -> None:
        path = table(tmp_path / "a.csv", "a,x,5,1", ",x,,2", "b,,5,3", "c,z,5,", header="user,item,rating,time")
        with pytest.raises(
            ArgumentError, match=r"Of 4 rows there are 1 without a user, 1 without an item, 1 without a rat"
        ):
            read(path)
        card = read(path, drop_missing=True).card
        assert [card[1][f"without_{role}"] for role in ("user", "item", "rating", "time")] == [1, 1, 1, 1]
        assert (card[0]["users"], card[0]["items"], card[0]["interactions"], card[1]["interactions"]) == (3, 2, 4, 1)

    @pytest.mark.parametrize("word", ["nan", "NaN", "None", "NULL", "<NA>", " ", '""'])
    def test_a_word_for_nothing_is_no_user(self, tmp_path: Path, word: str) -> None:
        path = table(tmp_path / "a.csv", "a,x", f"{word},x", "b,y")
        with pytest.raises(ArgumentError, match=r"a.csv, line 3, column 'user': a user id must not be empty"):
            read(path)
        assert rows(read(path, drop_missing=True)) == [("a", "x"), ("b", "y")]

    def test_fractions_of_pandas_are_ids_and_their_nan_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"user": [17850.0, float("nan"), 13047.0], "item": ["x", "y", "z"]}), path)
        with pytest.raises(ArgumentError, match=r"row 2, column 'user': a user id must not be empty"):
            read(path)
        assert rows(read(path, drop_missing=True)) == [(17850, "x"), (13047, "z")]

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"no interaction is left after .*missing \(0 left\)"):
            prepare(table(tmp_path / "a.csv", ",x", ",y"), drop_missing=True)


class TestColumns:
    def test_a_guessed_column_can_be_left_out(self, shop: Path, tmp_path: Path) -> None:
        path = table(tmp_path / "a.csv", "a,x,soon", "b,y,later", header="user,item,date")
        with pytest.raises(ArgumentError, match=r"add time=none to --columns"):
            read(path)
        assert read(path, columns={"time": "none"}).times is None
        assert "time 'date'" not in read(path, columns={"time": "none"}).card[0]["note"]

    def test_by_place(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("a,x\nb,y\n")
        assert rows(read(path, columns={"user": "1", "item": "2", "time": "none"})) == [("a", "x"), ("b", "y")]

    def test_a_column_that_is_called_none(self, tmp_path: Path) -> None:
        path = table(tmp_path / "a.csv", "a,x,3", header="user,item,none")
        assert rows(read(path, columns={"time": "none"})) == [("a", "x", 3)]

    def test_users_and_items_cannot_be_left_out(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"no column for the user"):
            read(table(tmp_path / "a.csv", "a,x"), columns={"user": "none"})

    def test_the_card_says_which_were_taken(self, shop: Path) -> None:
        notes = card_notes(read(shop, **READABLE).card)
        assert notes[0].startswith("columns: user 'CustomerID', item 'StockCode' (guessed), rating 'Quantity'")
        assert "time=none in `columns` leaves it out" in notes[0]


class TestReturns:
    def test_a_return_does_not_erase_a_purchase(self, tmp_path: Path) -> None:
        lines = ["a,x,6,1", "a,y,2,2", "a,z,1,3", "a,x,-6,9"]
        path = table(tmp_path / "a.csv", *lines, header="user,item,rating,time")
        prepared = prepare(path, min_rating=1)
        assert {row[1] for row in rows(prepared.interactions)} == {"x", "y", "z"}
        assert "'rating': 1 values are below 0, which `min_rating` can leave out" in card_notes(prepared.card)

    def test_as_many_pairs_as_were_ever_bought(self, shop: Path) -> None:
        lines = [line for line in lines_of(shop) if line["CustomerID"] and int(line["Quantity"]) > 0]
        bought = {(line["CustomerID"], line["StockCode"]) for line in lines}
        assert prepare(shop, **READABLE, min_rating=1).card[-1]["interactions"] == len(bought)

    def test_sparsity_is_never_negative(self, shop: Path) -> None:
        card = prepare(shop, **READABLE).card
        cells = card[1]["users"] * card[1]["items"]
        assert card[1]["interactions"] > cells  # pairs are repeated
        assert all(0 <= step["sparsity"] <= 1 for step in card)
        pairs = {(line["CustomerID"], line["StockCode"]) for line in lines_of(shop) if line["CustomerID"]}
        assert card[1]["sparsity"] == pytest.approx(1 - len(pairs) / cells, abs=1e-6)


class TestEncoding:
    @pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "UTF-8", "utf-8-sig"])
    def test_ids_and_names_of_columns(self, tmp_path: Path, encoding: str) -> None:
        path = table(tmp_path / "a.csv", "ü,x", "é,y", header="usér,item", encoding=encoding)
        found = read(path, encoding=encoding, columns={"user": "usér"})
        assert rows(found) == [("ü", "x"), ("é", "y")]

    def test_faults_name_the_line(self, tmp_path: Path) -> None:
        path = table(tmp_path / "a.csv", "ü,x,5", "é,y,good", header="user,item,rating", encoding="latin-1")
        with pytest.raises(ArgumentError, match=r"line 3, column 'rating': .* got 'good'"):
            read(path, encoding="latin-1")
        with pytest.raises(ArgumentError, match=r"a.csv is not in `encoding` ascii"):
            read(path, encoding="ascii")
        with pytest.raises(ArgumentError, match=r"`encoding` must be one that Python knows, .* got 'latin-99'"):
            read(path, encoding="latin-99")

    def test_bytes_in_a_column_that_nobody_reads(self, tmp_path: Path) -> None:
        """The message is about the fault, not about an é somewhere else."""
        lines = ["a,x,caf\xe9,1", ",y,caf\xe9,2"]
        path = table(tmp_path / "a.csv", *lines, header="user,item,note,time", encoding="latin-1")
        with pytest.raises(ArgumentError, match=r"line 3, column 'user': a user id must not be empty"):
            read(path)

    def test_parquet_has_one_of_its_own(self, tmp_path: Path) -> None:
        parquet.write_table(pa.table({"user": ["a"], "item": ["x"]}), tmp_path / "a.parquet")
        with pytest.raises(ArgumentError, match=r"`encoding` is for text, and a.parquet is Parquet"):
            read(tmp_path / "a.parquet", encoding="latin-1")


class TestDates:
    @pytest.mark.parametrize(
        ("date_format", "times"),
        [
            ("%m/%d/%Y %H:%M", ["12/1/2010 8:26", "1/9/2011 17:00", "12/1/2010 8:27"]),
            ("%d.%m.%Y", ["1.12.2010", "9.1.2011", "02.12.2010"]),
            ("%b %d, %Y", ["Dec 1, 2010", "Jan 9, 2011", "Dec 2, 2010"]),
            ("%Y%m%d", ["20101201", "20110109", "20101202"]),
            ("%m/%d/%Y %I:%M %p", ["12/1/2010 8:26 AM", "1/9/2011 1:00 AM", "12/1/2010 8:26 PM"]),
            ("%H:%M:%S.%f", ["08:00:00.5", "08:00:01.25", "08:00:00.75"]),
            ("%Y-%m-%d %H:%M:%S %z", ["2010-12-01 08:00:00 +0200", "2010-12-01 07:00:00 +0000",
                                      "2010-12-01 08:30:00 +0200"]),
        ],
    )  # fmt: skip
    def test_times_grow_with_time(self, tmp_path: Path, date_format: str, times: list[str]) -> None:
        lines = (f"u\t{i}\t{time}" for i, time in enumerate(times))
        path = table(tmp_path / "a.tsv", *lines, header="user\titem\ttime")
        found = read(path, date_format=date_format)
        assert found.times is not None
        assert found.times.argsort().tolist() == [0, 2, 1]

    def test_the_formats_that_read_all_are_offered(self, tmp_path: Path) -> None:
        assert fitting_formats(["12/1/2010", "1/2/2011"]) == ["%m/%d/%Y", "%d/%m/%Y"]
        assert fitting_formats(["12/1/2010", "13/2/2011"]) == ["%d/%m/%Y"]
        assert fitting_formats(["31/12/10"]) == ["%d/%m/%y"]
        assert fitting_formats(["yesterday"]) == []
        path = table(tmp_path / "a.csv", "a,x,12/1/2010", header="user,item,date")
        with pytest.raises(ArgumentError, match=r"Several .* --date-format %m/%d/%Y .* or --date-format %d/%m/%Y"):
            read(path)

    def test_a_time_in_another_format(self, tmp_path: Path) -> None:
        path = table(tmp_path / "a.csv", "a,x,1.2.2010", "b,x,30.2.2010", header="user,item,date")
        with pytest.raises(ArgumentError, match=r"line 3, column 'date': .* `date_format` '%d.%m.%Y' says; got '30.2"):
            read(path, date_format="%d.%m.%Y")

    @pytest.mark.parametrize("wrong", ["%Q", "day", "%d %d", "%"])
    def test_what_is_no_format(self, wrong: str) -> None:
        with pytest.raises(ArgumentError, match=r"`date_format` must be made of the letters of Python's strptime"):
            read(Path("a.csv"), date_format=wrong)

    def test_parquet_with_times_as_text(self, tmp_path: Path) -> None:
        iso = ["2010-12-02T00:00:00", "2010-12-01 10:00:00"]
        for times, date_format in ((iso, None), (["2.12.", "1.12."], "%d.%m.")):
            parquet.write_table(pa.table({"user": [1, 1], "item": [1, 2], "time": times}), tmp_path / "a.parquet")
            found = read(tmp_path / "a.parquet", date_format=date_format)
            assert found.times is not None
            assert found.times.argsort().tolist() == [1, 0]


class TestIds:
    def test_17850_and_17850_0_are_one_user(self, tmp_path: Path) -> None:
        found = read(table(tmp_path / "a.csv", "17850,x", "17850.0,y", "13047.0,x", ",z"), drop_missing=True)
        assert rows(found) == [("17850", "x"), ("17850", "y"), ("13047", "x")]
        assert any("17850.0 and the like are read as whole numbers" in note for note in card_notes(found.card))

    @pytest.mark.parametrize("other", ["85123A", "1.5", "1e3"])
    def test_unless_one_of_them_is_no_whole_number(self, tmp_path: Path, other: str) -> None:
        found = read(table(tmp_path / "a.csv", "7,x", "7.0,y", f"{other},x"))
        assert found.user_ids.tolist() == ["7", "7.0", other]


class TestJsonLines:
    LINES = (
        {"customer_id": 7, "sku": "a", "stars": 5, "date": "2010-12-02", "product_name": "Mug", "other": [1, {"x": 2}]},
        {"customer_id": 9, "sku": "b", "stars": 4.5, "date": "2010-12-01T10:00:00"},
        {"customer_id": 7, "sku": "a", "stars": 1, "date": "2010-12-03", "product_name": None},
    )

    def write(self, path: Path, *lines: dict) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    @pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.ndjson"])
    def test_fields_are_guessed(self, tmp_path: Path, name: str) -> None:
        found = read(self.write(tmp_path / name, *self.LINES))
        assert [row[:3] for row in rows(found)] == [(7, "a", 5.0), (9, "b", 4.5), (7, "a", 1.0)]
        assert found.times is not None
        assert found.times.argsort().tolist() == [1, 0, 2]
        assert found.item_titles is not None
        assert found.item_titles.tolist() == ["Mug", None]
        assert found.name == "own"

    def test_fields_are_named_and_the_file_may_be_an_amazon_like_one(self, tmp_path: Path) -> None:
        line = {"reviewerID": "a", "asin": "b", "overall": 5, "unixReviewTime": 1, "shop": "s"}
        path = self.write(tmp_path / "own.jsonl", line)
        assert rows(read(path)) == [("a", "b", 5.0, 1)]
        assert rows(read(path, columns={"item": "shop", "time": "none"})) == [("a", "s", 5.0)]

    def test_dates_and_missing_values(self, tmp_path: Path) -> None:
        first, last = {"user": "a", "item": 1, "date": "1.12.2010"}, {"item": 3, "date": "2.12.2010"}
        path = self.write(tmp_path / "own.jsonl", first, {"user": None, "item": 2}, last)
        with pytest.raises(ArgumentError, match=r"own.jsonl, line 1, column 'date': .* --date-format %d.%m.%Y"):
            read(path)
        with pytest.raises(ArgumentError, match=r"own.jsonl, line 2, column 'user': .* got nothing.* 2 without a user"):
            read(path, date_format="%d.%m.%Y")
        assert [row[:2] for row in rows(read(path, date_format="%d.%m.%Y", drop_missing=True))] == [("a", 1)]

    def test_later_lines_may_have_fractions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("manymax.study.data.sources.json_lines.LOOKED_AT", 1)
        lines = {"user": 7, "item": "a", "ts": 1}, {"user": 9.0, "item": "b", "ts": 0.5}
        path = self.write(tmp_path / "own.jsonl", *lines)
        assert [row[:2] for row in rows(read(path))] == [(7, "a"), (9, "b")]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"user": "a", "item": 5}', "line 2, column 'item': item ids must be all text or all numbers; got 5"),
            ('{"user": ["a"], "item": "b"}', "line 2, column 'user': user ids must be all text"),
            ('["a", "b"]', "line 2: expected a JSON object"),
            ("a,b", "line 2: expected one JSON object per line"),
        ],
    )
    def test_faults(self, tmp_path: Path, line: str, message: str) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text(f'{{"user": "a", "item": "b"}}\n{line}\n')
        with pytest.raises(ArgumentError, match=message):
            read(path)

    def test_another_encoding(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        path.write_bytes('{"user": "é", "item": "x"}\n'.encode("latin-1"))
        with pytest.raises(ArgumentError, match=r"line 1: .* --encoding latin-1"):
            read(path)
        assert rows(read(path, encoding="latin-1")) == [("é", "x")]


class TestTitles:
    def titles(self, found: Interactions) -> dict[str, str | None]:
        assert found.item_titles is not None
        return dict(zip(found.item_ids.tolist(), found.item_titles.tolist(), strict=True))

    def test_the_most_frequent_one_is_taken(self, tmp_path: Path) -> None:
        lines = ["a,x,?", "b,x,MUG", "c,x,MUG", "a,y,one", "b,y,two", "a,z,", "b,z,nan", ",z,guest"]
        path = table(tmp_path / "a.csv", *lines, header="user,item,item_title")
        assert self.titles(read(path, drop_missing=True)) == {"x": "MUG", "y": "one", "z": "guest"}

    def test_they_follow_the_items_and_are_saved(self, shop: Path, tmp_path: Path) -> None:
        prepared = prepare(shop, **READABLE, min_rating=1, k_core=15)
        found = self.titles(prepared.interactions)
        assert 0 < len(found) < 30, "the filter must drop some items and not all"
        assert found == {code: f"CAFÉ MUG {code}" for code in found}
        assert self.titles(prepare(save(prepared, tmp_path)).interactions) == found

    def test_no_row_is_incomplete_without_one(self, shop: Path) -> None:
        assert any(not line["Description"] for line in lines_of(shop))
        assert "without_title" not in prepare(shop, **READABLE).card[1]


def test_the_header_is_that_of_the_made_up_shop(shop: Path) -> None:
    assert list(lines_of(shop)[0]) == HEADER
