"""What a choice says at its end: the answer of its study, and what it does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.plan import ChoicePlan, edge_values
from manymax.study.choosing.rounds import SEED, TRIAL
from manymax.study.report.answer import Answer, answers
from manymax.study.report.runs import Study, read_study


@dataclass(frozen=True)
class Verdict:
    """The answer of a choice.

    answer: of its study. study: all of its runs.
    unknown: what it does not know, in sentences.
    """

    answer: Answer
    study: Study
    unknown: tuple[str, ...]

    @property
    def model(self) -> Path:
        """The folder of the run to use."""
        folder = self.answer.winner.model.folder
        assert folder is not None  # the runs of a choice are read from their folders
        return folder


def verdict(plan: ChoicePlan, folder: Path, clock: Clock) -> Verdict:
    """Read the runs of a choice that has ended.

    Raises:
        ManymaxError: no loss has been trained to its end.
    """
    study = read_study(folder)
    found = answers(study)
    if not found:
        raise ManymaxError(
            f"no trial in {folder} has come to its end: give more `--minutes`, and another folder or remove this one."
        )
    answer = found[0]
    return Verdict(answer, study, tuple(_unknown(plan, answer, clock)))


def _unknown(plan: ChoicePlan, answer: Answer, clock: Clock) -> Iterator[str]:
    """The cautions of the answer, with the edges of ranges that were searched in place of values that were tried."""
    yield from _left_out(plan, answer)
    yield from _cuts(plan, clock.decisions)
    edges = [edge for each in answer.contenders for edge in edge_values(plan, each.loss, each.trial.settings)]
    for caution in answer.cautions:
        if caution.kind != "edge":
            yield caution.text
    if edges:
        yield f"Best at the end of a range that was searched, so that more may be gained beyond: {', '.join(edges)}."


def _left_out(plan: ChoicePlan, answer: Answer) -> Iterator[str]:
    for name, reason in plan.left_out:
        yield f"Left out: {name}, which {reason}." if reason.startswith("draws") else f"Left out: {name}: {reason}."
    compared = {each.loss for each in answer.contenders}
    if lost := [each.name for each in plan.candidates if each.name not in compared]:
        yield f"No trial of {', '.join(lost)} came to its end: nothing is known of what it reaches."


def _cuts(plan: ChoicePlan, decisions: Mapping[str, Any]) -> Iterator[str]:
    """What the time did not allow."""
    trials, seeds = int(decisions.get(f"{TRIAL}s", 0)), int(decisions.get(f"{SEED}s", 0)) + 1
    lost_trials, lost_seeds = plan.effort.trials - trials, plan.effort.seeds - seeds
    cut = []
    if lost_trials > 0:
        cut.append(f"each loss had {trials} trials where {plan.effort.trials} were planned")
    if lost_seeds > 0:
        cut.append(f"each had {seeds} {'seeds' if seeds > 1 else 'seed'} where {plan.effort.seeds} were planned")
    if cut:
        yield f"Time was short: {', and '.join(cut)}. Give more `--minutes`."
