"""Keep what is worth publishing of finished runs: outcomes and curves, no weights, no users, no paths of a machine.

Run folders are read, those of version 0.1.0 too, and files of kept runs (`manymax.study.record_files`), which is also
what is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.files import read_sealed
from manymax.study.record_files import KEPT_SUFFIX, KeptRun, check_suffix, read_all_runs, write_runs
from manymax.study.records import EPOCHS, RECORD, Record, checked_file, read_probe, read_table
from manymax.study.run_options import with_source

PROBE_DIGITS = 4  # significant digits of what was probed, which is drawn and not computed with


@dataclass(frozen=True)
class CollectResult:
    """What `collect` did: runs that are new in the file, runs that took the place of an older one, runs left out."""

    new: tuple[KeptRun, ...]
    replaced: tuple[KeptRun, ...]
    left_out: int
    total: int

    @property
    def kept(self) -> tuple[KeptRun, ...]:
        """All runs that were written on this occasion."""
        return self.new + self.replaced


def collect(sources: Sequence[Path], into: Path, *, curves: bool = True) -> CollectResult:
    """Add the records and curves of the finished runs below `sources` to a file of kept runs.

    A run of the same settings (`record.hash`) that is in the file already is replaced. Runs that did not come to an end
    (stopped or failed) are left out: they go on when they are started again. If anything cannot be read, the file stays
    as it is.

    Args:
        sources: folders of studies or of single runs, or files of kept runs.
        into: the file; made if it is not there.
        curves: whether curves are kept; those of the trials of a search would be most of the file.

    Returns:
        What was added, replaced and left out.
    """
    check_suffix("into", into)
    before = {run.record.hash: run for run in read_all_runs(into)} if into.exists() else {}
    found = [run for source in sources for run in _runs_below(source)]
    ended = {run.record.hash: run if curves else replace(run, epochs={}) for run in found if run.record.final}
    after = before | ended
    if ended:
        write_runs(into, after.values())
    return CollectResult(
        new=tuple(run for key, run in ended.items() if key not in before),
        replaced=tuple(run for key, run in ended.items() if key in before),
        left_out=sum(not run.record.final for run in found),
        total=len(after),
    )


def _runs_below(source: Path) -> Iterator[KeptRun]:
    if source.is_file() and source.suffix == KEPT_SUFFIX:
        yield from read_all_runs(source)
    else:
        yield from (_portable_run(path.parent) for path in records_below(source))


def records_below(folder: Path) -> list[Path]:
    """The `record.json` files of all runs below a folder."""
    if not folder.is_dir():
        raise ArgumentError(
            f"`folders` must be folders with runs, or {KEPT_SUFFIX} files of kept runs; got {str(folder)!r}."
        )
    return sorted(folder.rglob(RECORD))


def _portable_run(folder: Path) -> KeptRun:
    """What is kept of a run folder."""
    record = portable(read_sealed(folder / RECORD), folder)
    path = checked_file(folder, record, EPOCHS)
    epochs = read_table(path).to_pydict() if path.is_file() else {}
    # The checksums are those of files that stay where they are.
    return KeptRun(record.model_copy(update={"files": {}}), epochs, _rounded(read_probe(folder)))


def portable(content: dict[str, Any], folder: Path) -> Record:
    """The record of a run folder without paths: the data source is the name of its file alone.

    A field that this version of `Record` does not have is dropped where it is empty. Where it is not, dropping it would
    lose something, which is an error.
    """
    try:
        unknown = {name: value for name, value in content.items() if name not in Record.model_fields}
        known = {name: value for name, value in content.items() if name in Record.model_fields}
        settings = with_source(known["settings"], _file_name)
        record = Record(**(known | {"settings": settings}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ManymaxError(f"{folder / RECORD} is no record of a run: {error!r}.") from None
    if lost := [name for name, value in unknown.items() if value]:
        raise ManymaxError(f"{folder / RECORD} holds {', '.join(lost)}, which this version of manymax does not know.")
    return record


def _file_name(source: str) -> str:
    """The last part of a path of any operating system.

    >>> _file_name("data/ml-1m.parquet"), _file_name("planted")
    ('ml-1m.parquet', 'planted')
    """
    return PureWindowsPath(PurePosixPath(source).name).name


def _rounded(value: Any) -> Any:
    """`value` with every float in it rounded to a few significant digits.

    >>> _rounded({"a": [0.123456, 1e-9, 3]})
    {'a': [0.1235, 1e-09, 3]}
    """
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{PROBE_DIGITS}g}") if isinstance(value, float) else value
