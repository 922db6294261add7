"""The one view of all runs of a study: where each stands, read from its checkpoint."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

from manymax.cli.study import StudyProgress
from manymax.study.checkpoint import TrainingState, read_training_state, save_checkpoint
from manymax.study.config import RunConfig
from manymax.study.engines import Job
from manymax.study.records import CHECKPOINT
from manymax.study.study_file import expand, read_study_file
from manymax.study.sweep import sweep

STANDING = TrainingState(epoch=2, batch=1, step=9, best_epoch=1, best_value=0.25)


def jobs(folder: Path) -> list[Job]:
    made = [Job(RunConfig(loss=loss, epochs=10), folder / loss) for loss in ("softmax", "nce")]
    made[0].folder.mkdir()
    save_checkpoint(made[0].folder / CHECKPOINT, "hash", STANDING, {"w": torch.zeros(3)})
    return made


def test_a_terminal_sees_every_run_that_is_under_way(tmp_path: Path) -> None:
    out = io.StringIO()
    with StudyProgress(Console(file=out, force_terminal=True, width=100)) as watch:
        watch(jobs(tmp_path))
    assert "planted mf softmax seed 0: epoch 3/10  best ndcg@20 0.2500" in out.getvalue()
    assert "planted mf nce seed 0: under way" in out.getvalue()


def test_a_file_sees_nothing_that_moves(tmp_path: Path) -> None:
    out = io.StringIO()
    with StudyProgress(Console(file=out, force_terminal=False)) as watch:
        watch(jobs(tmp_path))
    assert out.getvalue().strip() == ""


def test_a_checkpoint_tells_where_its_run_stood(tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    assert read_training_state(path) is None
    path.write_bytes(b"{")
    assert read_training_state(path) is None
    save_checkpoint(path, "hash", STANDING, {"w": torch.zeros(3)})
    assert read_training_state(path) == STANDING


class Pretended:
    """An engine that does nothing, in two rounds, and says that the process died."""

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


def test_any_engine_is_told_apart_from_its_runs(tmp_path: Path) -> None:
    """Runs are given up after three attempts, whoever makes them, and all are seen under way."""
    engine, seen = Pretended(), set()
    configs = expand(read_study_file(None))[:3]
    outcome = sweep(
        configs, tmp_path, engine=engine, on_poll=lambda jobs: seen.update(j.config.loss.name for j in jobs)
    )
    assert [record.status for record in outcome.records] == ["failed"] * 3
    assert {record.reason for record in outcome.records} == {"its process ended with code 1, 3 times"}
    assert len(engine.running) == 9
    assert seen == {config.loss.name for config in configs}
    assert engine.stopped == []
