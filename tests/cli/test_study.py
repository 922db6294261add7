"""`manymax study`: from a TOML file to the page of the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.errors import ManymaxError

FILE = """
title = "A small study"
[settings]
data = "planted"
size = "60x60x10"
dim = 4
epochs = 3
batch_size = 64
[[grid]]
loss = ["softmax", "nce"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def study(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


def test_a_dry_run_lists_and_does_nothing(file: Path, tmp_path: Path) -> None:
    result = study(file, "--dry-run", "--out", tmp_path / "out", "--set", "lr=0.5")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert "planted mf softmax" in first
    assert "lr=0.5" in first
    assert "nce" in second
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "epoch=3"], "did you mean 'epochs'"),
        (["--set", "epochs"], "NAME=VALUE"),
        (["--set", "epochs=many"], "`epochs`"),
        (["--set", "loss=sparsmax"], "did you mean 'sparsemax'"),
        (["--set", "lr=-1"], "`lr`"),
        (["--set", "solver=als"], "`solver='als'` needs loss 'rg'"),
    ],
)
def test_mistakes_are_named_before_anything_is_done(
    file: Path, tmp_path: Path, arguments: list, complaint: str
) -> None:
    result = study(file, "--out", tmp_path / "out", *arguments)
    assert isinstance(result.exception, ManymaxError)
    assert complaint in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_combinations_that_contradict_an_override_are_left_out(file: Path) -> None:
    """Alternating least squares cannot train SASRec."""
    file.write_text(f'{FILE}[[grid]]\nloss = "rg"\nsolver = "als"\n', encoding="utf-8")
    result = study(file, "--dry-run", "--set", "backbone=sasrec")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("1 of the file's combinations are not possible with the settings given")
    assert all(" sasrec " in line for line in result.stdout.splitlines())
    assert "als" not in result.stdout


def test_a_file_called_like_planted_data_has_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that the path is relative and begins with the word planted
    result = study("--dry-run", "--set", "data=planted_ratings.csv", "--set", "loss=softmax")
    assert " size=" not in result.stdout
    assert " size=" in study("--dry-run", "--set", "data=planted").stdout


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    result = study(tmp_path / "no.toml")
    assert "no.toml cannot be read" in str(result.exception)


@pytest.mark.slow
def test_from_a_file_to_a_page(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = study(file, "--out", out)
    assert result.exit_code == 0, result.output
    first, second, *_, last = result.stdout.splitlines()
    assert first == "planted, mf"
    assert second.startswith("  loss to use  ")
    assert last == f"report: {out / 'report' / 'report.html'}"
    *_, ended, counts = result.stderr.splitlines()
    assert ended.startswith("[2/2] planted mf ")
    assert counts == "2 runs: 2 done"
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "<h1>A small study</h1>" in page
    resumed = study(file, "--out", out, "--no-report", "--json")
    assert "[2/2]" not in resumed.stderr, "runs that were there before are not printed as new"
    assert "2 runs: 2 done (2 of them before)" in study(file, "--out", out, "--no-report").stderr
    again = json.loads(resumed.stdout)
    assert again["answers"][0]["loss"] in ("softmax", "nce")
    assert [run["status"] for run in again["runs"]] == ["done", "done"]
    assert again["report"] is None
    failed = study(file, "--out", tmp_path / "other", "--set", f"data={tmp_path / 'no.csv'}", "--set", "size=")
    assert failed.exit_code != 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_stopped_study_saves_and_says_how_to_go_on(file: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "manymax", "study", str(file), "--out", str(tmp_path / "out"), "--no-report"]
    command += ["--set", "epochs=100000", "--set", "patience=100000", "--set", "loss=softmax"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while not list((tmp_path / "out").glob("*/checkpoint.safetensors")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()  # whatever fails here, the endless run does not stay behind
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    (record,) = (tmp_path / "out").glob("*/record.json")
    assert json.loads(record.read_text(encoding="utf-8"))["status"] == "stopped"
