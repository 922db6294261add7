"""Matrix factorisation with softmax learns MovieLens-1M: a shortened run, with a larger rate than the paper's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manymax.study.config import RunConfig
from manymax.study.run import run

DATA = os.environ.get("MANYMAX_DATA")


@pytest.mark.realdata
@pytest.mark.skipif(DATA is None, reason="MANYMAX_DATA must name the folder with ml-1m.parquet")
def test_ml_1m_by_mf_and_softmax(tmp_path: Path) -> None:
    shortened = {"lr": 0.003, "batches": "chunks", "epochs": 7}
    config = RunConfig(data=f"{DATA}/ml-1m.parquet", preset="paper-table", threads=1, **shortened)
    record = run(config, tmp_path / "run")
    assert record.sizes["users"] == 6038
    assert record.sizes["items"] == 3307
    assert sum(record.sizes[part] for part in ("train", "valid", "test")) == 835_789
    assert record.popularity["ndcg@20"] == pytest.approx(0.122, abs=0.004)
    assert record.test["ndcg@20"] > 0.25
