"""What the rules of the findings look at: our trials, or the paper's numbers, as points that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from manymax.paper.numbers import NUMBERS
from manymax.paper.printed import SAMPLED, remoteness
from manymax.study.report.significance import SIGNIFICANCE_LEVEL, PairedComparison, compare
from manymax.study.report.trials import Trial, metrics

METRIC = "ndcg@20"


@dataclass(frozen=True)
class Point:
    """One method at one learning rate: `selected` is what the learning rate is chosen by, `score` what is compared."""

    data: str
    backbone: str
    loss: str
    lr: float | None
    num_negatives: int | None
    sampler: str | None
    selected: float
    score: float
    trial: Trial | None = None

    @property
    def batches(self) -> str | None:
        """How the trial's batches were made."""
        return None if self.trial is None else self.trial.batches

    @property
    def place(self) -> tuple[str, str]:
        """What it may be compared within."""
        return self.data, self.backbone


class Evidence:
    """The points that rules look at."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.points = list(points)

    def places(self) -> list[tuple[str, str]]:
        """The pairs of data and backbone, in their order."""
        return list(dict.fromkeys(point.place for point in self.points))

    def best(self, place: tuple[str, str], loss: str) -> Point | None:
        """The point of a loss at a place that is best by what was selected on, with batches nearest to the paper's."""
        return max(self._of(place, loss), key=lambda point: (-remoteness(point.batches), point.selected), default=None)

    def by_rate(self, place: tuple[str, str], *losses: str) -> list[dict[float, Point]]:
        """For each loss {learning rate: its best point, by what was selected on}, at the rates that all of them have.

        All with batches made in one way: the one with the most such rates, of equals the nearest to the paper's.
        """
        found: list[list[dict[float, Point]]] = [[{} for _ in losses]]
        for batches in sorted({p.batches for p in self._of(place, losses[0])}, key=remoteness):
            lines = [[p for p in self._of(place, loss) if p.batches == batches] for loss in losses]
            rates = set.intersection(*({p.lr for p in line if p.lr is not None} for line in lines))
            found.append([{lr: selected(p for p in line if p.lr == lr) for lr in rates} for line in lines])
        return max(found, key=lambda lines: len(lines[0]))

    def _of(self, place: tuple[str, str], loss: str) -> list[Point]:
        return [point for point in self.points if point.place == place and point.loss == loss]

    def losses(self, place: tuple[str, str]) -> list[str]:
        """The losses tried at a place."""
        return list(dict.fromkeys(point.loss for point in self.points if point.place == place))


def selected(points: Iterable[Point]) -> Point:
    """The best of the points by what they are selected by."""
    return max(points, key=lambda point: point.selected)


def from_trials(trials: Sequence[Trial]) -> Evidence:
    """Our runs; the learning rate is chosen on the validation part, test values are compared.

    De-biased estimators are not in the paper, and say nothing of what it finds.
    """
    found = []
    for trial in trials:
        if trial.settings.get("debias") is not None:
            continue
        metric = (metrics([trial]) or [METRIC])[0]
        selected, score = trial.mean(metric, "valid"), trial.mean(metric)
        if selected is not None and score is not None:
            k, sampler = (trial.settings.get(name) for name in ("num_negatives", "sampler"))
            if trial.loss not in SAMPLED:
                k, sampler = None, None
            found.append(Point(*trial.place, trial.loss, trial.lr, k, sampler, selected, score, trial))
    return Evidence(found)


def from_paper() -> Evidence:
    """The paper's printed N@20; it says what it selected by, and prints no other value."""
    found = []
    for number in NUMBERS:
        if number.metric == METRIC:
            rate, k, sampler = (number.setting.get(name) for name in ("lr", "num_negatives", "sampler"))
            if number.loss in SAMPLED:
                k, sampler = k or 100, sampler or "uniform"
            lr, negatives = None if rate is None else float(rate), None if k is None else int(k)
            law = None if sampler is None else str(sampler)
            place = number.data, number.backbone, number.loss
            found.append(Point(*place, lr, negatives, law, number.value, number.value))
    return Evidence(found)


def beats(first: Point, second: Point, tests: int = 1) -> bool | None:
    """Whether the first is better: True, False if worse, None if that is open.

    Our trials by a paired t-test over users on N@20, printed numbers by themselves. Where a case rests on any one of
    several `tests`, each has its part of the level (Bonferroni).
    """
    if first.trial is None or second.trial is None:
        return None if first.score == second.score else first.score > second.score
    result = _tested(first.trial, second.trial)
    return result.difference > 0 if result is not None and result.t < SIGNIFICANCE_LEVEL / tests else None


@lru_cache(maxsize=4096)
def _tested(first: Trial, second: Trial) -> PairedComparison | None:
    return compare(first, second, metrics([first])[0])


def untested(first: Point, second: Point) -> bool:
    """Whether two of our trials share no users to test on."""
    return first.trial is not None and second.trial is not None and _tested(first.trial, second.trial) is None
