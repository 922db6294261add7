"""Carrying out a plan: rounds of one trial of every loss, then rounds of one further seed of the best settings of each.

Every loss has had as many trials as any other whenever a round has ended. Whether another one begins is decided by the
clock: if it would hardly end in time, all losses go without it. A round that is under way when the time is over counts
for none of them: its runs are marked as ended early, so that no loss has the advantage of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manymax.study.choosing.candidates import is_baseline
from manymax.study.choosing.clock import Clock, OutOfTime
from manymax.study.choosing.effort import MOST_TRIALS, round_seconds
from manymax.study.choosing.plan import ChoicePlan
from manymax.study.config import RunConfig
from manymax.study.engines import Engine, Job, final_record
from manymax.study.records import CHECKPOINT, Record, new_record, read_record, write_record
from manymax.study.run import CHECKPOINT_SECONDS
from manymax.study.search import Progress
from manymax.study.sweep import sweep

MOST_SEEDS = 5  # where there is time for more than planned
MARGIN = 1.1  # a round may take this many times as long as those before it
CUT = "the time was over before every loss had this run"
TRIAL, SEED = "trial", "seed"
BETWEEN = "seconds between runs"


@dataclass(frozen=True)
class Round:
    """A round that has ended, for those who watch.

    kind: `TRIAL` or `SEED`. number: from 1; the first seed is that of the trials. planned: how many were planned.
    fresh: whether it ended now, and not before an interruption.
    progress: of all losses. clock: of the choice.
    """

    kind: str
    number: int
    planned: int
    fresh: bool
    progress: Sequence[Progress]
    clock: Clock


@dataclass
class Rounds:
    """A plan and how far it is.

    Args:
        plan: what is to be done.
        folder: of the choice.
        engine: does the runs.
        clock: of the choice. It keeps, for each kind of round, how many count ("trials"), whether there will be more
            ("trials over"), how long they took ("seconds of trials"), and how much of that was not spent within
            runs ("seconds between runs").
        reserve: seconds to keep for what comes after the runs.
        on_round: called after each round.
        on_poll: called about twice a second with the runs that are under way.
        checkpoint_seconds: least number of seconds between two checkpoints of a run.
    """

    plan: ChoicePlan
    folder: Path
    engine: Engine
    clock: Clock
    reserve: float = 0.0
    on_round: Callable[[Round], None] = lambda ended: None
    on_poll: Callable[[Sequence[Job]], None] = lambda jobs: None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    progress: list[Progress] = field(init=False)
    done: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = [Progress(each.search) for each in self.plan.candidates]
        self.done = {TRIAL: 0, SEED: 0}

    def run(self) -> None:
        """All rounds that there is time for."""
        for kind in (TRIAL, SEED):
            while self._goes_on(kind):
                self._round(kind)
        self.clock.write()

    def counted(self, kind: str) -> int:
        """How many rounds of a kind count."""
        return int(self.clock.decisions.get(f"{kind}s", 0))

    # What the clock decides

    def _goes_on(self, kind: str) -> bool:
        """Whether another round begins; what was decided before an interruption is not decided again."""
        done = self.done[kind]
        if done < self.counted(kind):
            return True
        if self.clock.decisions.get(f"{kind}s over", False) or done >= self._most(kind):
            return False
        first = kind == TRIAL and done == 0  # without it there is no answer at all
        if not first and self._expected(kind) + self._later(kind) > self.clock.left - self.reserve:
            self.clock.decide(f"{kind}s over", True)
            return False
        self.clock.decide(f"{kind}s", done + 1)
        return True

    def _most(self, kind: str) -> int:
        """The largest number of rounds: as planned, and more where a time was given that allows it."""
        request, effort = self.plan.request, self.plan.effort
        if kind == TRIAL:
            return effort.trials if request.trials is not None else MOST_TRIALS
        by_number = request.trials is not None or request.seeds is not None
        return (effort.seeds if by_number else max(effort.seeds, MOST_SEEDS)) - 1

    def _expected(self, kind: str) -> float:
        """Seconds that the next round will take."""
        if kind == SEED:
            return self._seconds_of_seed()
        # The first trials are trained to their end; later ones are shorter.
        return MARGIN * max(self.clock.decisions.get(f"seconds of {TRIAL}s", [])[-2:], default=0.0)

    def _later(self, kind: str) -> float:
        """Seconds to keep for the seeds while there are trials."""
        return (self.plan.effort.seeds - 1) * self._seconds_of_seed() if kind == TRIAL else 0.0

    def _seconds_of_seed(self) -> float:
        """Seconds of a whole round of the best settings, by the trials that they come from.

        Processes wait for the last run of a round, and each takes a time to begin, as in the rounds before.
        """
        best = [record for each in self._in_order() for record in each.search.ranked(each.trials)[:1]]
        between = max(self.clock.decisions.get(BETWEEN, []), default=0.0)
        return MARGIN * (self._within(best) + between)

    def _within(self, records: Sequence[Record]) -> float:
        """Seconds that a round of these runs takes, by the seconds that they took."""
        return round_seconds((sum(record.seconds.values()) for record in records), self.engine.slots)

    # Rounds

    def _round(self, kind: str) -> None:
        """A run of every loss; where the time is over before all have ended, it counts for none."""
        number = self.done[kind]
        configs = self._configs(kind)
        # Half of what the seeds will take is spent on a round that takes longer than expected rather than lose it.
        limit = self.reserve + (self._later(kind) / 2 if number else 0.0)
        fresh = len(self.clock.decisions.get(f"seconds of {kind}s", [])) <= number
        if not fresh:  # it ended before an interruption: what it lacks now is done again, and nothing is cut
            limit = -math.inf
        start = self.clock.spent
        whole = self._sweep([config for _, config in configs], limit)
        if not whole:
            # Whatever has ended of the first round is better than nothing.
            kept = 1 if kind == TRIAL and number == 0 else 0
            earlier = {record.hash for progress, _ in configs for record in progress.trials}
            self._mark([c for _, c in configs if c.content_hash() not in earlier], keep_ended=bool(kept))
            self.clock.decide(f"{kind}s cut", number + 1)
            self.clock.decide(f"{kind}s", number + kept)
            self.clock.decide(f"{kind}s over", True)
            if not kept:
                return
        records = [read_record(self.folder / config.content_hash()) for _, config in configs]
        for (progress, _), record in zip(configs, records, strict=True):
            (progress.trials if kind == TRIAL else progress.seeds).append(record)
        self.done[kind] = number + 1
        if fresh:
            self._note_seconds(kind, self.clock.spent - start, records)
        planned = self.plan.effort.trials if kind == TRIAL else self.plan.effort.seeds
        self.on_round(Round(kind, number + 1 + (kind == SEED), planned, fresh, self.progress, self.clock))

    def _note_seconds(self, kind: str, seconds: float, records: Sequence[Record]) -> None:
        """Note how long a round took; one that an interruption has cut in two seems to be shorter than its runs."""
        between = max(0.0, seconds - self._within(records))
        for name, value in {f"seconds of {kind}s": seconds, BETWEEN: between}.items():
            self.clock.decide(name, [*self.clock.decisions.get(name, []), round(value, 1)])

    def _in_order(self) -> list[Progress]:
        """The baseline first, with which others are compared, then slow losses: so no process waits long at the end."""
        costs = {id(p): each.epoch_seconds for p, each in zip(self.progress, self.plan.candidates, strict=True)}
        return sorted(self.progress, key=lambda p: (not is_baseline(p.search), -costs[id(p)]))

    def _configs(self, kind: str) -> list[tuple[Progress, RunConfig]]:
        """The runs of the next round."""
        order = self._in_order()
        if kind == TRIAL:
            return [(progress, progress.next_trial(self.folder)) for progress in order]
        seed = self.done[SEED] + 1
        return [(progress, config) for progress in order for config in progress.further_seed(self.folder, seed)]

    def _sweep(self, configs: Sequence[RunConfig], limit: float) -> bool:
        """Do these runs; False if no more than `limit` seconds are left before all have ended."""

        def watch(jobs: Sequence[Job]) -> None:
            self.on_poll(jobs)
            self.clock.tick()
            if self.clock.left < limit:
                raise OutOfTime

        try:
            sweep(configs, self.folder, engine=self.engine, on_poll=watch, checkpoint_seconds=self.checkpoint_seconds)
        except OutOfTime:
            return False
        return True

    def _mark(self, configs: Sequence[RunConfig], keep_ended: bool) -> None:
        """Mark the runs of a round that was cut as ended early; with `keep_ended` only those that have not ended."""
        for config in configs:
            folder = self.folder / config.content_hash()
            record = final_record(folder)
            if record is not None and keep_ended:
                continue
            if record is None:
                folder.mkdir(parents=True, exist_ok=True)
                record = new_record(config, "pruned", reason=CUT)
            write_record(folder, record.model_copy(update={"status": "pruned", "reason": CUT, "test": {}}))
            (folder / CHECKPOINT).unlink(missing_ok=True)
