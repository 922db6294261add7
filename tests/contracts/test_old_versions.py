"""Files of version 0.1.0 still work: state dicts load, its study is found finished and reported, its runs resume.

The files are in `tests/fixtures/v0_1_0`, with the script that made them.
"""

from __future__ import annotations

import csv
import json
import pkgutil
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import manymax
from manymax.cli import main

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1_0"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Heads -------------------------------------------------------------------------------------------


HEADS = read(OLD / "heads" / "heads.json")
INPUTS = {name: torch.tensor(each) for name, each in read(OLD / "heads" / "inputs.json").items()}
INPUTS = {name: each.double() if each.is_floating_point() else each for name, each in INPUTS.items()}
TREES = [name for name in HEADS if name.startswith("hierarchical")]


def build(what: Any) -> Any:
    """The object that an entry of `heads.json` describes."""
    match what:
        case {"class": name, "args": args, "kwargs": kwargs}:
            return pkgutil.resolve_name(name)(*map(build, args), **{key: build(each) for key, each in kwargs.items()})
        case {"tensor": numbers}:
            return torch.tensor(numbers, dtype=torch.float64)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"generator": seed}:
            return torch.Generator().manual_seed(seed)
        case other:
            return other


def check(head: Any, name: str) -> None:
    """Check that the head loads the state of that name and then gives the loss and ranking of version 0.1.0."""
    for tensor in head.state_dict().values():
        if tensor.is_floating_point():
            tensor.zero_()  # so that every number must come from the file
    head.load_state_dict(load_file(OLD / "heads" / f"{name}.safetensors"))
    expected = HEADS[name]
    args, kwargs = expected["call"]["args"], expected["call"]["kwargs"]
    loss = head(*(INPUTS[each] for each in args), **{key: INPUTS[each] for key, each in kwargs.items()})
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    if "topk" in expected:
        assert head.topk(INPUTS["queries"], 3)[1].tolist() == expected["topk"]


@pytest.mark.parametrize("name", HEADS)
def test_a_state_dict_loads_and_gives_the_same_loss_and_ranking(name: str) -> None:
    check(build(HEADS[name]["head"]), name)


def test_a_state_dict_brings_its_tree_along() -> None:
    name = "hierarchical_softmax"
    dim, _ = HEADS[name]["head"]["args"]
    other = manymax.HuffmanTree(torch.arange(12))
    check(manymax.HierarchicalSoftmaxLoss(dim, other, bias=True, dtype=torch.float64), name)


@pytest.mark.parametrize("name", TREES)
def test_the_linear_head_of_a_tree_loads_the_same_state(name: str) -> None:
    how = HEADS[name]["head"]
    dim, tree = map(build, how["args"])
    options = {key: build(each) for key, each in how["kwargs"].items()}
    head = pkgutil.resolve_name("manymax:LinearHierarchicalSoftmaxLoss")
    check(head(dim, tree.num_classes, tree=tree, **options), name)


# A study, and runs -------------------------------------------------------------------------------


Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that calls `manymax`, checks that it succeeds, and returns what it printed."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["manymax", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert not code, said.err
        return said.out

    return call


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished study; the working directory is the folder with its file and its data."""
    for name in ("study.toml", "loans.csv"):
        shutil.copy(OLD / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(OLD / "study", tmp_path / "study"))


def test_a_finished_study_is_not_run_again(study: Path, command: Command) -> None:
    before = {path: path.read_bytes() for path in study.glob("*/*")}
    told = json.loads(command("study", "study.toml", "--out", "study", "--no-report", "--json", "--workers", 30))
    assert Counter(run["status"] for run in told["runs"]) == {"done": 26, "diverged": 1}
    assert {path: path.read_bytes() for path in study.glob("*/*")} == before


def test_a_finished_study_is_reported(study: Path, command: Command) -> None:
    command("report", "study", "--no-images")
    page = (study / "report" / "report.html").read_text(encoding="utf-8")
    assert "<h1>Every loss and every setting</h1>" in page
    records = [read(path) for path in OLD.glob("study/*/record.json")]
    with (study / "report" / "tables" / "runs.csv").open(encoding="utf-8", newline="") as file:
        reported = [(row["loss"].partition(" (")[0], row["status"]) for row in csv.DictReader(file)]
    assert sorted(reported) == sorted((record["settings"]["loss"], record["status"]) for record in records)


def test_the_models_of_a_study_recommend_the_same(study: Path, command: Command) -> None:
    for run, expected in read(OLD / "recommended.json").items():
        (answer,) = json.loads(command("recommend", study / run, "--user", expected["user"], "--top", 4, "--json"))
        assert [found["item"] for found in answer["items"]] == [found["item"] for found in expected["items"]], run
        scores = [found["score"] for found in expected["items"]]
        assert [found["score"] for found in answer["items"]] == pytest.approx(scores, rel=1e-4, abs=1e-6), run


@pytest.mark.parametrize("name", ["sparsemax", "dns"])
def test_an_interrupted_run_goes_on_from_its_checkpoint(name: str, tmp_path: Path, command: Command) -> None:
    """Metrics are compared with a tolerance, because processors round differently.

    That the run did not begin again shows in the rows of its first epochs, which must be those of the checkpoint, with
    the seconds that they took then.
    """
    run, whole = tmp_path / "run", OLD / "interrupted" / "expected" / name
    shutil.copytree(OLD / "interrupted" / name, run)
    with safe_open(run / "checkpoint.safetensors", framework="pt") as file:
        trained = json.loads(file.metadata()["about"])["standing"]["rows"]
    command("train", "--config", OLD / "interrupted" / f"{name}.toml", "--out", run)
    record, expected = read(run / "record.json"), read(whole / "record.json")
    for key in ("status", "epochs", "best_epoch"):
        assert record[key] == expected[key]
    assert record["backend"] == "torch"  # which was all there was, unless a run asked for native code
    for part in ("valid", "test"):
        assert {key: record[part][key] for key in expected[part]} == pytest.approx(expected[part], rel=1e-4)
    epochs, others = (pq.read_table(folder / "epochs.parquet").to_pylist() for folder in (run, whole))
    assert epochs[: len(trained)] == trained
    for epoch, other in zip(epochs, others, strict=True):
        numbers = {key: value for key, value in other.items() if not key.startswith("seconds")}
        assert {key: epoch[key] for key in numbers} == pytest.approx(numbers, rel=1e-4)
