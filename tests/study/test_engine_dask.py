"""Studies on a cluster give the records of the local engine, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from manymax.cli.app import app
from manymax.errors import ManymaxError
from manymax.study.engines_dask import VERSION, DaskEngine, run_on_worker
from manymax.study.records import CHECKPOINT, MODEL, RECORD, read_record

SOURCE = Path(__file__).parents[2] / "src"
RUN = "manymax.study.engines_dask"  # is in the command line of the process of a run
FILE = """
[settings]
data = "planted"
size = "60x60x10"
dim = 4
epochs = {epochs}
patience = 1000
eval_every = 100
batch_size = 64
[[grid]]
loss = ["softmax", "sampled_softmax"]
"""

# A study in a process of its own; the last argument is the number of workers of a cluster, or "local".
SCRIPT = """
import sys
from pathlib import Path
from manymax.study.config import RunConfig
from manymax.study.engines_dask import DaskEngine
from manymax.study.engines import LocalEngine
from manymax.study.study_file import expand, read_study_file
from manymax.study.sweep import sweep
from contextlib import nullcontext
if __name__ == "__main__":
    file, out, workers = sys.argv[1:]
    configs = [*expand(read_study_file(Path(file))), RunConfig(data="nowhere.csv", threads=1)]
    with nullcontext(LocalEngine(1)) if workers == "local" else DaskEngine(workers=int(workers)) as engine:
        outcome = sweep(configs, Path(out), engine=engine, checkpoint_seconds=0.2)
    print("done", outcome.count("done"), "failed", outcome.count("failed"), flush=True)
"""


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return out, errors


def runs_below(ancestor: int) -> dict[int, int]:
    """{process of a run: its worker} of the runs below a process."""
    parents, found = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if RUN in (path / "cmdline").read_text().split("\0"):
                found.append(int(path.name))
        except OSError:
            continue

    def descends(process: int) -> bool:
        return process == ancestor or (process in parents and descends(parents[process]))

    return {run: parents[run] for run in found if descends(run)}


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def outcome_of(folder: Path) -> dict[str, object]:
    """What must be the same on every engine: settings, metrics to the last bit, and weights."""
    found = {}
    for path in folder.glob(f"*/{RECORD}"):
        record = read_record(path.parent)
        kept = record.model_dump(include={"status", "settings", "epochs", "best_epoch", "valid", "test", "popularity"})
        model = path.parent / MODEL
        found[record.hash] = kept, {n: w.tolist() for n, w in load_file(model).items()} if model.exists() else None
    return found


linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found through /proc")


@linux
@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_records_are_those_of_the_local_engine(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "study.toml").write_text(FILE.format(epochs=100), encoding="utf-8")
    process = start("-c", SCRIPT, tmp_path / "study.toml", tmp_path / "dask", 2)
    wait_for(lambda: list((tmp_path / "dask").glob(f"*/{CHECKPOINT}")), process)
    run, worker = next(iter(runs_below(process.pid).items()))
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: run not in runs_below(process.pid) and not Path(f"/proc/{run}").exists(), process)
    assert finish(process)[0] == "done 2 failed 1\n"
    assert finish(start("-c", SCRIPT, tmp_path / "study.toml", tmp_path / "local", "local"))[0] == "done 2 failed 1\n"
    assert outcome_of(tmp_path / "dask") == outcome_of(tmp_path / "local")
    assert len(outcome_of(tmp_path / "dask")) == 3
    assert not list((tmp_path / "dask").rglob("*.partial"))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A scheduler and a worker of two threads, as they are started from a shell."""
    pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    scheduler = start("-m", "dask", "scheduler", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    wait_for(file.exists, scheduler)
    worker = start("-m", "dask", "worker", "--scheduler-file", file, "--nthreads", 2, "--no-dashboard")
    yield json.loads(file.read_text(encoding="utf-8"))["address"]
    for process in (worker, scheduler):
        process.terminate()
        process.communicate(timeout=60)


@linux
@pytest.mark.slow
def test_a_running_cluster_does_the_runs_and_ctrl_c_saves_them(address: str, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    command = ["-m", "manymax", "study", file, "--out", tmp_path / "out", "--no-report"]
    cluster = ["--engine", "dask", "--address", address]
    file.write_text(FILE.format(epochs=100_000), encoding="utf-8")
    process = start(*command, *cluster, start_new_session=True)
    wait_for(lambda: len(list((tmp_path / "out").glob(f"*/{CHECKPOINT}"))) == 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = finish(process)
    assert process.returncode == 130
    assert "the same command goes on from there" in errors
    assert [read_record(path.parent).status for path in (tmp_path / "out").glob(f"*/{RECORD}")] == ["stopped"] * 2
    file.write_text(FILE.format(epochs=2), encoding="utf-8")
    for told in ("[2/2] planted mf ", "2 of them finished before"):
        out, errors = finish(start(*command, *cluster))
        assert out.startswith("planted, mf")
        assert "2 runs: 2 done" in errors
        assert told in errors


@pytest.mark.slow
def test_a_cluster_that_cannot_be_reached_is_named_after_some_seconds(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    process = start("-m", "manymax", "study", "--engine", "dask", "--address", "tcp://127.0.0.1:9", cwd=tmp_path)
    _, errors = finish(process)
    assert process.returncode == 2
    assert errors.startswith("manymax: `address` tcp://127.0.0.1:9: no cluster with a worker answers there within 10 s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--engine", "dusk"], "`engine` must be one of 'local', 'dask'; got 'dusk'. Did you mean 'dask'"),
        (["--address", "tcp://x:1"], "`--address` is that of a dask cluster: add `--engine dask`"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: list[str], complaint: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["study", "--out", str(tmp_path / "out"), *options])
    assert isinstance(result.exception, ManymaxError)
    assert complaint in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_without_dask_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ManymaxError, match=r'pip install "manymax\[cluster\]"'):
        DaskEngine()


def test_a_worker_that_cannot_do_the_run_says_why(tmp_path: Path) -> None:
    task = {"version": "0.0.0", "folder": str(tmp_path / "study" / "run")}
    with pytest.raises(ManymaxError, match=r"has manymax .*, but the study was started with 0\.0\.0"):
        run_on_worker(task, ".", "stop")
    with pytest.raises(ManymaxError, match="the folder must be on a shared file system"):
        run_on_worker(task | {"version": VERSION}, ".", "stop")
