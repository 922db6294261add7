"""`findings.json`: what the tests behind the findings said, for runs whose users are not kept.

The findings are decided by tests that are paired over users, and the rows of users are not kept with the records of
runs. The file holds what those tests said, with the hashes of the runs that were looked at, so that more runs can be
added when the users of the first runs are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from manymax.errors import ManymaxError
from manymax.paper.findings import FindingCase, judge
from manymax.paper.printed import paper_name
from manymax.study.files import read_json, read_sealed
from manymax.study.records import USER_METRICS, kept_file
from manymax.study.report.collect import records_below
from manymax.study.report.runs import Run, identity
from manymax.study.report.trials import trials

FINDINGS_FILE = "findings.json"
UNTESTED = "not tested yet"


def decide(
    runs: Iterable[Run], originals: Sequence[Path], earlier: Mapping[int, Sequence[FindingCase]]
) -> dict[str, Any]:
    """Judge the findings by the runs; the result is the content of `findings.json`.

    A case that compares users is tested where the users of all its runs are below `originals`. Where they are not, what
    the same test said earlier still holds; a case without either is open. A data set has the paper's name in whichever
    form it was used, because findings compare backbones with one another and these can need different forms.

    Args:
        runs: all runs that count.
        originals: folders with run folders, which hold the users.
        earlier: {number of the finding: cases} of the file as it is.
    """
    folders = folders_with_users(originals)
    known = [replace(run, folder=folders.get(run.identity, run.folder)) for run in runs]
    made = [replace(trial, data=paper_name(trial)) for trial in trials(known)]
    found = {each.finding.number: each.cases for each in judge(made)}
    return {
        "runs": sorted(run.record.hash for run in known),
        "findings": {
            str(number): [asdict(_settled(case, folders, earlier.get(number, ()))) for case in cases]
            for number, cases in found.items()
        },
    }


def folders_with_users(originals: Sequence[Path]) -> dict[str, Path]:
    """{identity: run folder} of the runs below `originals` that hold the metrics of their users."""
    found = {}
    for path in (path for folder in originals for path in records_below(folder)):
        if kept_file(path.parent, USER_METRICS).is_file():
            content = read_sealed(path)
            found[identity(content.get("hash", ""), content.get("test", {}))] = path.parent
    return found


def _settled(case: FindingCase, with_users: Collection[str], earlier: Iterable[FindingCase]) -> FindingCase:
    """The case if it could be tested, else the earlier case of the same name and runs, else the case left open."""
    if all(run in with_users for run in case.runs):
        return case
    untested = replace(case, supports=None, why=f"{case.why}; {UNTESTED}")
    return next((old for old in earlier if (old.name, old.runs) == (case.name, case.runs)), untested)


def read_decided(path: Path) -> tuple[set[str], dict[int, tuple[FindingCase, ...]]]:
    """The hashes of the runs that were looked at, and {number of the finding: cases}; both empty without a file."""
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
        raise ManymaxError(
            f"{path} does not hold findings: {error!r}. Write it again with `manymax reproduction --runs FOLDER`."
        ) from None
