"""Is one trial better than another? Paired over users, so that what makes a user hard cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manymax.study.report.runs import Array, Trial

LEVEL = 0.05


@dataclass(frozen=True)
class PairedComparison:
    """The mean difference first - second over users, with the p-values of a paired t-test and of Wilcoxon's test."""

    difference: float
    users: int
    t: float
    wilcoxon: float

    @property
    def significant(self) -> bool:
        """Whether the t-test says so at the level of 5 percent."""
        return self.t < LEVEL


def compare(first: Trial, second: Trial, metric: str) -> PairedComparison | None:
    """Compare on the users and seeds that both have; None where they share no two users.

    The seed makes the split, so only runs of the same seed can be paired; a user's differences are averaged over
    seeds first, because they are not independent of one another.
    """
    from scipy import stats  # type: ignore[import-untyped]  # here: it takes a second, and other commands do not need it

    differences = _differences(first, second, metric)
    if differences.size < 2:
        return None
    if not differences.any():
        return PairedComparison(0.0, differences.size, 1.0, 1.0)
    if np.ptp(differences) == 0:  # the same for all: no spread to test against
        return PairedComparison(float(differences[0]), differences.size, 0.0, 0.0)
    t = stats.ttest_1samp(differences, 0.0).pvalue
    return PairedComparison(
        float(differences.mean()), differences.size, float(t), float(stats.wilcoxon(differences).pvalue)
    )


def _differences(first: Trial, second: Trial, metric: str) -> Array:
    """(U,) the mean difference of each common user."""
    users: list[Array] = []
    values: list[Array] = []
    seeds = {run.settings["seed"]: run for run in second.runs}
    for run in first.runs:
        other = seeds.get(run.settings["seed"])
        here, there = run.users(metric), None if other is None else other.users(metric)
        if here is None or there is None:
            continue
        common, difference = _paired(here, there)
        users.append(common)
        values.append(difference)
    if not users:
        return np.empty(0)
    if all(np.array_equal(users[0], others) for others in users[1:]):
        return np.asarray(np.mean(values, axis=0))
    _, index = np.unique(np.concatenate(users), return_inverse=True)
    return np.bincount(index, weights=np.concatenate(values)) / np.bincount(index)


def _paired(here: tuple[Array, Array], there: tuple[Array, Array]) -> tuple[Array, Array]:
    """The users that both have, and their differences."""
    if np.array_equal(here[0], there[0]):  # as a rule: no sorting of names
        return here[0], here[1] - there[1]
    common, mine, its = np.intersect1d(here[0], there[0], return_indices=True)
    return common, here[1][mine] - there[1][its]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p-values for testing several at once, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
