"""The live view of a study: the progress of each run, read from its checkpoint."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from manymax.cli.study_progress import RunNames, StudyProgress
from manymax.study.checkpoint import TrainingState, read_training_state, save_checkpoint
from manymax.study.config import RunConfig
from manymax.study.engines import Job
from manymax.study.records import CHECKPOINT
from manymax.study.study_file import expand, read_study_file
from manymax.study.sweep import sweep

STATE = TrainingState(epoch=2, batch=1, step=9, best_epoch=1, best_value=0.25)


def jobs(folder: Path) -> list[Job]:
    made = [Job(RunConfig(loss=loss, epochs=10), folder / loss) for loss in ("softmax", "nce")]
    made[0].folder.mkdir()
    save_checkpoint(made[0].folder / CHECKPOINT, "hash", STATE, {"w": torch.zeros(3)})
    return made


def test_a_terminal_shows_every_run_that_is_under_way(tmp_path: Path) -> None:
    out = io.StringIO()
    with StudyProgress(console=Console(file=out, force_terminal=True, width=100)) as watch:
        watch(jobs(tmp_path))
    assert "planted mf softmax seed 0: epoch 3/10  best ndcg@20 0.2500" in out.getvalue()
    assert "planted mf nce seed 0: under way" in out.getvalue()


def test_output_to_a_file_has_a_line_per_run_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("manymax.cli.study_progress.time.monotonic", lambda: now)
    out, under_way = io.StringIO(), jobs(tmp_path)
    with StudyProgress(console=Console(file=out, force_terminal=False, width=40)) as watch:
        for seconds in range(61):
            now = 100.0 + seconds
            watch(under_way)
            assert bool(out.getvalue()) == (seconds >= 5), "the first lines come soon, but not at once"
    lines = ["planted mf softmax seed 0: epoch 3/10  best ndcg@20 0.2500", "planted mf nce seed 0: under way"]
    assert out.getvalue().splitlines() == lines * 2


def test_trials_are_named_by_what_is_searched_and_variants_of_a_loss_by_what_makes_them() -> None:
    names = RunNames((), ("lr", "temperature"))
    settings = {"loss": "softmax", "lr": 0.02, "dim": 8, "batches": "users"}
    assert names.of(RunConfig(**settings)) == "planted mf softmax lr=0.02 seed 0"
    variant = RunConfig(**settings, scale="cosine", temperature=0.3, exclude="positives", decoupled=True)
    expected = "planted mf softmax (exclude positives, decoupled) lr=0.02 temperature=0.3 seed 0"
    assert names.of(variant) == expected


def test_the_training_state_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    assert read_training_state(path) is None
    path.write_bytes(b"{")
    assert read_training_state(path) is None
    save_checkpoint(path, "hash", STATE, {"w": torch.zeros(3)})
    assert read_training_state(path) == STATE


class DyingEngine:
    """An engine that starts no process and reports every run as dead, with exit code 1."""

    slots = 2

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.stopped: list[Job] | None = None

    def start(self, job: Job, checkpoint_seconds: float) -> str:
        self.running.append(job)
        return job.config.loss.name

    def ended(self, started: list[str]) -> list[tuple[str, int]]:
        return [(name, 1) for name in started]

    def stop(self, started: list[str]) -> None:
        self.stopped = started


def test_runs_are_given_up_after_three_attempts_on_any_engine(tmp_path: Path) -> None:
    """Every run is also shown as being under way."""
    engine, seen = DyingEngine(), set()
    configs = expand(read_study_file(None))[::3][:3]  # of three losses
    outcome = sweep(
        configs, tmp_path, engine=engine, on_poll=lambda jobs: seen.update(j.config.loss.name for j in jobs)
    )
    assert [record.status for record in outcome.records] == ["failed"] * 3
    assert {record.reason for record in outcome.records} == {"its process ended with code 1, 3 times"}
    assert len(engine.running) == 9
    assert seen == {config.loss.name for config in configs}
    assert engine.stopped == []
