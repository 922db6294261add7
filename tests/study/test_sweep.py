"""Studies: the runs of a file, and that no run is lost or done twice whatever happens to the processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.records import MODEL, PROBE, RECORD, Record, read_record
from manymax.study.run import run
from manymax.study.study_file import StudyConfig, expand, read_study_file, searches
from manymax.study.sweep import sweep

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = {"data": "planted", "size": "60x60x10", "dim": 4, "epochs": 3, "batch_size": 64}

# A study in a process of its own, which may be killed.
SCRIPT = """
import sys
from pathlib import Path
from manymax.study.study_file import expand, read_study_file
from manymax.study.sweep import sweep
if __name__ == "__main__":
    configs = expand(read_study_file(Path(sys.argv[1])))
    outcome = sweep(configs, Path(sys.argv[2]), workers=2, checkpoint_seconds=0.2)
    print("done", outcome.count("done"), flush=True)
"""


def study(grid: dict | list, **settings: object) -> StudyConfig:
    return StudyConfig(settings=TINY | settings, grid=grid)


class TestFile:
    def test_lists_are_combined_and_tables_are_added(self) -> None:
        configs = expand(
            StudyConfig(grid=[{"loss": ["softmax", "nce"], "seed": [0, 1]}, {"loss": "rg", "solver": "als"}])
        )
        assert [(c.loss.name, c.seed, c.training.solver) for c in configs] == [
            ("softmax", 0, "gradient"),
            ("softmax", 1, "gradient"),
            ("nce", 0, "gradient"),
            ("nce", 1, "gradient"),
            ("rg", 0, "als"),
        ]

    def test_what_has_no_effect_makes_no_further_runs(self) -> None:
        configs = expand(StudyConfig(grid=[{"loss": ["softmax", "nce"], "num_negatives": [5, 10]}]))
        assert [(c.loss.name, c.sampler.num_negatives) for c in configs] == [("softmax", 100), ("nce", 5), ("nce", 10)]

    def test_the_size_of_planted_data_means_nothing_for_other_data(self) -> None:
        made = StudyConfig(grid=[{"size": ["tiny", "small"]}])
        assert [c.data.size for c in expand(made)] == ["tiny", "small"]
        assert [c.data.size for c in expand(made, data="ratings.csv")] == [None]

    def test_overrides_take_precedence_over_the_settings_of_the_file(self) -> None:
        made = StudyConfig(settings={"epochs": 7, "cutoffs": [5, 10]}, grid=[{"loss": ["softmax", "nce"], "epochs": 9}])
        assert {(c.training.epochs, c.evaluation.cutoffs) for c in expand(made)} == {(9, (5, 10))}
        assert {c.training.epochs for c in expand(made, epochs="3")} == {3}
        assert [c.loss.name for c in expand(made, loss="rg")] == ["rg"]

    def test_a_run_has_one_thread_unless_the_file_says_otherwise(self) -> None:
        assert expand(StudyConfig())[0].machine.threads == 1
        assert expand(StudyConfig(settings={"threads": 2}))[0].machine.threads == 2

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ({"tittle": "x"}, "did you mean 'title'"),
            ({"settings": {"epoch": 3}}, "did you mean 'epochs'"),
            ({"grid": [{"loss": "nce"}, {"los": "nce"}]}, "did you mean 'loss'"),
            ({"grid": [{"loss": ["softmax", "sparsmax"]}]}, "did you mean 'sparsemax'"),
            ({"grid": [{"loss": []}]}, "`loss` in .* at least one value"),
            ({"grid": ["softmax"]}, "must be tables"),
            ({"settings": 3}, "must be tables"),
            ({"grid": [{"epochs": 0}]}, "`epochs`"),
            ({"title": 3}, "`title`"),
        ],
    )
    def test_mistakes_are_named(self, content: dict, complaint: str) -> None:
        with pytest.raises(ManymaxError, match=complaint):
            expand(StudyConfig(**content))

    def test_an_unknown_override_is_refused(self) -> None:
        with pytest.raises(ManymaxError, match="did you mean 'epochs'"):
            expand(StudyConfig(), epoch=3)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"no\.toml cannot be read"):
            read_study_file(tmp_path / "no.toml")
        (tmp_path / "bad.toml").write_text("grid = [", encoding="utf-8")
        with pytest.raises(ArgumentError, match=r"bad\.toml cannot be read"):
            read_study_file(tmp_path / "bad.toml")

    @pytest.mark.parametrize("path", [None, *sorted(CONFIGS.glob("*.toml"))], ids=lambda path: path and path.stem)
    def test_every_file_in_configs_is_a_study(self, path: Path | None) -> None:
        content = read_study_file(path)
        assert content.title
        assert len(expand(content)) + sum(search.runs for search in searches(content)) > 10

    def test_the_quick_study_shows_exact_sparse_and_sampled_losses(self) -> None:
        content = read_study_file(None)
        losses = [config.member for config in expand(content)]
        assert {member.kind for member in losses} == {"exact", "sampled", "tree"}
        assert any(member.sparse for member in losses)
        assert "demonstration" in content.note
        assert content.note.endswith("manymax choose FILE.")


@pytest.mark.slow
class TestSweep:
    def test_good_bad_and_diverging_runs(self, tmp_path: Path) -> None:
        """A failed run is recorded and does not stop the others; a second start does only what is not done."""
        grid = [{"loss": "softmax"}, {"data": str(tmp_path / "no.csv"), "size": None}, {"lr": 1e30, "loss": "rg"}]
        configs = [*expand(study([grid[0], grid[2]])), *expand(StudyConfig(grid=[{"data": grid[1]["data"]}]))]
        heard: list[str] = []
        outcome = sweep(
            configs, tmp_path / "out", workers=2, on_record=lambda so_far, record: heard.append(record.status)
        )
        assert sorted(heard) == ["diverged", "done", "failed"]
        assert (outcome.total, outcome.count("done")) == (3, 1)
        by_status = {record.status: record for record in outcome.records}
        assert "no.csv" in str(by_status["failed"].reason)
        folders = {record.status: tmp_path / "out" / record.hash for record in outcome.records}
        assert (folders["done"] / PROBE).exists()
        before = {status: (folder / RECORD).stat().st_mtime_ns for status, folder in folders.items()}

        again = sweep(configs, tmp_path / "out", workers=1)
        assert {record.status for record in again.records} == {"done", "diverged", "failed"}
        after = {status: (folder / RECORD).stat().st_mtime_ns for status, folder in folders.items()}
        assert {status for status in before if before[status] != after[status]} == {"failed"}

    def test_the_error_of_a_failed_run_is_gone_when_it_succeeds(self, tmp_path: Path) -> None:
        (config,) = expand(StudyConfig(settings={"data": str(tmp_path / "x.csv"), "epochs": 2, "dim": 4}))
        (first,) = sweep([config], tmp_path / "out").records
        rows = [f"u{u},i{i},{u + i}" for u in range(20) for i in range(u % 3, u % 3 + 8)]
        (tmp_path / "x.csv").write_text("\n".join(["user,item,time", *rows]), encoding="utf-8")
        (second,) = sweep([config], tmp_path / "out").records
        assert (first.status, second.status) == ("failed", "done")

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ManymaxError, match="cannot be written to"):
            sweep(expand(study({})), tmp_path / "file" / "out")

    def test_a_full_disk_loses_no_finished_run(self, tmp_path: Path) -> None:
        """A limit on the size of files takes the place of a full disk: writing beyond it fails in the same way."""
        (first,) = expand(study({"seed": 0}))
        sweep([first], tmp_path)
        kept = {path.name: path.read_bytes() for path in (tmp_path / first.content_hash()).iterdir() if path.is_file()}
        script = f"""
import resource, sys
from pathlib import Path
from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.sweep import sweep
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    configs = [RunConfig(**{TINY | {"threads": 1}!r}, seed=seed) for seed in (0, 1)]
    try:
        sweep(configs, Path({str(tmp_path)!r}), workers=1)
    except ManymaxError as error:
        print(error)
"""
        result = python(script)
        assert "the disk is full" in result.stdout
        assert "Traceback" not in result.stderr
        for name, content in kept.items():
            assert (tmp_path / first.content_hash() / name).read_bytes() == content
        assert not list(tmp_path.rglob("*.partial"))
        configs = expand(study({"seed": [0, 1]}))
        assert sweep(configs, tmp_path).count("done") == 2


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


Start = Callable[[Path, Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a study in a process of its own; the process is ended with the test."""
    started = []

    def begin(file: Path, out: Path) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, str(file), str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def runs_of(pid: int) -> list[int]:
    """The processes of runs: those forked from the fork server of the study."""
    return [worker for server in children(pid) for worker in children(server)]


def kill_runs(study: subprocess.Popen[str]) -> int:
    """kill -9 on the runs of a study; returns how many were killed, because some may have ended before."""
    killed = 0
    for worker in runs_of(study.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
            killed += 1
    return killed


def outcome_of(folder: Path) -> dict[str, tuple[Record, dict]]:
    """What must be the same however often a study was interrupted: settings, metrics and weights."""
    found = {}
    for path in folder.glob(f"*/{RECORD}"):
        record = read_record(path.parent)
        kept = record.model_dump(include={"status", "settings", "epochs", "best_epoch", "valid", "test", "popularity"})
        weights = {name: value.tolist() for name, value in load_file(path.parent / MODEL).items()}
        found[record.hash] = (kept, weights)
    return found


FILE = """
[settings]
data = "planted"
size = "200x100x20"
dim = 8
epochs = 20
patience = 20
batch_size = 256
lr = 1e-3
[[grid]]
loss = ["softmax", "sampled_softmax"]
seed = [0, 1]
"""

linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found through /proc")


@linux
@pytest.mark.slow
class TestKilled:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        (tmp_path / "study.toml").write_text(FILE, encoding="utf-8")
        return tmp_path / "study.toml"

    def test_killed_workers_and_parents_change_nothing(
        self, start: Start, file: Path, tmp_path: Path, seed: int
    ) -> None:
        """kill -9 on the runs of a study, then on the study, twice: the records are those of an uninterrupted study."""
        chance, killed = random.Random(seed), tmp_path / "killed"
        for _ in range(2):
            process = start(file, killed)
            wait_for(lambda pid=process.pid: runs_of(pid))
            time.sleep(chance.uniform(0.2, 1.5))
            kill_runs(process)
            time.sleep(chance.uniform(0.2, 1.5))
            workers = runs_of(process.pid)
            process.kill()
            process.communicate()
            wait_for(lambda workers=workers: not any(map(alive, workers)))
        last, errors = start(file, killed).communicate(timeout=300)
        assert last == "done 4\n", errors
        assert outcome_of(killed) == uninterrupted(file, tmp_path / "whole")
        assert not list(killed.rglob("*.partial"))

    def test_two_studies_in_one_folder_survive_their_workers(self, start: Start, file: Path, tmp_path: Path) -> None:
        both = [start(file, tmp_path / "out") for _ in range(2)]
        wait_for(lambda: any(map(kill_runs, both)))
        assert [process.communicate(timeout=300)[0] for process in both] == ["done 4\n"] * 2
        assert outcome_of(tmp_path / "out") == uninterrupted(file, tmp_path / "alone")


def uninterrupted(file: Path, folder: Path) -> dict[str, tuple[Record, dict]]:
    """The outcome of the same four runs, one after the other and in this process."""
    for config in expand(read_study_file(file)):
        run(config, folder / config.content_hash())
    outcome = outcome_of(folder)
    assert len(outcome) == 4
    return outcome


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
