"""A choice names a loss that long runs find best, on planted data where losses differ by more than the seeds do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manymax.study.choosing.candidates import read_candidates
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.plan import ChoiceRequest, make_plan
from manymax.study.choosing.rounds import Rounds
from manymax.study.choosing.verdict import verdict
from manymax.study.config import RunConfig
from manymax.study.data.planted import plant
from manymax.study.engines import Job, do_run
from manymax.study.run import prepare_data

# N@20 on the test part, from 6 trials and 2 seeds of each loss, by `long_runs` of benchmarks/choose.py on "tiny".
LONG = {"softmax": 0.4703, "bpr": 0.4658, "rankmax": 0.4516, "sparsemax": 0.4155}
WITHIN = 0.99  # of the best


class InThisProcess:
    """An engine that does each run at once."""

    slots = 1

    def start(self, job: Job, checkpoint_seconds: float) -> str:
        do_run(job.config, job.folder, checkpoint_seconds)
        return job.folder.name

    def ended(self, started: Sequence[str]) -> Iterator[tuple[str, int]]:
        return iter([(name, 0) for name in started])

    def stop(self, started: Sequence[str]) -> None:
        pass


@pytest.mark.slow
def test_the_best_loss_is_found(tmp_path: Path) -> None:
    """By numbers of trials and not by a time: then it is the same on every machine, but for the last digits."""
    found, _ = plant("300x150x20", seed=0, zipf=0.8)
    columns = {"user": found.users.numpy(), "item": found.items.numpy(), "time": found.times.numpy()}
    pq.write_table(pa.table(columns), tmp_path / "tiny.parquet")
    content = read_candidates(None)
    compared = [each for each in content.search if each["loss"] in LONG and not each.get("decoupled")]
    content = content.model_copy(update={"search": compared})
    settings, named = {"data": str(tmp_path / "tiny.parquet"), "split": "ratio"}, []
    for seed in range(3):
        request, folder = ChoiceRequest(settings, {}, "ndcg@20", seed, 0.0, trials=3, seeds=1), tmp_path / str(seed)
        prepared = prepare_data(RunConfig(**settings, seed=seed))
        plan = make_plan(request, content, prepared, 0.0, time.perf_counter(), 0.0, 1)
        assert {each.search.settings["loss"] for each in plan.candidates} == {*LONG}
        clock = Clock(folder, float("inf"), time.perf_counter())
        Rounds(plan, folder, InThisProcess(), clock).run()
        named.append(str(verdict(plan, folder, clock).answer.winner.trial.loss))
    good = [loss for loss in named if LONG[loss] >= WITHIN * max(LONG.values())]
    assert len(good) >= 2, f"of three seeds {named} were named"
    assert "sparsemax" not in named
