"""`torchrun -m manymax train`: one result from several processes, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from manymax.study.records import CHECKPOINT, MODEL, RECORD, read_record

SOURCE = Path(__file__).parents[2] / "src"
SETTINGS = "--data planted --size 60x50x9 --dim 4 --batch-size 100 --lr 0.01 --threads 1 --loss ssm --num-negatives 5"
ALONE = [sys.executable, "-m"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def start(launcher: list[str], *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "manymax", "train", *SETTINGS.split(), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    out, errors = process.communicate(timeout=300)
    return out, errors, process.returncode


OPTIONS = ["--epochs", "30", "--patience", "30", "--eval-every", "30", "--checkpoint-seconds", "0.05", "--out"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    out, errors, code = finish(start(TORCHRUN, *OPTIONS, str(folder)))
    assert code == 0, errors
    assert out.count("ndcg@20") == 1, "only the first rank speaks"
    assert errors.count("epoch 30/30") == 1
    return folder


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(whole: Path, tmp_path: Path) -> None:
    _, errors, code = finish(start(ALONE, *OPTIONS, str(tmp_path / "one")))
    assert code == 0, errors
    one, two = read_record(tmp_path / "one"), read_record(whole)
    assert two.test == pytest.approx(one.test, abs=2e-2)
    assert two.machine["ranks"] == 2
    assert {path.name for path in whole.iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}


def ranks_of(torchrun: int) -> dict[int, int]:
    """{rank: process id} of the processes that torchrun has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun:
                variables = dict(entry.split("=", 1) for entry in (path / "environ").read_text().split("\0") if entry)
                found[int(variables["RANK"])] = int(path.name)
        except (OSError, KeyError, ValueError):
            continue
    return found


def wait_for_progress(process: subprocess.Popen[str], checkpoint: Path) -> None:
    """Wait until the checkpoint has been replaced by a new one."""
    before, end = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0, time.monotonic() + 300
    while not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, process.kill()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found through /proc")
def test_a_killed_rank_is_an_error_on_the_others_and_the_run_goes_on(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    for victim in (1, 0):
        process = start(TORCHRUN, *OPTIONS, str(cut))
        wait_for_progress(process, cut / CHECKPOINT)
        os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        _, errors, code = finish(process)
        assert code != 0
        assert "manymax: another rank has ended, or cannot be reached" in errors
        assert "continues from the last checkpoint" in errors
        assert not (cut / RECORD).exists() or read_record(cut).status == "failed"
    _, errors, code = finish(start(TORCHRUN, *OPTIONS, str(cut)))
    assert code == 0, errors
    assert ", from epoch " in errors
    records = [read_record(folder) for folder in (cut, whole)]
    assert records[0].test == records[1].test
    weights = [load_file(folder / MODEL) for folder in (cut, whole)]
    assert {name: value.tolist() for name, value in weights[0].items()} == {
        name: value.tolist() for name, value in weights[1].items()
    }


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ["--epochs", "100000", "--patience", "100000", "--eval-every", "1000", "--out", str(tmp_path / "run")]
    process = start(TORCHRUN, *options, "--checkpoint-seconds", "0.2")
    wait_for_progress(process, tmp_path / "run" / CHECKPOINT)
    process.send_signal(signal.SIGINT)
    out, _, code = finish(process)
    assert code != 0
    assert "the same command goes on from there" in out
    record = read_record(tmp_path / "run")
    assert (record.status, record.reason) == ("stopped", "stopped by SIGINT")


@pytest.mark.slow
def test_a_rank_that_is_missing_is_an_error() -> None:
    """Only one of two ranks is started."""
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [*ALONE, "manymax", "train", *SETTINGS.split(), "--rank-timeout", "2"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)} | alone
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert result.returncode == 2
    assert "manymax: the ranks have not found each other" in result.stderr
    assert "Traceback" not in result.stderr
