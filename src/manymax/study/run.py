"""One run: settings in, a folder with its record out. Starting it again goes on where it stood."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.backbones import BACKBONES
from manymax.study.backbones.base import Settings
from manymax.study.checkpoint import load_optimizer, optimizer_tensors, read_tensors, write_tensors
from manymax.study.config import RunConfig
from manymax.study.data.interactions import PARTS, Split
from manymax.study.data.load import changed
from manymax.study.data.prepare import Prepared, prepare
from manymax.study.evaluate import Evaluation, evaluate, popularity
from manymax.study.files import LOCK, is_partial, locked, read_json, remove_partial, write_json
from manymax.study.groups import GRADIENT
from manymax.study.metrics import METRICS
from manymax.study.parallel import Team
from manymax.study.records import (
    CHECKPOINT,
    MODEL,
    RECORD,
    SETTINGS,
    Record,
    Status,
    new_record,
    read_record,
    read_vocabulary,
    write_epochs,
    write_record,
    write_users,
    write_vocabulary,
)
from manymax.study.run_head import build_head
from manymax.study.run_options import flat
from manymax.study.seeds import generator
from manymax.study.supervisor import Diverged, ProgressReporter, Stopped, TrainingSupervisor
from manymax.study.train import Model, build_optimizer, follow, train
from manymax.study.train_als import train_als

CHECKPOINT_SECONDS = 10.0


def run(
    config: RunConfig,
    folder: Path,
    *,
    progress: ProgressReporter | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    prepared: Prepared | None = None,
    team: Team | None = None,
) -> Record:
    """Train, evaluate and record; what is there already is not done again.

    A finished folder answers with its record, an interrupted one goes on from its checkpoint, and one that belongs to
    other settings is an error. However the process ends, each file of the folder is whole.

    Args:
        config: the settings.
        folder: of this run alone; made if it is not there.
        progress: hears of steps and epochs.
        checkpoint_seconds: at least this much time between two checkpoints.
        prepared: the data of `config`, where the caller has it already.
        team: the ranks that share the work, of which this one is the first; the others are at `assist`.

    Returns:
        The record; its status is "done", "diverged" or "stopped".
    """
    team = team or Team()
    if team.size > 1 and config.training.solver != GRADIENT:
        raise ArgumentError(f"`solver={config.training.solver!r}` works in one process: start it without torchrun.")
    if (found := finished(config, folder)) is not None:
        return found
    start = time.perf_counter()
    with _threads(config.machine.threads):
        prepared = prepared or prepare_data(config)
        seconds = time.perf_counter() - start
        with locked(folder):
            if (found := finished(config, folder)) is not None:  # another process was faster
                return found
            remove_partial(folder)
            _claim(config, folder, prepared)
            try:
                return _run(config, folder, prepared, progress or ProgressReporter(), checkpoint_seconds, seconds, team)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError):  # a disk that is full
                    write_record(folder, new_record(config, "failed", reason=reason, card=prepared.card))
                raise


def finished(config: RunConfig, folder: Path) -> Record | None:
    """The record of a run that need not be done again; None if there is something to do.

    An error if the folder belongs to another run, or is no folder of a run at all.
    """
    if folder.exists() and not folder.is_dir():
        raise ManymaxError(f"{folder} is a file: choose another folder for the run.")
    if (folder / SETTINGS).exists():
        _check_same(config, folder)
    elif folder.exists() and any(path.name != LOCK and not is_partial(path) for path in folder.iterdir()):
        raise ManymaxError(f"{folder} holds other files and no run: choose another folder.")
    if not (folder / RECORD).exists():
        return None
    record = read_record(folder)
    if not record.final:
        return None
    check_files(config, record, folder)
    return record


def check_files(config: RunConfig, record: Record, folder: Path) -> None:
    """Raise if the files that a finished run was of have other content now: its numbers are not theirs."""
    files: dict[str, str] = next((step["files"] for step in record.card or () if "files" in step), {})
    if others := changed(config.data.source, files, config.data.columns):
        raise ManymaxError(
            f"{', '.join(others)} has changed since the run in {folder} was finished: choose another folder, or remove"
            " this one."
        )


def _check_same(config: RunConfig, folder: Path) -> None:
    there = read_json(folder / SETTINGS)
    if not isinstance(there, Mapping) or not isinstance(there.get("settings"), Mapping):
        raise ManymaxError(f"{folder / SETTINGS} holds no settings of a run. Remove it, or choose another folder.")
    if there.get("hash") == config.content_hash():
        return
    now, before = config.flat(), flat(there["settings"])
    others = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    raise ManymaxError(
        f"{folder} holds a run with other settings ({', '.join(others) or 'another version'}): choose another folder."
    )


def _claim(config: RunConfig, folder: Path, prepared: Prepared) -> None:
    """Write the settings, or see that data has not changed since they were written."""
    data = fingerprint(prepared.split)
    if not (folder / SETTINGS).exists():
        content = {"hash": config.content_hash(), "data": data, "settings": config.nested()}
        write_json(folder / SETTINGS, content)
    elif read_json(folder / SETTINGS).get("data") != data:
        raise ManymaxError(f"the data has changed since the run in {folder} began: choose another folder.")


def fingerprint(split: Split) -> str:
    """16 hex digits of the numbered interactions in their three parts."""
    digest = hashlib.sha256(str(split.num_items).encode())
    for part in PARTS:
        lists = getattr(split, part)
        digest.update(lists.offsets.numpy().tobytes())
        digest.update(lists.items.numpy().tobytes())
    return digest.hexdigest()[:16]


def prepare_data(config: RunConfig) -> Prepared:
    """The data of a run."""
    data = config.data
    return prepare(
        data.source,
        columns=data.columns,
        preset=data.preset,
        min_rating=data.min_rating,
        k_core=data.k_core,
        split=data.split,
        seed=config.seed,
        size=data.size,
        name=data.name,
    )


def build_model(config: RunConfig, split: Split) -> Model:
    """The model of a run before training."""
    torch.manual_seed(0)  # whatever is not drawn from a generator of its own is the same in every run
    settings = cast(Settings, SimpleNamespace(**config.flat()))
    backbone = BACKBONES[config.backbone.name].build(split, settings, generator(config.seed, "init"))
    return Model(backbone, build_head(config, split))


def assist(team: Team) -> None:
    """What the other ranks do while the first is at `run`: their part of the training, with what it sends them."""
    task = team.task()
    if task is None:
        return
    config = RunConfig(**task["settings"])
    with _threads(config.machine.threads):
        model = build_model(config, task["split"])
        optimizer = build_optimizer(config, model)
        model.load_state_dict(task["model"])
        load_optimizer(optimizer, model, task["optimizer"])
        follow(model, optimizer, task["split"], config, team)


def _begin(team: Team, config: RunConfig, split: Split, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Send the other ranks what they need; they read no file."""
    state = {"model": model.state_dict(), "optimizer": optimizer_tensors(optimizer, model)}
    team.begin({"settings": config.nested(), "split": split, **state})


def _run(
    config: RunConfig,
    folder: Path,
    prepared: Prepared,
    progress: ProgressReporter,
    checkpoint_seconds: float,
    seconds: float,
    team: Team,
) -> Record:
    """The run itself: train, test, write down."""
    if METRICS[config.monitored.partition("@")[0]].of == "truth" and prepared.truth is None:
        raise ArgumentError(f"`monitor` {config.monitored!r} needs the true law of the data: only planted data has it.")
    split, model = prepared.split, build_model(config, prepared.split)
    optimizer = build_optimizer(config, model) if config.training.solver == GRADIENT else None
    supervisor = TrainingSupervisor(
        config,
        model,
        lambda: _evaluate(config, model, prepared, "valid").mean,
        folder / CHECKPOINT,
        progress=progress,
        checkpoint_seconds=checkpoint_seconds,
        optimizer=optimizer,
    )
    supervisor.state.seconds.setdefault("preparing", seconds)
    status: Status = "done"
    reason = None
    progress.begin(config, folder, supervisor.state)
    try:
        with supervisor.stoppable():
            if optimizer is None:
                train_als(model, split, supervisor)
            else:
                _begin(team, config, split, model, optimizer)
                train(model, optimizer, split, supervisor, team)
    except Diverged as diverged:
        status, reason = "diverged", str(diverged)
    except Stopped as stopped:
        status, reason = "stopped", str(stopped)
    finally:
        progress.end()
    outcome = {} if status == "stopped" else _test(supervisor, model, folder, prepared)
    return _write(supervisor, folder, prepared, status=status, reason=reason, **outcome)


def _evaluate(config: RunConfig, model: Model, prepared: Prepared, part: str) -> Evaluation:
    return evaluate(
        model.backbone, model.head, prepared.split, part, cutoffs=config.evaluation.cutoffs, truth=prepared.truth
    )


def _test(supervisor: TrainingSupervisor, model: Model, folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Test the best weights, save them and what is needed to serve them; the metrics for the record."""
    config, split, found = supervisor.config, prepared.split, {}
    with supervisor.timed("testing"):
        baseline = popularity(split, "test", cutoffs=config.evaluation.cutoffs, truth=prepared.truth)
        found["popularity"] = _finite(baseline.mean)
        if supervisor.best:
            model.load_state_dict(supervisor.best)
            test = _evaluate(config, model, prepared, "test")
            found["test"] = _finite(test.mean)
            write_users(folder, prepared.interactions.user_ids[test.users.numpy()], test.per_user)
            write_tensors(folder / MODEL, supervisor.best, {"hash": config.content_hash()})
        write_vocabulary(folder, prepared.interactions.user_ids, prepared.interactions.item_ids, split)
    return found


def _write(supervisor: TrainingSupervisor, folder: Path, prepared: Prepared, **outcome: Any) -> Record:
    """Write epochs and record; a run that is over needs its checkpoint no more."""
    state, split = supervisor.state, prepared.split
    best = next((row for row in state.rows if row["epoch"] == state.best_epoch), {})
    record = new_record(
        supervisor.config,
        sizes={"users": split.num_users, "items": split.num_items}
        | {part: getattr(split, part).items.numel() for part in PARTS},
        card=prepared.card,
        epochs=state.epoch,
        best_epoch=state.best_epoch,
        valid=_finite({name: value for name, value in best.items() if "@" in name}),
        seconds=state.seconds,
        **outcome,
    )
    if state.rows:
        write_epochs(folder, state.rows)
    write_record(folder, record)
    if record.final:
        (folder / CHECKPOINT).unlink(missing_ok=True)
    return record


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON, which knows no nan."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_model(folder: Path) -> tuple[RunConfig, Model, list[Any], list[Any], Split]:
    """What serving needs of a finished run: its settings, its best weights, user ids, item ids and the split."""
    record = read_record(folder)
    if record.status != "done" and not (folder / MODEL).exists():
        raise ManymaxError(f"{folder} holds no trained model: its run is {record.status} ({record.reason}).")
    config = RunConfig(**record.settings)
    try:
        user_ids, item_ids, split = read_vocabulary(folder)
        tensors, _ = read_tensors(folder / MODEL, "model")
        model = build_model(config, split)
        model.load_state_dict(tensors)
    except (ManymaxError, RuntimeError, KeyError) as error:
        raise ManymaxError(
            f"the model in {folder} cannot be used: {error} Remove {RECORD} there and train once more: the same "
            "settings make the same model."
        ) from None
    return config, model.eval(), user_ids, item_ids, split
