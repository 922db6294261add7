"""The files of a run folder: JSON, Parquet and safetensors, readable without this package.

settings.json            the settings of the run; written first
checkpoint.safetensors   the state of training, while the run is under way
epochs.parquet           one row per epoch: loss, seconds, validation metrics
user_metrics.parquet     one row per test user: the user's id and metrics
user_items.parquet       one row per user, by the user's number: id, and item numbers in each part of the split
items.parquet            one row per item, by the item's number: id, and title where the data has titles
model.safetensors        the weights of the best epoch
record.json              the outcome; written last
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor, distributed

from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.data.interactions import PARTS, Lists, Split
from manymax.study.files import atomic_write, file_checksum, read_sealed, write_sealed
from manymax.study.memory import peak_memory_mb

SETTINGS_FILE, RECORD, CHECKPOINT, MODEL = "settings.json", "record.json", "checkpoint.safetensors", "model.safetensors"
EPOCHS, ITEMS = "epochs.parquet", "items.parquet"
USER_METRICS, USER_ITEMS = "user_metrics.parquet", "user_items.parquet"
# {file: its name in version 0.1.0}; runs of that version are read under the old names.
OLD_NAMES = {USER_METRICS: "users.parquet", USER_ITEMS: "people.parquet"}
PROBE, STUDY = "probe.json", "study.json"  # written by studies: the first in run folders, the second beside them

PROBED = {"gradients", "zero_share", "jacobian", "approximations", "error"}  # what the first may hold

Status = Literal["done", "diverged", "pruned", "stopped", "failed"]
Metrics = dict[str, float | None]
Ids = np.ndarray[Any, Any]


class Record(BaseModel):
    """The outcome of a run.

    status: "done"; "diverged" if the loss or a weight was no longer finite; "stopped" by Ctrl-C, and continued when it
        is started again; "pruned" if a search ended it early; "failed" with an error, and begun anew when it is started
        again.
    reason: why it did not end well.
    settings, hash: those of the `RunConfig`. Settings are nested; in records of version 0.1.0 they are flat. The
        function `flat` of `manymax.study.run_options` reads both.
    sizes: the numbers of users and items, and of interactions in each part of the split.
    card: the steps that prepared the data.
    epochs: how many were trained. best_epoch: the one whose weights were kept; 0 if there is none.
    valid, test: metrics of the best weights. popularity: test metrics of the popularity ranking.
    seconds: {purpose: seconds}: loading, training, evaluation, saving, and preparing the data.
    backend: "torch", or "native-" and the level of the native code that computed the loss; None in records of version
        0.1.0, and of a run that failed before it knew.
    files: {name: checksum} of the other files of the run; empty in records of version 0.1.0, whose files are read as
        they are.
    peak_memory_mb: of the process. training_memory_mb: what training took of it, beside data and model; None where the
        system does not tell, of solvers without steps and in older records.
    versions: of packages and Python. machine: system, processor, cores, threads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status
    reason: str | None = None
    settings: dict[str, Any]
    hash: str
    sizes: dict[str, int] = {}
    card: list[dict[str, Any]] = []
    epochs: int = 0
    best_epoch: int = 0
    valid: Metrics = {}
    test: Metrics = {}
    popularity: Metrics = {}
    seconds: dict[str, float] = {}
    backend: str | None = None
    files: dict[str, str] = {}
    peak_memory_mb: float | None = None
    training_memory_mb: float | None = None
    versions: dict[str, str]
    machine: dict[str, Any]

    @model_serializer(mode="wrap")
    def _without_unknown(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields without those that old records lack, where they are not known."""
        content: dict[str, Any] = serialise(self)
        unknown = [name for name in ("backend", "files", "training_memory_mb") if not getattr(self, name)]
        return {name: value for name, value in content.items() if name not in unknown}

    @property
    def final(self) -> bool:
        """Whether the run has come to an end: starting it again would only repeat it."""
        return self.status in ("done", "diverged", "pruned")


def new_record(config: RunConfig, status: Status, **fields: Any) -> Record:
    """A record with the settings of `config`, this machine and the installed versions; `fields` are the others."""
    return Record(
        status=status,
        settings=config.nested(),
        hash=config.content_hash(),
        versions={name: metadata.version(name) for name in ("manymax", "torch", "numpy")}
        | {"python": platform.python_version()},
        machine={"system": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count()}
        | {"threads": torch.get_num_threads()}
        | ({"ranks": distributed.get_world_size()} if distributed.is_initialized() else {}),
        peak_memory_mb=peak_memory_mb(),
        **fields,
    )


def _cpu() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write_record(folder: Path, record: Record) -> None:
    """Write `record.json`, the last file of a run."""
    write_sealed(folder / RECORD, record.model_dump(mode="json"))


def read_record(folder: Path) -> Record:
    """Read the record of a run folder; an error says what is wrong if there is none."""
    if not (path := folder / RECORD).exists():
        raise ManymaxError(f"{folder} holds no finished run: there is no {RECORD}.")
    try:
        return Record(**read_sealed(path))
    except (ValidationError, TypeError) as error:
        raise ManymaxError(f"{path} is no record of this version of manymax: {error}") from None


def kept_file(folder: Path, name: str) -> Path:
    """The path of a file of a finished run: the one with its name of version 0.1.0 if only that exists."""
    old = folder / OLD_NAMES.get(name, name)
    return old if old.exists() and not (folder / name).exists() else folder / name


def checksums(folder: Path) -> dict[str, str]:
    """The checksums of the files of a run that are there, but for the record, which has one of itself."""
    names = (EPOCHS, USER_METRICS, USER_ITEMS, ITEMS, MODEL)
    return {name: file_checksum(folder / name) for name in names if (folder / name).is_file()}


def checked_file(folder: Path, record: Record, name: str) -> Path:
    """The path of a file of a finished run; an error if it is not what the run wrote.

    Files of version 0.1.0, of which the record has no checksum, are taken as they are.
    """
    path = kept_file(folder, name)
    if name in record.files and (not path.is_file() or file_checksum(path) != record.files[name]):
        what = "has changed" if path.is_file() else "has gone"
        raise ManymaxError(
            f"{path} {what} since its run ended, by the checksum it had. Get it back from a copy, or: Remove"
            f" {RECORD} there and train again; the same settings give the same files."
        )
    return path


def read_probe(folder: Path) -> dict[str, Any]:
    """What was measured of the model of a run, `probe.json`; empty where nothing was."""
    path = folder / PROBE
    content = read_sealed(path) if path.is_file() else {}
    if unknown := sorted(content.keys() - PROBED):
        raise ManymaxError(f"{path} is damaged: it holds {', '.join(unknown)}. Remove it to measure again.")
    return content


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Write {column: values} as a Parquet file; a crash leaves no partial file."""
    with atomic_write(path) as partial:
        pq.write_table(pa.table(dict(columns)), partial, compression="zstd")


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file; an error names a file that is missing or no Parquet."""
    if not path.exists():
        raise ManymaxError(f"{path} is missing.")
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ManymaxError(f"{path} cannot be read: {error}") from None


def write_epochs(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write {column: value} of each epoch; a value that an epoch lacks, as metrics without evaluation, is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    write_table(folder / EPOCHS, {name: [row.get(name) for row in rows] for name in names})


def write_users(folder: Path, ids: Ids, per_user: Mapping[str, Tensor]) -> None:
    """Write the metrics of each test user: ids (U,), and {metric: values (U,)}."""
    write_table(folder / USER_METRICS, {"user": ids} | {name: values.numpy() for name, values in per_user.items()})


def write_vocabulary(
    folder: Path, user_ids: Ids, item_ids: Ids, split: Split, item_titles: Sequence[str | None] | Ids | None = None
) -> None:
    """Write the ids of users and items in the order of their numbers, and each user's item numbers in each part."""
    titles = {} if item_titles is None else {"title": pa.array(item_titles, pa.large_string())}
    write_table(folder / ITEMS, {"item": item_ids, **titles})
    parts = {part: _list_array(getattr(split, part)) for part in PARTS}
    write_table(folder / USER_ITEMS, {"user": user_ids, **parts})


def _list_array(lists: Lists) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(lists.offsets.numpy()), pa.array(lists.items.numpy()))


def read_vocabulary(folder: Path) -> tuple[list[Any], list[Any], Split]:
    """Read the user ids, the item ids and the split of a run folder."""
    users, items = read_table(kept_file(folder, USER_ITEMS)), read_table(folder / ITEMS)
    lists = {part: _lists(users[part].combine_chunks()) for part in PARTS}
    return users["user"].to_pylist(), items["item"].to_pylist(), Split(**lists, num_items=items.num_rows)


def read_titles(folder: Path) -> list[str | None] | None:
    """Read the titles of the items of a run folder, in the order of their numbers; None if the data has no titles."""
    items = read_table(folder / ITEMS)
    return items["title"].to_pylist() if "title" in items.column_names else None


def _lists(column: pa.LargeListArray) -> Lists:
    return Lists(torch.tensor(column.offsets.to_numpy()), torch.tensor(column.flatten().to_numpy()))
