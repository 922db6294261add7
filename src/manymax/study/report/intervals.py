"""How much better one trial is than another, in per cent, with an interval over users and seeds.

Both vary: with other users, and with another split and other first weights, the difference would be another one. Users
who occur under several seeds are one sample of users. So the variance of the mean difference has two parts, one over
users and one over seeds, and the little data of few seeds enters the interval through its degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manymax.study.record_files import Array
from manymax.study.report.trials import Trial, direction

CONFIDENCE = 0.95  # of the interval

Pairs = list[tuple[Array, Array, Array]]  # per common seed: ids of common users, values of the first, of the second


@dataclass(frozen=True)
class Interval:
    """A difference in per cent, positive where the first is better.

    value: the difference. low, high: the interval of 95 %; nan where there is too little to tell.
    p: of no difference, two-sided; nan likewise.
    users, seeds: over how many it was taken; users is 0 where only means over users were kept.
    """

    value: float
    low: float
    high: float
    p: float
    users: int
    seeds: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:+.1f} %"
        return f"{self.value:+.1f} % ({self.low:+.1f} to {self.high:+.1f})"

    @property
    def known(self) -> bool:
        """Whether there is an interval and not a value alone."""
        return not math.isnan(self.low)


def difference(first: Trial, second: Trial, metric: str) -> Interval | None:
    """By how many per cent of the second the first is better, on the users and seeds that both have.

    Args:
        first, second: trials on the same data.
        metric: on the test part. Where less is better, fewer per cent count as positive.

    Returns:
        The difference; None where the trials have no seed with this metric in common, or the second is 0.
    """
    pairs = _pairs(first, second, metric)
    means = [(a.mean(), b.mean()) for _, a, b in pairs] if pairs else _means(first, second, metric)
    if not means or not (base := float(np.mean([b for _, b in means]))):
        return None
    ratio = float(np.mean([a for a, _ in means])) / base
    scale = 100 * direction(metric)
    if pairs:  # the ratio of two means, made linear: its error is the mean of a - ratio * b
        errors = [(users, (a - ratio * b) / base) for users, a, b in pairs]
        variance, freedom, count = _variance(errors)
    else:
        by_seed = np.array([(a - ratio * b) / base for a, b in means])
        variance, freedom, count = _mean_variance(by_seed), len(by_seed) - 1.0, 0
    low, high, p = _interval(ratio - 1, variance, freedom)
    ends = sorted((scale * low, scale * high))
    return Interval(scale * (ratio - 1), ends[0], ends[1], p, count, len(means))


def _means(first: Trial, second: Trial, metric: str) -> list[tuple[float, float]]:
    """The test metric of both trials for each common seed."""
    found = [{run.settings["seed"]: run.record.test.get(metric) for run in trial.runs} for trial in (first, second)]
    both = ((value, found[1].get(seed)) for seed, value in found[0].items())
    return [(a, b) for a, b in both if a is not None and b is not None]


def _pairs(first: Trial, second: Trial, metric: str) -> Pairs:
    """The values of common users for each common seed."""
    others = {run.settings["seed"]: run for run in second.runs}
    found = []
    for run in first.runs:
        other = others.get(run.settings["seed"])
        ours, theirs = run.users(metric), None if other is None else other.users(metric)
        if ours is None or theirs is None:
            continue
        common, here, there = np.intersect1d(ours[0], theirs[0], return_indices=True)
        if common.size:
            found.append((common, ours[1][here], theirs[1][there]))
    return found


def _variance(errors: list[tuple[Array, Array]]) -> tuple[float, float, int]:
    """The variance of the mean over users and seeds, its degrees of freedom, and the number of users.

    What a user adds to the mean is summed over seeds, which gives the part over users and, with it, a share of the
    rest. The part over seeds has the same share in it, which is counted once. Degrees of freedom are Satterthwaite's.
    """
    seeds = len(errors)
    _, index = np.unique(np.concatenate([users for users, _ in errors]), return_inverse=True)
    centred = np.concatenate([values - values.mean() for _, values in errors])
    weights = np.concatenate([np.full(values.size, 1 / (seeds * values.size)) for _, values in errors])
    influence, count = np.bincount(index, weights=centred * weights), int(index.max()) + 1
    if count < 2:
        return math.nan, 1.0, count
    over_users = float((influence**2).sum()) * count / (count - 1)
    if seeds == 1:
        return over_users, count - 1.0, count
    own = np.bincount(index, weights=centred) / np.bincount(index)  # the mean of each user
    rest = float((((centred - own[index]) * weights) ** 2).sum()) * seeds / (seeds - 1)
    over_seeds = max(0.0, _mean_variance(np.array([values.mean() for _, values in errors])) - rest)
    total = over_users + over_seeds
    parts = over_users**2 / (count - 1) + over_seeds**2 / (seeds - 1)
    return total, total**2 / parts if parts else 1.0, count


def _mean_variance(values: Array) -> float:
    """The variance of the mean of independent values; nan for one value."""
    return float(values.var(ddof=1)) / values.size if values.size > 1 else math.nan


def _interval(value: float, variance: float, freedom: float) -> tuple[float, float, float]:
    """The ends of the interval around `value`, and the p-value of 0."""
    from scipy import stats  # type: ignore[import-untyped]  # imported here: it takes a second

    if math.isnan(variance):
        return math.nan, math.nan, math.nan
    error = math.sqrt(variance)
    if error < 1e-12:  # the same for all users and seeds
        return value, value, float(abs(value) < 1e-12)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return value - half, value + half, float(2 * stats.t.sf(abs(value) / error, freedom))
