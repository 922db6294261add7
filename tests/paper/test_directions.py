"""Nothing of the paper assumes that a higher value of a metric is better: `METRICS` says which direction is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from manymax.paper import paper_columns, selection
from manymax.paper.findings.accuracy_rules import larger_rates, rankmax_on_top, sparse_falls_behind
from manymax.paper.findings.points import Point, PointSet, beats, best_point, from_trials
from manymax.paper.findings.time_rules import overhead
from manymax.paper.numbers import PaperNumber
from manymax.study.report.runs import read_study
from manymax.study.report.trials import Trial, at_best_rates, best_value, trials
from tests.study.report.generated import write_run

REGRET = "regret@20"


def point(loss: str, value: float, *, lr: float = 1e-3, backbone: str = "mf", metric: str = REGRET) -> Point:
    return Point("ml-1m", backbone, loss, lr, None, None, value, value, metric=metric)


@pytest.fixture
def made(tmp_path: Path) -> list[Trial]:
    """Two losses at two learning rates; where the regret is lower, N@20 is lower too."""
    for loss, lr, regret in (("softmax", 1e-3, 0.3), ("softmax", 1e-4, 0.2), ("rankmax", 1e-3, 0.1)):
        write_run(tmp_path, loss=loss, lr=lr, regret=regret, quality=regret, data="ml-1m")
    return trials(read_study(tmp_path).done)


def lrs(some: Iterable[Trial]) -> dict[str, float | None]:
    return {trial.loss: trial.lr for trial in some}


def test_the_best_rate_by_regret_is_that_of_the_lowest(made: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    assert lrs(selection.tuned(made)) == {"softmax": 1e-3, "rankmax": 1e-3}  # by N@20
    monkeypatch.setattr(selection, "MAIN_METRIC", REGRET)
    assert lrs(selection.tuned(made)) == {"softmax": 1e-4, "rankmax": 1e-3}
    assert lrs(at_best_rates(made, REGRET)) == {"softmax": 1e-4, "rankmax": 1e-3}


def test_the_best_of_a_column_is_the_lowest_regret(made: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_columns, "PAPER_METRICS", ("ndcg@20", REGRET))
    table = paper_columns.comparison_table("", made)
    marked = {names[0]: (cells[0].best, cells[2].best) for names, cells in table.rows if names[2] == "0.001"}
    assert marked == {"softmax": (True, False), "rankmax": (False, True)}


def test_a_missing_value_is_not_the_best_of_a_column(made: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_columns, "PAPER_METRICS", ("ndcg@20", REGRET))
    (without,) = (trial for trial in made if trial.loss == "rankmax")
    record = without.runs[0].record.model_copy(update={"test": {"ndcg@20": 0.3}})
    rows = [*made[:2], replace(without, runs=(replace(without.runs[0], record=record),))]
    marked = [cells[2].best for _, cells in paper_columns.comparison_table("", rows).rows]
    assert marked == [trial.mean(REGRET) == 0.2 for trial in rows]
    assert best_value([None, None], REGRET) is None


def test_the_papers_best_rate_is_that_of_its_lowest_regret(made: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {1e-3: 0.5, 5e-4: 0.3, 1e-4: 0.4}

    def number(trial: Trial, metric: str) -> PaperNumber | None:
        lr = trial.lr
        assert lr is not None
        return PaperNumber("", "ml-1m", "mf", trial.loss, metric, printed[lr], {"lr": lr})

    monkeypatch.setattr(paper_columns, "printed", number)
    for metric, best in (("ndcg@20", 0.5), (REGRET, 0.3)):
        monkeypatch.setattr(paper_columns, "MAIN_METRIC", metric)
        monkeypatch.setattr(paper_columns, "PAPER_METRICS", (metric,))
        assert paper_columns.paper_numbers(made[0])[metric].value == best


def test_a_lower_regret_beats() -> None:
    low, high = point("softmax", 0.1), point("rankmax", 0.2)
    assert (beats(low, high), beats(high, low), beats(low, low)) == (True, False, None)
    assert best_point([high, low]) is low
    assert best_point([replace(high, metric="ndcg@20"), replace(low, metric="ndcg@20")]).score == 0.2
    assert PointSet([high, replace(high, selected=0.05, lr=1e-4)]).best(high.place, "rankmax").lr == 1e-4  # type: ignore[union-attr]


def test_the_test_over_users_knows_the_direction(tmp_path: Path) -> None:
    """Trials that have the regret alone are compared by it: the user metrics of `write_run` are renamed."""
    for loss, quality in (("softmax", 0.3), ("rankmax", 0.2)):
        folder = write_run(tmp_path, loss=loss, quality=quality)
        _rename_metric(folder, "ndcg@20", REGRET)
    points = {each.loss: each for each in from_trials(trials(read_study(tmp_path).done)).points}
    assert points["softmax"].metric == REGRET
    assert beats(points["rankmax"], points["softmax"]) is True
    (case,) = rankmax_on_top(PointSet(points.values()))
    assert case.supports is True


def _rename_metric(folder: Path, old: str, new: str) -> None:
    """Leave one metric to a run, under another name."""
    import pyarrow.parquet as pq

    from manymax.study.records import USER_METRICS, read_record, write_record, write_table

    record = read_record(folder)
    parts = {part: {new: getattr(record, part)[old]} for part in ("valid", "test", "popularity")}
    write_record(folder, record.model_copy(update=parts))
    users = pq.read_table(folder / USER_METRICS)
    write_table(folder / USER_METRICS, {"user": users["user"], new: users[old]})


def test_rules_on_a_metric_of_which_less_is_better() -> None:
    rates = [
        point(loss, 0.1 if lr == best else 0.2, lr=lr)
        for loss, best in (("softmax", 1e-2), ("sparsemax", 1e-3))
        for lr in (1e-2, 1e-3)
    ]
    assert [case.supports for case in larger_rates(PointSet(rates))] == [True]
    shares = [
        ("mf", "softmax", 0.10),
        ("mf", "sparsemax", 0.11),
        ("sasrec", "softmax", 0.10),
        ("sasrec", "sparsemax", 0.2),
    ]
    behind = PointSet(point(loss, value, backbone=backbone) for backbone, loss, value in shares)
    assert [case.supports for case in sparse_falls_behind(behind)] == [True]


def test_a_competitive_regret_is_above_the_best_one(tmp_path: Path) -> None:
    """Finding 9: the goal is softmax's best divided by 90 %, which both reach, and the sampled loss sooner."""
    for loss, seconds in (("softmax", 2.0), ("nce", 0.5)):
        folder = write_run(tmp_path, loss=loss, quality=0.3, seconds_per_epoch=seconds, curve=False)
        _rename_metric(folder, "ndcg@20", REGRET)
        _write_falling_curve(folder, seconds)
    case = list(overhead(from_trials(trials(read_study(tmp_path).done))))[-1]
    assert case.supports is True
    assert "after 16.0 s with softmax, 4.0 s with sampling" in case.why


def _write_falling_curve(folder: Path, seconds: float) -> None:
    from manymax.study.records import read_record, write_epochs

    best = read_record(folder).valid[REGRET]
    assert best is not None
    rows = [{"epoch": e, "seconds_train": seconds * e, REGRET: best * (1 + (8 - e) / 2)} for e in range(1, 9)]
    write_epochs(folder, rows)
