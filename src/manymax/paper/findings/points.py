"""Points: what the rules of the findings compare, made of our trials or of the paper's printed numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from manymax.paper.numbers import MAIN_METRIC, NUMBERS
from manymax.paper.printed import DEFAULTS, SAMPLED, distance_from_pairs
from manymax.study.report.significance import SIGNIFICANCE_LEVEL, PairedComparison, compare
from manymax.study.report.trials import Trial, direction, metrics


@dataclass(frozen=True)
class Point:
    """One method at one learning rate.

    data, backbone, loss, lr, num_negatives, sampler: what it is; the last two only for sampled losses.
    selected: the value that the learning rate is chosen by; for our trials that of the validation part.
    score: the value that is compared; for our trials that of the test part.
    trial: ours; None for a number of the paper.
    metric: what `selected` and `score` are values of.
    """

    data: str
    backbone: str
    loss: str
    lr: float | None
    num_negatives: int | None
    sampler: str | None
    selected: float
    score: float
    trial: Trial | None = None
    metric: str = MAIN_METRIC

    @property
    def batches(self) -> str | None:
        """How the trial's batches were made; None for the paper's numbers."""
        return None if self.trial is None else self.trial.batches

    @property
    def place(self) -> tuple[str, str]:
        """The data and the backbone: points of one place can be compared."""
        return self.data, self.backbone

    @property
    def sign(self) -> int:
        """1 where a higher value of the metric is better, -1 where a lower one is."""
        return direction(self.metric)

    @property
    def merit(self) -> float:
        """A number that is higher the better the point is by the value that it is selected by."""
        return self.sign * self.selected


class PointSet:
    """The points that a rule looks at."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = list(points)

    def places(self) -> list[tuple[str, str]]:
        """The pairs of data and backbone, in the order in which they first occur."""
        return list(dict.fromkeys(point.place for point in self.points))

    def losses(self, place: tuple[str, str]) -> list[str]:
        """The losses that have a point at a place."""
        return list(dict.fromkeys(point.loss for point in self.points if point.place == place))

    def best(self, place: tuple[str, str], loss: str) -> Point | None:
        """The best point of a loss at a place, of those with batches nearest to the paper's; None if it has none."""
        return max(
            self._of(place, loss), key=lambda point: (-distance_from_pairs(point.batches), point.merit), default=None
        )

    def by_rate(self, place: tuple[str, str], *losses: str) -> list[dict[float, Point]]:
        """For each loss {learning rate: its best point}, at the rates that all of the losses have.

        All points have batches that were made in one way: the way with the most such rates or, of several with equally
        many, the nearest to the paper's.
        """
        found: list[list[dict[float, Point]]] = [[{} for _ in losses]]
        for batches in sorted({p.batches for p in self._of(place, losses[0])}, key=distance_from_pairs):
            lines = [[p for p in self._of(place, loss) if p.batches == batches] for loss in losses]
            rates = set.intersection(*({p.lr for p in line if p.lr is not None} for line in lines))
            found.append([{lr: best_point(p for p in line if p.lr == lr) for lr in rates} for line in lines])
        return max(found, key=lambda lines: len(lines[0]))

    def _of(self, place: tuple[str, str], loss: str) -> list[Point]:
        return [point for point in self.points if point.place == place and point.loss == loss]

    def by_negatives(self, sampler: str) -> dict[tuple[tuple[str, str], str], dict[int, list[Point]]]:
        """{(place, loss): {number of negatives: points}} of a sampler, sorted by the number of negatives."""
        lines: dict[tuple[tuple[str, str], str], dict[int, list[Point]]] = {}
        for point in self.points:
            if point.sampler == sampler and point.num_negatives is not None:
                lines.setdefault((point.place, point.loss), {}).setdefault(point.num_negatives, []).append(point)
        return {key: dict(sorted(line.items())) for key, line in lines.items()}


def best_point(points: Iterable[Point]) -> Point:
    """The best of the points by the value that they are selected by."""
    return max(points, key=lambda point: point.merit)


def at_common_settings(*groups: Sequence[Point]) -> list[Point]:
    """The best point of each group, of the learning rates that all groups were run at.

    Otherwise a group that was run at more rates would be better for that alone. For the same reason all points have the
    same batches: the nearest to the paper's that the groups have in common. Where the groups have no rate and batches
    in common, each counts at its best.
    """
    common = set.intersection(*({(point.lr, point.batches) for point in group} for group in groups))
    nearest = min((distance_from_pairs(batches) for _, batches in common), default=0)
    wanted = {(lr, batches) for lr, batches in common if distance_from_pairs(batches) == nearest}
    return [best_point([p for p in group if (p.lr, p.batches) in wanted] or group) for group in groups]


def from_trials(trials: Sequence[Trial]) -> PointSet:
    """The points of our trials: the learning rate is chosen on the validation part, and test values are compared.

    De-biased estimators are left out: the paper does not have them.
    """
    found = []
    for trial in trials:
        if trial.settings.get("debias") is not None:
            continue
        metric = (metrics([trial]) or [MAIN_METRIC])[0]
        selected, score = trial.mean(metric, "valid"), trial.mean(metric)
        if selected is not None and score is not None:
            k, sampler = (trial.settings.get(name) for name in DEFAULTS)
            if trial.loss not in SAMPLED:
                k, sampler = None, None
            found.append(Point(*trial.place, trial.loss, trial.lr, k, sampler, selected, score, trial, metric))
    return PointSet(found)


def from_paper() -> PointSet:
    """The points of the paper's printed N@20, which is both selected by and compared: it prints no other value."""
    found = []
    for number in NUMBERS:
        if number.metric == MAIN_METRIC:
            rate, k, sampler = (number.setting.get(name) for name in ("lr", *DEFAULTS))
            if number.loss in SAMPLED:
                k, sampler = k or DEFAULTS["num_negatives"], sampler or DEFAULTS["sampler"]
            lr, num_negatives = None if rate is None else float(rate), None if k is None else int(k)
            sampler = None if sampler is None else str(sampler)
            place = number.data, number.backbone, number.loss
            found.append(Point(*place, lr, num_negatives, sampler, number.value, number.value))
    return PointSet(found)


def beats(first: Point, second: Point, tests: int = 1) -> bool | None:
    """Whether the first point is better than the second: True, False if it is worse, None if that is open.

    Our trials are compared by a paired t-test over users, printed numbers as they are.

    Args:
        first, second: two points of one place and metric.
        tests: how many tests a case rests on of which any one would decide it; each then has its share of the
            significance level (Bonferroni).
    """
    if first.trial is None or second.trial is None:
        return None if first.score == second.score else first.sign * (first.score - second.score) > 0
    result = _tested(first.trial, second.trial)
    if result is None or result.t >= SIGNIFICANCE_LEVEL / tests:
        return None
    return first.sign * result.difference > 0


@lru_cache(maxsize=4096)  # several findings compare the same trials
def _tested(first: Trial, second: Trial) -> PairedComparison | None:
    return compare(first, second, metrics([first])[0])


def untested(first: Point, second: Point) -> bool:
    """Whether the points are two of our trials that have no users in common to test on."""
    return first.trial is not None and second.trial is not None and _tested(first.trial, second.trial) is None
