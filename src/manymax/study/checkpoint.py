"""A checkpoint: one safetensors file with tensors and, in its metadata, where the run stands."""

from __future__ import annotations

import dataclasses
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

FORMAT = "manymax checkpoint 1"

Tensors = dict[str, Tensor]


@dataclass
class TrainingState:
    """Where a run stands: with the tensors, all that the rest of the run depends on.

    Generators are not in it: each step's are made anew from the seed, the purpose and the step.

    epoch, batch: finished epochs, and batches done of the one that is under way.
    step: batches since the beginning.
    total_loss: sum over the batches of this epoch.
    best_epoch, best_value: of the monitored metric; 0 and None before the first evaluation.
    waited: evaluations since then.
    rows: one for each finished epoch, as in `epochs.parquet`.
    seconds: spent so far, by purpose; `epoch_seconds`: in training of this epoch.
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


def write_tensors(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Write tensors and what is to be known about them as one file, whole."""
    own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about | {"crc32": _checksum(own)})
    with atomic_write(path) as partial:
        partial.write_bytes(save(own, metadata={"about": text}))  # one entry: the order of several is random


def read_tensors(path: Path, kind: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the metadata of a file; an error that says what is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if about["crc32"] != _checksum(tensors):
            raise ValueError("the checksum is another")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ManymaxError(f"{path} is no {kind} of manymax, or damaged ({error}).") from None
    return tensors, about


def _checksum(tensors: Tensors) -> str:
    """crc32 of the tensors' bytes in the order of their names."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    """The same tensors under longer names."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def part(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names begin with the prefix, without it."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def snapshot(model: nn.Module) -> Tensors:
    """A copy of everything that the model has learned."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensors:
    """The optimiser's state by the names of the parameters: "moment/parameter"."""
    return {
        f"{kind}/{name}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors) -> None:
    """Put a state back that `optimizer_tensors` took out."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        kind, _, parameter = name.partition("/")
        optimizer.state[parameters[parameter]][kind] = value


def save_checkpoint(path: Path, content_hash: str, state: TrainingState, tensors: Tensors) -> None:
    """Write the state of a run whole."""
    about = {"format": FORMAT, "hash": content_hash, "standing": dataclasses.asdict(state)}
    write_tensors(path, tensors, about)


def load_checkpoint(path: Path, content_hash: str) -> tuple[TrainingState, Tensors]:
    """The state of a run; an error if it is damaged or belongs to another one."""
    try:
        tensors, about = read_tensors(path, "checkpoint")
    except ManymaxError as error:
        raise ManymaxError(f"{error} Remove it to begin again.") from None
    if about.get("format") != FORMAT or about.get("hash") != content_hash:
        raise ManymaxError(f"{path} belongs to another run or another version. Remove it to begin again.")
    return TrainingState(**about["standing"]), tensors


def read_training_state(path: Path) -> TrainingState | None:
    """Where a run stood at its checkpoint, without reading the tensors; None where there is none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return TrainingState(**json.loads((file.metadata() or {})["about"])["standing"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
