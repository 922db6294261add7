"""`kill -9` of studies: of all their processes, and of workers of a cluster, at random moments of their progress.

A moment is a number of epochs, which the checkpoints show, and not a time: on a machine that is busy with other things
the same kills happen, only later.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manymax.study.checkpoint import read_training_state
from manymax.study.records import CHECKPOINT, RECORD
from tests.study.test_engine_dask import outcome_of

pytestmark = [pytest.mark.extras, pytest.mark.skipif(os.name == "nt", reason="kills are those of POSIX")]
SOURCE = Path(__file__).parents[2] / "src"
EPOCHS, RUNS, KILLS = 60, 2, 4
SECONDS = 300  # for one start, on a machine that is busy

SCRIPT = """
import sys
from contextlib import nullcontext
from pathlib import Path
from manymax.study.config import RunConfig
from manymax.study.engines import LocalEngine
from manymax.study.engines_dask import DaskEngine
from manymax.study.sweep import sweep
if __name__ == "__main__":
    out, engine, epochs = sys.argv[1:]
    settings = {"data": "planted", "size": "60x60x10", "dim": 4, "batch_size": 64, "threads": 1}
    settings |= {"epochs": int(epochs), "patience": 1000, "eval_every": 20}
    configs = [RunConfig(**settings, seed=seed) for seed in (0, 1)]
    with nullcontext(LocalEngine(2)) if engine == "local" else DaskEngine(workers=2) as chosen:
        outcome = sweep(configs, Path(out), engine=chosen, checkpoint_seconds=0.0)
    print("done", outcome.count("done"), flush=True)
"""


@contextlib.contextmanager
def study(out: Path, engine: str) -> Iterator[subprocess.Popen[str]]:
    """A study in a process of its own; none of its processes stays behind."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(out), engine, str(EPOCHS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        kill_all(process)
        process.communicate()


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of a process and of all below it, and wait until they are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        every = [family, *family.children(recursive=True)]
        for each in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(every[1:], timeout=60)


def progress(out: Path) -> int:
    """How many epochs all runs have done."""
    ended = list(out.glob(f"*/{RECORD}"))
    under_way = [read_training_state(path) for path in out.glob(f"*/{CHECKPOINT}")]
    return EPOCHS * len(ended) + sum(state.epoch for state in under_way if state is not None)


def wait_for(process: subprocess.Popen[str], out: Path, epochs: int) -> bool:
    """Wait until so many epochs are done; False if the process has ended before."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        if progress(out) >= epochs:
            return True
        time.sleep(0.01)
    assert process.poll() == 0, process.communicate()[1]
    return False


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a study is that nobody kills."""
    out = tmp_path_factory.mktemp("whole")
    with study(out, "local") as process:
        text, errors = process.communicate(timeout=SECONDS)
    assert text == "done 2\n", errors
    return outcome_of(out)


def moments() -> list[int]:
    """Numbers of epochs at which something is killed; the last ones are near the end, where records are written."""
    chance = random.Random(0)
    return sorted(chance.randint(1, RUNS * EPOCHS - 1) for _ in range(KILLS))


def test_a_study_killed_at_random_moments_ends_like_an_uninterrupted_one(
    expected: dict[str, object], tmp_path: Path
) -> None:
    kills = 0
    for epochs in moments():
        with study(tmp_path, "local") as process:
            kills += wait_for(process, tmp_path, epochs)
    assert kills >= KILLS / 2, "most kills must hit a study that is under way"
    with study(tmp_path, "local") as process:
        assert process.communicate(timeout=SECONDS)[0] == "done 2\n"
    assert outcome_of(tmp_path) == expected
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob(CHECKPOINT))


def test_a_cluster_whose_processes_are_killed_at_random_moments_does_the_same(
    expected: dict[str, object], tmp_path: Path
) -> None:
    """Now one of its runs or workers, and now the whole study with all of them."""
    pytest.importorskip("distributed")
    chance, kills = random.Random(1), 0
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(study(tmp_path, "dask"))
        for number, epochs in enumerate(moments()):
            if not wait_for(process, tmp_path, epochs):
                break
            below = sorted(psutil.Process(process.pid).children(recursive=True), key=lambda each: each.pid)
            if number % 3 == 2:
                kill_all(process)
                process = stack.enter_context(study(tmp_path, "dask"))
                kills += 1
            else:
                with contextlib.suppress(psutil.NoSuchProcess):
                    chance.choice([each for each in below if "manymax" in " ".join(each.cmdline())] or below).kill()
                    kills += 1
        assert kills >= KILLS / 2
        text, errors = process.communicate(timeout=SECONDS)
    assert text == "done 2\n", errors[-3000:]
    assert outcome_of(tmp_path) == expected
    assert not list(tmp_path.rglob("*.partial"))
