"""`manymax choose`: from a file to a loss, its numbers and a model; interrupted it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.errors import ManymaxError
from manymax.study.choosing.clock import PROGRESS
from manymax.study.data.planted import plant

CANDIDATES = """
[settings]
dim = 8
[[search]]
loss = "softmax"
over = { lr = { low = 1e-2, high = 0.1, log = true } }
first = [{ lr = 0.03 }]
[[search]]
loss = "bpr"
num_negatives = 5
over = { lr = { low = 1e-2, high = 0.1, log = true } }
first = [{ lr = 0.03 }]
"""
NUMBERS = ["--trials", "2", "--seeds", "2", "--set", "epochs=3", "--no-report"]


def choose(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["choose", *map(str, arguments)])


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    path = tmp_path / "candidates.toml"
    path.write_text(CANDIDATES, encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A shop's table with guests, which have no id."""
    found, _ = plant("60x60x10", seed=1)
    customers = [*map(str, found.users.tolist()), "", ""]
    columns = {"customer": customers, "sku": [*found.items.tolist(), 1, 2]}
    path = tmp_path / "orders.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_the_plan_comes_before_anything_else(table: Path, candidates: Path, tmp_path: Path) -> None:
    arguments = [table, "--columns", "user=customer,item=sku", "--drop-missing", "--candidates", candidates]
    result = choose(*arguments, "--minutes", "30", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "2 without a user" in result.stdout
    assert "plan: 2 losses, about 24 trials of each, at most 100 epochs" in result.stdout
    assert "lr 0.01 to 0.1 (log)" in result.stdout
    assert "minutes of 30 given" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--metric", "ndcg"], "such as ndcg@20"),
        (["--metric", "ndgc@20"], "ndcg"),
        (["--set", "epochs=2,3"], "must have one value"),
        (["--set", "epoch=2"], "did you mean 'epochs'"),
        (["--encoding", "latin-7"], "encoding"),
        (["--engine", "slurm"], "engine"),
    ],
)
def test_mistakes_are_named_before_anything_is_done(arguments: list, complaint: str, tmp_path: Path) -> None:
    result = choose("planted", "--size", "60x60x10", "--out", tmp_path / "out", *arguments)
    assert isinstance(result.exception, ManymaxError)
    assert complaint in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_as_if_it_were_not(candidates: Path, tmp_path: Path) -> None:
    own = ["planted", "--size", "60x60x10", "--candidates", str(candidates), *NUMBERS]
    whole = choose(*own, "--out", tmp_path / "whole", "--json")
    assert whole.exit_code == 0, whole.output
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "manymax", "choose", *own, "--out", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while not list(folder.glob("*/record.json")):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(1.0)  # its run notices that its parent is gone, and ends too
    again = choose(*own, "--out", folder, "--json")
    assert again.exit_code == 0, again.output
    expected, found = json.loads(whole.stdout), json.loads(again.stdout)
    same = ("loss", "settings", "valid", "test", "over_softmax", "tied")
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()
    )
    text = choose(*own, "--out", folder).stdout
    assert "going on with the plan" in text
    lines = ("loss to use", "settings", "tied with it", "cost", "100 times", "items:", "model", "not known")
    assert [line for line in lines if line not in text] == []
    with pytest.raises(ManymaxError, match=r"other options \(trials\)"):
        raise choose(*own, "--trials", "3", "--out", folder).exception  # type: ignore[misc]
    assert json.loads((folder / PROGRESS).read_text())["decisions"]["trials"] == 2
