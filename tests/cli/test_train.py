"""`manymax train`: from the command line to a record, and what happens when something goes wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.cli.train import LiveProgress
from manymax.errors import ManymaxError
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.records import read_record
from manymax.study.run_options import flat, options

SOURCE = Path(__file__).parents[2] / "src"
TINY = ["--data", "planted-tiny", "--dim", "8", "--batch-size", "500", "--lr", "0.01"]


def train(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", *TINY, *arguments])


def test_a_run_from_options_to_a_record(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train("--loss", "entmax", "--alpha", "1.3", "--epochs", "2", "--cutoffs", "5,20", "--out", str(folder))
    assert result.exit_code == 0, result.output
    reading, found, *lines = result.stderr.splitlines()
    assert (reading, found.split(":")[0]) == ("reading planted-tiny", "planted-tiny")
    assert "200 users" in found
    assert lines[0].startswith("entmax on mf, planted-tiny, seed 0")
    assert lines[1].startswith("epoch 1/2  loss ")
    assert "ndcg@20" in lines[1]
    assert "best" in lines[2]
    assert result.stdout.splitlines()[0].split() == ["metric", "valid", "test", "popularity"]
    assert "best epoch 2 of 2" in result.stdout
    record = read_record(folder)
    assert RunConfig(**record.settings) == RunConfig(
        data="planted-tiny", dim=8, batch_size=500, lr=0.01, loss="entmax", alpha=1.3, epochs=2, cutoffs=(5, 20)
    )


def test_the_same_command_again_only_shows_the_result(tmp_path: Path) -> None:
    command = ["--epochs", "1", "--out", str(tmp_path / "run")]
    first, second = train(*command), train(*command)
    assert first.stdout == second.stdout
    assert second.stderr == ""


def test_json_is_the_record(tmp_path: Path) -> None:
    result = train("--epochs", "1", "--json", "--out", str(tmp_path / "run"))
    assert json.loads(result.stdout) == read_record(tmp_path / "run").model_dump(mode="json")


def test_different_settings_get_different_folders_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--epochs", "1").exit_code == 0
    assert train("--epochs", "1", "--seed", "1").exit_code == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert all(name.startswith("planted-tiny-mf-softmax-") for name in names)


def test_options_take_precedence_over_the_settings_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('loss = "ssm"\nnum_negatives = 7\nepochs = 9\n', encoding="utf-8")
    result = train("--config", str(tmp_path / "run.toml"), "--epochs", "1", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    settings = flat(read_record(tmp_path / "run").settings)
    assert (settings["loss"], settings["num_negatives"], settings["epochs"]) == ("sampled_softmax", 7, 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("loss = ", "cannot be read"), ("bach_size = 3", "did you mean 'batch_size'"), ("clip = 'high'", "`clip`: input")],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "run.toml").write_text(content, encoding="utf-8")
    result = train("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"))
    assert isinstance(result.exception, ManymaxError)
    assert complaint in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_every_setting_is_an_option_with_a_line_of_help() -> None:
    text = " ".join(CliRunner().invoke(app, ["train", "--help"]).stdout.split())
    for option in options():
        assert f"--{option.name.replace('_', '-')} " in text
        assert option.help.replace("-", "") in text.replace("- ", "").replace("-", ""), option.name


def test_a_run_that_diverged_says_what_to_try(tmp_path: Path) -> None:
    result = train("--lr", "1e30", "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "diverged: " in result.stdout
    assert "--lr" in result.stdout


def test_a_run_that_hardly_beats_popularity_says_what_to_try(tmp_path: Path) -> None:
    slow = train("--lr", "1e-6", "--epochs", "2", "--out", str(tmp_path / "slow")).stdout
    assert "hardly better than the popularity ranking" in slow
    assert "about 7 steps per epoch" in slow
    solved = ["--loss", "rg", "--solver", "als", "--data", "planted-tiny", "--epochs", "5", "--threads", "1"]
    good = CliRunner().invoke(app, ["train", *solved, "--out", str(tmp_path / "good")]).stdout
    assert "best epoch" in good
    assert "hardly better" not in good


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "manymax", "train", *TINY, *arguments]


@pytest.mark.slow
def test_a_mistake_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        command("--loss", "sparsmax"), capture_output=True, text=True, check=False, cwd=tmp_path, env=environment()
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("manymax: unknown loss 'sparsmax': did you mean 'sparsemax'?")
    assert list(tmp_path.iterdir()) == []


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def interrupted(arguments: list[str], after: int) -> tuple[list[str], str, int]:
    """Run a command and send Ctrl-C after `after` lines of progress; returns these lines, stdout and the exit code."""
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    with running:
        assert running.stderr is not None
        lines = [running.stderr.readline() for _ in range(after)]
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate()
    return lines, out, running.returncode


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    endless = command("--epochs", "100000", "--patience", "100000", "--out", str(tmp_path / "run"))
    lines, out, code = interrupted(endless, after=5)  # two lines on the data, one on the run
    assert lines[4].startswith("epoch 2/100000")
    assert code == 130
    assert out.startswith("stopped by SIGINT in epoch")
    assert "the same command goes on from there" in out
    trained = read_record(tmp_path / "run").epochs
    lines, _, code = interrupted(endless, after=4)
    assert f", from epoch {trained + 1}, step " in lines[2]
    assert lines[3].startswith(f"epoch {trained + 1}/100000")
    assert code == 130


def test_a_terminal_sees_a_moving_line() -> None:
    out = io.StringIO()
    screen = LiveProgress(Console(file=out, force_terminal=True, width=100, highlight=False))
    config, state = RunConfig(epochs=4), TrainingState(epoch=1, batch=3, step=10, best_epoch=1, best_value=0.25)
    screen.begin(config, Path("runs") / "a", state)
    screen.step(state, 2.5, 7)
    state.epoch = 2
    screen.epoch(state, {"epoch": 2, "loss": 2.25, "ndcg@20": 0.5})
    screen.end()
    text = out.getvalue()
    assert "from epoch 2, step 11: runs/a" in text
    assert "epoch 2/4  step 3/7  loss 2.5000" in text
    assert "epoch 2/4  loss 2.2500  ndcg@20 0.5000  best 0.2500 (epoch 1)  at most 0:00 left" in text
