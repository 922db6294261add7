"""Search: the same number of trials for every loss, chosen on the validation part, then several seeds of the best.

A search has fixed settings and ranges of others. Each trial is an ordinary run, in a folder named by the hash of its
settings. What the next trial is follows from the records of the trials before it and from nothing else: after a kill
the same trials are proposed again, and those that have ended are read from their records. Optuna proposes them (its
tree-structured Parzen estimator), and its pruners end trials that are hopeless; see `trials.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from manymax.errors import ArgumentError, check_choice
from manymax.study.config import RunConfig
from manymax.study.groups import find_loss
from manymax.study.metrics import METRICS
from manymax.study.records import Record
from manymax.study.run_options import by_flat_name, flattened
from manymax.study.seeds import derive
from manymax.study.trials import PRUNERS, EarlierTrial, TrialRules, curve, write_rules

if TYPE_CHECKING:  # its import takes a third of a second, which studies without a search need not wait for
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

DIGITS = 3  # significant digits of a proposed value: more would only be hard to read
# Trials that are drawn at random, the given ones included, before the others follow what was seen.
RANDOM_TRIALS = 5


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high` that a setting is searched in; `log` if uniformly in the logarithm."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (" (log)" if self.log else "")

    @property
    def whole(self) -> bool:
        """Whether only integers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def clip(self, value: float) -> float:
        """A value with few digits that is not outside."""
        if self.whole:
            return int(value)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def holds(self, value: float) -> bool:
        """Whether a value is inside."""
        return self.low <= value <= self.high

    def edge(self, value: float) -> str | None:
        """ "low" or "high" if a value is closer to that end than a twentieth of the range; None if inside."""
        scale = math.log if self.log else float
        place = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return "low" if place < 0.05 else "high" if place > 0.95 else None


@dataclass(frozen=True)
class Choices:
    """The values that a setting is chosen from."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.values))

    def clip(self, value: Any) -> Any:
        """The value itself."""
        return value

    def holds(self, value: Any) -> bool:
        """Whether a value is one of them."""
        return value in self.values

    def edge(self, value: Any) -> str | None:
        """ "low" or "high" if a value is the first or last of several numbers in order; 0 has nothing below it."""
        numbers = [each for each in self.values if isinstance(each, (int, float)) and not isinstance(each, bool)]
        if len(numbers) < max(2, len(self.values)) or sorted(numbers) != list(numbers):
            return None
        return "high" if value == numbers[-1] else "low" if value == numbers[0] != 0 else None


Space = Mapping[str, Range | Choices]


@dataclass(frozen=True)
class Search:
    """Trials of one row of settings.

    settings: of every trial.
    space: the settings that are searched.
    trials: how many are made.
    finalists: how many of the best settings are run with further seeds, to be chosen among by the mean of all seeds:
        the best of many trials is in part the luckiest.
    seeds: with how many seeds they are run; a trial is the first of these runs.
    first: values of the first trials; settings of the space that one leaves out are proposed.
    pruner: "halving", "median" or "none"; see `trials.py`. Trials of `first` are run to their end.
    warmup: epochs before which no trial is ended.
    row: those of the settings that tell it from other searches of the study.
    title: what pages call it.
    """

    settings: Mapping[str, Any]
    space: Space
    trials: int = 12
    finalists: int = 2
    seeds: int = 3
    first: tuple[Mapping[str, Any], ...] = ()
    pruner: str = "halving"
    warmup: int = 10
    row: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    def __post_init__(self) -> None:
        check_choice("pruner", self.pruner, PRUNERS)
        for name, least in {"trials": 1, "finalists": 1, "seeds": 1, "warmup": 0}.items():
            if not (isinstance(value := getattr(self, name), int) and value >= least):
                raise ArgumentError(f"`{name}` of a search must be an integer of at least {least}; got {value!r}.")

    @property
    def runs(self) -> int:
        """How many runs it needs: trials, and the best settings with further seeds."""
        return self.trials + min(self.finalists, self.trials) * (self.seeds - 1)

    def config(self, values: Mapping[str, Any], seed: int = 0) -> RunConfig:
        """The run with these values of what is searched."""
        settings = {**self.settings, **values}
        first = RunConfig(seed=settings.get("seed", 0)).seed  # which may be text, from a command line
        return RunConfig.trimmed(settings | {"seed": first + seed})

    @property
    def metric(self) -> str:
        """The metric on the validation part that decides."""
        return RunConfig.trimmed(self.settings).monitored

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of the metric is better."""
        return METRICS[self.metric.partition("@")[0]].higher_is_better

    def value(self, record: Record) -> float | None:
        """What a trial has reached on the validation part; None where it has reached nothing."""
        return record.valid.get(self.metric) if record.final else None

    def ranked(self, trials: Sequence[Record]) -> list[Record]:
        """The trials that were trained to their end, best first; the first `finalists` of them are the finalists."""
        ended = {r.hash: r for r in trials if r.status in ("done", "diverged") and self.value(r) is not None}
        sign = 1 if self.higher_is_better else -1
        return sorted(ended.values(), key=lambda record: -sign * (self.value(record) or 0.0))

    def chosen(self, trials: Sequence[Record], further: Sequence[Record]) -> tuple[Record, ...]:
        """The runs of the settings that are best in the mean of their seeds, a trial and then further seeds.

        Settings that have not been run with all seeds yet are not chosen, unless there are no others.
        """
        finalists = self.ranked(trials)[: self.finalists]
        groups = [(each, *(r for r in further if self.values(r) == self.values(each))) for each in finalists]
        whole = [group for group in groups if len(group) >= self.seeds] or groups[:1]
        sign = 1 if self.higher_is_better else -1
        return max(whole, key=lambda group: sign * fmean(self.value(r) or 0.0 for r in group), default=())

    def values(self, record: Record) -> dict[str, Any]:
        """The values that a trial had of what is searched, but for settings without effect beside the others."""
        settings = by_flat_name(record.settings)
        return {name: settings[name] for name in self.space if name in settings}

    def check_ends(self) -> None:
        """Raise an error for a value that its setting does not take: at once, and not in the middle of a study."""
        for name, place in self.space.items():
            for value in place.values if isinstance(place, Choices) else (place.low, place.high):
                self.config({**(self.first[0] if self.first else {}), name: value})

    def propose(self, records: Sequence[Record]) -> dict[str, Any]:
        """The values of the next trial, from the records of those before it."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        number = len(records)
        # A seed per trial and not per search: every loss starts with the same random trials.
        seed = derive(int(self.settings.get("seed", 0)), "search", number) % (1 << 32)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(direction="maximize" if self.higher_is_better else "minimize", sampler=sampler)
        distributions = {name: _distribution(each) for name, each in self.space.items()}
        study.add_trials([self._frozen(record, distributions) for record in records])
        asked = study.ask(distributions).params
        given = self.first[number] if number < len(self.first) else {}
        return {name: given.get(name, each.clip(asked[name])) for name, each in self.space.items()}

    def _frozen(self, record: Record, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        """A trial as Optuna knows it."""
        import optuna

        value, states = self.value(record), optuna.trial.TrialState
        state = states.FAIL if value is None else states.PRUNED if record.status == "pruned" else states.COMPLETE
        # A value given in the file may be outside of the range that later ones are proposed in.
        known = self.values(record)
        inside = {name: each for name, each in known.items() if self.space[name].holds(each)}
        return optuna.trial.create_trial(
            state=state,
            value=value if state == states.COMPLETE else None,
            params=inside,
            distributions={name: distributions[name] for name in inside},
            intermediate_values={record.epochs: value} if state == states.PRUNED and value is not None else {},
        )


def _distribution(each: Range | Choices) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(each, Choices):
        return CategoricalDistribution(each.values)
    if each.whole:
        return IntDistribution(int(each.low), int(each.high), log=each.log)
    return FloatDistribution(each.low, each.high, log=each.log)


@dataclass
class Progress:
    """How far one search is: records of its trials in order, then those of the finalists with further seeds."""

    search: Search
    trials: list[Record] = field(default_factory=list)
    seeds: list[Record] = field(default_factory=list)

    @property
    def chosen(self) -> tuple[Record, ...]:
        """The runs of the best settings so far."""
        return self.search.chosen(self.trials, self.seeds)

    @property
    def trials_done(self) -> bool:
        """Whether all trials have ended."""
        return len(self.trials) >= self.search.trials

    def next_trial(self, folder: Path) -> RunConfig:
        """The next trial; what ends it early is written beside its folder in the `folder` of the study."""
        config = self.search.config(self.search.propose(self.trials))
        pruner = "none" if len(self.trials) < len(self.search.first) else self.search.pruner
        return self._with_rules(config, folder, pruner)

    def further_seed(self, folder: Path, seed: int) -> list[RunConfig]:
        """The best settings with a further seed, to be run to their end."""
        finalists = self.search.ranked(self.trials)[: self.search.finalists]
        configs = [self.search.config(self.search.values(each), seed) for each in finalists]
        return [self._with_rules(config, folder, "none") for config in configs]

    def _with_rules(self, config: RunConfig, folder: Path, pruner: str) -> RunConfig:
        search = self.search
        earlier = self._earlier(folder) if pruner != "none" else ()
        rules = TrialRules(search.metric, search.higher_is_better, pruner, search.warmup, earlier)
        write_rules(folder / config.content_hash(), rules)
        return config

    def _earlier(self, folder: Path) -> tuple[EarlierTrial, ...]:
        """The curves of the trials so far."""
        search = self.search
        ended = {record.hash: record for record in self.trials if search.value(record) is not None}
        return tuple(
            EarlierTrial(record.status != "pruned", curve(folder / name, search.metric, search.higher_is_better))
            for name, record in ended.items()
        )


class Searches:
    """All searches of a study: which runs come first, and which follow when one has ended.

    The trials of one search come one after the other, because each depends on those before it. Several searches go on
    at a time.

    Args:
        searches: the searches.
        folder: of the study.
    """

    def __init__(self, searches: Sequence[Search], folder: Path) -> None:
        self.folder = folder
        self.all = [Progress(search) for search in searches]
        self.waiting: dict[str, list[Progress]] = {}  # by the hash of a run: whose it is

    @property
    def total(self) -> int:
        """The number of runs of all searches."""
        return sum(progress.search.runs for progress in self.all)

    def begin(self) -> list[RunConfig]:
        """The first trial of each search."""
        return [config for progress in self.all for config in self._next(progress)]

    def after(self, record: Record) -> list[RunConfig]:
        """The runs that follow when one has ended."""
        owners = self.waiting.get(record.hash, [])
        if not owners:
            return []
        progress = owners.pop(0)
        if progress.trials_done:
            progress.seeds.append(record)
            return []
        progress.trials.append(record)
        return self._next(progress)

    def owner(self, record: Record) -> Progress | None:
        """The search that a run which has ended, and which `after` was told of, belongs to."""
        runs = ((each, run) for each in self.all for run in (*each.trials, *each.seeds))
        return next((each for each, run in runs if run.hash == record.hash), None)

    def _next(self, progress: Progress) -> list[RunConfig]:
        """The next trial; after the last one the finalists with further seeds."""
        if not progress.trials_done:
            return [self._expect(progress, progress.next_trial(self.folder))]
        configs = [progress.further_seed(self.folder, seed) for seed in range(1, progress.search.seeds)]
        # All seeds of the best settings before those of the next best.
        return [self._expect(progress, config) for finalist in zip(*configs, strict=True) for config in finalist]

    def _expect(self, progress: Progress, config: RunConfig) -> RunConfig:
        self.waiting.setdefault(config.content_hash(), []).append(progress)
        return config


def read_search(table: Mapping[str, Any], common: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[Search]:
    """The searches of one [[search]] table: one for each combination of the lists among its settings.

    Args:
        table: with `over`, `trials`, `finalists`, `seeds`, `first`, `pruner`, `warmup` and `title`; all else are
            settings.
        common: settings of every run.
        overrides: settings from outside. One that the table itself gives chooses among its values, so that a part of a
            study can be run alone; one that is searched is no longer searched; all others replace those of `common`.
    """
    own = {name: table[name] for name in ("trials", "seeds", "finalists", "pruner", "warmup", "title") if name in table}
    rest = {name: each for name, each in table.items() if name not in (*own, "over", "first")}
    axes = {name: each if isinstance(each, list) else [each] for name, each in flattened(rest).items()}
    for name, value in overrides.items():
        if name in axes:
            axes[name] = [value if name == "data" else each for each in axes[name] if _same(name, each, value)]
    space = read_space(flattened(table.get("over", {})))
    first = [flattened(each) for each in table.get("first", ())]
    for given in first:
        if unknown := [name for name in given if name not in space]:
            raise ArgumentError(f"`first` gives a value of `{unknown[0]}`, which `over` does not search.")
    space = {name: each for name, each in space.items() if name not in overrides}
    first = [{name: each for name, each in given.items() if name in space} for given in first]
    replaced = {name: value for name, value in overrides.items() if name not in axes}
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    found = [Search({**common, **row, **replaced}, space, first=tuple(first), row=row, **own) for row in rows]
    for search in found:
        search.check_ends()
    return found


def _same(name: str, ours: Any, other: Any) -> bool:
    """Whether two values of an option mean the same: a loss has aliases, a file lies anywhere, and all may be text."""
    if name == "data":
        return Path(str(ours)).name == Path(str(other)).name
    return find_loss(ours).name == find_loss(other).name if name == "loss" else str(ours) == str(other)


def read_space(table: Mapping[str, Any]) -> dict[str, Range | Choices]:
    """The ranges and choices that a file gives: {low, high, log} or a list of values for each setting."""
    found: dict[str, Range | Choices] = {}
    for name, given in table.items():
        if isinstance(given, list) and given:
            found[name] = Choices(tuple(given))
        elif isinstance(given, Mapping) and {"low", "high"} <= set(given) <= {"low", "high", "log"}:
            found[name] = Range(given["low"], given["high"], bool(given.get("log", False)))
            if not (given["low"] < given["high"] and (given["low"] > 0 or not found[name].log)):  # type: ignore[union-attr]
                raise ArgumentError(f"`over.{name}` must have `low` below `high`, above 0 with `log`; got {given!r}.")
        else:
            raise ArgumentError(
                f"`over.{name}` must be a list of values or {{low = ..., high = ..., log = true}}; got {given!r}."
            )
    return found


def summaries(searches: Searches) -> Iterator[str]:
    """A line for each search: its best settings, what they reach on the validation part, and what is at an edge."""
    for progress in searches.all:
        search, runs = progress.search, progress.chosen
        config = RunConfig.trimmed(search.settings)
        name = f"{config.data.title} {config.backbone.name} {config.loss.name}"
        if not runs:
            yield f"{name}: no trial has reached anything"
            continue
        shown = []
        for key, value in search.values(runs[0]).items():
            edge = search.space[key].edge(value)
            shown.append(f"{key}={value}" + (f" (at the {edge} end)" if edge else ""))
        mean = fmean(search.value(run) or 0.0 for run in runs)
        yield f"{name}: {search.metric} {mean:.4f} on the validation part, {len(runs)} seeds, with {' '.join(shown)}"
