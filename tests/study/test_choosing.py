"""Choosing a loss: the effort that a time allows, rounds that treat all losses alike, and a plan that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from manymax.errors import ArgumentError
from manymax.members import BASELINE
from manymax.study.choosing.candidates import candidates, name_of, read_candidates, settings_for, unfit
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.effort import FEWEST_TRIALS, LEAST_LOSSES, MOST_TRIALS, Effort, RunCost, affordable
from manymax.study.choosing.plan import (
    Candidate,
    ChoicePlan,
    ChoiceRequest,
    check_same,
    edge_values,
    make_plan,
    read_plan,
)
from manymax.study.choosing.rounds import CUT, SEED, TRIAL, Rounds
from manymax.study.data.prepare import prepare
from manymax.study.engines import Job, do_run
from manymax.study.records import RECORD, new_record, read_record, write_record
from manymax.study.search import Choices, Range, Search
from manymax.study.study_file import StudyConfig

TINY = {"data": "planted", "size": "60x60x10"}
SPACE = {"lr": Range(1e-3, 0.1, log=True), "weight_decay": Choices((0.0, 1e-4))}
LOSSES = ("softmax", "rankmax", "bpr")


def request(**values) -> ChoiceRequest:
    return ChoiceRequest(
        **{"settings": TINY, "overrides": {}, "metric": "ndcg@20", "seed": 0, "minutes": 1.0, **values}
    )


def plan(trials: int | None = None, effort: Effort | None = None, **values) -> ChoicePlan:
    effort = effort or Effort(trials or 3, 10, 2)
    settings = TINY | {"dim": 4, "threads": 1, "epochs": effort.epochs, "batch_size": 64, "monitor": "ndcg@20"}
    own = {"trials": effort.trials, "seeds": effort.seeds, "finalists": 1, "first": ({"lr": 0.02},), "warmup": 2}
    found = [Candidate(Search(settings | {"loss": loss}, SPACE, **own), 0.1) for loss in LOSSES]
    return ChoicePlan(request(trials=trials, **values), [{"step": "raw"}], tuple(found), effort, (), 60.0, 1)


class Time:
    """Seconds that pass when a run is made to take them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FakeEngine:
    """Writes a record in place of a run, which takes some seconds; may be interrupted before a run of some number.

    `beginning` are the seconds that a process takes before its run begins, of which its record says nothing.
    """

    slots = 1

    def __init__(
        self, now: Time, seconds=lambda started: 1.0, stop_at: int | None = None, beginning: float = 0.0
    ) -> None:
        self.now, self.seconds, self.stop_at, self.beginning = now, seconds, stop_at, beginning
        self.started: list[str] = []
        self.jobs: dict[str, Job] = {}

    def start(self, job: Job, checkpoint_seconds: float) -> str:
        if len(self.started) == self.stop_at:
            raise KeyboardInterrupt
        self.started.append(job.folder.name)
        self.jobs[job.folder.name] = job
        self.now.seconds += self.beginning + self.seconds(len(self.started))
        return job.folder.name

    def ended(self, started: Sequence[str]) -> Iterator[tuple[str, int]]:
        for name in started:
            self.do(self.jobs[name])
            yield name, 0

    def do(self, job: Job) -> None:
        value = 0.5 - abs(job.config.training.lr - 0.03) - 0.01 * job.config.seed
        seconds = {"training": self.seconds(len(self.started))}
        job.folder.mkdir(parents=True, exist_ok=True)
        metrics = {"ndcg@20": value}
        write_record(job.folder, new_record(job.config, "done", valid=metrics, test=metrics, seconds=seconds))

    def stop(self, started: Sequence[str]) -> None:
        pass


def rounds(folder: Path, engine: FakeEngine, made: ChoicePlan, budget: float = float("inf"), **keywords) -> Rounds:
    return Rounds(made, folder, engine, Clock(folder, budget, engine.now.seconds, engine.now), **keywords)


def counts(found: Rounds) -> set[tuple[int, int]]:
    return {(len(each.trials), len(each.seeds)) for each in found.progress}


class TestEffort:
    COSTS = tuple(
        RunCost(name, 1.0, epoch, name == "a") for name, epoch in {"a": 0.5, "b": 1.0, "c": 1.5, "d": 9.0}.items()
    )

    @pytest.mark.parametrize("minutes", [2, 5, 10, 30, 100, 1000])
    def test_it_fits_the_time_and_grows_with_it(self, minutes: float) -> None:
        found = affordable(self.COSTS, 60 * minutes, 2)
        assert found.effort.seconds(found.kept, 2) <= 60 * minutes
        assert found.effort.trials >= FEWEST_TRIALS
        more = affordable(self.COSTS, 120 * minutes, 2)
        assert len(more.kept) >= len(found.kept)
        assert {cost.name for cost in found.kept} | {name for name, _ in found.left_out} == set("abcd")

    def test_the_slow_go_first_and_the_baseline_never(self) -> None:
        assert [name for name, _ in affordable(self.COSTS, 60 * 12, 2).left_out] == ["d"]
        assert "times as long" in affordable(self.COSTS, 60 * 12, 2).left_out[0][1]
        slowest_spared = [RunCost("a", 1.0, 50.0, True), *self.COSTS[1:]]
        found = affordable(slowest_spared, 60, 2)
        assert "a" in [cost.name for cost in found.kept]
        assert len(found.kept) >= LEAST_LOSSES
        assert found.effort.trials == 1

    def test_time_is_that_of_whole_rounds(self) -> None:
        """Three equal runs on two processors take as long as four."""
        costs = [RunCost(name, 1.0, 1.0) for name in "abc"]
        assert Effort(2, 10, 2).seconds(costs, 2) == pytest.approx(3 * 2 * costs[0].whole(10))
        assert Effort(2, 10, 2).seconds(costs, 8) == pytest.approx(3 * costs[0].whole(10))
        assert Effort(3, 10, 1).seconds(costs, 2) >= Effort(2, 10, 1).seconds(costs, 2) + 2 * costs[0].trial(10)

    def test_enough_is_enough(self) -> None:
        assert affordable(self.COSTS, 1e9, 2).effort == Effort(MOST_TRIALS, 100, 3)


class TestRounds:
    def test_every_loss_has_the_same_effort(self, tmp_path: Path) -> None:
        found = rounds(tmp_path, FakeEngine(Time()), plan(trials=3))
        found.run()
        assert counts(found) == {(3, 1)}
        for each in found.progress:
            assert each.search.values(each.seeds[0]) == each.search.values(each.search.ranked(each.trials)[0])

    def test_an_interrupted_choice_makes_the_same_runs(self, tmp_path: Path) -> None:
        whole = FakeEngine(Time())
        rounds(tmp_path / "whole", whole, plan(trials=2)).run()
        for stop_at in (1, 5, 7):
            folder, first, then = tmp_path / str(stop_at), FakeEngine(Time(), stop_at=stop_at), FakeEngine(Time())
            with pytest.raises(KeyboardInterrupt):
                rounds(folder, first, plan(trials=2)).run()
            rounds(folder, then, plan(trials=2)).run()
            assert first.started + then.started == whole.started

    def test_no_round_begins_that_would_not_end(self, tmp_path: Path) -> None:
        now = Time()
        found = rounds(tmp_path, FakeEngine(now), plan(), budget=20.0, reserve=2.0)
        found.run()
        # Rounds take 3 s. After four of trials 3.3 s are left for one more, and 3.3 s for that of a second seed.
        assert counts(found) == {(4, 1)}
        assert now.seconds == 15
        again = FakeEngine(now)
        repeated = rounds(tmp_path, again, plan(), budget=1e9)  # what was decided is not decided again
        repeated.run()
        assert again.started == []
        assert counts(repeated) == {(4, 1)}

    def test_time_for_the_seeds_is_that_of_whole_rounds(self, tmp_path: Path) -> None:
        now = Time()
        found = rounds(tmp_path, FakeEngine(now, beginning=1.0), plan(), budget=29.0)
        found.run()
        # Rounds take 6 s, of which the records show 3 s. After a fourth one of trials no seed would come to its end.
        assert counts(found) == {(3, 1)}
        assert now.seconds == 24

    def test_a_round_that_the_time_ends_counts_for_no_loss(self, tmp_path: Path) -> None:
        engine = FakeEngine(Time(), lambda started: 50.0 if started == 8 else 1.0)
        found = rounds(tmp_path, engine, plan(), budget=30.0)
        found.run()
        assert counts(found) == {(2, 0)}
        assert len(engine.started) == 8
        cut = [read_record(tmp_path / name) for name in engine.started[6:]]
        assert [(record.status, record.reason, record.test) for record in cut] == [("pruned", CUT, {})] * 2
        again = FakeEngine(Time())
        repeated = rounds(tmp_path, again, plan(), budget=30.0)
        repeated.run()
        assert again.started == []
        assert counts(repeated) == {(2, 0)}

    def test_a_run_that_was_lost_afterwards_is_done_again_and_nothing_is_cut(self, tmp_path: Path) -> None:
        now = Time()
        first = FakeEngine(now)
        rounds(tmp_path, first, plan(), budget=20.0, reserve=2.0).run()
        (tmp_path / first.started[4] / RECORD).unlink()
        again = FakeEngine(now, lambda started: 50.0)
        found = rounds(tmp_path, again, plan(), budget=20.0, reserve=2.0)
        found.run()
        assert again.started == [first.started[4]]
        assert counts(found) == {(4, 1)}

    def test_of_a_first_round_what_has_ended_is_kept(self, tmp_path: Path) -> None:
        engine = FakeEngine(Time(), lambda started: 50.0 if started == 2 else 1.0)
        found = rounds(tmp_path, engine, plan(), budget=30.0)
        found.run()
        assert engine.started[0] == found.progress[0].trials[0].hash  # the baseline comes first
        assert [len(each.search.ranked(each.trials)) for each in found.progress] == [1, 0, 0]
        assert (found.counted(TRIAL), found.counted(SEED)) == (1, 0)


class TestPlan:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        assert read_plan(tmp_path) is None
        made = plan()
        made.write(tmp_path)
        assert read_plan(tmp_path) == made

    def test_another_request_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"other options \(minutes\)"):
            check_same(plan(), request(minutes=2.0), tmp_path)
        check_same(plan(), request(), tmp_path)

    @pytest.mark.slow
    def test_own_candidates_in_a_time(self) -> None:
        content, prepared = read_candidates(None), prepare("planted-tiny")
        asked = request(settings={"data": "planted", "size": "tiny"}, minutes=200.0)
        made = make_plan(asked, content, prepared, 0.1, time.perf_counter(), 5.0, 2)
        names = [each.name for each in made.candidates]
        assert BASELINE.name in names
        assert f"{BASELINE.name} (exclude positives, decoupled)" in names
        assert len(set(names)) == len(names) >= 8
        assert "draws 1,000 of 147 items" in dict(made.left_out)["sampled_softmax"]
        assert made.seconds <= 200 * 60
        assert {each.search.settings["monitor"] for each in made.candidates} == {"ndcg@20"}
        assert all(each.search.config(dict(first)) for each in made.candidates for first in each.search.first)
        with pytest.raises(ArgumentError, match="is too little"):
            make_plan(request(minutes=0.01), content, prepared, 0.1, time.perf_counter(), 0.1, 2)

    def test_edges_are_those_of_the_range(self) -> None:
        assert [*edge_values(plan(), "rankmax", {"lr": 0.1, "weight_decay": 0.0})] == [
            "lr=0.1 of rankmax (the high end)"
        ]
        assert [*edge_values(plan(), "rankmax", {"lr": 0.05, "weight_decay": 1e-4})] == [
            "weight_decay=0.0001 of rankmax (the high end)"
        ]


def test_a_loss_is_named_once_and_draws_no_more_than_there_is() -> None:
    split = prepare("planted-tiny").split
    common = settings_for(split, {"data": "planted", "size": "tiny"}, "recall@10", 3)
    table = {"loss": "sampled_softmax", "num_negatives": 100, "over": {"lr": [0.1, 0.2]}}
    (search,) = candidates(StudyConfig(search=[table]), common, {})
    assert (search.metric, search.config({}).seed, search.config({}, 1).seed) == ("recall@10", 3, 4)
    assert [name for name, _ in unfit([search], 147)] == [name_of(search)]
    assert [*unfit([search], 1000)] == []
    with pytest.raises(ArgumentError, match="sampled_softmax twice"):
        candidates(StudyConfig(search=[table, table]), common, {})
    with pytest.raises(ArgumentError, match="such as ndcg@20"):
        settings_for(split, {}, "ndcg", 0)


@pytest.mark.slow
def test_real_runs_that_were_interrupted_end_as_if_they_were_not(tmp_path: Path) -> None:
    class InThisProcess(FakeEngine):
        def do(self, job: Job) -> None:
            do_run(job.config, job.folder, checkpoint_seconds=0.0)

    outcomes = []
    for stops in ((None,), (4, None)):
        folder = tmp_path / f"{len(stops)}"
        for stop_at in stops:
            found = rounds(folder, InThisProcess(Time(), stop_at=stop_at), plan(trials=2, effort=Effort(2, 3, 2)))
            try:
                found.run()
            except KeyboardInterrupt:
                assert stop_at is not None
        outcomes.append([[(r.hash, r.valid, r.test) for r in (*each.trials, *each.seeds)] for each in found.progress])
    assert outcomes[0] == outcomes[1]
