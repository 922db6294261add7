"""Records small enough to be kept with the code: outcomes and curves without weights, users or paths of a machine.

A collected run is a folder named by its hash, with `record.json`, `epochs.parquet` and, of a probed model,
`probe.json`. The findings are decided by tests that are paired over users, whose rows stay behind; `findings.json`
holds what those tests said, with the hashes of the runs that were looked at, so that more runs can be added when the
rows of the first are gone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from manymax.errors import ArgumentError, ManymaxError
from manymax.paper.findings import Case, judge
from manymax.study.config import with_source
from manymax.study.files import read_json, whole, write_json
from manymax.study.records import EPOCHS, PROBE, RECORD, USERS, Record
from manymax.study.report.runs import Run, Trial, data_name, identity, trials

FINDINGS = "findings.json"
UNTESTED = "not tested yet"
ENDED = ("done", "diverged")  # the others go on when they are started again
DIGITS = 4  # significant ones of what was probed: it is drawn, not computed with

# Names of files that hold a set of the paper in another form.
PAPER_NAMES = {"electronics_10core": "electronics", "electronics_sequences": "electronics"}


def collect(folders: Sequence[Path], into: Path) -> list[Path]:
    """Copy the records and curves of the runs below `folders` that have ended.

    Args:
        folders: of studies, or of single runs.
        into: a folder of a study; made if it is not there. A run of the same hash in it is replaced.

    Returns:
        The folders of the copies, one a run.
    """
    found = [path.parent for folder in folders for path in _below(folder, RECORD)]
    records = {place: portable(read_json(place / RECORD), place) for place in found}
    ended = {place: record for place, record in records.items() if record.status in ENDED}
    try:
        return [_copy(place, record, into / record.hash) for place, record in ended.items()]
    except OSError as error:
        raise ManymaxError(f"{into} cannot be written to: {error.strerror or error}.") from None


def _below(folder: Path, name: str) -> list[Path]:
    if not folder.is_dir():
        raise ArgumentError(f"`folders` must be folders with runs; got {str(folder)!r}, which is none.")
    return sorted(folder.rglob(name))


def portable(content: dict[str, Any], place: Path) -> Record:
    """A record without paths: the data set is the name of its file.

    Fields of other versions may go where they are empty; what they hold otherwise would be lost, which is an error.
    """
    try:
        unknown = {name: value for name, value in content.items() if name not in Record.model_fields}
        known = {name: value for name, value in content.items() if name in Record.model_fields}
        settings = with_source(known["settings"], _file_name)
        record = Record(**(known | {"settings": settings}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ManymaxError(f"{place / RECORD} is no record of a run: {error!r}.") from None
    if lost := [name for name, value in unknown.items() if value]:
        raise ManymaxError(f"{place / RECORD} holds {', '.join(lost)}, which this version of manymax does not know.")
    return record


def _file_name(data: str) -> str:
    """The last part of a path of any system.

    >>> _file_name("data/ml-1m.parquet"), _file_name("planted")
    ('ml-1m.parquet', 'planted')
    """
    return PureWindowsPath(PurePosixPath(data).name).name


def _copy(place: Path, record: Record, target: Path) -> Path:
    """The record goes last: a folder without it is no run."""
    target.mkdir(parents=True, exist_ok=True)
    (target / RECORD).unlink(missing_ok=True)
    if (place / EPOCHS).is_file():
        with whole(target / EPOCHS) as partial:
            shutil.copyfile(place / EPOCHS, partial)
    if (place / PROBE).is_file() and (probe := read_json(place / PROBE)):
        with whole(target / PROBE) as partial:
            partial.write_text(json.dumps(_rounded(probe)) + "\n", encoding="utf-8")
    write_json(target / RECORD, record.model_dump(mode="json"))
    return target


def _rounded(value: Any) -> Any:
    """Every number below `value` to a few significant digits.

    >>> _rounded({"a": [0.123456, 1e-9, 3]})
    {'a': [0.1235, 1e-09, 3]}
    """
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def paper_name(trial: Trial) -> str:
    """What the paper calls the data of a trial."""
    name = data_name(trial.settings).lower()
    return PAPER_NAMES.get(name, name)


def decide(runs: Iterable[Run], originals: Sequence[Path], earlier: Mapping[int, Sequence[Case]]) -> dict[str, Any]:
    """Judge the findings by the runs; the content of `findings.json`.

    A case that compares users is tested where the rows of all its runs are below `originals`. Where they are not, what
    the same test said `earlier` still holds; a case without either is open. A set has one name in whichever of its
    forms it was used: findings compare backbones with one another.
    """
    rows = {}
    for path in (path for folder in originals for path in _below(folder, RECORD) if path.with_name(USERS).is_file()):
        content = read_json(path)
        rows[identity(content.get("hash", ""), content.get("test", {}))] = path.parent
    known = [Run(rows.get(run.identity, run.folder), run.record) for run in runs]
    made = [replace(trial, data=paper_name(trial)) for trial in trials(known)]
    found = {each.finding.number: each.cases for each in judge(made)}
    return {
        "runs": sorted(run.record.hash for run in known),
        "findings": {
            str(number): [asdict(_settled(case, rows, earlier.get(number, ()))) for case in cases]
            for number, cases in found.items()
        },
    }


def _settled(case: Case, there: Collection[str], earlier: Iterable[Case]) -> Case:
    """The case where it could be tested, else what was found of the same runs before, else the case left open."""
    if all(run in there for run in case.runs):
        return case
    untested = replace(case, supports=None, why=f"{case.why}; {UNTESTED}")
    return next((old for old in earlier if (old.name, old.runs) == (case.name, case.runs)), untested)


def read_decided(path: Path) -> tuple[set[str], dict[int, tuple[Case, ...]]]:
    """The hashes of the runs that were looked at, and the cases of each finding; nothing where there is no file."""
    if not path.is_file():
        return set(), {}
    content = read_json(path)
    try:
        cases = {
            int(number): tuple(Case(**(case | {"runs": tuple(case["runs"])})) for case in found)
            for number, found in content["findings"].items()
        }
        return set(content["runs"]), cases
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManymaxError(f"{path} does not hold findings: {error!r}. Write it again.") from None
