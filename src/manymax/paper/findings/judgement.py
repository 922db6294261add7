"""Every finding with the cases that our runs and the paper's tables give it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from manymax.paper.findings.cases import FindingCase, Verdict, verdict
from manymax.paper.findings.points import from_paper, from_trials
from manymax.paper.findings.table import FINDINGS, Finding
from manymax.study.report.trials import Trial


@dataclass(frozen=True)
class Judgement:
    """A finding with its cases.

    cases: from our runs.
    printed: from the paper's own tables.
    """

    finding: Finding
    cases: tuple[FindingCase, ...]
    printed: tuple[FindingCase, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict from our runs."""
        return verdict(self.cases, self.finding.parts)

    @property
    def printed_verdict(self) -> Verdict:
        """The verdict from the paper's own tables."""
        return verdict(self.printed, self.finding.parts)

    @property
    def missing(self) -> list[str]:
        """What a verdict from our runs lacks, a line for each part; empty where there is a verdict."""
        if self.verdict != "not enough runs":
            return []
        supported = {case.part for case in self.cases if case.supports}
        counts = Counter(case.part for case in self.cases)
        return [
            _undecided(part, counts[part]) if counts[part] else f"no runs of {need}"
            for part, need in self.finding.parts.items()
            if part not in supported
        ]


def _undecided(part: str, count: int) -> str:
    cases = "the case is" if count == 1 else f"all {count} cases are"
    return f"{cases} open{f' for {part}' if part else ''}: no difference beyond chance"


def judge(trials: Sequence[Trial]) -> list[Judgement]:
    """Judge every finding by our trials and by the paper's tables."""
    ours, paper = from_trials(trials), from_paper()
    return [Judgement(each, tuple(each.cases(ours)), tuple(each.cases(paper))) for each in FINDINGS]
