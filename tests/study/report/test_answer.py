"""The answer of a study: chosen on validation, measured on test, with an interval over users and seeds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from manymax.study.agenda import note_cautions
from manymax.study.report.answer import Answer, answers
from manymax.study.report.intervals import difference
from manymax.study.report.runs import read_study
from manymax.study.report.trials import Trial
from tests.study.report.generated import write_run

METRIC = "ndcg@20"


def trial(*by_seed: Any, users: bool = True) -> Trial:
    """A trial with these values of users, an array for each seed."""
    runs = tuple(
        SimpleNamespace(
            settings={"seed": seed},
            users=lambda _, v=values: (np.arange(len(v)), np.asarray(v)) if users else None,
            record=SimpleNamespace(test={METRIC: float(np.mean(values))}),
        )
        for seed, values in enumerate(by_seed)
    )
    return Trial("d", "mf", "softmax", "softmax", 1e-3, runs, {})  # type: ignore[arg-type]


def the_answer(folder: Path) -> Answer:
    (found,) = answers(read_study(folder))
    return found


def test_one_seed_gives_the_paired_t_interval(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = np.full(80, 0.4)  # the same for all users, so that the ratio has no variance of its own
    better = rng.normal(0.44, 0.1, 80)
    found = difference(trial(better), trial(base), METRIC)
    expected = stats.ttest_1samp(better / 0.4 - 1, 0.0)
    assert found is not None
    assert found.value == pytest.approx(100 * (better.mean() / 0.4 - 1))
    assert (found.low, found.high) == pytest.approx(tuple(100 * end for end in expected.confidence_interval()))
    assert found.p == pytest.approx(expected.pvalue)


def test_means_of_seeds_alone_give_the_t_interval_over_seeds() -> None:
    base, better = [np.full(9, 0.5)] * 3, [np.full(9, value) for value in (0.51, 0.53, 0.55)]
    expected = stats.ttest_1samp([0.02, 0.06, 0.10], 0.0)
    for users in (False, True):  # where users do not differ at all, they tell nothing beside the seeds
        found = difference(trial(*better, users=users), trial(*base, users=users), METRIC)
        assert found is not None
        assert (found.low, found.high) == pytest.approx(tuple(100 * end for end in expected.confidence_interval()))
        assert (found.users, found.seeds) == (9 if users else 0, 3)


@pytest.mark.slow
def test_the_interval_covers_the_truth_where_users_and_seeds_both_vary(seed: int) -> None:
    rng, covered = np.random.default_rng(seed), 0
    for _ in range(400):
        of_user, of_seed = rng.normal(0, 0.1, (1, 60)), rng.normal(0, 0.01, (4, 1))
        gain = 0.02 + of_user + of_seed + rng.normal(0, 0.1, (4, 60))
        found = difference(trial(*(1 + gain)), trial(*np.ones((4, 60))), METRIC)
        assert found is not None
        covered += found.low < 2.0 < found.high
    assert 0.92 <= covered / 400 <= 0.985  # users alone would give 0.86


def test_the_winner_is_chosen_on_validation_and_measured_on_test(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, loss="softmax", quality=0.30, seed=seed)
        write_run(tmp_path, loss="rankmax", quality=0.33, seed=seed)
        write_run(tmp_path, loss="entmax", quality=0.3301, seed=seed, valid=0.31)
        write_run(tmp_path, loss="nce", quality=0.25, seed=seed, seconds_per_epoch=0.5)
    found = the_answer(tmp_path)
    assert [each.loss for each in found.contenders] == ["rankmax", "entmax", "softmax", "nce"]
    gain = found.winner.gain
    assert gain is not None
    assert gain.low < 10 < gain.high < 13
    assert (gain.users, gain.seeds) == (200, 2)
    assert [each.loss for each in found.tied] == ["entmax"]
    assert found.frontier[0].loss == "nce"  # the fastest
    assert "softmax" not in [each.loss for each in found.frontier]  # as slow as rankmax, and worse
    assert found.headline().startswith("rankmax: ndcg@20 0.3")
    assert "% over softmax (95 % interval +" in found.headline()


def test_settings_with_all_seeds_go_before_a_lucky_seed(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax", lr=0.5, quality=0.40)
    for seed in range(3):
        write_run(tmp_path, loss="softmax", lr=0.1, quality=0.30, seed=seed)
        write_run(tmp_path, loss="softmax", lr=0.2, quality=0.32, seed=seed)
    assert the_answer(tmp_path).winner.chosen_settings == {"lr": 0.2}


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    for lr in (0.1, 0.2, 0.4):
        write_run(tmp_path, loss="softmax", lr=lr, quality=0.30 + lr / 100, num_users=30)
    write_run(tmp_path, loss="rankmax", quality=0.302, epochs=8, lr=0.2, num_users=30, limit=8)
    write_run(tmp_path, loss="nce", status="failed", reason="no memory")
    found = {each.kind: each.text for each in the_answer(tmp_path).cautions}
    assert [*found] == ["missing", "users", "seeds", "tuning", "edge", "limit"]
    assert "1 failed" in found["missing"]
    assert "30 test users" in found["users"]
    assert "Fewer settings were tried for rankmax: 1, where others had 3." in found["tuning"]
    assert "lr=0.4 of softmax (the largest of 3)" in found["edge"]
    assert "limit of 8 epochs" in found["limit"]
    assert "rankmax" in found["limit"]


def test_what_the_command_knows_better_is_said_in_place_of_what_the_runs_show(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        write_run(tmp_path, loss="softmax", lr=lr, quality=0.30 + lr / 100)
    note_cautions(tmp_path, {"edge": [], "left out": ["Left out: bpr (slow)."]})
    found = [each.kind for each in the_answer(tmp_path).cautions]
    assert (found[0], "edge" in found) == ("left out", False)


def test_all_settings_that_were_tried_are_named_and_those_without_effect_are_not(tmp_path: Path) -> None:
    for lr, quality, rest in ((0.1, 0.30, {"scale": "cosine", "temperature": 0.2, "weight_decay": 1e-4}),
                              (0.2, 0.31, {"scale": "cosine", "temperature": 0.3, "weight_decay": 1e-3}),
                              (0.3, 0.29, {"scale": "dot", "weight_decay": 1e-2})):  # fmt: skip
        write_run(tmp_path, loss="softmax", lr=lr, quality=quality, **rest)
    settings = the_answer(tmp_path).winner.chosen_settings
    assert settings == {"lr": 0.2, "scale": "cosine", "temperature": 0.3, "weight_decay": 1e-3}
    write_run(tmp_path, loss="softmax", lr=0.4, quality=0.4, scale="dot", weight_decay=0.0)
    assert the_answer(tmp_path).winner.chosen_settings == {"lr": 0.4, "scale": "dot", "weight_decay": 0.0}


def test_the_metric_that_the_runs_watch_decides(tmp_path: Path) -> None:
    for loss, quality in (("softmax", 0.30), ("rankmax", 0.32)):
        write_run(tmp_path, loss=loss, quality=quality, monitor="recall@20", cutoffs=(20, 50))
    assert the_answer(tmp_path).metric == "recall@20"
    write_run(tmp_path, loss="sparsemax", quality=0.2, monitor="ndcg@20", cutoffs=(20, 50))
    assert the_answer(tmp_path).metric == METRIC


def test_nothing_is_said_of_a_study_that_is_whole(tmp_path: Path) -> None:
    for seed in range(3):
        for lr, quality in ((0.1, 0.29), (0.2, 0.30), (0.4, 0.28)):
            write_run(tmp_path, loss="softmax", lr=lr, quality=quality, seed=seed, num_users=2000)
            write_run(tmp_path, loss="rankmax", lr=lr, quality=quality + 0.05, seed=seed, num_users=2000)
    assert the_answer(tmp_path).cautions == ()
    assert the_answer(tmp_path).tied_text() == "nothing: every other loss is behind by more than chance"


def test_what_makes_another_loss_of_a_loss_is_compared_and_not_tuned(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, loss="softmax", quality=0.30, seed=seed)
        write_run(tmp_path, loss="softmax", exclude="positives", decoupled=True, quality=0.33, seed=seed)
        write_run(tmp_path, loss="nce", quality=0.20, seed=seed)
        write_run(tmp_path, loss="nce", sampler="in_batch", quality=0.25, seed=seed)
    found = the_answer(tmp_path)
    names = ["softmax (exclude positives, decoupled)", "softmax", "nce (in_batch)", "nce"]
    assert [each.loss for each in found.contenders] == names
    assert found.baseline is found.contenders[1]
    assert "% over softmax (95 %" in found.headline()
