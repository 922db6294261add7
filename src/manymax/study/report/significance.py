"""Tests of whether one trial is better than another, paired over users.

Some users are harder to predict than others, for every loss. The difference of two losses on the same user is free of
that, so that paired tests see smaller effects than a comparison of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manymax.study.record_files import Array
from manymax.study.report.trials import Trial

SIGNIFICANCE_LEVEL = 0.05  # a p-value below it counts as significant


@dataclass(frozen=True)
class PairedComparison:
    """The difference between two trials.

    Args:
        difference: the mean over users of first - second.
        users: the number of users.
        t: p-value of the paired t-test.
        wilcoxon: p-value of Wilcoxon's signed-rank test.
    """

    difference: float
    users: int
    t: float
    wilcoxon: float

    @property
    def significant(self) -> bool:
        """Whether the p-value of the t-test is below `SIGNIFICANCE_LEVEL`."""
        return self.t < SIGNIFICANCE_LEVEL


def compare(first: Trial, second: Trial, metric: str) -> PairedComparison | None:
    """Compare two trials on the users and seeds that both have; None where they have fewer than two users in common.

    The seed determines the split, so only runs of the same seed can be paired. The differences of a user are averaged
    over the seeds before the test, because they are not independent of one another.
    """
    from scipy import stats  # type: ignore[import-untyped]  # imported here: it takes a second

    differences = _differences(first, second, metric)
    if differences.size < 2:
        return None
    if not differences.any():
        return PairedComparison(0.0, differences.size, 1.0, 1.0)
    if np.ptp(differences) == 0:  # the same for all users: the t statistic would divide by a spread of 0
        return PairedComparison(float(differences[0]), differences.size, 0.0, 0.0)
    t = stats.ttest_1samp(differences, 0.0).pvalue
    return PairedComparison(
        float(differences.mean()), differences.size, float(t), float(stats.wilcoxon(differences).pvalue)
    )


def _differences(first: Trial, second: Trial, metric: str) -> Array:
    """(U,) for each user that both trials have, the difference first - second, averaged over the common seeds."""
    users: list[Array] = []
    values: list[Array] = []
    second_by_seed = {run.settings["seed"]: run for run in second.runs}
    for run in first.runs:
        other = second_by_seed.get(run.settings["seed"])
        ours, theirs = run.users(metric), None if other is None else other.users(metric)
        if ours is None or theirs is None:
            continue
        common, difference = _paired(ours, theirs)
        users.append(common)
        values.append(difference)
    if not users:
        return np.empty(0)
    if all(np.array_equal(users[0], others) for others in users[1:]):  # as a rule; saves the sorting of all ids
        return np.asarray(np.mean(values, axis=0))
    _, index = np.unique(np.concatenate(users), return_inverse=True)
    return np.bincount(index, weights=np.concatenate(values)) / np.bincount(index)


def _paired(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """From two pairs (user ids, metrics) to the common ids and the differences of their metrics."""
    (first_ids, first_values), (second_ids, second_values) = first, second
    if np.array_equal(first_ids, second_ids):  # as a rule; saves the sorting of ids
        return first_ids, first_values - second_values
    common, in_first, in_second = np.intersect1d(first_ids, second_ids, return_indices=True)
    return common, first_values[in_first] - second_values[in_second]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p-values for testing several hypotheses at once; the results keep the given order.

    The i-th smallest of m p-values is multiplied by m - i + 1; a result is at least as large as those of smaller
    p-values, and at most 1.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
