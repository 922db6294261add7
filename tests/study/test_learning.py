"""Members of every kind learn planted data on every backbone: a short form of configs/planted.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from manymax.study.config import RunConfig
from manymax.study.run import run

# As many steps in an epoch as the whole study has, and twice its rate: the plateau at the start is left sooner.
SHORT = {"size": "1000x150x20", "batch_size": 256, "lr": 2e-3, "epochs": 8, "threads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "loss"),
    [
        ("mf", "softmax"),
        ("mf", "rankmax"),
        ("mf", "nce"),
        ("mf", "rg"),
        ("lightgcn", "sparsemax"),
        ("lightgcn", "hierarchical_softmax"),
        ("sasrec", "entmax"),
        ("sasrec", "sampled_softmax"),
    ],
)
def test_it_ranks_clearly_better_than_popularity(backbone: str, loss: str, tmp_path: Path) -> None:
    record = run(RunConfig(backbone=backbone, loss=loss, **SHORT), tmp_path / "run")
    assert record.status == "done"
    assert record.test["ndcg@20"] > 1.2 * record.popularity["ndcg@20"]
    assert record.test["regret@20"] < 0.8 * record.popularity["regret@20"]
