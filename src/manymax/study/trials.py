"""Trials of a search: when one is hopeless and ends early.

Before a trial starts, the search writes what ends it beside its folder: the curves of the trials before it and the name
of a pruner. The process that does the run, on whatever machine, reads this file; no other message passes between them.

Curves are those of the best value so far. Optuna's pruners decide:

    halving   successive halving: after `warmup` epochs, and each time that these have doubled, the trials in the better
              half of all that have come so far go on
    median    a trial ends when it is below the median, at its epoch, of the trials that were trained to their end
    none      none ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.files import read_json, write_json
from manymax.study.records import EPOCHS, read_table
from manymax.study.supervisor import ProgressReporter, Pruned

if TYPE_CHECKING:
    import optuna

PRUNERS = ("halving", "median", "none")
RULES = "trials"  # the folder beside the folders of the runs
LEAST_TRIALS = 3  # a median of fewer says little


@dataclass(frozen=True)
class EarlierTrial:
    """A trial that has ended: whether it was trained to its end, and its best values so far by epoch."""

    complete: bool
    curve: Mapping[int, float]


@dataclass(frozen=True)
class TrialRules:
    """What ends a trial early.

    metric: on the validation part. higher_is_better: whether a larger value is better.
    pruner: one of `PRUNERS`. warmup: epochs before which no trial ends.
    earlier: the trials before this one.
    """

    metric: str
    higher_is_better: bool
    pruner: str
    warmup: int
    earlier: tuple[EarlierTrial, ...]


def _rules_path(folder: Path) -> Path:
    return folder.parent / RULES / f"{folder.name}.json"


def write_rules(folder: Path, rules: TrialRules) -> None:
    """Write the rules of the trial in `folder`, beside it: the folder itself belongs to the run."""
    path = _rules_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = [{"complete": each.complete, "curve": dict(each.curve)} for each in rules.earlier]
    write_json(path, {**vars(rules), "earlier": earlier})


def has_rules(folder: Path) -> bool:
    """Whether the run in `folder` belongs to a search."""
    return _rules_path(folder).exists()


def read_rules(folder: Path) -> TrialRules | None:
    """The rules of the trial in `folder`; None for a run that is no trial."""
    if not has_rules(folder):
        return None
    content = read_json(_rules_path(folder))
    earlier = tuple(
        EarlierTrial(each["complete"], {int(epoch): value for epoch, value in each["curve"].items()})
        for each in content["earlier"]
    )
    return TrialRules(**{**content, "earlier": earlier})


def curve(folder: Path, metric: str, higher_is_better: bool) -> dict[int, float]:
    """{epoch: best value so far} of the run in `folder`; empty where it has no curve."""
    if not (folder / EPOCHS).exists():
        return {}
    table = read_table(folder / EPOCHS)
    rows = zip(table["epoch"].to_pylist(), table[metric].to_pylist(), strict=True)
    found: dict[int, float] = {}
    best: float | None = None
    for epoch, value in rows:
        if value is not None:
            best = value if best is None else max(best, value) if higher_is_better else min(best, value)
            found[epoch] = best
    return found


class Pruning(ProgressReporter):
    """Ends a trial by raising `Pruned` after an epoch in which a pruner finds it hopeless.

    Args:
        rules: of the trial.
    """

    def __init__(self, rules: TrialRules) -> None:
        self.rules = rules
        self.best: float | None = None

    def begin(self, config: RunConfig, folder: Path, state: TrainingState) -> None:
        """Make a study of the trials before this one, and bring this one to where its checkpoint is."""
        self.config = config
        self.trial = None if self.rules.pruner == "none" else self._trial()
        for row in state.rows:
            self._report(row)
            if self.trial is not None:
                self.trial.should_prune()  # it was not pruned there; halving notes which rungs it has passed

    def epoch(self, state: TrainingState, row: dict[str, Any]) -> None:
        """Look at the trial after an epoch."""
        self._report(row)
        training = self.config.training
        # A run that has come to its end anyway is tested like any other.
        going_on = state.epoch < training.epochs and state.waited < training.patience
        if self.trial is None or not going_on or self.rules.metric not in row or state.epoch < self.rules.warmup:
            return
        if self.trial.should_prune():
            raise Pruned(f"{self.rules.metric} {self.best:.4f} after {state.epoch} epochs is behind other trials")

    def _report(self, row: Mapping[str, Any]) -> None:
        value = row.get(self.rules.metric)
        if value is None:
            return
        better = max if self.rules.higher_is_better else min
        self.best = value if self.best is None else better(self.best, value)
        if self.trial is not None:
            self.trial.report(self.best, row["epoch"])

    def _trial(self) -> optuna.Trial:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if self.rules.pruner == "median":
            pruner: Any = optuna.pruners.MedianPruner(n_startup_trials=LEAST_TRIALS, n_warmup_steps=self.rules.warmup)
        else:
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, self.rules.warmup), reduction_factor=2)
        study = optuna.create_study(direction="maximize" if self.rules.higher_is_better else "minimize", pruner=pruner)
        states = optuna.trial.TrialState
        for each in self.rules.earlier:
            trial = study.ask()
            for epoch, value in each.curve.items():
                trial.report(value, epoch)
                trial.should_prune()  # by which a pruner notes what it needs to know of this trial
            final = list(each.curve.values())[-1] if each.complete and each.curve else None
            study.tell(trial, final, state=states.PRUNED if final is None else states.COMPLETE)
        return study.ask()
