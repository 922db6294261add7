"""How many trials, epochs and seeds a time allows, the same for every loss, and which losses are too slow for it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

MOST_TRIALS = 24  # of a loss: more have hardly found anything better
FEWEST_TRIALS = 5  # with fewer, what is compared is luck with learning rates
USUAL_EPOCHS = 30  # that a trial takes if it is not ended early, unless it is allowed fewer
GIVEN_TRIALS = 2  # have values of the file of candidates and are trained to their end
BUSY = 1.25  # an epoch takes longer beside others than alone
SLOW = 3.0  # an epoch of more than this many times the median loss is slow

LEAST_LOSSES = 3  # that are compared even where time is very short

# (epochs, seeds) that are given up one after the other where time is short, and, where losses have been left out and it
# is still too short, those of the last resort.
STEPS_DOWN = ((100, 3), (100, 2), (40, 2), (20, 2))
LAST_RESORT = ((20, 1), (10, 1))


@dataclass(frozen=True)
class RunCost:
    """Seconds of a process: `fixed` for each run of a loss, and `epoch` for training and evaluation of one epoch.

    spared: whether the loss is kept whatever it costs.
    """

    name: str
    fixed: float
    epoch: float
    spared: bool = False

    def whole(self, epochs: int) -> float:
        """A run that is trained to its end."""
        return BUSY * (self.fixed + min(epochs, USUAL_EPOCHS) * self.epoch)

    def trial(self, epochs: int) -> float:
        """A trial on average: every second one ends after the warm-up."""
        return BUSY * (self.fixed + (warmup(epochs) + min(epochs, USUAL_EPOCHS)) / 2 * self.epoch)


@dataclass(frozen=True)
class Effort:
    """The effort for each loss: trials of at most so many epochs, and seeds of the best settings."""

    trials: int
    epochs: int
    seeds: int

    def seconds(self, costs: Sequence[RunCost], slots: int) -> float:
        """The time that it takes with so many runs at a time: that of whole rounds, each with a run of every loss."""
        given = min(self.trials, GIVEN_TRIALS)
        wholes, shorter = given + self.seeds - 1, self.trials - given
        whole = sorted((cost.whole(self.epochs) for cost in costs), reverse=True)
        # One of many trials is trained to its end even where most are not.
        trial = max(round_seconds(sorted((cost.trial(self.epochs) for cost in costs), reverse=True), slots), whole[0])
        return wholes * round_seconds(whole, slots) + shorter * trial


@dataclass(frozen=True)
class Affordable:
    """What a time allows: the effort, the losses that get it, and those that are too slow, with the reason."""

    effort: Effort
    kept: tuple[RunCost, ...]
    left_out: tuple[tuple[str, str], ...]


def round_seconds(runs: Iterable[float], slots: int) -> float:
    """Seconds until the last of some runs has ended, if each begins as soon as one of the slots is free.

    >>> round_seconds([3.0, 3.0, 2.0], 2)  # the third begins when one of the first two has ended
    5.0
    """
    free = [0.0] * slots
    for seconds in runs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def warmup(epochs: int) -> int:
    """Epochs before which no trial is ended."""
    return max(1, min(10, epochs // 4))


def patience(epochs: int) -> int:
    """Evaluations without a better value after which a run ends."""
    return max(2, min(10, epochs // 4))


def affordable(costs: Sequence[RunCost], seconds: float, slots: int) -> Affordable:
    """The largest effort that fits the time.

    Losses that are slow are left out, the slowest first, until each of the others gets `FEWEST_TRIALS` trials. If that
    is not enough, seeds and epochs are given up, then further losses until `LEAST_LOSSES` are left.
    """
    left, out = list(costs), []

    def drop(epochs: int, seeds: int) -> None:
        slowest = max((cost for cost in left if not cost.spared), key=lambda cost: cost.epoch)
        left.remove(slowest)
        times = slowest.epoch / median(cost.epoch for cost in left)
        with_it = _trials([*left, slowest], seconds, slots, epochs, seeds)
        told = f"{with_it} {'trials' if with_it > 1 else 'trial'}" if with_it else "no trial"
        reason = f"an epoch takes {times:.1f} times as long as that of others: with it there is time for {told} of each"
        out.append((slowest.name, reason))

    while _trials(left, seconds, slots, *STEPS_DOWN[0]) < FEWEST_TRIALS and _has_slow(left):
        drop(*STEPS_DOWN[0])
    while True:
        enough = len(left) > LEAST_LOSSES and any(not cost.spared for cost in left)
        for epochs, seeds in STEPS_DOWN if enough else (*STEPS_DOWN, *LAST_RESORT):
            if (trials := _trials(left, seconds, slots, epochs, seeds)) >= FEWEST_TRIALS:
                return Affordable(Effort(trials, epochs, seeds), tuple(left), tuple(out))
        if not enough:
            return Affordable(Effort(max(1, trials), *LAST_RESORT[-1]), tuple(left), tuple(out))
        drop(*STEPS_DOWN[-1])


def _has_slow(costs: Sequence[RunCost]) -> bool:
    typical = median(cost.epoch for cost in costs)
    return len(costs) > 2 and any(cost.epoch > SLOW * typical and not cost.spared for cost in costs)


def _trials(costs: Sequence[RunCost], seconds: float, slots: int, epochs: int, seeds: int) -> int:
    """The number of trials that fit; 0 if none does."""
    fitting = (t for t in range(MOST_TRIALS, 0, -1) if Effort(t, epochs, seeds).seconds(costs, slots) <= seconds)
    return next(fitting, 0)
