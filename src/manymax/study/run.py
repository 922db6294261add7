"""One run: from settings to a folder with a trained model and its record.

The files of the folder are described in `records.py`. `settings.json` is written first and `record.json` last, each
file atomically, so that the folder of a run that was killed at any moment is in one of these states:

    settings.json missing                     nothing was done; the run begins
    settings.json, no checkpoint              the run begins again, with the same result
    settings.json and checkpoint              the run continues from the checkpoint
    record.json that is final                 the run is finished and is not done again
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.backbones import BACKBONES
from manymax.study.backbones.base import Settings
from manymax.study.checkpoint import load_optimizer, optimizer_tensors, read_tensors
from manymax.study.config import RunConfig
from manymax.study.data.interactions import PARTS, Split
from manymax.study.data.load import changed_files
from manymax.study.data.prepare import Prepared, prepare
from manymax.study.files import LOCK, is_partial, locked, read_json, remove_partial, write_json
from manymax.study.groups import GRADIENT
from manymax.study.metrics import METRICS
from manymax.study.parallel import Team
from manymax.study.records import (
    CHECKPOINT,
    ITEMS,
    MODEL,
    RECORD,
    SETTINGS_FILE,
    USER_ITEMS,
    Record,
    Status,
    checked_file,
    new_record,
    read_record,
    read_vocabulary,
    write_record,
)
from manymax.study.run_head import build_head, choose_backend
from manymax.study.run_options import LATER_OPTIONS, flat
from manymax.study.run_outcome import evaluate_part, test_best, write_outcome
from manymax.study.seeds import generator
from manymax.study.supervisor import Diverged, ProgressReporter, Pruned, Stopped, TrainingSupervisor
from manymax.study.train import Model, build_optimizer, follow, train
from manymax.study.train_als import train_als

CHECKPOINT_SECONDS = 10.0  # default of the least time between two checkpoints: what a killed run loses at most


def run(
    config: RunConfig,
    folder: Path,
    *,
    progress: ProgressReporter | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    prepared: Prepared | None = None,
    team: Team | None = None,
) -> Record:
    """Train a model, test it and write its record to `folder`; what the folder holds already is not done again.

    If the run in the folder is finished, its record is returned. If it was interrupted, it continues from its
    checkpoint. A folder that belongs to other settings is an error. However the process ends, each file of the folder
    is complete.

    Args:
        config: the settings.
        folder: for this run only; created if it does not exist.
        progress: is told about batches and epochs.
        checkpoint_seconds: least number of seconds between two checkpoints.
        prepared: the data of `config`, if the caller has it already.
        team: the ranks that share each batch. This process is the first of them; the others call `follow_run`.

    Returns:
        The record; its status is "done", "diverged", "pruned" or "stopped".

    Raises:
        ManymaxError: the run cannot be done in this folder. Later errors are recorded as "failed", then raised.
    """
    team = team or Team()
    if team.size > 1 and config.training.solver != GRADIENT:
        raise ArgumentError(f"`solver={config.training.solver!r}` works in one process: start it without torchrun.")
    if team.size > 1 and config.keeps_pairs:
        raise ArgumentError(
            f"`{config.member.per_pair}` works in one process, which sees every step of a pair: start it without"
            " torchrun."
        )
    if (found := finished(config, folder)) is not None:  # before the data is prepared, which may take minutes
        _clear_remains(folder)
        return found
    choose_backend(config, folder / CHECKPOINT)  # an error now, if there is one, rather than after these minutes
    start, reporter = time.perf_counter(), progress or ProgressReporter()
    with _torch_threads(config.machine.threads):
        reporter.reading(config)
        prepared = prepared or prepare_data(config)
        reporter.prepared(config, prepared.card, prepared.split.num_items)
        seconds = time.perf_counter() - start
        # The lock is taken after the data is prepared: an error in the data leaves no folder behind.
        with locked(folder):
            if (found := finished(config, folder)) is not None:  # another process has finished it in the meantime
                return found
            remove_partial(folder)
            _write_or_check_settings(config, folder, prepared)
            backend = choose_backend(config, folder / CHECKPOINT)
            try:
                return _train_and_test(config, folder, prepared, reporter, checkpoint_seconds, seconds, team, backend)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                failed = new_record(config, "failed", reason=reason, card=prepared.card, backend=backend)
                with contextlib.suppress(OSError):  # the disk may be full, and that may be the error
                    write_record(folder, failed)
                raise


def finished(config: RunConfig, folder: Path) -> Record | None:
    """The record of the run in `folder` if it is finished; None if there is something left to do.

    Raises:
        ManymaxError: the folder belongs to a run with other settings, or holds other files.
    """
    if folder.exists() and not folder.is_dir():
        raise ManymaxError(f"{folder} is a file: choose another folder for the run.")
    if (folder / SETTINGS_FILE).exists():
        _check_same(config, folder)
    elif folder.exists() and any(path.name != LOCK and not is_partial(path) for path in folder.iterdir()):
        raise ManymaxError(f"{folder} holds other files and not a run: choose another folder.")
    if not (folder / RECORD).exists():
        return None
    record = read_record(folder)
    if not record.final:
        return None
    check_data_files(config, record, folder)
    return record


def _clear_remains(folder: Path) -> None:
    """Delete what a process killed just after the record was written has left behind, if the folder can be written."""
    if (folder / CHECKPOINT).exists():
        with contextlib.suppress(ManymaxError, OSError), locked(folder):
            remove_partial(folder)
            (folder / CHECKPOINT).unlink(missing_ok=True)


def check_data_files(config: RunConfig, record: Record, folder: Path) -> None:
    """Raise an error if the data files of a finished run have changed since: its numbers are of the old content."""
    files: dict[str, str] = next((step["files"] for step in record.card or () if "files" in step), {})
    if changed := changed_files(config.data.source, files, config.data.table_options):
        raise ManymaxError(
            f"{', '.join(changed)} has changed since the run in {folder} was finished: choose another folder, or remove"
            " this one."
        )


def _check_same(config: RunConfig, folder: Path) -> None:
    """Raise an error that names the settings in which `config` differs from the run in `folder`."""
    stored = read_json(folder / SETTINGS_FILE)
    if not isinstance(stored, Mapping) or not isinstance(stored.get("settings"), Mapping):
        raise ManymaxError(f"{folder / SETTINGS_FILE} holds no settings of a run. Remove it, or choose another folder.")
    if stored.get("hash") == config.content_hash():
        return
    now, before = config.flat(), {**LATER_OPTIONS, **flat(stored["settings"])}
    different = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    raise ManymaxError(
        f"{folder} holds a run with other settings ({', '.join(different) or 'another version'}): choose another"
        " folder."
    )


def _write_or_check_settings(config: RunConfig, folder: Path, prepared: Prepared) -> None:
    """Write `settings.json` of a new run; for one that is resumed, check that its data has not changed since.

    From here on the folder belongs to this run. A checkpoint of other data would have tensors of other sizes, or item
    numbers of another meaning.
    """
    data = fingerprint(prepared.split)
    if not (folder / SETTINGS_FILE).exists():
        content = {"hash": config.content_hash(), "data": data, "settings": config.nested()}
        write_json(folder / SETTINGS_FILE, content)
    elif read_json(folder / SETTINGS_FILE).get("data") != data:
        raise ManymaxError(f"the data has changed since the run in {folder} was started: choose another folder.")


def fingerprint(split: Split) -> str:
    """16 hex digits that identify the data: a hash of the item numbers of all users in the three parts."""
    digest = hashlib.sha256(str(split.num_items).encode())
    for part in PARTS:
        lists = getattr(split, part)
        digest.update(lists.offsets.numpy().tobytes())
        digest.update(lists.items.numpy().tobytes())
    return digest.hexdigest()[:16]


def prepare_data(config: RunConfig) -> Prepared:
    """Read, filter and split the data that `config` names."""
    return prepare(config.data.source, seed=config.seed, **config.data.model_dump(exclude={"source"}))


def build_model(config: RunConfig, split: Split, backend: str = "auto") -> Model:
    """The model of a run before training, with its random first weights."""
    # Weights are drawn from generators of their own. Layers of torch also fill their weights from the global generator
    # when they are created, before these are overwritten; a fixed seed makes even that the same in every run.
    torch.manual_seed(0)
    settings = cast(Settings, SimpleNamespace(**config.flat()))
    backbone = BACKBONES[config.backbone.name].build(split, settings, generator(config.seed, "init"))
    held = split.num_users if config.loss.bound_epochs else 0
    return Model(backbone, build_head(config, split, backend), held)


def follow_run(team: Team) -> None:
    """The work of the other ranks while the first rank is in `run`: train on their rows of each batch.

    They read and write no files: settings, data, weights and the optimiser's state come from the first rank, which may
    have them from a checkpoint.
    """
    task = team.receive_task()
    if task is None:  # the first rank found the run finished, or failed before training
        return
    config = RunConfig(**task["settings"])
    with _torch_threads(config.machine.threads):
        model = build_model(config, task["split"], task["backend"])
        optimizer = build_optimizer(config, model)
        model.load_state_dict(task["model"])
        load_optimizer(optimizer, model, task["optimizer"])
        follow(model, optimizer, task["split"], config, team)


def _send_task(
    team: Team, config: RunConfig, split: Split, model: Model, optimizer: torch.optim.Optimizer, backend: str
) -> None:
    """Send the other ranks all that `follow_run` needs."""
    state = {"model": model.state_dict(), "optimizer": optimizer_tensors(optimizer, model)}
    team.send_task({"settings": config.nested(), "split": split, "backend": backend, **state})


def _train_and_test(
    config: RunConfig,
    folder: Path,
    prepared: Prepared,
    progress: ProgressReporter,
    checkpoint_seconds: float,
    seconds: float,
    team: Team,
    backend: str,
) -> Record:
    """Train, test the best weights and write the record; the caller holds the lock of the folder.

    Args:
        seconds: how long the preparation of the data took.
        backend: as `choose_backend` gives it.
    """
    if METRICS[config.monitored.partition("@")[0]].of == "truth" and prepared.truth is None:
        raise ArgumentError(
            f"`monitor` {config.monitored!r} needs the true p(item | user) of the data, which is known for planted data"
            " only."
        )
    split, model = prepared.split, build_model(config, prepared.split, backend)
    optimizer = build_optimizer(config, model) if config.training.solver == GRADIENT else None
    supervisor = TrainingSupervisor(
        config,
        model,
        lambda: evaluate_part(config, model, prepared, "valid").mean,
        folder / CHECKPOINT,
        progress=progress,
        checkpoint_seconds=checkpoint_seconds,
        optimizer=optimizer,
    )
    supervisor.state.seconds.setdefault("preparing", seconds)
    supervisor.state.backend = backend
    status: Status = "done"
    reason = None
    progress.begin(config, folder, supervisor.state)
    try:
        with supervisor.stop_on_signals():
            if optimizer is None:
                train_als(model, split, supervisor)
            else:
                # After the supervisor has restored the checkpoint, if there is one: the other ranks get that state.
                _send_task(team, config, split, model, optimizer, backend)
                train(model, optimizer, split, supervisor, team)
    except Diverged as diverged:
        status, reason = "diverged", str(diverged)
    except Pruned as pruned:
        status, reason = "pruned", str(pruned)
    except Stopped as stopped:
        status, reason = "stopped", str(stopped)
    finally:
        progress.end()
    # A diverged run is tested too, with the best weights of before. A process killed while testing leaves the last
    # checkpoint of the training and no final record: the next start trains the few remaining steps and tests again.
    outcome = {} if status in ("stopped", "pruned") else test_best(supervisor, model, folder, prepared)
    return write_outcome(supervisor, folder, prepared, status=status, reason=reason, **outcome)


@contextlib.contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads while the block runs; as many as before if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_model(folder: Path) -> tuple[RunConfig, Model, list[Any], list[Any], Split]:
    """Load a finished run.

    Returns:
        The settings, the model with its best weights in evaluation mode, the user ids and the item ids of the data, and
        the split.
    """
    record = read_record(folder)
    if record.status != "done" and not (folder / MODEL).exists():
        raise ManymaxError(f"{folder} holds no trained model: its run is {record.status} ({record.reason}).")
    config = RunConfig(**record.settings)
    for name in (USER_ITEMS, ITEMS, MODEL):
        checked_file(folder, record, name)
    try:
        user_ids, item_ids, split = read_vocabulary(folder)
        tensors, _ = read_tensors(folder / MODEL, "model")
        model = build_model(config, split)
        model.load_state_dict(tensors)
    except (ManymaxError, RuntimeError, KeyError) as error:
        raise ManymaxError(
            f"the model in {folder} cannot be used: {error} Remove {RECORD} there and train again: the same settings "
            "give the same model."
        ) from None
    return config, model.eval(), user_ids, item_ids, split
