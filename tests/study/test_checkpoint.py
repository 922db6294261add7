"""Checkpoints: everything is restored bit for bit, and damaged or foreign files are refused with a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from manymax.errors import ManymaxError
from manymax.study.checkpoint import (
    TrainingState,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    prefixed,
    read_tensors,
    save_checkpoint,
    unprefixed,
    write_tensors,
)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_resumed_optimiser_takes_the_same_steps(tmp_path: Path, seed: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    for _ in range(3):
        step(model, optimizer)
    state = TrainingState(epoch=1, batch=2, step=5, total_loss=0.1 + 0.2, best_value=1 / 3, rows=[{"epoch": 1}])
    tensors = prefixed("model", model.state_dict()) | prefixed("optimizer", optimizer_tensors(optimizer, model))
    save_checkpoint(tmp_path / "c.safetensors", "hash", state, tensors)

    again = nn.Linear(3, 2)
    second = torch.optim.Adam(again.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    found, saved = load_checkpoint(tmp_path / "c.safetensors", "hash")
    again.load_state_dict(unprefixed("model", saved))
    load_optimizer(second, again, unprefixed("optimizer", saved))
    assert found == state
    step(model, optimizer)
    step(again, second)
    assert torch.equal(model.weight, again.weight)
    assert torch.equal(model.bias, again.bias)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, "hash", TrainingState(), {"model.a": torch.arange(1000.0)})
    good = path.read_bytes()
    flipped = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    for bad in (b"", good[:100], good[:-1], b"\xff" * 50, b"text", flipped):
        path.write_bytes(bad)
        with pytest.raises(ManymaxError, match=r"c\.safetensors is not a checkpoint of manymax, or it is damaged"):
            load_checkpoint(path, "hash")
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ManymaxError, match="is not a checkpoint of manymax"):
        load_checkpoint(path, "hash")
    write_tensors(path, {"a": torch.zeros(1)}, {"something": "else"})
    with pytest.raises(ManymaxError, match="belongs to another run"):
        load_checkpoint(path, "hash")
    path.write_bytes(good)
    with pytest.raises(ManymaxError, match="belongs to another run"):
        load_checkpoint(path, "other hash")
    assert load_checkpoint(path, "hash")[0] == TrainingState()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManymaxError, match=r"m\.safetensors is not a model of manymax"):
        read_tensors(tmp_path / "m.safetensors", "model")
