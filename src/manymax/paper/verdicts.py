"""`findings.json`: what the tests behind the findings said, kept where the rows of the users are not.

The findings are decided by tests that are paired over users, whose rows stay behind when the records of runs are
collected. The file holds what those tests said, with the hashes of the runs that were looked at, so that more runs can
be added when the rows of the first are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.paper.findings import FindingCase, judge
from manymax.paper.printed import paper_name
from manymax.study.files import read_json
from manymax.study.records import USER_METRICS, kept_file
from manymax.study.report.collect import records_below
from manymax.study.report.runs import Run, identity
from manymax.study.report.trials import trials

FINDINGS = "findings.json"
UNTESTED = "not tested yet"


def decide(
    runs: Iterable[Run], originals: Sequence[Path], earlier: Mapping[int, Sequence[FindingCase]]
) -> dict[str, Any]:
    """Judge the findings by the runs; the content of `findings.json`.

    A case that compares users is tested where the rows of all its runs are below `originals`. Where they are not, what
    the same test said `earlier` still holds; a case without either is open. A set has one name in whichever of its
    forms it was used: findings compare backbones with one another.
    """
    rows = {}
    for path in (
        path for folder in originals for path in records_below(folder) if kept_file(path.parent, USER_METRICS).is_file()
    ):
        content = read_json(path)
        rows[identity(content.get("hash", ""), content.get("test", {}))] = path.parent
    known = [replace(run, folder=rows.get(run.identity, run.folder)) for run in runs]
    made = [replace(trial, data=paper_name(trial)) for trial in trials(known)]
    found = {each.finding.number: each.cases for each in judge(made)}
    return {
        "runs": sorted(run.record.hash for run in known),
        "findings": {
            str(number): [asdict(_settled(case, rows, earlier.get(number, ()))) for case in cases]
            for number, cases in found.items()
        },
    }


def _settled(case: FindingCase, there: Collection[str], earlier: Iterable[FindingCase]) -> FindingCase:
    """The case where it could be tested, else what was found of the same runs before, else the case left open."""
    if all(run in there for run in case.runs):
        return case
    untested = replace(case, supports=None, why=f"{case.why}; {UNTESTED}")
    return next((old for old in earlier if (old.name, old.runs) == (case.name, case.runs)), untested)


def read_decided(path: Path) -> tuple[set[str], dict[int, tuple[FindingCase, ...]]]:
    """The hashes of the runs that were looked at, and the cases of each finding; nothing where there is no file."""
    if not path.is_file():
        return set(), {}
    content = read_json(path)
    try:
        cases = {
            int(number): tuple(FindingCase(**(case | {"runs": tuple(case["runs"])})) for case in found)
            for number, found in content["findings"].items()
        }
        return set(content["runs"]), cases
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManymaxError(f"{path} does not hold findings: {error!r}. Write it again.") from None
