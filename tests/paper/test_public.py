"""The page of the public table: ours beside theirs, goals, and intervals from what is kept in place of users."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from manymax.paper.public import read_rows, write
from manymax.paper.public.rows import CONFIG, PublicRow
from manymax.paper.public.users import difference, read_users
from manymax.study.records import new_record, write_record, write_users
from manymax.study.report.collect import collect
from manymax.study.study_file import read_study_file, searches

ROOT = Path(__file__).parents[2]
USERS, SEEDS = 40, 3
LOSSES = ("softmax", "rankmax", "sl_at_k")


def values(search, number: int) -> dict:
    given = dict(search.first[number])
    return given | ({"temperature": 4.9} if search.row["loss"] == "rankmax" and number == 0 else {})


@pytest.fixture
def root(tmp_path: Path, seed: int) -> Path:
    """A checkout with two trials of some losses on one set; the first is the better one and has further seeds."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / CONFIG, tmp_path / CONFIG)
    rng = np.random.default_rng(seed)
    level = rng.uniform(0, 0.2, USERS)  # some users are easy for every loss
    for search in searches(read_study_file(ROOT / CONFIG), data="irb_health.parquet"):
        if search.row["loss"] not in LOSSES or search.row["backbone"] != "mf":
            continue
        shift = 0.03 * LOSSES.index(search.row["loss"])
        for number, at_seed in ((0, 0), (1, 0), (0, 1), (0, 2)):
            config = search.config(values(search, number), at_seed)
            users = level + shift + 0.01 * at_seed + rng.normal(0, 0.02, USERS)
            test = {f"{name}@{k}": float(users.mean()) for name in ("ndcg", "recall") for k in (5, 10, 20, 50, 75, 100)}
            valid = {"ndcg@20": 0.2 - 0.1 * number}
            record = new_record(
                config, "done", valid=valid, test=test, epochs=4, best_epoch=2, seconds={"training": 8.0}
            )
            folder = tmp_path / "study" / record.hash
            folder.mkdir(parents=True)
            write_record(folder, record)
            write_users(folder, np.arange(USERS), {"ndcg@20": torch.tensor(users)})
    collect([tmp_path / "study"], tmp_path / "results/public/irb_health.jsonl", curves=False)
    return tmp_path


def rows_of(root: Path) -> dict[str, PublicRow]:
    return {row.title: row for row in read_rows(root)}


def users_of(row: PublicRow, root: Path) -> np.ndarray:
    import pyarrow.parquet as pq

    paths = [root / "study" / run.hash / "user_metrics.parquet" for run in row.runs]
    return np.stack([pq.read_table(path)["ndcg@20"].to_numpy() for path in paths])


def test_rows_have_the_best_settings_with_every_seed(root: Path) -> None:
    rows = rows_of(root)
    assert set(rows) == {"softmax", "SL", "SL@20", "rankmax"}
    softmax = rows["softmax"]
    assert (len(softmax.trials), len(softmax.runs)) == (2, SEEDS)
    assert softmax.mean() == pytest.approx(users_of(softmax, root).mean())
    assert softmax.epoch_seconds == 2.0
    assert softmax.values["lr"] == softmax.search.first[0]["lr"]


def test_an_interval_over_users_and_seeds(root: Path) -> None:
    write(root, [root / "study"])
    rows = rows_of(root)
    found = difference(read_users(root), rows["rankmax"], rows["softmax"])
    ours, base = users_of(rows["rankmax"], root), users_of(rows["softmax"], root)
    of_users = np.var((ours - base).mean(0), ddof=1) / USERS
    of_seeds = np.var((ours - base).mean(1), ddof=1) / SEEDS
    freedom = (of_users + of_seeds) ** 2 / (of_users**2 / (USERS - 1) + of_seeds**2 / (SEEDS - 1))
    half = stats.t.ppf(0.975, freedom) * np.sqrt(of_users + of_seeds)
    assert found is not None
    expected = np.array([0, -half, half]) + (ours - base).mean()
    assert [found.share, found.low, found.high] == pytest.approx(expected / base.mean(), rel=1e-4)
    assert found.verdict == "above"


def test_the_page_states_figures_goals_and_edges(root: Path) -> None:
    write(root, [root / "study"])
    text = (root / "docs/public_benchmark.md").read_text(encoding="utf-8")
    row = rows_of(root)["SL@20"]
    assert f"| SL@20 | **{row.mean():.4f} ± {row.spread():.4f}** | 0.1390 | {row.mean() / 0.139:.1%} |" in text
    assert "Amazon Health, PSL: not run yet" in text
    assert "4.9 (high end)" in text
    assert "rankmax against softmax: above on Amazon Health, MF" in text
    assert "| LLPAUC |  | 0.1209 |" in text  # they have it, we have not


def test_without_users_there_is_no_interval(root: Path) -> None:
    write(root)
    assert "no interval yet" in (root / "docs/public_benchmark.md").read_text(encoding="utf-8")
