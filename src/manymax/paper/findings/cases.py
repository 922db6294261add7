"""Cases of a finding, and the verdict that they lead to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from manymax.paper.findings.points import Point

Verdict = Literal["confirmed", "contradicted", "not enough runs"]


@dataclass(frozen=True)
class FindingCase:
    """What one case says about a part of a finding.

    name: the data set, the backbone and whatever else tells it from the other cases of the finding.
    supports: True if it supports the finding, False if it opposes it, None if it leaves it open.
    why: the numbers behind that, in words.
    part: the part of the finding; empty where the finding has only one.
    runs: the identities of the runs whose users it compares; empty where it needs no test.
    """

    name: str
    supports: bool | None
    why: str
    part: str = ""
    runs: tuple[str, ...] = ()


def verdict(cases: Sequence[FindingCase], parts: Collection[str] = ("",)) -> Verdict:
    """The verdict that cases lead to, for a finding with these parts.

    >>> supports, leaves_open, opposes = (FindingCase("", value, "") for value in (True, None, False))
    >>> verdict([supports, leaves_open]), verdict([supports, opposes])
    ('confirmed', 'contradicted')
    >>> verdict([FindingCase("a", True, "", "HSM")], ("HSM", "RG"))
    'not enough runs'
    """
    if any(case.supports is False for case in cases):
        return "contradicted"
    supported = {case.part for case in cases if case.supports}
    return "confirmed" if supported.issuperset(parts) else "not enough runs"


def case_name(place: tuple[str, str], more: str = "") -> str:
    """The name of a case: its data, its backbone and, if given, more.

    >>> case_name(("ml-1m", "mf"), "k=5")
    'ml-1m, mf, k=5'
    """
    return ", ".join(filter(None, (*place, more)))


def run_identities(*points: Point) -> tuple[str, ...]:
    """The identities of all runs of our trials among the points; the paper's points have none."""
    return tuple(sorted({run.identity for p in points if p.trial is not None for run in p.trial.runs}))


def two_scores(first: Point, second: Point) -> str:
    """Two losses with their scores, in words."""
    return f"{first.loss} {first.score:.4f}, {second.loss} {second.score:.4f}"
