"""Commands on an export of a shop: what they say before training, and the names of users and items afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.cli.study import describe
from manymax.cli.study_docs import STUDY_PAGE, with_settings
from manymax.errors import ArgumentError, ManymaxError
from manymax.study.config import RunConfig
from manymax.study.study_file import expand, read_study_file, searches
from tests.study.data.shop import DATE_FORMAT, write_shop

ROOT = Path(__file__).parents[2]
COLUMNS = "user=CustomerID,rating=Quantity,title=Description"
READABLE = ["--columns", COLUMNS, "--encoding", "latin-1", "--date-format", DATE_FORMAT, "--drop-missing"]
IN_STUDY = [f"columns={COLUMNS}", "encoding=latin-1", f"date_format={DATE_FORMAT}", "drop_missing=true"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYMAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop") / "shop.csv")


@pytest.fixture(scope="module")
def run(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    sizes = ["--dim", "4", "--epochs", "1", "--loss", "nce", "--num-negatives", "31", "--name", "mugs"]
    result = invoke("train", "--data", shop, *READABLE, *sizes, "--out", folder)
    assert result.exit_code == 0, result.output
    (folder.parent / "stderr.txt").write_text(result.stderr)
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def study(*settings: str, options: tuple = ()) -> Result:
    return invoke("study", *options, *(part for each in settings for part in ("--set", each)))


class TestAfterTraining:
    def test_titles_stand_beside_the_items(self, run: Path) -> None:
        found = json.loads(invoke("recommend", run, "--user", "12346", "--top", "3", "--json").stdout)[0]["items"]
        assert [each["title"] for each in found] == [f"CAFÉ MUG {each['item']}" for each in found]
        lines = invoke("recommend", run, "--user", "12346", "--top", "3").stdout.splitlines()
        assert lines[0].split() == ["user", "rank", "item", "title", "score"]
        assert f"CAFÉ MUG {found[0]['item']}" in lines[2]

    def test_they_are_exported(self, run: Path, tmp_path: Path) -> None:
        assert invoke("export", run, "--out", tmp_path).exit_code == 0
        items = pq.read_table(tmp_path / "item_vectors.parquet").to_pydict()
        assert items["title"] == [f"CAFÉ MUG {item}" for item in items["item"]]

    @pytest.mark.parametrize("user", ["12346", "12346.0"])
    def test_a_user_is_the_same_however_the_number_is_written(self, run: Path, user: str) -> None:
        result = invoke("recommend", run, "--user", user, "--top", "1")
        assert result.exit_code == 0, result.exception

    def test_what_is_read_and_what_is_odd_is_said_before_training(self, run: Path) -> None:
        reading, found, odd, training, *_ = (run.parent / "stderr.txt").read_text().splitlines()
        assert reading == "reading mugs"
        assert found.startswith("mugs: 25 users, 30 items, ")
        assert odd.startswith("nce draws 31 negatives for each positive, but mugs has 30 items")
        assert training.startswith("nce on mf, mugs, seed 0")


class TestBeforeAStudy:
    def test_a_bad_file_fails_once_and_at_once(self, shop: Path, tmp_path: Path) -> None:
        for options in (("--dry-run",), ("--out", tmp_path / "out")):
            result = study(f"data={shop}", "seed=0,1,2", "loss=softmax", options=options)
            assert isinstance(result.exception, ArgumentError)
            assert "--set 'date_format=%m/%d/%Y %H:%M'" in str(result.exception)
            assert result.stderr.count(f"reading {shop}") == 1
            assert result.stdout == ""
        assert not (tmp_path / "out").exists()

    def test_each_data_set_is_read_once(self, shop: Path) -> None:
        settings = [f"data={shop}", *IN_STUDY, "name=mugs", "loss=softmax,nce", "num_negatives=5,31", "min_rating=0,1"]
        result = study(*settings, "sampler=uniform", "lr=0.01", options=("--dry-run",))
        assert result.exit_code == 0, result.exception
        lines = result.stderr.splitlines()
        assert lines.count("reading mugs") == 2  # with either filter
        assert sum(line.startswith("nce draws 31 negatives") for line in lines) == 2
        assert len(result.stdout.splitlines()) == 6

    def test_negatives_of_planted_data_are_compared_too(self) -> None:
        result = study("size=60x60x10", "loss=ssm", "num_negatives=20,100", options=("--dry-run",))
        assert "draws 100 negatives for each positive, but planted has 60 items" in result.stderr
        assert "draws 20 " not in result.stderr

    def test_a_wrong_size_and_too_few_pairs_in_the_last_batch(self, shop: Path) -> None:
        assert "unknown size 'tniy'" in str(study("size=tniy", options=("--dry-run",)).exception)
        settings = [f"data={shop}", *IN_STUDY, "loss=ssm", "sampler=in_batch", "batch_size=100", "num_negatives=99"]
        settings.append("batches=pairs")
        assert "the last batch of an epoch has" in str(study(*settings, options=("--dry-run",)).exception)


class TestSet:
    def test_several_values_are_combined(self) -> None:
        lines = study("seed=0,1,2", "loss=softmax, rankmax", "lr=[0.1,0.2]", options=("--dry-run",)).stdout.splitlines()
        assert len(lines) == len({line.split()[0] for line in lines}) >= 12
        assert {line.split("seed=")[1] for line in lines} == {"0", "1", "2"}

    def test_commas_within_a_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("a,b.csv").write_text("user,item\n" + "".join(f"{u},{i}\n" for u in range(4) for i in range(5)))
        lines = study("data=a,b.csv", "cutoffs=5,10", "columns=user=user,item=item", "loss=softmax",
                      options=("--dry-run",)).stdout.splitlines()  # fmt: skip
        assert lines
        assert all(" a,b.csv mf softmax" in line and "cutoffs=(5, 10)" in line for line in lines)

    @pytest.mark.parametrize("given", [["seed=0,,1"], ["seed=0", "seed=1"], ["loss=softmax,sparsmax"], ["sede=0,1"]])
    def test_mistakes(self, given: list[str]) -> None:
        assert isinstance(study(*given, options=("--dry-run",)).exception, ManymaxError)


def test_the_name_of_the_data_is_used_for_it() -> None:
    config = RunConfig(data="somewhere/a.csv", name="mugs")
    assert describe(config).startswith("mugs mf softmax")
    assert describe(RunConfig(data="somewhere/a.csv")).startswith("somewhere/a.csv mf softmax")


class TestCards:
    def files(self, tmp_path: Path) -> list[Path]:
        made = []
        for folder, users in (("one", 4), ("two", 5)):
            (tmp_path / folder).mkdir()
            made.append(tmp_path / folder / "ratings.csv")
            made[-1].write_text("user,item\n" + "".join(f"{u},{i}\n" for u in range(users) for i in range(5)))
        return made

    def test_files_of_one_name_have_cards_of_their_own(self, tmp_path: Path) -> None:
        for path, users in zip(self.files(tmp_path), (4, 5), strict=True):
            assert invoke("data", "prepare", path).exit_code == 0
            assert json.loads(invoke("data", "card", path, "--json").stdout)[0]["users"] == users
        assert json.loads(invoke("data", "card", tmp_path / "one" / "ratings.csv", "--json").stdout)[0]["users"] == 4

    def test_the_name_alone_is_enough_while_there_is_one(self, tmp_path: Path) -> None:
        one, two = self.files(tmp_path)
        invoke("data", "prepare", one)
        assert json.loads(invoke("data", "card", "ratings", "--json").stdout)[0]["users"] == 4
        invoke("data", "prepare", two)
        assert "several files called 'ratings' have a card" in str(invoke("data", "card", "ratings").exception)


class TestPage:
    TEXT = (ROOT / STUDY_PAGE).read_text(encoding="utf-8")

    def test_its_tables_are_current(self) -> None:
        assert with_settings(self.TEXT) == self.TEXT, "run `make docs`"

    def test_its_examples_are_studies(self, tmp_path: Path) -> None:
        runs = []
        for part in self.TEXT.split("```toml\n")[1:]:
            (tmp_path / "study.toml").write_text(part.partition("```")[0], encoding="utf-8")
            study_file = read_study_file(tmp_path / "study.toml")
            runs.append((len(expand(study_file)), len(searches(study_file))))
        assert runs == [(18, 0), (0, 3), (1, 0)]
