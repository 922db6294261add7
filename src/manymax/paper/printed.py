"""Which of the paper's printed numbers a trial is to be compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from manymax.paper.numbers import NUMBERS, PaperNumber
from manymax.study.report.trials import Trial, data_name

# What the paper's text fixes for all tables; a trial with another value has no number there.
FIXED = {"alpha": ("entmax", 1.5), "debias": ("sampled_softmax", None), "pool": ("dns", 500)}
SAMPLED = ("sampled_softmax", "nce")
DEFAULTS = {"num_negatives": 100, "sampler": "uniform"}
BATCHES = ("pairs", "chunks", "users")  # ways to make batches, the paper's first

# Names of files that hold a set of the paper in another form.
PAPER_NAMES = {"electronics_10core": "electronics", "electronics_sequences": "electronics"}

_BY_PLACE: dict[tuple[str, str, str, str], list[PaperNumber]] = {}
for _number in NUMBERS:
    _BY_PLACE.setdefault((_number.data, _number.backbone, _number.loss, _number.metric), []).append(_number)


def paper_name(trial: Trial) -> str:
    """What the paper calls the data of a trial."""
    name = data_name(trial.settings).lower()
    return PAPER_NAMES.get(name, name)


def printed(trial: Trial, metric: str) -> PaperNumber | None:
    """The number that the paper prints for the trial's data, backbone, loss and settings; None if it prints none."""
    return next(matching(trial, metric), None)


def matching(trial: Trial, metric: str) -> Iterator[PaperNumber]:
    """All such numbers: the paper has some in several tables."""
    settings = trial.settings
    for name, (owner, value) in FIXED.items():
        if owner in (trial.loss, settings.get("sampler")) and settings.get(name) != value:
            return
    sampling = {name: settings.get(name) for name in DEFAULTS} if trial.loss in SAMPLED else DEFAULTS
    for number in _BY_PLACE.get((data_name(settings).lower(), trial.backbone, trial.loss, metric), []):
        wanted = DEFAULTS | {name: value for name, value in number.setting.items() if name in DEFAULTS}
        if sampling == wanted and _same_rate(trial.lr, number):
            yield number


def _same_rate(lr: float | None, number: PaperNumber) -> bool:
    """Tables of k and of proposals do not state the rate; RG has none."""
    rate = number.setting.get("lr")
    if rate is None:
        return (number.loss == "rg") == (lr is None)
    return lr is not None and math.isclose(lr, float(rate))


def remoteness(batches: str | None) -> int:
    """How far a way to make batches is from the paper's: it makes them of pairs.

    >>> remoteness("pairs"), remoteness("users"), remoteness(None)
    (0, 2, 0)
    """
    return BATCHES.index(batches) if batches in BATCHES else 0
