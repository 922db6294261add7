"""`manymax export`: vectors whose inner products are the scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from manymax.cli.app import app
from manymax.errors import ArgumentError, ManymaxError
from manymax.study.config import RunConfig
from manymax.study.run import run
from manymax.study.serve import Served

TINY = {"data": "planted-tiny", "dim": 8, "batch_size": 500, "epochs": 1}


def export(*arguments: str):
    return CliRunner().invoke(app, ["export", *arguments])


@pytest.mark.parametrize("settings", [{}, {"backbone": "sasrec"}, {"backbone": "lightgcn", "scale": "cosine"}], ids=str)
def test_inner_products_of_what_is_written_rank_like_the_run(settings: dict, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(RunConfig(**TINY | settings), folder)
    result = export(str(folder), "--out", str(tmp_path / "index"))
    assert result.exit_code == 0, result.output
    users, items = (pq.read_table(tmp_path / "index" / f"{side}_vectors.parquet") for side in ("user", "item"))
    scores = np.array(users["vector"].to_pylist()) @ np.array(items["vector"].to_pylist()).T
    served = Served.load(folder)
    assert scores.shape == (served.split.num_users, served.split.num_items)
    number = served.number("7")
    _, best = served.recommend(torch.tensor([number]), 3, seen=True)
    row = users["user"].to_pylist().index(served.user_ids[number])
    names = items["item"].to_pylist()
    assert [names[i] for i in scores[row].argsort()[::-1][:3]] == [served.item_ids[i] for i in best[0]]


def test_arrays_for_an_index(tmp_path: Path) -> None:
    run(RunConfig(**TINY), tmp_path / "run")
    assert export(str(tmp_path / "run"), "--format", "npy").exit_code == 0
    vectors = np.load(tmp_path / "run" / "item_vectors.npy")
    assert vectors.dtype == np.float32
    assert len(pq.read_table(tmp_path / "run" / "item_ids.parquet")) == len(vectors)
    assert np.array_equal(vectors, Served.load(tmp_path / "run").vectors()[1].numpy())


def test_a_tree_has_no_item_vectors(tmp_path: Path) -> None:
    run(RunConfig(**TINY, loss="hsm"), tmp_path / "run")
    result = export(str(tmp_path / "run"), "--out", str(tmp_path / "index"))
    assert isinstance(result.exception, ManymaxError)
    assert "there are no item vectors to export" in str(result.exception)
    assert not (tmp_path / "index").exists()


def test_a_wrong_format_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    run(RunConfig(**TINY), tmp_path / "run")
    assert isinstance(export(str(tmp_path / "run"), "--format", "csv").exception, ArgumentError)
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = export(str(tmp_path / "run"), "--out", str(tmp_path / "file"))
    assert isinstance(result.exception, ManymaxError)
    assert "cannot be written to" in str(result.exception)
