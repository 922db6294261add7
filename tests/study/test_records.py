"""Records and tables of a run folder: what is written is what is read, by anybody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.data.interactions import Lists, Split
from manymax.study.records import (
    new_record,
    read_record,
    read_vocabulary,
    write_epochs,
    write_record,
    write_users,
    write_vocabulary,
)

LISTS = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=3, max_size=3)


def lists(rows: list[list[int]]) -> Lists:
    users = torch.tensor([user for user, row in enumerate(rows) for _ in row], dtype=torch.long)
    return Lists.from_pairs(users, torch.tensor([item for row in rows for item in row], dtype=torch.long), len(rows))


@settings(max_examples=20)  # each writes and syncs two files
@given(train=LISTS, valid=LISTS, test=LISTS)
def test_the_vocabulary_and_the_split_come_back(tmp_path_factory, train, valid, test) -> None:
    folder = tmp_path_factory.mktemp("run")
    split = Split(lists(train), lists(valid), lists(test), num_items=6)
    write_vocabulary(folder, np.array(["anna", "b,c", "ü"]), np.array([10, 20, 30, 40, 50, 60]), split)
    users, items, again = read_vocabulary(folder)
    assert (users, items, again.num_items) == (["anna", "b,c", "ü"], [10, 20, 30, 40, 50, 60], 6)
    for part in ("train", "valid", "test"):
        assert torch.equal(getattr(again, part).offsets, getattr(split, part).offsets)
        assert torch.equal(getattr(again, part).items, getattr(split, part).items)
    assert pq.read_table(folder / "user_items.parquet")["train"].to_pylist() == train


def test_epochs_without_evaluation_have_empty_cells(tmp_path: Path) -> None:
    write_epochs(tmp_path, [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0, "ndcg@20": 0.3}])
    table = pq.read_table(tmp_path / "epochs.parquet").to_pydict()
    assert table == {"epoch": [1, 2], "loss": [2.0, 1.0], "ndcg@20": [None, 0.3]}


def test_users_carry_their_own_ids(tmp_path: Path) -> None:
    write_users(tmp_path, np.array(["u7", "u9"]), {"ndcg@20": torch.tensor([0.5, 1.0], dtype=torch.float64)})
    assert pq.read_table(tmp_path / "user_metrics.parquet").to_pydict() == {"user": ["u7", "u9"], "ndcg@20": [0.5, 1.0]}


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    record = new_record(RunConfig(loss="entmax", alpha=1.3), "done", test={"ndcg@20": 1 / 3, "regret@20": None})
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    # the metadata of a wheel may leave out the local part, such as +cu124
    assert record.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert record.peak_memory_mb is None or record.peak_memory_mb > 1
    assert record.machine["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "holds no finished run"),
        ("{", "cannot be read"),
        ("[1]", "holds no JSON object"),
        ('{"a": 1}', "is no record"),
    ],
)
def test_what_is_not_a_record_is_refused_with_a_message(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "record.json").write_text(content, encoding="utf-8")
    with pytest.raises(ManymaxError, match=complaint):
        read_record(tmp_path)
