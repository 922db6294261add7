"""`manymax data list`, `get`, `prepare` and `card`: what they print, save and refuse."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.errors import ManymaxError
from manymax.study.data import download
from manymax.study.data.sources import SOURCES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYMAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments])


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def words(text: str) -> str:
    return " ".join(text.split())


class TestList:
    def test_every_data_set_has_a_row(self) -> None:
        lines = output("list").splitlines()
        assert [line.split()[0] for line in lines[2 : 2 + len(SOURCES)]] == list(SOURCES)

    def test_says_which_data_sets_are_on_this_machine(self, cache: Path) -> None:
        status = {entry["name"]: entry["status"] for entry in json.loads(output("list", "--json"))}
        assert (status["planted"], status["ml-1m"]) == ("built in", "not fetched")
        (cache / "ml-1m").mkdir(parents=True)
        (cache / "ml-1m" / "ml-1m.zip").touch()
        assert json.loads(output("list", "--json"))[2]["status"] == "here"
        assert str(cache) in output("list")

    def test_json_has_terms_and_presets(self) -> None:
        entry = next(entry for entry in json.loads(output("list", "--json")) if entry["name"] == "ml-1m")
        assert entry["presets"]["paper-table"] == {"min_rating": 3, "k_core": 5}
        assert "no redistribution" in entry["terms"]


class TestGet:
    def test_fetches_and_names_the_terms(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def receive(url: str, partial: Path, progress: download.Progress) -> None:
            partial.write_bytes(b"content")
            progress(partial.stem, 7, 7)

        monkeypatch.setattr(download, "_receive", receive)
        text = output("get", "gowalla-checkins")
        assert "its publisher gives no checksum; sha256:" in text
        assert "Terms: published by Stanford SNAP" in text
        assert "Please cite: Cho" in text
        assert (cache / "gowalla-checkins" / "loc-gowalla_totalCheckins.txt.gz").read_bytes() == b"content"

    def test_planted_needs_nothing(self) -> None:
        assert "nothing to fetch" in output("get", "planted")

    def test_unknown_name(self) -> None:
        assert "did you mean 'ml-1m'" in str(run("get", "ml-1n").exception)


class TestPrepare:
    def test_prints_and_saves_the_card(self, cache: Path) -> None:
        text = output("prepare", "planted-tiny", "--k-core", "6", "--split", "ratio-time")
        assert text.splitlines()[0].split() == ["step", "users", "items", "interactions", "sparsity"]
        assert "6-core" in text
        path = cache / "prepared" / "planted" / "planted.parquet"
        assert f"saved {path} and its card" in text
        assert words(output("card", "planted")) == words(text[: text.index("saved ")])
        assert output("card", str(path)) == output("card", "planted")

    def test_json(self, tmp_path: Path) -> None:
        card = json.loads(output("prepare", "planted", "--size", "60x40x10", "--out", str(tmp_path), "--json"))
        assert card[0]["users"] == 60
        assert json.loads(output("card", str(tmp_path), "--json")) == card
        assert json.loads((tmp_path / "planted.card.json").read_text()) == card

    def test_a_named_data_set_from_a_file_elsewhere(self, tmp_path: Path) -> None:
        lines = [f"{u}::{i}::{5 if i else 1}::{i}" for u in range(6) for i in range(6)]
        path = tmp_path / "mine.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("ml-1m/ratings.dat", "\n".join(lines))
        text = output("prepare", "ml-1m", "--from", str(path), "--preset", "paper-table")
        assert "rating >= 3" in text
        assert "5-core" in text

    def test_columns_of_an_own_file(self, tmp_path: Path) -> None:
        path = tmp_path / "own.csv"
        path.write_text("who,what\n" + "".join(f"{u},{i}\n" for u in range(4) for i in range(5)))
        assert "own, all" in output("prepare", str(path), "--columns", "user=who,item=what")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("nothing.csv",), "nothing.csv does not exist"),
            (("ml-1m",), "`manymax data get ml-1m`"),
            (
                ("planted", "--preset", "paper-table"),
                "`preset` 'paper-table' stands for the filters that the",
            ),
            (("planted", "--split", "loo"), "`split` must be one of"),
            (("planted", "--k-core", "1000"), "no interaction is left"),
            (("planted", "--min-rating", "3"), "`min_rating` needs ratings"),
            (("planted", "--columns", "user"), "`columns` must look like"),
        ],
    )
    def test_faults_leave_nothing_behind(self, cache: Path, arguments: tuple[str, ...], message: str) -> None:
        result = run("prepare", *arguments)
        assert isinstance(result.exception, ManymaxError)
        assert message in str(result.exception)
        assert not cache.exists()


def test_a_data_set_without_a_card_says_how_to_make_one() -> None:
    assert "`manymax data prepare ml-1m` writes one" in str(run("card", "ml-1m").exception)


@pytest.mark.parametrize("command", [(), ("list",), ("prepare",), ("card",)])
def test_help_gives_examples_that_work(command: tuple[str, ...]) -> None:
    output("prepare", "planted-tiny")
    lines = [line.strip() for line in output(*command, "--help").splitlines()]
    examples = [line.split("  ")[0].split()[2:] for line in lines if line.startswith("manymax data ")]
    assert examples
    for arguments in examples:
        output(*arguments)
