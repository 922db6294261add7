"""Records small enough to be kept with the code: outcomes and curves without weights, users or paths of a machine.

A collected run is a folder named by its hash, with `record.json`, `epochs.parquet` and, of a probed model,
`probe.json`. The rows of users stay behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.files import atomic_write, read_json, write_json
from manymax.study.records import EPOCHS, PROBE, RECORD, Record
from manymax.study.run_options import with_source

ENDED = ("done", "diverged")  # the others go on when they are started again
DIGITS = 4  # significant ones of what was probed: it is drawn, not computed with


def collect(folders: Sequence[Path], into: Path) -> list[Path]:
    """Copy the records and curves of the runs below `folders` that have ended.

    Args:
        folders: of studies, or of single runs.
        into: a folder of a study; made if it is not there. A run of the same hash in it is replaced.

    Returns:
        The folders of the copies, one a run.
    """
    found = [path.parent for folder in folders for path in records_below(folder)]
    records = {place: portable(read_json(place / RECORD), place) for place in found}
    ended = {place: record for place, record in records.items() if record.status in ENDED}
    try:
        return [_copy(place, record, into / record.hash) for place, record in ended.items()]
    except OSError as error:
        raise ManymaxError(f"{into} cannot be written to: {error.strerror or error}.") from None


def records_below(folder: Path) -> list[Path]:
    """The files of the records of all runs below a folder."""
    if not folder.is_dir():
        raise ArgumentError(f"`folders` must be folders with runs; got {str(folder)!r}, which is none.")
    return sorted(folder.rglob(RECORD))


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
        with atomic_write(target / EPOCHS) as partial:
            shutil.copyfile(place / EPOCHS, partial)
    if (place / PROBE).is_file() and (probe := read_json(place / PROBE)):
        with atomic_write(target / PROBE) as partial:
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
