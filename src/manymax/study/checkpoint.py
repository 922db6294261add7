"""Checkpoints: one safetensors file with the tensors of a run and, as JSON in its metadata, the `TrainingState`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from manymax.errors import ManymaxError
from manymax.study.files import atomic_write

FORMAT = "manymax checkpoint 1"  # checked when a checkpoint is loaded; a changed layout needs a new number

Tensors = dict[str, Tensor]


@dataclass
class TrainingState:
    """The progress of a run. With the tensors of the model and the optimiser it determines all remaining steps.

    Random generators are not part of it: every step makes its own from (seed, purpose, step), see `seeds.py`.

    epoch: number of finished epochs.
    batch: number of finished batches of the current epoch.
    step: number of finished batches since the beginning of the run.
    total_loss: sum of the losses of the finished batches of the current epoch.
    best_epoch, best_value: epoch and value of the best monitored metric; 0 and None before the first evaluation.
    waited: number of evaluations since the best one; early stopping compares it with `patience`.
    rows: one dict per finished epoch, the rows of `epochs.parquet`.
    seconds: time spent so far by purpose: {"training": ..., "evaluation": ..., ...}.
    epoch_seconds: not used any more; it stays because checkpoints of version 0.1.0 hold it.
    backend: "torch", or "native-" and a level: what the run began with and goes on with. None in checkpoints of version
        0.1.0.
    training_memory_mb: by how much the memory of the process grew in the first epoch that it trained.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    total_loss: float = 0.0
    best_epoch: int = 0
    best_value: float | None = None
    waited: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    epoch_seconds: float = 0.0
    backend: str | None = None
    training_memory_mb: float | None = None


def write_tensors(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Write tensors and the JSON object `about` as one safetensors file, atomically.

    A checksum of the tensors is added to `about`: safetensors itself would read changed bytes without an error.
    """
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    about = json.loads(json.dumps(about)) | {"crc32": _checksum(contiguous)}  # as a reader will see it
    text = json.dumps(about | {"sealed": _seal(contiguous, about)})
    with atomic_write(path) as partial:
        # One metadata entry that holds all of `about`: safetensors writes several entries in a random order, and equal
        # runs should leave equal files.
        partial.write_bytes(save(contiguous, metadata={"about": text}))


def read_tensors(path: Path, kind: str) -> tuple[Tensors, dict[str, Any]]:
    """Read a file of `write_tensors`.

    Args:
        path: of the file.
        kind: what the file should be, for the error message: "checkpoint" or "model".

    Returns:
        The tensors by name, and `about`.

    Raises:
        ManymaxError: the file is missing, damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        sealed = about.pop("sealed", None)  # files of version 0.1.0 have a checksum of their tensors alone
        if about["crc32"] != _checksum(tensors) or sealed not in (None, _seal(tensors, about)):
            raise ValueError("its checksum does not match its content")
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise ManymaxError(f"{path} is not a {kind} of manymax, or it is damaged ({error}).") from None
    return tensors, about


def _checksum(tensors: Tensors) -> str:
    """CRC-32 over the bytes of all tensors, in the order of their names, as 8 hex digits."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _seal(tensors: Tensors, about: dict[str, Any]) -> str:
    """SHA-256 of all but the numbers, which `crc32` is the checksum of: names, dtypes and shapes, and `about`."""
    layout = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    return hashlib.sha256(json.dumps([layout, about], sort_keys=True).encode()).hexdigest()


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    """The same tensors, each named "prefix.name"."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Tensors) -> Tensors:
    """The inverse of `prefixed`: the tensors named "prefix.name", under their names without the prefix."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def snapshot(model: nn.Module) -> Tensors:
    """A copy of the model's state, which later training steps do not change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensors:
    """The state of the optimiser, each tensor named "kind/parameter", for example "exp_avg/backbone.users.weight".

    `Optimizer.state_dict` numbers the parameters instead; names keep a checkpoint valid if their order changes.
    """
    return {
        f"{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors) -> None:
    """Restore the state that `optimizer_tensors` returned."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        kind, _, parameter = name.partition("/")
        optimizer.state[parameters[parameter]][kind] = value


def save_checkpoint(path: Path, content_hash: str, state: TrainingState, tensors: Tensors) -> None:
    """Write the checkpoint of the run whose settings have this hash; a kill meanwhile leaves the previous one."""
    # The key "standing" is that of version 0.1.0, whose checkpoints must load.
    about = {"format": FORMAT, "hash": content_hash, "standing": dataclasses.asdict(state)}
    write_tensors(path, tensors, about)


def load_checkpoint(path: Path, content_hash: str) -> tuple[TrainingState, Tensors]:
    """Read the checkpoint of the run whose settings have this hash.

    Raises:
        ManymaxError: the file is damaged, or belongs to a run with other settings.
    """
    try:
        tensors, about = read_tensors(path, "checkpoint")
    except ManymaxError as error:
        raise ManymaxError(f"{error} Remove it to begin again.") from None
    if about.get("format") != FORMAT or about.get("hash") != content_hash:
        raise ManymaxError(f"{path} belongs to another run or another version. Remove it to begin again.")
    return TrainingState(**about["standing"]), tensors


def read_training_state(path: Path) -> TrainingState | None:
    """The training state in a checkpoint, without reading its tensors; None if there is no readable checkpoint.

    For views of runs under way, possibly on another machine: a missing or damaged file is not an error there.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return TrainingState(**json.loads((file.metadata() or {})["about"])["standing"])
    # torch maps the file after a look at its size: one that is replaced in between is a RuntimeError.
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
        return None
