"""`manymax recommend`: users and items are named by the ids of the data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.errors import ManymaxError
from manymax.study.data.planted import plant
from manymax.study.report.answer import answers
from manymax.study.report.runs import read_study
from manymax.study.serve import Served


def read_csv(path: Path) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seen.setdefault(row["reader"], []).append(row["book"])
    return seen


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file with words as ids and its columns in an unusual order."""
    path = tmp_path_factory.mktemp("own") / "loans.csv"
    interactions, _ = plant("tiny", seed=1)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["day", "book", "reader"])
        rows = zip(interactions.times, interactions.items, interactions.users, strict=True)
        writer.writerows([int(day), f"böök, {item}", f"r{user:03}"] for day, item, user in rows)
    return path


@pytest.fixture(scope="module", params=["mf", "sasrec", "hsm"])
def run(table: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    model = {"mf": [], "sasrec": ["--backbone", "sasrec"], "hsm": ["--loss", "hsm"]}[request.param]
    columns = ["--columns", "user=reader,item=book,time=day"]
    options = ["--epochs", "2", "--dim", "8", "--batch-size", "500", "--lr", "0.01", *model]
    result = CliRunner().invoke(app, ["train", "--data", str(table), *columns, *options, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def recommend(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["recommend", *arguments])


def test_the_best_new_items_by_their_ids(run: Path, table: Path) -> None:
    result = recommend(str(run), "--user", "r007", "--user", "r003", "--top", "5", "--json")
    assert result.exit_code == 0, result.output
    answers = json.loads(result.stdout)
    seen = read_csv(table)
    assert [answer["user"] for answer in answers] == ["r007", "r003"]
    for answer in answers:
        names = [found["item"] for found in answer["items"]]
        assert len(set(names)) == 5
        assert all(name.startswith("böök, ") for name in names)
        assert not set(names) & set(seen[answer["user"]])
        scores = [found["score"] for found in answer["items"]]
        assert scores == sorted(scores, reverse=True)


def test_scores_are_those_of_the_model(run: Path) -> None:
    served = Served.load(run)
    user = torch.tensor([served.number("r007")])
    scores, items = served.recommend(user, 5, seen=True)
    vectors = served.model.backbone.vectors()
    weight = vectors.for_head(served.model.head)
    every = served.model.head.scores(served.queries(user, vectors), linear_weight=weight)
    best = every[0].topk(5)
    torch.testing.assert_close(scores[0], best.values)
    assert torch.equal(items[0], best.indices)


def test_the_table_as_text(run: Path) -> None:
    lines = recommend(str(run), "--user", "r007", "--top", "3").stdout.splitlines()
    assert lines[0].split() == ["user", "rank", "item", "score"]
    assert [line.split()[:2] for line in lines[2:]] == [["r007", "1"], ["r007", "2"], ["r007", "3"]]


def test_items_that_the_user_has_are_left_out(run: Path, table: Path) -> None:
    served = Served.load(run)
    found = json.loads(recommend(str(run), "--user", "r007", "--top", str(served.split.num_items), "--json").stdout)
    assert len(found[0]["items"]) == served.split.num_items - len(read_csv(table)["r007"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--user", "r0077"], "unknown user 'r0077': did you mean 'r077'? The run knows 200 users, such as 'r000'."),
        (["--user", "r007", "--top", "0"], "`top` must be from 1 to the number of items"),
        (["--user", "r007", "--top", "9999"], "`top` must be from 1 to the number of items"),
    ],
)
def test_wrong_arguments_end_in_a_message(run: Path, arguments: list[str], complaint: str) -> None:
    result = recommend(str(run), *arguments)
    assert isinstance(result.exception, ManymaxError)
    assert complaint in str(result.exception)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = recommend(str(tmp_path), "--user", "1")
    assert isinstance(result.exception, ManymaxError)
    assert "holds no finished run" in str(result.exception)


@pytest.mark.slow
def test_of_a_study_the_winner_is_used(table: Path, tmp_path: Path) -> None:
    file, study = tmp_path / "two.toml", tmp_path / "study"
    file.write_text(
        f'[settings]\ndata = "{table}"\ncolumns = "user=reader,item=book,time=day"\ndim = 8\nbatch_size = 500\n'
        'lr = 0.02\n[[grid]]\nloss = "softmax"\nepochs = [1, 6]\npatience = [6, 7]\n',
        encoding="utf-8",
    )
    made = CliRunner().invoke(app, ["study", str(file), "--out", str(study), "--no-report"])
    assert made.exit_code == 0, made.output
    (answer,) = answers(read_study(study))
    of_study, of_run = (recommend(str(folder), "--user", "r007") for folder in (study, answer.winner.model.folder))
    assert of_study.stdout == of_run.stdout
    assert "the winner of" in of_study.stderr
    exported = CliRunner().invoke(app, ["export", str(study)])
    assert exported.exit_code == 0, exported.output
    assert (study / "item_vectors.parquet").is_file()
