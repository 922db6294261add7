"""Which trials answer a question of the paper where batches were made in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manymax.paper.selection import nearest_batches, question_1, question_1_rates, question_2
from manymax.study.report.runs import read_study
from manymax.study.report.trials import Trial, trials
from tests.study.report.generated import write_run


@pytest.fixture
def made(tmp_path: Path) -> list[Trial]:
    """Most learning rates and numbers of negatives with batches of users, a few with pairs or chunks, two without."""
    users: dict[str, Any] = {"batches": "users"}
    for lr in (1e-3, 5e-4, 1e-4):
        write_run(tmp_path, loss="softmax", lr=lr, **users)
        write_run(tmp_path, loss="entmax", lr=lr, **users)
    write_run(tmp_path, loss="softmax", lr=5e-4, batches="chunks")
    write_run(tmp_path, loss="softmax", lr=1e-4, batches="pairs")
    write_run(tmp_path, loss="rg", solver="als")
    write_run(tmp_path, loss="rg", **users)
    for k in (5, 100):
        write_run(tmp_path, loss="nce", num_negatives=k, **users)
    write_run(tmp_path, loss="nce", num_negatives=100, lr=5e-4)
    write_run(tmp_path, loss="softmax", backbone="sasrec")
    return trials(read_study(tmp_path).done)


def summary(made: list[Trial]) -> set[tuple[str, str, str | None, float | None]]:
    return {(trial.backbone, trial.label, trial.batches, trial.lr) for trial in made}


def test_question_1_takes_the_batches_nearest_to_pairs(made: list[Trial]) -> None:
    assert summary(question_1(made)) == {
        ("mf", "softmax", "pairs", 1e-4),
        *(("mf", "entmax", "users", lr) for lr in (1e-3, 5e-4, 1e-4)),
        ("mf", "nce", "pairs", 5e-4),
        ("mf", "rg (solver=als)", None, None),
        ("mf", "rg (solver=gradient)", "users", 1e-3),
        ("sasrec", "softmax", None, 1e-3),
    }


def test_rates_are_those_of_the_batches_that_most_were_run_with(made: list[Trial]) -> None:
    softmax = {each for each in summary(question_1_rates(made)) if each[:2] == ("mf", "softmax")}
    assert softmax == {("mf", "softmax", "users", lr) for lr in (1e-3, 5e-4, 1e-4)}
    assert ("mf", "nce", "pairs", 5e-4) in summary(question_1_rates(made))  # of equals the nearest to the paper's


def test_question_2_takes_the_batches_that_most_proposals_were_run_with(made: list[Trial]) -> None:
    assert summary(question_2(made)) == {
        ("mf", "nce (num_negatives=5)", "users", 1e-3),
        ("mf", "nce (num_negatives=100)", "users", 1e-3),
    }


def test_each_number_of_negatives_has_its_own_nearest(made: list[Trial]) -> None:
    sampled = {each for each in summary(nearest_batches(made)) if each[1].startswith("nce")}
    assert sampled == {
        ("mf", "nce (num_negatives=5)", "users", 1e-3),
        ("mf", "nce (num_negatives=100)", "pairs", 5e-4),
    }
