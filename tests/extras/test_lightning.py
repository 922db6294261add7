"""Heads in the trainer of Lightning: as cross entropy, in half precision, accumulated, saved and gone on with."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("default")]

CLASSES, DIM = 60, 16


class CrossEntropy(nn.Module):
    """What the head stands for, with a table of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, CLASSES, bias=False)

    def forward(self, queries: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(queries).float(), target)


def module(head: nn.Module) -> Any:
    """A LightningModule: a tower and a head, with the losses of its steps."""
    lightning: Any = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tower = nn.Sequential(nn.Embedding(CLASSES, DIM), nn.Linear(DIM, DIM))
            self.head = head
            with torch.no_grad():
                self.head.linear.weight.normal_()
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss: Tensor = self.head(self.tower(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    return Model()


def fit(model: Any, folder: Path, epochs: int = 2, resume: Path | None = None, **more: Any) -> Any:
    lightning: Any = importlib.import_module("lightning")
    items = torch.arange(CLASSES)
    data = torch.utils.data.TensorDataset(items, (items + 1) % CLASSES)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=10), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize(
    "more", [{"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=["accumulated", "bf16"]
)
def test_a_softmax_head_trains_as_cross_entropy(more: dict[str, Any], tmp_path: Path) -> None:
    models = [module(manymax.LinearSoftmaxLoss(DIM, CLASSES)), module(CrossEntropy())]
    for model in models:
        fit(model, tmp_path, **more)
    ours, theirs = (model.losses for model in models)
    assert ours == pytest.approx(theirs, rel=2e-2 if "precision" in more else 1e-4)
    assert len(ours) == 12


def test_a_sparse_head_is_saved_and_trains_on(tmp_path: Path) -> None:
    def sparse() -> Any:
        return module(manymax.LinearEntmaxLoss(DIM, CLASSES, learnable=True))

    whole, first, second = sparse(), sparse(), sparse()
    fit(whole, tmp_path / "whole", epochs=30)
    trainer = fit(first, tmp_path / "first", epochs=15)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(second, tmp_path / "second", epochs=30, resume=tmp_path / "half.ckpt")
    assert whole.losses[-1] < 0.3 * whole.losses[0]
    assert second.losses == pytest.approx(whole.losses[90:], rel=1e-5)
    learned = dict(whole.head.named_parameters())
    assert len(learned) == 2  # class vectors and alpha
    torch.testing.assert_close(learned, dict(second.head.named_parameters()))
