"""What a study cannot tell: reasons to distrust its answer, in sentences that say what to do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from manymax.study.report.contenders import Contender
from manymax.study.report.labels import data_place, setting_text, variant
from manymax.study.report.runs import Run, Study
from manymax.study.report.trials import direction

WIDEST_HALF = 2.0  # per cent: with intervals that reach further than this to each side, there are too few users
MOST_NAMES = 4  # that a sentence lists before it counts the others


@dataclass(frozen=True)
class Caution:
    """A sentence about what is not known.

    kind: "time" (was too short for all that was planned), "left out" (losses), "missing" (runs that did not end well,
        or never started), "edge" (best at the end of what was tried), "limit" (training ended by the limit of epochs),
        "tuning" (fewer trials than others), "users" (too few), "seeds", "validation" (the test part disagrees) or
        "popularity".
    text: the sentence.
    """

    kind: str
    text: str


def cautions(study: Study, contenders: Sequence[Contender]) -> Iterator[Caution]:
    """What to know before using the answer of one data set and backbone, the gravest first."""
    places = {data_place(each.trial.settings) for each in contenders}
    here = [run for run in study.runs if data_place(run.settings) in places]
    found: dict[str, Iterable[str]] = {
        "time": (),
        "left out": (),
        "missing": _missing(study),
        "validation": _validation(contenders),
        "popularity": _popularity(contenders),
        "users": _users(contenders),
        "seeds": _seeds(contenders),
        "tuning": _tuning(contenders, here),
        "edge": _edges(contenders, here),
        "limit": _limit(contenders),
        **study.cautions,
    }
    yield from (Caution(kind, text) for kind, texts in found.items() for text in texts)


def _missing(study: Study) -> Iterator[str]:
    counts: dict[str, int] = defaultdict(int)
    for run in study.failed:
        counts[run.record.status] += 1
    counts["under way or interrupted"] = len(study.unfinished)
    counts["never started"] = study.never_started
    counts["unreadable"] = len(study.unreadable)
    if told := [f"{count} {what}" for what, count in counts.items() if count]:
        yield f"The study is not whole: of its runs {', '.join(told)}."


def _validation(contenders: Sequence[Contender]) -> Iterator[str]:
    told = [each for each in contenders if each.p is not None and not each.tied]
    if better := [f"{each.loss} {each.behind}" for each in told if each.behind is not None and each.behind.value > 0]:
        names = _names(better)
        yield f"On the test part {names} is better than {contenders[0].loss}, which the validation part has chosen."


def _popularity(contenders: Sequence[Contender]) -> Iterator[str]:
    winner = contenders[0]
    values = [run.record.popularity.get(winner.metric) for run in winner.trial.runs]
    known, sign = [value for value in values if value is not None], direction(winner.metric)
    if known and winner.test is not None and sign * winner.test <= sign * sum(known) / len(known):
        yield f"Ranking by popularity is as good ({sum(known) / len(known):.4f}): nothing was learned of users."


def _users(contenders: Sequence[Contender]) -> Iterator[str]:
    reaches = [each.behind for each in contenders[1:] if each.behind is not None]
    if not any(each.users for each in reaches) and reaches:
        yield "The metrics of single users were not kept: intervals are over seeds alone."
    halves = [(each.high - each.low) / 2 for each in reaches if each.known]
    if any(each.tied for each in contenders) and (half := median(halves)) > WIDEST_HALF:
        users = max(each.users for each in reaches)
        sample = f"{users:,} test users" if users else "these seeds"
        yield f"Too little data to tell losses apart that differ by less than {half:.1f} %: {sample}."


def _seeds(contenders: Sequence[Contender]) -> Iterator[str]:
    counts = sorted({len(each.trial.runs) for each in contenders})
    if counts == [1]:
        yield "One seed: how much first weights and the split matter is not in the intervals."
    elif len(counts) > 1:
        fewest = _names(each.loss for each in contenders if len(each.trial.runs) == counts[0])
        yield f"Seeds differ: {counts[-1]} at most, {counts[0]} for {fewest}."


def _tuning(contenders: Sequence[Contender], here: Sequence[Run]) -> Iterator[str]:
    tried = {each.loss: len({_tuned(run) for run in _runs_of(each, here)}) for each in contenders if _is_tuned(each)}
    most = max(tried.values(), default=0)
    if fewer := [loss for loss, count in tried.items() if count < most]:
        least = min(tried[loss] for loss in fewer)
        numbers = f"{least}" if least == max(tried[loss] for loss in fewer) else f"{least} or more"
        yield f"Fewer settings were tried for {_names(fewer)}: {numbers}, where others had {most}."
    elif most == 1 and len(tried) > 1:
        yield "One setting was tried for each loss: with other learning rates the order may be another one."


def _is_tuned(each: Contender) -> bool:
    return each.trial.lr is not None


def _tuned(run: Run) -> str:
    """The settings of a run but for its seed, as a key."""
    return repr(sorted((name, value) for name, value in run.settings.items() if name != "seed"))


def _runs_of(each: Contender, here: Iterable[Run]) -> list[Run]:
    return [run for run in here if variant(run.settings) == each.loss]


def _edges(contenders: Sequence[Contender], here: Sequence[Run]) -> Iterator[str]:
    found = []
    for each in contenders:
        values = _values([run.settings for run in _runs_of(each, here)], each.chosen_settings)
        for name, tried in values.items():
            value = each.chosen_settings[name]
            if len(tried) > 1 and value in (tried[0], tried[-1]) and value != 0:
                end = "least" if value == tried[0] else "largest"
                found.append(f"{name}={setting_text(value)} of {each.loss} (the {end} of {len(tried)})")
    if found:
        yield f"Best at the end of what was tried, so that more may be gained beyond: {_names(found)}."


def _values(settings: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[float]]:
    """{setting: the values that were tried, in order}, of those settings that are numbers."""
    found: dict[str, set[float]] = {name: set() for name in names}
    for each in settings:
        for name, values in found.items():
            if isinstance(value := each.get(name), (int, float)) and not isinstance(value, bool):
                values.add(value)
    return {name: sorted(values) for name, values in found.items() if values}


def _limit(contenders: Sequence[Contender]) -> Iterator[str]:
    if ended := [each for each in contenders if any(map(_at_limit, each.trial.runs))]:
        epochs = max(run.record.epochs for each in ended for run in each.trial.runs)
        losses = _names(each.loss for each in ended)
        yield f"Training ended at the limit of {epochs} epochs, not for lack of progress: {losses}."


def _at_limit(run: Run) -> bool:
    """Whether a run would have gone on if it had been allowed more epochs."""
    settings, record = run.settings, run.record
    limit, patience = settings.get("epochs", math.inf), settings.get("patience", 0) * settings.get("eval_every", 1)
    by_epochs = settings.get("solver", "gradient") == "gradient"
    return by_epochs and record.epochs >= limit and record.epochs - record.best_epoch < patience


def _names(names: Iterable[str]) -> str:
    """Names in a row, the last of many counted and not named."""
    found = list(names)
    shown = found[:MOST_NAMES] if len(found) > MOST_NAMES + 1 else found
    return ", ".join(shown) + (f" and {len(found) - len(shown)} more" if len(shown) < len(found) else "")
