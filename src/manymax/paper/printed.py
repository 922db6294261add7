"""Which of the paper's printed numbers a trial is to be compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from manymax.paper.numbers import NUMBERS, PaperNumber
from manymax.study.report.labels import data_name
from manymax.study.report.trials import Trial

SAMPLED = ("sampled_softmax", "nce")
DEFAULTS: dict[str, Any] = {"num_negatives": 100, "sampler": "uniform"}  # of sampled losses, where a table has no other
BATCHES = ("pairs", "chunks", "users")  # how batches can be made; the paper's way first, then by likeness to it

# {setting: (loss or sampler that has it, value)}: what the paper's text fixes for all tables. A trial of that loss or
# sampler with another value has no printed number.
FIXED_SETTINGS = {"alpha": ("entmax", 1.5), "debias": ("sampled_softmax", None), "pool": ("dns", 500)}

# {our name: the paper's name} of data sets that we have in another form than the paper.
PAPER_NAMES = {"electronics_10core": "electronics", "electronics_sequences": "electronics"}

_NUMBERS_BY_PLACE: dict[tuple[str, str, str, str], list[PaperNumber]] = {}
for _number in NUMBERS:
    _NUMBERS_BY_PLACE.setdefault((_number.data, _number.backbone, _number.loss, _number.metric), []).append(_number)


def paper_name(trial: Trial) -> str:
    """What the paper calls the data of a trial."""
    name = data_name(trial.settings).lower()
    return PAPER_NAMES.get(name, name)


def printed(trial: Trial, metric: str) -> PaperNumber | None:
    """The number that the paper prints for the data, backbone, loss and settings of a trial; None if it prints none."""
    return next(matching(trial, metric), None)


def matching(trial: Trial, metric: str) -> Iterator[PaperNumber]:
    """All numbers that the paper prints for a trial: it repeats some of them in several tables."""
    settings = trial.settings
    for name, (owner, value) in FIXED_SETTINGS.items():
        if owner in (trial.loss, settings.get("sampler")) and settings.get(name) != value:
            return
    sampling = {name: settings.get(name) for name in DEFAULTS} if trial.loss in SAMPLED else DEFAULTS
    for number in _NUMBERS_BY_PLACE.get((data_name(settings).lower(), trial.backbone, trial.loss, metric), []):
        wanted = DEFAULTS | {name: value for name, value in number.setting.items() if name in DEFAULTS}
        if sampling == wanted and _same_rate(trial.lr, number):
            yield number


def _same_rate(lr: float | None, number: PaperNumber) -> bool:
    """Whether a number holds for a learning rate.

    Tables of numbers of negatives and of proposals do not state the rate, so that their numbers hold for any. RG has
    none: its numbers are compared with trials without a rate alone.
    """
    rate = number.setting.get("lr")
    if rate is None:
        return (number.loss == "rg") == (lr is None)
    return lr is not None and math.isclose(lr, float(rate))


def distance_from_pairs(batches: str | None) -> int:
    """How unlike the paper's batches, which are made of pairs, these are; 0 for a trial without such a choice.

    >>> distance_from_pairs("pairs"), distance_from_pairs("users"), distance_from_pairs(None)
    (0, 2, 0)
    """
    return BATCHES.index(batches) if batches in BATCHES else 0
