"""The answer of a study: for each data set and backbone the loss to use, and how much better than softmax it is.

This is what the first screen of the page says, and what a command prints at its end:

    for answer in answers(read_study(folder)):
        print("\\n".join(answer.lines()))

`answer.winner` is the loss that is best on the validation part, `answer.contenders` are all losses at the settings that
are best there, `winner.gain` is the difference to softmax on the test part with its interval, `answer.tied` are the
losses that chance alone may have put behind the winner, `answer.frontier` those that nothing is both faster and better
than, and `answer.cautions` what the study cannot tell. `winner.model` is the run whose folder has the weights to keep,
`winner.chosen_settings` what was chosen for it, and `winner.trial.settings` all of its settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from manymax.errors import ArgumentError
from manymax.members import BASELINE
from manymax.study.records import RECORD, SETTINGS_FILE
from manymax.study.report.cautions import Caution, cautions
from manymax.study.report.contenders import Contender, contenders
from manymax.study.report.runs import Study, read_study
from manymax.study.report.trials import Trial, direction, metrics, trials

TIMES_FASTER = 2.0  # than the winner: what trains in so much less time is worth naming beside it


@dataclass(frozen=True, eq=False)
class Answer:
    """What a study says about the losses on one data set with one backbone.

    data, backbone: names.
    metric: what decides, on the validation part; differences are those on the test part.
    contenders: a loss each, best on the validation part first; never empty.
    popularity: the metric of the ranking by popularity; None if unknown.
    cautions: what the study cannot tell.
    """

    data: str
    backbone: str
    metric: str
    contenders: tuple[Contender, ...]
    popularity: float | None = None
    cautions: tuple[Caution, ...] = ()

    @property
    def winner(self) -> Contender:
        """The loss to use."""
        return self.contenders[0]

    @property
    def baseline(self) -> Contender | None:
        """Softmax; None if the study does not have it."""
        return next((each for each in self.contenders if each.is_baseline), None)

    @property
    def tied(self) -> tuple[Contender, ...]:
        """The losses whose difference to the winner may be chance."""
        return tuple(each for each in self.contenders[1:] if each.tied)

    @cached_property
    def frontier(self) -> tuple[Contender, ...]:
        """Those that no other loss is both faster and better than on the test part, fastest first."""
        known = [each for each in self.contenders if each.seconds is not None and each.test is not None]
        sign = direction(self.metric)
        found: list[Contender] = []
        for each in sorted(known, key=lambda each: (each.seconds or 0.0, -sign * (each.test or 0.0))):
            if not found or sign * (each.test or 0.0) > sign * (found[-1].test or 0.0):
                found.append(each)
        return tuple(found)

    @property
    def quicker(self) -> Contender | None:
        """The best of those that train in at most half the time of the winner; None where there is none."""
        limit = (self.winner.seconds or 0.0) / TIMES_FASTER
        found = [each for each in self.frontier if (each.seconds or math.inf) <= limit]
        return found[-1] if found else None

    def headline(self) -> str:
        """The loss to use and how much better than softmax it is, in one sentence."""
        winner, baseline = self.winner, self.baseline
        value = f"{self.metric} {winner.test:.4f}" if winner.test is not None else f"no {self.metric} on the test part"
        first = f"{winner.loss}: {value}"
        if baseline is None:
            return f"{first}; {BASELINE.name} is not in the study"
        if winner is baseline:
            return f"{first}; no other loss is better on the validation part"
        gain = winner.gain
        if gain is None:
            return f"{first}; the difference to {BASELINE.name} is not known"
        interval = f" (95 % interval {gain.low:+.1f} to {gain.high:+.1f})" if gain.known else ""
        return f"{first}, {gain.value:+.1f} % over {BASELINE.name}{interval}"

    def sample(self) -> str:
        """How many users and seeds the intervals are over."""
        found = self.winner.gain or next((each.behind for each in self.contenders[1:] if each.behind is not None), None)
        if found is None:
            return _count(len(self.winner.trial.runs), "seed")
        users = f"{_count(found.users, 'test user')} and " if found.users else ""
        return users + _count(found.seeds, "seed")

    def tied_text(self) -> str:
        """What is tied with the winner, with differences; empty where it is alone."""
        if len(self.contenders) == 1:
            return "nothing else was run"
        if all(each.p is None for each in self.contenders):
            return "not known: it takes the metrics of users, or several seeds"
        if not self.tied:
            return "nothing: every other loss is behind by more than chance"
        return ", ".join(
            each.loss + ("" if each.behind is None else f" {each.behind.value:+.1f} %") for each in self.tied
        )

    def cost_text(self) -> str:
        """Seconds of training and memory of the winner."""
        winner, parts = self.winner, []
        if winner.seconds is not None:
            parts.append(f"{seconds_text(winner.seconds)} of training")
        if winner.memory_mb is not None:
            parts.append(f"{winner.memory_mb:,.0f} MB beside data and model")
        elif winner.peak_memory_mb is not None:
            parts.append(f"{winner.peak_memory_mb:,.0f} MB at the peak of the process")
        return ", ".join(parts)

    def quicker_text(self) -> str:
        """What to use if time matters more; empty where nothing is much faster."""
        if (other := self.quicker) is None or not other.seconds or not self.winner.seconds:
            return ""
        times = f"{self.winner.seconds / other.seconds:.1f} times as fast"
        return f"{other.loss}: {times}" + ("" if other.behind is None else f", {other.behind.value:+.1f} %")

    def lines(self) -> list[str]:
        """The answer for a terminal."""
        rows = {
            "loss to use": self.headline(),
            "settings": self.winner.settings_text,
            "tied with it": self.tied_text(),
            "cost": self.cost_text(),
            "much faster": self.quicker_text(),
            "measured on": self.sample(),
        }
        told = [f"  {name:<13}{text}" for name, text in rows.items() if text]
        return [f"{self.data}, {self.backbone}", *told, *(f"  {'not known':<13}{each.text}" for each in self.cautions)]


def answers(study: Study, made: Sequence[Trial] | None = None) -> tuple[Answer, ...]:
    """The answer for each data set and backbone of a study, in the order of their names; empty before any run is done.

    For each loss the settings are taken that are best on the validation part, and of the losses the one that is best
    there; the test part is only looked at to say by how much.

    Args:
        study: the runs.
        made: its trials, if the caller has them already.
    """
    made = trials(study.done) if made is None else made
    names = metrics(made)
    if not names:
        return ()
    by_place: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in made:
        by_place[trial.place].append(trial)
    found = [_answer(place, own, names[0]) for place, own in by_place.items()]
    return tuple(replace(each, cautions=tuple(cautions(study, each.contenders))) for each in found if each is not None)


def winner_folder(folder: Path) -> Path:
    """The folder of the run to use: that of the winner for a study, and `folder` itself for a single run.

    Raises:
        ArgumentError: nothing in the study is done, or it has winners on several data sets or backbones.
    """
    below = (path.parent for name in (RECORD, SETTINGS_FILE) for path in folder.glob(f"*/{name}"))
    if (folder / RECORD).exists() or next(below, None) is None:
        return folder
    found = answers(read_study(folder))
    if not found:
        raise ArgumentError(f"no run in {str(folder)!r} is done yet: `manymax report` says what became of them.")
    models = {f"{each.data}, {each.backbone}": each.winner.model.folder for each in found}
    if len(models) > 1:
        told = "; ".join(f"{name}: {path}" for name, path in models.items())
        raise ArgumentError(f"{str(folder)!r} has a winner on several data sets or backbones; name the run. {told}.")
    (model,) = models.values()
    if model is None:
        raise ArgumentError(f"{str(folder)!r} holds records without models: give the folder of the study itself.")
    return model


def _answer(place: tuple[str, str], own: Sequence[Trial], metric: str) -> Answer | None:
    found = contenders(own, metric)
    return Answer(*place, metric, found, _popularity(own, metric)) if found else None


def _popularity(own: Sequence[Trial], metric: str) -> float | None:
    by_seed: Mapping[Any, float | None] = {
        run.settings["seed"]: run.record.popularity.get(metric) for trial in own for run in trial.runs
    }
    values = [value for value in by_seed.values() if value is not None]
    return fmean(values) if values else None


def seconds_text(seconds: float) -> str:
    """A time in words.

    >>> seconds_text(3.21), seconds_text(1234), seconds_text(40_000)
    ('3.2 s', '20.6 min', '11.1 h')
    """
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:.1f} h"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
