"""The tables of the report, on generated records with known effects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from manymax.study.files import read_sealed, write_sealed
from manymax.study.records import RECORD, write_users
from manymax.study.report import pace, standings, tables
from manymax.study.report.answer import answers
from manymax.study.report.formats import Cell, ReportTable
from manymax.study.report.runs import read_study
from manymax.study.report.trials import Trial, at_best_rates, trials
from tests.study.report.generated import grid, write_run


def trials_in(folder: Path) -> list[Trial]:
    return trials(read_study(folder).done)


def row(table: ReportTable, *headers: str) -> tuple[Cell, ...]:
    (cells,) = [cells for names, cells in table.rows if names == headers]
    return cells


def test_the_layout_of_results(tmp_path: Path) -> None:
    grid(tmp_path, losses=("softmax", "sparsemax"), data=("ml-1m", "gowalla"), lr=(1e-3, 1e-4), seed=(0, 1))
    write_run(tmp_path, loss="rg", solver="als", data="ml-1m", quality=0.9)
    table = tables.results(trials_in(tmp_path), "mf")
    rates = ("lr=0.001", "lr=0.0001", "no lr")
    assert table.columns == tuple((data, rate) for data in ("gowalla", "ml-1m") for rate in rates)
    assert [names for names, _ in table.rows][:4] == [
        ("softmax", "N@20"),
        ("softmax", "P@20"),
        ("softmax", "R@20"),
        ("sparsemax", "N@20"),
    ]
    softmax, sparsemax, rg = (row(table, loss, "N@20") for loss in ("softmax", "sparsemax", "rg"))
    assert [cell.best for cell in softmax] == [True, False, False] * 2  # a larger rate is better for softmax
    assert [cell.best for cell in sparsemax] == [False, True, False] * 2
    assert [cell.overall for cell in softmax] == [True, *[False] * 5]
    assert [cell.value is not None for cell in rg] == [*[False] * 5, True]  # in no column of a learning rate
    assert rg[-1].overall
    assert softmax[0].spread is not None
    assert "2 seeds" in table.note


def test_popularity_is_a_row_without_marks(tmp_path: Path) -> None:
    grid(tmp_path, losses=("softmax",), lr=(1e-3, 1e-4))
    *at_rates, cell = row(tables.results(trials_in(tmp_path), "mf"), "popularity", "N@20")
    assert [other.value for other in at_rates] == [None, None]
    assert (cell.value, cell.best, cell.overall) == (0.1, False, False)


def test_marks_are_of_the_validation_part_everywhere(tmp_path: Path) -> None:
    """The test part prefers another learning rate, and another loss."""
    write_run(tmp_path, loss="softmax", lr=0.1, quality=0.30, valid=0.25)
    write_run(tmp_path, loss="softmax", lr=0.2, quality=0.28, valid=0.29)
    write_run(tmp_path, loss="nce", lr=0.1, quality=0.33, valid=0.2)
    (answer,) = answers(read_study(tmp_path))
    assert (answer.winner.loss, answer.winner.trial.lr) == ("softmax", 0.2)
    by_rate = tables.results(trials_in(tmp_path), "mf")
    assert [(cell.best, cell.overall) for cell in row(by_rate, "softmax", "N@20")][:2] == [(True, True), (False, False)]
    assert not any(cell.overall for cell in row(by_rate, "nce", "N@20"))
    first, second, last = standings.standing(answer, trials_in(tmp_path), "standing").rows
    assert [each[0] for each in (first, second, last)] == [("softmax",), ("nce",), ("popularity",)]
    assert [str(cell) for cell in first[1][:3]] == ["to use", "lr=0.2", "0.2900"]
    assert first[1][3].overall
    assert not second[1][3].overall
    assert {names[2] for names, _ in standings.significance([answer]).rows} == {"softmax"}


def test_sweeps(tmp_path: Path) -> None:
    for k, quality in ((5, 0.2), (100, 0.3), (20, 0.25)):
        write_run(tmp_path, loss="nce", num_negatives=k, quality=quality, lr=1e-3)
        write_run(tmp_path, loss="nce", num_negatives=k, quality=quality - 0.05, lr=1e-4)
    write_run(tmp_path, loss="nce", sampler="dns", quality=0.4)
    write_run(tmp_path, loss="softmax")
    table = tables.sweep(trials_in(tmp_path), "num_negatives", {"sampler": "uniform"}, "k")
    assert table is not None
    assert [column[1] for column in table.columns[:3]] == ["k=5", "k=20", "k=100"]
    ((names, cells),) = table.rows
    assert names == ("planted", "mf", "nce")
    assert [cell.best for cell in cells[:3]] == [False, False, True]
    assert cells[0].value == pytest.approx(0.2, abs=0.01)  # the better learning rate
    proposals = tables.sweep(trials_in(tmp_path), "sampler", {}, "q")
    assert proposals is not None
    assert [column[1] for column in proposals.columns[:2]] == ["uniform", "dns"]


def test_no_sweep_without_variation(tmp_path: Path) -> None:
    grid(tmp_path, losses=("softmax", "nce"))
    assert tables.sweep(trials_in(tmp_path), "num_negatives", {}, "k") is None
    assert tables.sweep([], "num_negatives", {}, "k") is None


def test_significance_is_of_the_best_against_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, loss="softmax", quality=0.3)
    write_run(tmp_path, loss="nce", quality=0.2)
    write_run(tmp_path, loss="entmax", quality=0.3001)
    table = standings.significance(answers(read_study(tmp_path)))
    assert {names[2] for names, _ in table.rows} == {"entmax"} or {names[2] for names, _ in table.rows} == {"softmax"}
    by_other = {names[3]: cells for names, cells in table.rows}
    assert by_other["nce"][4].best
    (near,) = set(by_other) - {"nce"}
    assert not by_other[near][4].best


def test_where_less_is_better_the_best_has_the_least(tmp_path: Path) -> None:
    """In a study with the regret as its only metric, the choice of the rate, the tests and the pace go by it."""
    for loss, lr, regret in (("softmax", 1e-3, 0.2), ("softmax", 1e-4, 0.4), ("nce", 1e-3, 0.3)):
        folder = write_run(tmp_path, loss=loss, lr=lr, regret=regret)
        record = read_sealed(folder / RECORD)
        record |= {part: {"regret@20": record[part]["regret@20"]} for part in ("test", "valid")}
        write_sealed(folder / RECORD, record)
        shift = torch.linspace(-0.01, 0.01, 50)
        users = np.array([f"u{i}" for i in range(50)])
        write_users(folder, users, {"regret@20": regret + shift * shift.roll(int(100 * regret))})
    best, other = at_best_rates(trials_in(tmp_path), "regret@20")
    assert (best.loss, best.lr, other.loss) == ("softmax", 1e-3, "nce")
    ((names, cells),) = standings.significance(answers(read_study(tmp_path))).rows
    assert names[2:] == ("softmax", "nce")
    assert cells[0].value == pytest.approx(-0.1, abs=1e-3)
    values = np.array([0.5, 0.25, 0.3, 0.205, 0.2, 0.6])
    best.__dict__["curve"] = {"epoch": np.arange(1.0, 7.0), "seconds_train": np.arange(1.0, 7.0), "regret@20": values}
    assert pace.arrival(best, "regret@20", "epoch") == 4  # 0.2 / 0.95 = 0.2105
    assert pace.arrival(best, "regret@20", "epoch", goal=0.26) == 2
    assert pace.longest_wait(best, "regret@20") == 2
    assert pace.pace(best, "regret@20")[3].value == 5  # seconds to the best


def test_cost(tmp_path: Path) -> None:
    write_run(tmp_path, epochs=10, seconds_per_epoch=3.0, speed=2.0)
    (cells,) = [cells for _, cells in pace.cost(trials_in(tmp_path)).rows]
    epochs, best_epoch, training, evaluation, arrives, total, of_training, memory = (cell.value for cell in cells)
    assert (epochs, best_epoch) == (10, 9)
    assert training == pytest.approx(3.0)
    assert evaluation == pytest.approx(0.3)
    # 1 - exp(-e / 2) reaches 95 % of its value at epoch 10 from epoch 6 on
    assert arrives == pytest.approx(6 * 3.0)
    assert total == pytest.approx(30 + 3 + 0.3)
    assert memory is not None
    assert of_training is None


def test_arrival_never(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path, loss="nce", curve=False)
    with_curve, without = trials_in(tmp_path)
    assert pace.arrival(with_curve, "ndcg@20", "epoch", goal=2.0) is None
    assert pace.arrival(without, "ndcg@20", "epoch") is None


def test_the_longest_wait_for_a_better_value(tmp_path: Path) -> None:
    write_run(tmp_path)
    (trial,) = trials_in(tmp_path)
    values = np.array([0.1, 0.3, 0.2, 0.3, 0.3, 0.4, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    trial.__dict__["curve"] = {"epoch": np.arange(1.0, 13.0), "ndcg@20": values}  # waits 1, 1, 4, 1; then the end
    assert pace.longest_wait(trial, "ndcg@20") == 4
    assert pace.longest_wait(trial, "recall@20") is None


def test_data_and_cards(tmp_path: Path) -> None:
    write_run(tmp_path, data="b.csv", num_users=200)
    write_run(tmp_path, data="a.csv", num_users=1234)
    all_trials = trials_in(tmp_path)
    assert [names for names, _ in tables.data_sets(all_trials).rows] == [("a", "ratio"), ("b", "ratio")]
    assert str(row(tables.data_sets(all_trials), "a", "ratio")[0]) == "1,234"
    first, second = tables.cards(all_trials)
    assert (first.title, second.title) == ("Data card: a, ratio", "Data card: b, ratio")
    assert str(row(first, "raw")[2]) == "4,000"
    assert str(row(first, "5-core")[2]) == ""


def test_runs_without_result(tmp_path: Path) -> None:
    write_run(tmp_path, status="diverged", reason="the loss is nan", lr=1.0)
    write_run(tmp_path, status="failed", reason=None, lr=0.5)
    study = read_study(tmp_path)
    reasons = sorted(str(cells[0]) for _, cells in tables.not_done(study).rows)
    assert reasons == ["no reason was recorded", "the loss is nan"]
    assert len(tables.all_runs(study).rows) == 2
