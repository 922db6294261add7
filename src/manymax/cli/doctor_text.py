"""The text of `manymax doctor`, by the standard library alone: it also works where the extra `study` is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from manymax.heads.machine_report import MachineReport, machine_report
from manymax.study.plain_text import in_lines


def print_report(as_json: bool) -> int:
    """Look at this machine, print what was found, and return the exit code: 1 if something is wrong."""
    report = machine_report()
    text = json.dumps(asdict(report), indent=2, allow_nan=False) if as_json else "\n".join(_lines(report))
    sys.stdout.write(f"{in_lines(text)}\n")
    return 1 if report.problems else 0


def _lines(report: MachineReport) -> Iterator[str]:
    has = ", ".join(name for name, there in report.instructions.items() if there) or "none of those that matter here"
    yield from (
        f"manymax    {report.versions['manymax']}, torch {report.versions['torch']}, "
        f"Python {report.versions['python']}",
        f"system     {report.system}",
        f"processor  {report.processor}: {has}",
        f"threads    {report.threads} of {report.cores} cores; OpenMP of {report.openmp or 'torch'}",
        f"auto       {report.backend}: {report.because}",
        "",
        f"{'level':16} {'machine':8} {'here':5} tested",
    )
    for level in report.levels:
        here = "used" if level.used else "no" if level.missing else "yes"
        yield f"{level.name:16} {level.machine:8} {here:5} {'; '.join(level.tested) or 'nowhere: used on demand alone'}"
    yield ""
    yield from _checks(report)
    for title, sentences in (("wrong", report.problems), ("advice", report.advice)):
        for sentence in sentences:
            yield f"{title:10} {sentence}"


def _checks(report: MachineReport) -> Iterator[str]:
    """One line per back end: the largest difference from plain torch, by precision."""
    if not report.checks:
        yield "self-check nothing to compare: there is only plain torch"
    for backend in dict.fromkeys(one.backend for one in report.checks):
        own = [one for one in report.checks if one.backend == backend]
        worst = {one.dtype: max(o.difference or 0 for o in own if o.dtype == one.dtype) for one in own}
        told = ", ".join(f"{difference:.0e} in {dtype}" for dtype, difference in worst.items())
        members = ", ".join(dict.fromkeys(one.member for one in own))
        if all(one.passed for one in own):
            yield f"self-check {backend} agrees with plain torch to {told} ({members})"
        else:
            yield f"self-check {backend} DIFFERS FROM PLAIN TORCH, see below"
