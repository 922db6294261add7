"""Paired tests over users, and Holm's correction."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from manymax.study.report.significance import compare, holm
from manymax.study.report.trials import Trial

METRIC = "ndcg@20"


def trial(*runs: tuple[int, list[str], list[float]]) -> Trial:
    made = tuple(
        SimpleNamespace(settings={"seed": seed}, users=lambda m, u=users, v=values: (np.array(u), np.array(v)))
        for seed, users, values in runs
    )
    return Trial("d", "mf", "softmax", "softmax", 1e-3, made, {})  # type: ignore[arg-type]


def test_it_is_the_paired_t_test_and_wilcoxon(seed: int) -> None:
    rng = np.random.default_rng(seed)
    users = [f"u{i}" for i in range(50)]
    first, second = rng.normal(0.3, 0.1, 50), rng.normal(0.28, 0.1, 50)
    result = compare(trial((0, users, first)), trial((0, users, second)), METRIC)
    assert result is not None
    assert result.t == pytest.approx(stats.ttest_rel(first, second).pvalue)
    assert result.wilcoxon == pytest.approx(stats.wilcoxon(first, second).pvalue)
    assert result.difference == pytest.approx(first.mean() - second.mean())
    assert result.users == 50


def test_users_are_matched_by_name_not_by_place() -> None:
    first = trial((0, ["a", "b", "c", "x"], [0.1, 0.2, 0.3, 9.0]))
    second = trial((0, ["c", "a", "b", "y"], [0.3, 0.1, 0.1, -9.0]))
    result = compare(first, second, METRIC)
    assert result is not None
    assert result.users == 3
    assert result.difference == pytest.approx(0.1 / 3)


def test_seeds_are_paired_and_averaged_within_users() -> None:
    first = trial((0, ["a", "b"], [1.0, 2.0]), (1, ["b", "c"], [4.0, 5.0]), (2, ["a"], [99.0]))
    second = trial((1, ["b", "c"], [0.0, 3.0]), (0, ["a", "b"], [0.0, 0.0]))
    result = compare(first, second, METRIC)
    assert result is not None
    assert result.users == 3  # a: 1; b: (2 + 4) / 2; c: 2
    assert result.difference == pytest.approx(2.0)


def test_seeds_with_the_same_users_average_alike() -> None:
    both = compare(
        trial((0, ["a", "b", "c"], [1.0, 2.0, 3.0]), (1, ["a", "b", "c"], [3.0, 2.0, 2.0])),
        trial((0, ["a", "b", "c"], [0.0, 0.0, 0.0]), (1, ["a", "b", "c"], [0.0, 0.0, 0.0])),
        METRIC,
    )
    assert both is not None
    assert both.t == pytest.approx(stats.ttest_1samp([2.0, 2.0, 2.5], 0).pvalue)


def test_nothing_to_pair() -> None:
    assert compare(trial((0, ["a", "b"], [1.0, 2.0])), trial((1, ["a", "b"], [1.0, 2.0])), METRIC) is None
    assert compare(trial((0, ["a"], [1.0])), trial((0, ["a"], [2.0])), METRIC) is None
    empty = SimpleNamespace(settings={"seed": 0}, users=lambda metric: None)
    assert compare(Trial("d", "mf", "l", "l", None, (empty,), {}), trial((0, ["a"], [2.0])), METRIC) is None  # type: ignore[arg-type]


def test_equal_values_are_not_significant_and_a_constant_gain_is() -> None:
    users, values = ["a", "b", "c"], [0.1, 0.2, 0.3]
    same = compare(trial((0, users, values)), trial((0, users, values)), METRIC)
    assert same is not None
    assert (same.t, same.significant) == (1.0, False)
    more = compare(trial((0, users, [1.0, 1.0, 1.0])), trial((0, users, [0.5, 0.5, 0.5])), METRIC)
    assert more is not None
    assert more.significant
    assert more.difference == 0.5


def test_false_alarms_are_as_rare_as_the_level_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    users, trials = [f"u{i}" for i in range(30)], 400
    alarms = sum(
        compare(trial((0, users, rng.normal(size=30))), trial((0, users, rng.normal(size=30))), METRIC).significant  # type: ignore[union-attr]
        for _ in range(trials)
    )
    assert abs(alarms / trials - 0.05) < 4 * np.sqrt(0.05 * 0.95 / trials)


def test_holm_is_monotone_bounded_and_in_the_given_order(seed: int) -> None:
    p_values = np.random.default_rng(seed).uniform(size=7) ** 4
    adjusted = np.array(holm(p_values.tolist()))
    assert (adjusted >= p_values).all()
    assert adjusted.max() <= 1
    assert (np.diff(adjusted[p_values.argsort()]) >= 0).all()
    assert adjusted.min() == pytest.approx(min(1.0, 7 * p_values.min()))
    assert holm([]) == []


def test_the_values_come_from_the_files_of_the_run(tmp_path: Path) -> None:
    from manymax.study.report.runs import read_study
    from manymax.study.report.trials import trials
    from tests.study.report.generated import write_run

    write_run(tmp_path, loss="softmax", quality=0.3)
    write_run(tmp_path, loss="nce", quality=0.2)
    first, second = trials(read_study(tmp_path).done)
    result = compare(first, second, METRIC)
    assert result is not None
    assert result.significant
    assert result.difference == pytest.approx(0.1, abs=0.01)
