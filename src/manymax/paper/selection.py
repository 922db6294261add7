"""Which trials answer a question of the paper: at its settings, with one kind of batches, tuned on validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from manymax.paper.numbers import MAIN_METRIC
from manymax.paper.printed import DEFAULTS, SAMPLED, distance_from_pairs
from manymax.study.report.labels import STOPPING_SETTINGS
from manymax.study.report.trials import Trial, trials, validation_merit

TUNED = ("lr", "ridge", "ridge_power", "positive_weight")  # settings that are chosen on the validation part
METHOD = ("loss", "solver", "debias")  # settings that make a method of its own


def question_1(made: Sequence[Trial]) -> list[Trial]:
    """The trials of question 1 (accuracy), each method with the batches nearest to the paper's."""
    return nearest_batches([trial for trial in made if _at_defaults(trial)])


def question_1_rates(made: Sequence[Trial]) -> list[Trial]:
    """The trials of question 1, each method with the batches that most of its learning rates were run with."""
    return same_batches([trial for trial in made if _at_defaults(trial)], METHOD, lambda trial: trial.lr)


def question_2(made: Sequence[Trial]) -> list[Trial]:
    """The trials of question 2 (negatives), each method with the batches that most of its proposals were run with."""
    return same_batches([trial for trial in made if trial.loss in SAMPLED], METHOD, sampling)


def nearest_batches(made: Sequence[Trial]) -> list[Trial]:
    """Each method, at each number of negatives and proposal, with the batches nearest to the paper's."""
    return same_batches(made, (*METHOD, *DEFAULTS))


def same_batches(
    made: Iterable[Trial], same: Sequence[str], varied: Callable[[Trial], Any] | None = None
) -> list[Trial]:
    """Of trials that differ in how batches were made, those with one kind of batches; labels name what still varies.

    Args:
        made: the trials.
        same: settings; each combination of their values, of data and of backbone chooses its kind on its own.
        varied: a value of a trial; the kind with the most different values is taken. Of kinds with equally many, and
            if `varied` is left out, it is the kind nearest to the paper's.
    """
    groups: dict[str, dict[str | None, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in made:
        key = repr((*trial.place, *(trial.settings.get(name) for name in same)))
        groups[key][trial.batches].append(trial)

    def preference(found: Sequence[Trial]) -> tuple[int, int]:
        return len({varied(trial) for trial in found}) if varied else 0, -distance_from_pairs(found[0].batches)

    best = (max(by_batches.values(), key=preference) for by_batches in groups.values())
    return trials([run for found in best for trial in found for run in trial.runs])


def sampling(trial: Trial) -> tuple[Any, ...]:
    """The number of negatives and their proposal."""
    return tuple(trial.settings.get(name) for name in DEFAULTS)


def _at_defaults(trial: Trial) -> bool:
    """Whether a trial belongs to question 1, where sampled losses draw 100 negatives uniformly."""
    return trial.loss not in SAMPLED or all(trial.settings.get(name) == value for name, value in DEFAULTS.items())


def tuned(made: Iterable[Trial]) -> list[Trial]:
    """Of trials that differ in tuned settings alone, the one that is best on the validation part."""
    best: dict[str, Trial] = {}
    left_out = {*TUNED, *STOPPING_SETTINGS, "seed"}
    for trial in made:
        key = repr(sorted((name, value) for name, value in trial.settings.items() if name not in left_out))
        if key not in best or validation_merit(trial, MAIN_METRIC) > validation_merit(best[key], MAIN_METRIC):
            best[key] = trial
    return list(best.values())
