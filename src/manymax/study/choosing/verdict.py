"""What a choice says at its end: the answer of its study, and what it does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.study.agenda import note_cautions
from manymax.study.choosing.clock import Clock
from manymax.study.choosing.plan import ChoicePlan, edge_values
from manymax.study.choosing.rounds import SEED, TRIAL
from manymax.study.report.answer import Answer, answers
from manymax.study.report.runs import Study, read_study


@dataclass(frozen=True)
class Verdict:
    """The answer of a choice.

    answer: of its study. study: all of its runs.
    """

    answer: Answer
    study: Study

    @property
    def unknown(self) -> tuple[str, ...]:
        """What it does not know, in sentences."""
        return tuple(each.text for each in self.answer.cautions)

    @property
    def model(self) -> Path:
        """The folder of the run to use."""
        folder = self.answer.winner.model.folder
        assert folder is not None  # the runs of a choice are read from their folders
        return folder


def verdict(plan: ChoicePlan, folder: Path, clock: Clock) -> Verdict:
    """Read the runs of a choice that has ended, and note in its folder what they do not show, for the page.

    Raises:
        ManymaxError: no loss has been trained to its end.
    """
    study = read_study(folder)
    found = answers(study)
    if not found:
        raise ManymaxError(
            f"no trial in {folder} has come to its end: give more `--minutes`, and another folder or remove this one."
        )
    of_plan = {
        "time": [*_cuts(plan, clock.decisions)],
        "left out": [*_left_out(plan, found[0])],
        "edge": [*_edges(plan, found[0])],  # of ranges that were searched, in place of values that were tried
    }
    note_cautions(folder, of_plan)
    study = replace(study, cautions=of_plan)
    return Verdict(answers(study)[0], study)


def _edges(plan: ChoicePlan, answer: Answer) -> Iterator[str]:
    found = [edge for each in answer.contenders for edge in edge_values(plan, each.loss, each.chosen_settings)]
    if found:
        yield f"Best at the end of a range that was searched, so that more may be gained beyond: {', '.join(found)}."


def _left_out(plan: ChoicePlan, answer: Answer) -> Iterator[str]:
    if plan.left_out:
        yield f"Left out: {'; '.join(f'{name} ({reason})' for name, reason in plan.left_out)}."
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
