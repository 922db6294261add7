"""Which of the trials answer a question: at the paper's settings, in one way to make batches, tuned on validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from manymax.paper.numbers import PAPER_METRICS
from manymax.paper.printed import DEFAULTS, SAMPLED, remoteness
from manymax.study.report.trials import STOPPING_SETTINGS, Trial, trials

METRIC = PAPER_METRICS[0]
TUNED = ("lr", "ridge", "ridge_power", "positive_weight")  # chosen on the validation part
METHOD = ("loss", "solver", "debias")


def question_1(made: Sequence[Trial]) -> list[Trial]:
    """The trials at the paper's numbers of negatives, each method with the batches nearest to the paper's."""
    return nearest([trial for trial in made if _at_defaults(trial)])


def rates(made: Sequence[Trial]) -> list[Trial]:
    """The same, each method with the batches that most of its learning rates were run with."""
    return one_way([trial for trial in made if _at_defaults(trial)], METHOD, lambda trial: trial.lr)


def question_2(made: Sequence[Trial]) -> list[Trial]:
    """Those of sampled losses, each method with the batches that most of its proposals were run with."""
    return one_way([trial for trial in made if trial.loss in SAMPLED], METHOD, draws)


def nearest(made: Sequence[Trial]) -> list[Trial]:
    """Each method with the batches nearest to the paper's, at each of its proposals."""
    return one_way(made, (*METHOD, *DEFAULTS))


def one_way(made: Iterable[Trial], same: Sequence[str], varied: Callable[[Trial], Any] | None = None) -> list[Trial]:
    """Of trials that differ in the way to make batches those of one, labelled by what still varies.

    Args:
        made: the trials.
        same: settings, beside data and backbone, of which each combination has its own way.
        varied: the way with the most values of this is taken; of equals, and without it, the nearest to the paper's.
    """
    groups: dict[str, dict[str | None, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in made:
        key = repr((*trial.place, *(trial.settings.get(name) for name in same)))
        groups[key][trial.batches].append(trial)

    def worth(found: Sequence[Trial]) -> tuple[int, int]:
        return len({varied(trial) for trial in found}) if varied else 0, -remoteness(found[0].batches)

    best = (max(ways.values(), key=worth) for ways in groups.values())
    return trials([run for found in best for trial in found for run in trial.runs])


def draws(trial: Trial) -> tuple[Any, ...]:
    """The number of negatives and their proposal."""
    return tuple(trial.settings.get(name) for name in DEFAULTS)


def _at_defaults(trial: Trial) -> bool:
    """Whether it is one of the paper's question 1: sampled losses draw 100 negatives uniformly there."""
    return trial.loss not in SAMPLED or all(trial.settings.get(name) == value for name, value in DEFAULTS.items())


def tuned(made: Iterable[Trial]) -> list[Trial]:
    """Of the trials that differ in tuned settings alone, the one that is best on the validation part."""
    best: dict[str, Trial] = {}
    for trial in made:
        key = repr(sorted((k, v) for k, v in trial.settings.items() if k not in {*TUNED, *STOPPING_SETTINGS, "seed"}))
        if key not in best or _valid(trial) > _valid(best[key]):
            best[key] = trial
    return list(best.values())


def _valid(trial: Trial) -> float:
    value = trial.mean(METRIC, "valid")
    return float("-inf") if value is None else value
