"""Generated run folders for tests of the report: records with known effects, written in milliseconds."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manymax.study.config import RunConfig
from manymax.study.records import new_record, write_epochs, write_record, write_users

METRICS = ("ndcg@20", "precision@20", "recall@20")

# The mean N@20 that a run with each loss gets.
QUALITY = {
    "softmax": 0.30,
    "sparsemax": 0.27,
    "entmax": 0.28,
    "rankmax": 0.33,
    "taylor_softmax": 0.25,
    "sampled_softmax": 0.29,
    "nce": 0.26,
    "hierarchical_softmax": 0.20,
    "rg": 0.31,
    "bpr": 0.24,
    "bce": 0.23,
}


def write_run(
    folder: Path,
    *,
    status: str = "done",
    reason: str | None = None,
    quality: float | None = None,
    num_users: int = 200,
    epochs: int = 8,
    curve: bool = True,
    regret: float | None = None,
    seconds_per_epoch: float = 2.0,
    speed: float = 2.0,
    sizes: dict[str, int] | None = None,
    valid: float | None = None,
    limit: int | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of one run, and return it.

    `quality` is the mean of N@20 over users. Some users are easier than others, and for the same seed they are so for
    all losses, which paired tests rely on. `speed` is the number of epochs in which the curve covers 63 % of its way.
    `valid` is N@20 on the validation part, and `limit` the setting `epochs`.
    """
    settings |= {} if limit is None else {"epochs": limit}
    config = RunConfig(**settings)
    folder = folder / config.content_hash()
    folder.mkdir(parents=True)
    if status != "done":
        write_record(folder, new_record(config, status, reason=reason))
        return folder
    quality = QUALITY[config.loss.name] if quality is None else quality
    easy = np.random.default_rng(config.seed).normal(0, 0.05, num_users)
    noise = np.random.default_rng(zlib.crc32(config.content_hash().encode()))
    per_user = {
        m: quality * f + easy + noise.normal(0, 0.02, num_users) for m, f in zip(METRICS, (1, 0.5, 1.1), strict=True)
    }
    test = {name: float(values.mean()) for name, values in per_user.items()}
    if regret is not None:
        test["regret@20"] = regret
    write_users(
        folder, np.array([f"u{i}" for i in range(num_users)]), {k: torch.tensor(v) for k, v in per_user.items()}
    )
    rows = [
        {
            "epoch": e,
            "step": 100 * e,
            "loss": 8.0 - e / 10,
            "seconds_train": seconds_per_epoch * e,
            "seconds_eval": 0.3 * e,
            "seconds_total": (seconds_per_epoch + 0.4) * e,
            **{name: value * (1 - np.exp(-e / speed)) for name, value in test.items()},
        }
        for e in range(1, epochs + 1)
    ]
    if curve:
        write_epochs(folder, rows)
    record = new_record(
        config,
        status,
        sizes=sizes or {"users": num_users, "items": 150, "train": 3000, "valid": 400, "test": 400},
        card=[
            {"step": "raw", "users": 210, "items": 160, "interactions": 4000},
            {"step": "5-core", "users": num_users},
        ],
        epochs=epochs,
        best_epoch=epochs - 1,
        valid={name: value * 0.95 for name, value in test.items()} | ({} if valid is None else {METRICS[0]: valid}),
        test=test,
        popularity=dict.fromkeys(test, 0.1),
        seconds={"preparing": 0.1, "loading": 0.2, "training": seconds_per_epoch * epochs, "evaluation": 0.3 * epochs},
    )
    write_record(folder, record)
    return folder


def grid(folder: Path, losses: Iterable[str] = QUALITY, **lists: Iterable[Any]) -> None:
    """Write a run for every combination; a larger learning rate is better, but worse for sparsemax and entmax."""
    names = list(lists)
    for loss, *values in product(losses, *lists.values()):
        settings = dict(zip(names, values, strict=True))
        slope = -0.01 if loss in ("sparsemax", "entmax") else 0.01
        quality = QUALITY[loss] + slope * np.log10(settings.get("lr", 1e-3) / 1e-3)
        write_run(folder, loss=loss, quality=quality, **settings)
