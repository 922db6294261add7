"""Does `manymax choose` find the loss that is best in long runs? On planted data of three kinds.

    python benchmarks/choose.py WORK --all --json results/benchmarks/choose.json     everything that follows, for hours

    python benchmarks/choose.py WORK --long flat                        12 trials and 3 seeds of every loss, once
    python benchmarks/choose.py WORK --choose flat --minutes 10 --seeds 0,1,2    what is chosen in this time
    python benchmarks/choose.py WORK --json results/benchmarks/choose.json       judge all that there is in WORK

WORK is a folder for data and runs. Each of them goes on where it was interrupted, and does not repeat what is
done. The bar: a choice names a loss whose N@20 on the test part, in long runs, is within 1 % of the best. With `--json`
outcomes of the file that are not in WORK are kept.

    flat     500 items, almost equally popular, many positives per user
    steep    5,000 items, a few of which have most of the popularity, many positives per user
    one      500 items, one test item per user and few before it
    tiny     150 items: for the test of the project, not for its claims

Where MANYMAX_DATA names a folder with them, there are also the published sets `health`, `electronic` and `movielens`,
with the split that their files give. `--all` chooses with 10 seeds on each planted kind and with 3 on each of these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import environment, write

from manymax.study.choosing.candidates import read_candidates
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.plan import ChoiceRequest, make_plan, read_plan
from manymax.study.choosing.rounds import Round, Rounds
from manymax.study.config import RunConfig
from manymax.study.data.planted import plant
from manymax.study.engines import Job, do_run
from manymax.study.records import RECORD, read_record
from manymax.study.report.answer import answers
from manymax.study.report.runs import read_study
from manymax.study.run import prepare_data

# {kind: size, exponent of the popularity, how items are held out}
KINDS = {
    "flat": ("1000x500x30", 0.2, "ratio"),
    "steep": ("1000x5000x30", 1.2, "ratio"),
    "one": ("3000x500x5", 0.8, "leave-one-out"),
    "tiny": ("300x150x20", 0.8, "ratio"),
}
# {published set: its file in the folder of $MANYMAX_DATA}
FILES = {
    "health": "irb_health.parquet",
    "electronic": "irb_electronic.parquet",
    "movielens": "irb_movielens100k.parquet",
}
CHOICES_PLANTED, CHOICES_PUBLISHED = 10, 3  # seeds of `--all`
TRIALS, SEEDS, FIRST_SEED = 12, 3, 1000  # of long runs; choices have other seeds
WITHIN = 0.01  # of the best


class InThisProcess:
    """An engine that does each run at once: a process of its own would take longer than many of these runs."""

    slots = 1

    def start(self, job: Job, checkpoint_seconds: float) -> str:
        """Do the run."""
        do_run(job.config, job.folder, checkpoint_seconds)
        if not (job.folder / RECORD).exists() or read_record(job.folder).status == "stopped":
            raise KeyboardInterrupt  # or `kill`, which a run takes for a reason to save itself
        return job.folder.name

    def ended(self, started: Sequence[str]) -> Iterator[tuple[str, int]]:
        """All of them."""
        return iter([(name, 0) for name in started])

    def stop(self, started: Sequence[str]) -> None:
        """Nothing is under way."""


def published() -> list[str]:
    """The published sets that are on this machine."""
    folder = os.environ.get("MANYMAX_DATA")
    return [] if folder is None else [name for name, file in FILES.items() if (Path(folder) / file).exists()]


def split_of(kind: str) -> str:
    """How items are held out."""
    return KINDS[kind][2] if kind in KINDS else "given"


def data_file(work: Path, kind: str) -> Path:
    """The planted interactions of a kind, drawn once; the file of a published set."""
    if kind in FILES:
        return Path(os.environ["MANYMAX_DATA"]) / FILES[kind]
    path = work / f"{kind}.parquet"
    if not path.exists():
        size, zipf, _ = KINDS[kind]
        found, _ = plant(size, seed=0, zipf=zipf)
        columns = {
            "user": found.users.numpy(),
            "item": found.item_ids[found.items.numpy()],
            "time": found.times.numpy(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
    return path


def long_runs(work: Path, kind: str, trials: int = TRIALS, seeds: int = SEEDS) -> None:
    """Many trials and several seeds of every loss."""
    folder = work / f"long-{kind}"
    settings = {"data": str(data_file(work, kind)), "split": split_of(kind)}
    request = ChoiceRequest(settings, {}, "ndcg@20", FIRST_SEED, 0.0, trials=trials, seeds=seeds)
    if (plan := read_plan(folder)) is None:
        prepared = prepare_data(RunConfig(**settings, seed=FIRST_SEED))
        plan = make_plan(request, read_candidates(None), prepared, 0.0, time.perf_counter(), 0.0, 1)
        plan.write(folder)
    clock = Clock(folder, float("inf"), time.perf_counter())
    Rounds(plan, folder, InThisProcess(), clock, on_round=_tell).run()


def _tell(ended: Round) -> None:
    if ended.fresh:
        print(f"{ended.kind} {ended.number} of {ended.planned}, {ended.clock.spent / 60:.1f} minutes", flush=True)


def choices(work: Path, kind: str, minutes: float, seeds: Sequence[int]) -> None:
    """What `manymax choose` says for each seed."""
    for seed in seeds:
        folder = work / f"choose-{kind}-{minutes:g}-{seed}"
        if (folder / "answer.json").exists():
            continue
        command = [sys.executable, "-m", "manymax", "choose", str(data_file(work, kind)), "--split", split_of(kind)]
        command += ["--minutes", f"{minutes:g}", "--seed", str(seed), "--out", str(folder), "--no-report", "--json"]
        start = time.perf_counter()
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        (folder / "answer.json").write_text(json.dumps(found | {"wall_minutes": (time.perf_counter() - start) / 60}))
        print(f"{kind}, seed {seed}: {found['loss']}, {found['minutes']:.1f} minutes", flush=True)


def of_long_runs(folder: Path) -> dict[str, Any]:
    """{loss: what it reached}, the best first."""
    (answer,) = answers(read_study(folder))
    plan = read_plan(folder)
    assert plan is not None
    ranked = sorted(answer.contenders, key=lambda each: -(each.test or 0.0))
    return {
        "trials": plan.effort.trials,
        "seeds": len(ranked[0].trial.runs),
        "users": ranked[0].trial.runs[0].record.sizes["users"],
        "losses": {each.loss: {"test": each.test, "valid": each.valid, **each.chosen_settings} for each in ranked},
    }


def of_choice(folder: Path) -> dict[str, Any]:
    """What was chosen, and in how many minutes."""
    found = json.loads((folder / "answer.json").read_text())
    _, kind, minutes, seed = folder.name.split("-")
    kept = {name: found[name] for name in ("loss", "settings", "tied", "unknown", "wall_minutes")}
    return {"kind": kind, "minutes": float(minutes), "seed": int(seed), **kept}


def judged(long: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """By how much the loss that was chosen is behind the best in long runs."""
    reached = {name: each["test"] for name, each in long["losses"].items()}
    behind = 1 - reached[choice["loss"]] / max(reached.values()) if choice["loss"] in reached else None
    return {**choice, "behind": behind, "found": behind is not None and behind <= WITHIN}


def collected(work: Path, before: dict[str, Any]) -> dict[str, Any]:
    """All outcomes below `work`, with those of before."""
    done = (path for path in work.glob("long-*") if (path / "choose.json").exists())
    long = before.get("long", {}) | {path.name.removeprefix("long-"): of_long_runs(path) for path in done}
    old = {(each["kind"], each["minutes"], each["seed"]): each for each in before.get("choices", ())}
    new = map(of_choice, sorted(path.parent for path in work.glob("choose-*/answer.json")))
    every = old | {(each["kind"], each["minutes"], each["seed"]): each for each in new}
    rows = [judged(long[each["kind"]], each) for _, each in sorted(every.items()) if each["kind"] in long]
    return {"long": long, "choices": rows}


def main() -> None:
    """Do what was asked for, and print what there is."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("work", type=Path, help="folder for data and runs")
    options.add_argument("--all", action="store_true", help="long runs and choices of all kinds and published sets")
    options.add_argument("--long", choices=[*KINDS, *FILES], help="make the long runs of this kind")
    options.add_argument("--choose", choices=[*KINDS, *FILES], help="choose on data of this kind")
    options.add_argument("--trials", type=int, default=TRIALS, help="of the long runs")
    options.add_argument("--minutes", type=float, default=10.0, help="of each choice")
    options.add_argument("--json", metavar="FILE", help="judge all that there is, and write it to FILE")
    options.add_argument("--seeds", default="0", help="of the choices, such as 0,1,2")
    arguments = options.parse_args()
    for kind in (*(each for each in KINDS if each != "tiny"), *published()) if arguments.all else ():
        long_runs(arguments.work, kind, arguments.trials)
        seeds = range(CHOICES_PLANTED if kind in KINDS else CHOICES_PUBLISHED)
        choices(arguments.work, kind, arguments.minutes, seeds)
    if arguments.long:
        long_runs(arguments.work, arguments.long, arguments.trials)
    if arguments.choose:
        choices(arguments.work, arguments.choose, arguments.minutes, [int(each) for each in arguments.seeds.split(",")])
    path = Path(arguments.json) if arguments.json else None
    before = json.loads(path.read_text()) if path is not None and path.exists() else {}
    found = collected(arguments.work, before)
    for kind, long in found["long"].items():
        reached = ", ".join(f"{name} {each['test']:.4f}" for name, each in long["losses"].items())
        print(f"{kind}, {long['trials']} trials and {long['seeds']} seeds: {reached}")
    for each in found["choices"]:
        behind = "not in the long runs" if each["behind"] is None else f"{100 * each['behind']:.1f} % behind the best"
        print(f"{each['kind']}, {each['minutes']:g} minutes, seed {each['seed']}: {each['loss']}, {behind}")
    if path is not None:
        write(str(path), {**environment(arguments), **found})


if __name__ == "__main__":
    main()
