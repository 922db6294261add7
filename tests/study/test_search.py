"""Searches: what is proposed, what ends early, what is chosen, and that a search goes on where it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from manymax.errors import ArgumentError
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.engines import Job, do_run
from manymax.study.records import Record, new_record
from manymax.study.search import Choices, Range, Search, Searches
from manymax.study.study_file import StudyConfig, searches
from manymax.study.supervisor import Pruned
from manymax.study.sweep import sweep
from manymax.study.trials import EarlierTrial, Pruning, TrialRules

TINY = {"data": "planted", "size": "60x60x10", "dim": 4, "epochs": 6, "batch_size": 64, "scale": "cosine"}
OVER = {"lr": {"low": 1e-3, "high": 0.1, "log": True}, "temperature": [0.1, 0.3, 1.0]}
TABLE = {"loss": ["softmax", "rankmax"], "over": OVER, "first": [{"lr": 0.05}], "trials": 4, "seeds": 2}


def found(search: Search, values: dict, value: float, status: str = "done") -> Record:
    return new_record(search.config(values), status, valid={"ndcg@20": value}, epochs=3)


def proposals(search: Search, value=lambda each: -abs(each["lr"] - 0.02)) -> list[dict]:
    records: list[Record] = []
    for _ in range(search.trials):
        values = search.propose(records)
        records.append(found(search, values, 1 + value(values)))
    return [search.values(record) for record in records]


class InThisProcess:
    """An engine that does each run at once."""

    slots = 1

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self, job: Job, checkpoint_seconds: float) -> str:
        self.done.append(job.folder.name)
        do_run(job.config, job.folder, checkpoint_seconds)
        return job.folder.name

    def ended(self, started: Sequence[str]) -> Iterator[tuple[str, int]]:
        return iter([(name, 0) for name in started])

    def stop(self, started: Sequence[str]) -> None:
        pass


class TestProposals:
    def test_trials_follow_from_the_records_before_them_and_from_nothing_else(self) -> None:
        softmax, rankmax = searches(StudyConfig(settings=TINY, search=[TABLE | {"trials": 8}]))
        first = proposals(softmax)
        assert first == proposals(softmax)
        assert first[0]["lr"] == 0.05
        # Each loss is tried at the same random places, then where it was seen to be good.
        assert first[:5] == proposals(rankmax)[:5]
        other = proposals(softmax, value=lambda each: each["lr"])
        assert other[:5] == first[:5]
        assert other != first

    def test_values_are_inside_and_have_few_digits(self) -> None:
        space = {"lr": Range(1e-3, 0.1, log=True), "dim": Range(2, 5), "temperature": Choices((0.1, 0.3))}
        for values in proposals(Search(TINY, space, trials=9)):
            assert 1e-3 <= values["lr"] <= 0.1
            assert values["lr"] == float(f"{values['lr']:.3g}")
            assert values["dim"] in (2, 3, 4, 5)
            assert values["temperature"] in (0.1, 0.3)

    def test_the_best_was_trained_to_its_end_and_is_best_in_the_mean_of_its_seeds(self) -> None:
        search = Search(TINY, {"lr": Range(1e-3, 0.1)}, seeds=2)
        trials = [found(search, {"lr": lr}, value) for lr, value in ((0.01, 0.3), (0.02, 0.4), (0.04, 0.2))]
        hopeless = found(search, {"lr": 0.03}, 0.5, "pruned")
        assert search.ranked([*trials, hopeless]) == [trials[1], trials[0], trials[2]]
        assert search.chosen([hopeless], []) == ()
        assert search.chosen(trials, []) == (trials[1],)
        lucky, steady = found(search, {"lr": 0.02}, 0.1), found(search, {"lr": 0.01}, 0.3)
        assert search.chosen(trials, [lucky]) == (trials[1], lucky)
        assert search.chosen(trials, [lucky, steady]) == (trials[0], steady)

    def test_edges_of_ranges(self) -> None:
        assert [Range(1e-3, 0.1, log=True).edge(each) for each in (1e-3, 0.01, 0.1)] == ["low", None, "high"]
        # Nothing is below 0.
        assert [Choices((0.0, 1e-5, 1e-4)).edge(each) for each in (0.0, 1e-5, 1e-4)] == [None, None, "high"]
        assert Choices(("none", "positives")).edge("none") is None


class TestFile:
    def test_settings_beside_the_file_choose_fix_or_replace(self) -> None:
        study = StudyConfig(settings=TINY, search=[TABLE, TABLE | {"loss": "bpr", "data": "mine.parquet"}])
        assert len(searches(study)) == 3
        (one,) = searches(study, loss="rankmax", lr=0.02, epochs=2)
        assert (one.settings["loss"], one.settings["lr"], one.settings["epochs"]) == ("rankmax", 0.02, 2)
        assert (list(one.space), one.first) == (["temperature"], ({},))
        # A file is the same wherever it lies; rows that name no data take any.
        data = "/elsewhere/mine.parquet"
        assert [each.settings["data"] for each in searches(study, data=data)] == [data] * 3
        assert len(searches(study, data="other.parquet")) == 2

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (TABLE | {"over": {"lr": 0.1}}, r"`over\.lr` must be a list"),
            (TABLE | {"over": {"lr": {"low": 1, "high": 1}}}, "`low` below `high`"),
            (TABLE | {"over": {}}, "which `over` does not search"),
            (TABLE | {"trials": 0}, "`trials`"),
            (TABLE | {"over": OVER | {"weight_decay": [0.0, -1.0]}}, "weight_decay"),
            (TABLE | {"over": OVER | {"temperature": {"low": -1.0, "high": 1.0}}}, "temperature"),
            (TABLE | {"pruner": "medain"}, "median"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, table: dict, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            searches(StudyConfig(settings=TINY, search=[table]))

    def test_a_loss_that_the_file_has_not(self) -> None:
        with pytest.raises(ArgumentError, match="no search of the file has loss=entmax"):
            searches(StudyConfig(settings=TINY, search=[TABLE]), loss="entmax")


class TestPruning:
    @pytest.mark.parametrize(("pruner", "ends"), [("halving", True), ("median", True), ("none", False)])
    def test_a_trial_behind_others_ends_after_the_warmup(self, tmp_path: Path, pruner: str, ends: bool) -> None:
        earlier = tuple(EarlierTrial(True, dict.fromkeys(range(1, 6), value)) for value in (0.2, 0.3, 0.4))
        trial = Pruning(TrialRules("ndcg@20", True, pruner, 4, earlier))
        state = TrainingState()
        trial.begin(RunConfig(**TINY), tmp_path, state)
        for epoch, value in enumerate((0.01, 0.25, 0.1), start=1):
            state.epoch = epoch
            trial.epoch(state, {"epoch": epoch, "ndcg@20": value})
        state.epoch = 4
        if not ends:
            trial.epoch(state, {"epoch": 4, "ndcg@20": 0.1})
            return
        with pytest.raises(Pruned, match="after 4 epochs"):
            trial.epoch(state, {"epoch": 4, "ndcg@20": 0.1})
        # One that goes on from a checkpoint is judged by all of its epochs.
        again = Pruning(trial.rules)
        again.begin(RunConfig(**TINY), tmp_path, TrainingState(rows=[{"epoch": 2, "ndcg@20": 0.45}]))
        again.epoch(state, {"epoch": 4, "ndcg@20": 0.1})

    def test_half_of_the_trials_go_on_at_each_rung(self, tmp_path: Path) -> None:
        ends = []
        earlier: list[EarlierTrial] = []
        for value in (0.5, 0.1, 0.4, 0.6, 0.2, 0.7):
            trial, state = Pruning(TrialRules("ndcg@20", True, "halving", 2, tuple(earlier))), TrainingState()
            trial.begin(RunConfig(**TINY | {"epochs": 9}), tmp_path, state)
            try:
                for epoch in range(1, 9):
                    state.epoch = epoch
                    trial.epoch(state, {"epoch": epoch, "ndcg@20": value})
            except Pruned:
                pass
            ends.append(state.epoch)
            earlier.append(EarlierTrial(state.epoch == 8, dict.fromkeys(range(1, state.epoch + 1), value)))
        assert ends == [8, 2, 2, 8, 2, 8]


def test_a_search_that_was_killed_makes_the_same_trials(tmp_path: Path) -> None:
    every = searches(StudyConfig(settings=TINY, search=[TABLE | {"warmup": 2}]))
    engine, folder = InThisProcess(), tmp_path / "study"
    outcome = sweep([], folder, engine=engine, searches=Searches(every, folder))
    assert outcome.total == 2 * (4 + 2)
    assert len(engine.done) == len(outcome.records) <= outcome.total
    for lost in engine.done[3::2]:
        shutil.rmtree(folder / lost)
    again, searching = InThisProcess(), Searches(every, folder)
    repeated = sweep([], folder, engine=again, searches=searching)
    assert {record.hash for record in repeated.records} == {record.hash for record in outcome.records}
    assert sorted(again.done) == sorted(engine.done[3::2])
    for progress in searching.all:
        finalists = progress.search.ranked(progress.trials)[:2]
        assert {record.settings["seed"] for record in progress.seeds} == {1}
        assert [*map(progress.search.values, progress.seeds)] == [*map(progress.search.values, finalists)]
        assert len(progress.chosen) == 2
