"""`kill -9` at random moments: the resumed run ends bit for bit like one that was never interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from manymax.study.records import read_record

# Runs are forked from a process that has imported everything, so that a start costs milliseconds. The time of a kill
# counts from the beginning of the training. Every step ends with a checkpoint, so that some kills hit a write.
SCRIPT = """
import json, os, pathlib, random, signal, sys, time
import torch
torch.set_num_threads(1)
from manymax.study.config import RunConfig
from manymax.study.supervisor import ProgressReporter
from manymax.study.run import run

class Bell(ProgressReporter):
    def __init__(self, pipe): self.pipe = pipe
    def begin(self, *_): os.write(self.pipe, b"!")

def child(folder, pipe):
    run(config, folder, progress=Bell(pipe), checkpoint_seconds=0.0)

def killed(folder, delay):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(folder, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)

folder, settings, kills = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
config, chance = RunConfig(**settings), random.Random(0)
start = time.perf_counter()
run(config, folder / "whole", checkpoint_seconds=0.0)
longest = (time.perf_counter() - start) / kills  # about every second kill moves on by a part of the run
rounds, done = [], 0
while done < kills:  # a run that is over before it was killed often enough is followed by another
    place = folder / f"round-{len(rounds)}"
    moves = []
    while done < kills and not (place / "record.json").exists():
        if killed(place, chance.uniform(0, 2 * longest)):
            done += 1
            moves.append((place / "checkpoint.safetensors").exists())
    run(config, place, checkpoint_seconds=0.0)
    rounds.append(moves)
print(json.dumps(rounds))
"""

SETTINGS = {
    "data": "planted-tiny",
    "backbone": "sasrec",
    "loss": "ssm",
    "sampler": "popularity",
    "num_negatives": 10,
    "dim": 16,
    "batch_size": 300,
    "lr": 0.01,
    "epochs": 30,
    "patience": 3,
}


# By native code, where the library is compiled.
ENTMAX = {
    "data": "planted-tiny",
    "loss": "entmax",
    "dim": 16,
    "batch_size": 50,
    "lr": 0.03,
    "epochs": 60,
    "patience": 3,
}


# With a moving average for each training pair.
AVERAGED = {
    "data": "planted-tiny",
    "loss": "ssm",
    "correction": "partition",
    "compositional": 0.2,
    "num_negatives": 5,
    "batches": "chunks",
    "dim": 16,
    "batch_size": 300,
    "lr": 0.03,
    "epochs": 30,
    "patience": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, ENTMAX, AVERAGED], ids=["ssm", "entmax", "averaged"])
def test_a_run_killed_twenty_times_ends_like_an_uninterrupted_one(settings: dict[str, object], tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings), "20"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rounds = json.loads(result.stdout)
    assert sum(map(len, rounds)) == 20
    assert sum(map(sum, rounds)) >= 10  # most kills hit a run that had made progress
    whole = tmp_path / "whole"
    expected = read_record(whole)
    assert expected.epochs < settings["epochs"], "early stopping is part of the test"
    for number in range(len(rounds)):
        folder = tmp_path / f"round-{number}"
        record = read_record(folder)
        assert (record.status, record.epochs, record.best_epoch) == ("done", expected.epochs, expected.best_epoch)
        assert (record.valid, record.test, record.backend) == (expected.valid, expected.test, expected.backend)
        for name in ("model.safetensors", "user_metrics.parquet"):
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
        assert _curve(folder) == _curve(whole)
        assert not list(folder.glob("*.partial")), "what a kill left behind is cleared away"
        assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}


def _curve(folder: Path) -> dict[str, list[float]]:
    table = pq.read_table(folder / "epochs.parquet").to_pydict()
    return {name: values for name, values in table.items() if not name.startswith("seconds")}
