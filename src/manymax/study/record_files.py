"""Files of kept runs: JSON Lines, one file per study, one line per run.

A run folder holds weights, users and paths of the machine. What is kept of it in a file of this form is small and can
be published: a line is a JSON object with

    record   the content of the run's `record.json`
    epochs   {column: values}, the table `epochs.parquet`; one value per epoch, null where an epoch has none
    probe    the content of the run's `probe.json`; left out where the model was not probed

Floats are written with as many digits as bring back the same float. JSON has no numbers that are not finite, so these
are the strings "NaN", "Infinity" and "-Infinity". Lines are sorted by the hash of the settings, `record.hash`, which
no two lines of a file share: adding a run to a file under version control changes one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.files import atomic_write
from manymax.study.records import Record

KEPT_SUFFIX = ".jsonl"
NOT_FINITE = ("NaN", "Infinity", "-Infinity")

Number = int | float | None
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class KeptRun:
    """What is kept of one run: one line of a file."""

    record: Record
    epochs: Mapping[str, list[Number]] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, Array]:
        """{column: array} of the epochs: int64 where all values are integers, else float64 with nan for null."""
        return {
            name: np.array(values, dtype=np.int64 if all(isinstance(v, int) for v in values) else np.float64)
            for name, values in self.epochs.items()
        }


def check_suffix(name: str, path: Path) -> Path:
    """The path, if it is named like a file of kept runs; `name` is what the caller calls the argument."""
    if path.suffix != KEPT_SUFFIX:
        raise ArgumentError(f"`{name}` must be a file that ends in {KEPT_SUFFIX}, one line per run; got {str(path)!r}.")
    return path


def to_line(run: KeptRun) -> str:
    """One line, without its end.

    >>> from manymax.study.config import RunConfig
    >>> from manymax.study.records import new_record
    >>> run = KeptRun(new_record(RunConfig(), "done"), {"epoch": [1, 2], "loss": [0.1, float("inf")]})
    >>> to_line(run).rpartition('"epochs": ')[2]
    '{"epoch": [1, 2], "loss": [0.1, "Infinity"]}}'
    >>> from_line(to_line(run)) == run
    True
    """
    content = {"record": run.record.model_dump(mode="json"), "epochs": {k: _encoded(v) for k, v in run.epochs.items()}}
    if run.probe:
        content["probe"] = dict(run.probe)
    return json.dumps(content, allow_nan=False)


def _encoded(values: Iterable[Number]) -> list[Number | str]:
    return [json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def from_line(line: str | bytes) -> KeptRun:
    """The run of a line; a ValueError that says what is wrong with it."""
    content = json.loads(line, parse_constant=_refuse)
    if not isinstance(content, dict) or not {"record", "epochs"} <= set(content) <= {"record", "epochs", "probe"}:
        raise ValueError("it is no object of `record`, `epochs` and, if the model was probed, `probe`")
    record, epochs, probe = content["record"], content["epochs"], content.get("probe", {})
    if not all(isinstance(part, dict) for part in (record, epochs, probe)):
        raise ValueError("`record`, `epochs` and `probe` are not all objects")
    if not all(isinstance(values, list) for values in epochs.values()) or len(set(map(len, epochs.values()))) > 1:
        raise ValueError("the columns of `epochs` are not lists of one length")
    return KeptRun(Record(**record), {name: [_decoded(v) for v in values] for name, values in epochs.items()}, probe)


def _decoded(value: Any) -> Number:
    if value in NOT_FINITE:
        return float(value)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} in `epochs` is no number")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON: write it as a string")


def read_runs(path: Path) -> tuple[list[KeptRun], list[str]]:
    """The runs of a file, and a sentence for each line that cannot be read.

    Args:
        path: of a file of kept runs.

    Returns:
        The runs in the order of the lines, and for each damaged line the file, the line's number, what is wrong with
        it and what can be done.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # bytes: a line that is no UTF-8 leaves the others readable
    except OSError as error:
        raise ManymaxError(f"{path} cannot be read: {error.strerror or error}.") from None
    runs: list[KeptRun] = []
    damaged: list[str] = []
    first_with: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            run = from_line(line)
        except (ValueError, TypeError) as error:
            damaged.append(_damage(path, number, _reason(error)))
            continue
        if (first := first_with.setdefault(run.record.hash, number)) != number:
            damaged.append(_damage(path, number, f"it holds the run {run.record.hash}, as line {first} does"))
            continue
        runs.append(run)
    return runs, damaged


def _reason(error: Exception) -> str:
    """What is wrong, in one line; pydantic writes several."""
    if isinstance(error, ValidationError):
        return "its record is none of this version: " + "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
        )
    return " ".join(str(error).split())


def _damage(path: Path, number: int, reason: str) -> str:
    return (
        f"{path}, line {number}, is damaged: {reason}. Get the file from version control again, or remove the line "
        "and keep the run once more with `manymax records`."
    )


def read_all_runs(path: Path) -> list[KeptRun]:
    """The runs of a file of which every line can be read; otherwise an error that names the damaged lines."""
    runs, damaged = read_runs(path)
    if damaged:
        raise ManymaxError(" ".join(damaged))
    return runs


def write_runs(path: Path, runs: Iterable[KeptRun]) -> None:
    """Write the file whole, its lines sorted by hash; a crash leaves the old file or the new one."""
    lines = [to_line(run) + "\n" for run in sorted(runs, key=lambda run: run.record.hash)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_text("".join(lines), encoding="utf-8", newline="\n")
    except OSError as error:
        raise ManymaxError(f"{path} cannot be written: {error.strerror or error}.") from None
