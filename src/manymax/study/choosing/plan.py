"""The plan of a choice: which losses, with how much effort each. It is written before anything starts.

A plan is made from the data, the time and the measured speed of this machine. The file holds all that follows from
them, so that the same command goes on with the same plan after an interruption, at whatever speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.choosing.candidates import candidates, is_baseline, name_of, settings_for, unfit
from manymax.study.choosing.effort import Effort, RunCost, affordable, patience, warmup
from manymax.study.choosing.timing import epoch_seconds, evaluation_seconds
from manymax.study.config import RunConfig
from manymax.study.data.prepare import Prepared
from manymax.study.files import read_sealed, write_sealed
from manymax.study.search import Choices, Range, Search, read_space
from manymax.study.study_file import StudyConfig

PLAN = "choose.json"
START_SECONDS = 1.5  # of a run beside reading the data: its process begins, and it is tested
MOST_EPOCHS_BETWEEN = 5  # evaluations


@dataclass(frozen=True)
class ChoiceRequest:
    """What was asked for.

    settings: of the data, by name. overrides: of every run. metric, seed, minutes: as on the command line.
    trials, seeds: numbers instead of a time; None for as many as the time allows.
    candidates: the name of a file of candidates; None for the package's own.
    """

    settings: Mapping[str, Any]
    overrides: Mapping[str, Any]
    metric: str
    seed: int
    minutes: float
    trials: int | None = None
    seeds: int | None = None
    candidates: str | None = None

    @property
    def seconds(self) -> float:
        """The time; a choice that counts trials has as much as it needs."""
        return float("inf") if self.trials is not None else 60 * self.minutes


@dataclass(frozen=True)
class Candidate:
    """A loss of the plan: its search, and seconds of an epoch, evaluation included."""

    search: Search
    epoch_seconds: float

    @property
    def name(self) -> str:
        """What it is called."""
        return name_of(self.search)


@dataclass(frozen=True)
class ChoicePlan:
    """What will be done.

    request: what was asked for.
    card: of the data.
    candidates: the losses, in the order of the file.
    effort: for each of them.
    left_out: (name, reason) of the others.
    seconds: the estimate for all of it, on `slots` runs at a time.
    """

    request: ChoiceRequest
    card: Sequence[Mapping[str, Any]]
    candidates: tuple[Candidate, ...]
    effort: Effort
    left_out: tuple[tuple[str, str], ...]
    seconds: float
    slots: int

    def write(self, folder: Path) -> None:
        """Write the plan into the folder of the choice."""
        content = {
            "request": asdict(self.request),
            "card": [dict(step) for step in self.card],
            "candidates": [_as_json(each) for each in self.candidates],
            "effort": asdict(self.effort),
            "left_out": [list(pair) for pair in self.left_out],
            "seconds": self.seconds,
            "slots": self.slots,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_sealed(folder / PLAN, content)
        except OSError as error:
            raise ManymaxError(f"{folder} cannot be written to: {error.strerror}. Choose another folder.") from None


def _as_json(each: Candidate) -> dict[str, Any]:
    search = each.search
    space = {
        name: list(place.values) if isinstance(place, Choices) else asdict(place)
        for name, place in search.space.items()
    }
    return {
        "settings": dict(search.settings),
        "over": space,
        "first": [dict(values) for values in search.first],
        "trials": search.trials,
        "seeds": search.seeds,
        "pruner": search.pruner,
        "warmup": search.warmup,
        "epoch_seconds": each.epoch_seconds,
    }


def read_plan(folder: Path) -> ChoicePlan | None:
    """The plan in a folder; None if there is none."""
    if not (folder / PLAN).exists():
        return None
    content = read_sealed(folder / PLAN)
    return ChoicePlan(
        request=ChoiceRequest(**content["request"]),
        card=content["card"],
        candidates=tuple(map(_from_json, content["candidates"])),
        effort=Effort(**content["effort"]),
        left_out=tuple((name, reason) for name, reason in content["left_out"]),
        seconds=content["seconds"],
        slots=content["slots"],
    )


def _from_json(content: Mapping[str, Any]) -> Candidate:
    own = {name: content[name] for name in ("settings", "trials", "seeds", "pruner", "warmup")}
    space = read_space(content["over"])
    return Candidate(Search(space=space, first=tuple(content["first"]), finalists=1, **own), content["epoch_seconds"])


def check_same(plan: ChoicePlan, request: ChoiceRequest, folder: Path) -> None:
    """Raise an error if the plan in a folder is of another request."""
    before, now = asdict(plan.request), asdict(request)
    if different := [name for name in now if before[name] != now[name]]:
        raise ArgumentError(
            f"{folder} holds a choice that was asked for with other options ({', '.join(different)}). Repeat its"
            " command to go on with it, or choose another folder with `--out`."
        )


def make_plan(
    request: ChoiceRequest,
    content: StudyConfig,
    prepared: Prepared,
    preparing: float,
    started: float,
    reserve: float,
    slots: int,
) -> ChoicePlan:
    """Measure the candidates and find out what the time allows.

    Args:
        request: what is asked for.
        content: the file of candidates.
        prepared: the data.
        preparing: seconds that it took to read and prepare it, which every run does again.
        started: `time.perf_counter()` when the time began.
        reserve: seconds to keep for the report.
        slots: how many runs are done at a time.
    """
    common = settings_for(prepared.split, request.settings, request.metric, request.seed)
    found = candidates(content, common, request.overrides)
    out = list(unfit(found, prepared.split.num_items))
    found = [search for search in found if name_of(search) not in dict(out)]
    if len(found) < 2:
        raise ArgumentError(
            "`--candidates` leaves fewer than two losses that fit this data: there is nothing to choose."
        )
    costs, between = _measured(found, prepared, preparing)
    spent = time.perf_counter() - started
    if request.trials is not None:
        effort, kept = Effort(request.trials, 100, request.seeds or 3), tuple(costs)
    else:
        afforded = affordable(costs, request.seconds - spent - reserve, slots)
        effort, kept = afforded.effort, afforded.kept
        effort = replace(effort, seeds=request.seeds or effort.seeds)
        out += afforded.left_out
    seconds = spent + reserve + effort.seconds(kept, slots)
    if effort.trials == 1 and seconds > 1.5 * request.seconds:
        raise ArgumentError(
            f"`--minutes {request.minutes:g}` is too little: one trial of {' and '.join(c.name for c in kept)} takes"
            f" about {seconds / 60:.2g} minutes here. Give more, or a part of the data."
        )
    by_name = {cost.name: cost.epoch for cost in kept}
    made = (_with_effort(search, effort, between, request) for search in found if name_of(search) in by_name)
    chosen = tuple(Candidate(search, by_name[name_of(search)]) for search in made)
    return ChoicePlan(request, prepared.card, chosen, effort, tuple(out), seconds, slots)


def _config(search: Search) -> RunConfig:
    """A run that stands for those of a search."""
    return search.config(dict(search.first[0]) if search.first else search.propose([]))


def _measured(found: Sequence[Search], prepared: Prepared, preparing: float) -> tuple[list[RunCost], int]:
    """What each loss costs, and the number of epochs between two evaluations.

    Evaluations are so rare that training takes at least half as long as evaluating.
    """
    training = [epoch_seconds(_config(search), prepared) for search in found]
    evaluation = evaluation_seconds(_config(found[0]), prepared)
    between = max(1, min(MOST_EPOCHS_BETWEEN, round(evaluation / (2 * min(training)))))
    fixed = preparing + START_SECONDS
    costs = [
        RunCost(name_of(search), fixed, seconds + evaluation / between, is_baseline(search))
        for search, seconds in zip(found, training, strict=True)
    ]
    return costs, between


def _with_effort(search: Search, effort: Effort, between: int, request: ChoiceRequest) -> Search:
    """A search with the numbers of the plan, unless settings from outside say otherwise."""
    stopping = {"epochs": effort.epochs, "patience": patience(effort.epochs), "eval_every": between}
    given = {name: value for name, value in request.overrides.items() if name in stopping}
    settings = {**search.settings, **stopping, **given}
    return replace(
        search,
        settings=settings,
        trials=effort.trials,
        seeds=effort.seeds,
        finalists=1,
        warmup=warmup(int(settings["epochs"])),
    )


def described(plan: ChoicePlan) -> Iterator[str]:
    """The plan in sentences, for a terminal, before it starts."""
    settings = plan.candidates[0].search.config({})
    effort, cores = plan.effort, os.cpu_count() or 1
    by_time = plan.request.trials is None
    about = "about " if by_time else ""
    yield (
        f"plan: {len(plan.candidates)} losses, {about}{effort.trials} trials of each, at most"
        f" {settings.training.epochs} epochs a trial; then the best settings of each with {effort.seeds}"
        f" {'seeds' if effort.seeds > 1 else 'seed'}"
    )
    yield (
        f"model: {settings.backbone.name}, {settings.backbone.dim} dimensions; {settings.training.batch_size:,} pairs a"
        f" batch; judged by {settings.monitored} on the validation part"
    )
    for each in plan.candidates:
        ranges = "; ".join(f"{name} {place}" for name, place in each.search.space.items())
        yield f"  {each.name}: {each.epoch_seconds:.2g} s an epoch; {ranges}"
    for name, reason in plan.left_out:
        yield f"  left out: {name}: {reason}"
    given = f" of {plan.request.minutes:g} given" if by_time else ""
    yield f"estimate: {plan.seconds / 60:.1f} minutes{given}, {plan.slots} runs at a time on {cores} cores"


def edge_values(plan: ChoicePlan, name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Those of a loss's chosen values that are at an end of the range that was searched."""
    for each in plan.candidates:
        for key, place in each.search.space.items() if each.name == name else ():
            if key in values and isinstance(place, Range | Choices) and (edge := place.edge(values[key])) is not None:
                yield f"{key}={values[key]:g} of {name} (the {edge} end)"
