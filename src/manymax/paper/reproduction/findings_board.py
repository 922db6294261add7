"""The section on the paper's findings: each with its verdict and the cases behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from manymax.paper.findings import FINDINGS, Finding, FindingCase, verdict
from manymax.paper.findings.points import from_paper
from manymax.paper.reproduction.collected import Collected
from manymax.paper.reproduction.markup import NOT_ENOUGH, without_title
from manymax.study.report.formats import Cell, ReportTable, escape


def findings_board(collected: Collected) -> Iterator[str]:
    """A table of verdicts, then the cases of each finding."""
    yield "## Findings\n"
    hashes = {run.record.hash for run in collected.done}
    yield (
        f"Decided from {len(collected.decided & hashes)} of the {len(hashes)} finished runs by the rules of "
        "`manymax report`; the same rules are put to the paper's own tables. A finding that is stated without "
        "exception is contradicted by one case that opposes it. De-biased losses, which the paper does not have, "
        "decide nothing.\n"
    )
    rows = [_verdict_row(finding, collected.cases.get(finding.number, ())) for finding in FINDINGS]
    columns = (("our runs",), ("the paper's tables",), ("support",), ("oppose",), ("open",))
    yield without_title(ReportTable("findings", "", ("", "finding"), columns, tuple(rows)))
    for finding in FINDINGS:
        yield f"### Finding {finding.number}\n"
        yield f"{escape(finding.claim)} {escape(finding.rule)}\n"
        yield "\n".join(_case_lines(collected.cases.get(finding.number, ()))) + "\n"


def _verdict_row(finding: Finding, cases: Sequence[FindingCase]) -> tuple[tuple[str, ...], tuple[Cell, ...]]:
    counts = Counter(case.supports for case in cases)
    paper_verdict = verdict(tuple(finding.cases(from_paper())), finding.parts)
    cells = [verdict(cases, finding.parts), paper_verdict, *(str(counts[supports]) for supports in (True, False, None))]
    return (str(finding.number), finding.claim), tuple(Cell(text=cell, best=i == 0) for i, cell in enumerate(cells))


def _case_lines(cases: Sequence[FindingCase]) -> Iterator[str]:
    """A line per case; those that oppose come first, because one of them decides."""
    if not cases:
        yield f"{NOT_ENOUGH}: no case can be looked at yet."
    for supports, word in ((False, "opposes"), (True, "supports"), (None, "open")):
        yield from (f"- {word}: {escape(case.name)}: {escape(case.why)}" for case in cases if case.supports is supports)
