"""Lines of files of kept runs: what is written comes back, and what is damaged is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manymax.errors import ManymaxError
from manymax.study.config import RunConfig
from manymax.study.record_files import KeptRun, from_line, read_all_runs, read_runs, to_line, write_runs
from manymax.study.records import new_record

RECORD = new_record(RunConfig(), "done", test={"ndcg@20": 1 / 3, "regret@20": None})
OTHER = new_record(RunConfig(loss="sparsemax"), "done")
COLUMNS = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.lists(st.one_of(st.none(), st.floats(), st.integers(-(2**60), 2**60)), min_size=3, max_size=3),
    max_size=3,
)


@settings(max_examples=50)
@given(columns=COLUMNS)
def test_every_number_comes_back(columns: dict[str, Any]) -> None:
    again = from_line(to_line(KeptRun(RECORD, columns)))
    assert again.record == RECORD
    assert list(again.epochs) == list(columns)
    for name, values in columns.items():
        assert repr(again.epochs[name]) == repr(values)  # tells -0.0 from 0.0, nan from None and 1 from 1.0


def test_a_line_is_json_that_other_readers_take() -> None:
    line = to_line(KeptRun(RECORD, {"loss": [math.nan, -math.inf, 0.1]}, {"zero_share": 0.5}))
    refused: list[str] = []
    content = json.loads(line, parse_constant=refused.append)
    assert not refused
    assert content["epochs"]["loss"] == ["NaN", "-Infinity", 0.1]
    assert content["probe"] == {"zero_share": 0.5}
    assert "\n" not in line


def test_columns_are_arrays() -> None:
    columns = KeptRun(RECORD, {"epoch": [1, 2], "ndcg@20": [None, 0.5], "seconds": [1.0, 2]}).columns()
    assert {name: values.dtype for name, values in columns.items()} == {
        "epoch": np.int64,
        "ndcg@20": np.float64,
        "seconds": np.float64,
    }
    assert np.isnan(columns["ndcg@20"][0])
    assert columns["ndcg@20"][1] == 0.5


def test_lines_are_sorted_by_hash(tmp_path: Path) -> None:
    runs = sorted((KeptRun(RECORD), KeptRun(OTHER)), key=lambda run: run.record.hash)
    for given_runs in (runs, runs[::-1]):
        write_runs(tmp_path / "a" / "b.jsonl", given_runs)
        assert read_all_runs(tmp_path / "a" / "b.jsonl") == runs


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{to_line(KeptRun(RECORD))}\r\n\n", encoding="utf-8")
    assert read_all_runs(tmp_path / "a.jsonl") == [KeptRun(RECORD)]


def changed(**parts: Any) -> bytes:
    return json.dumps(json.loads(to_line(KeptRun(RECORD, {"epoch": [1]}))) | parts).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"[]", "no object of `record`"),
        (changed(weights=[1]), "no object of `record`"),
        (changed(epochs=[]), "not all objects"),
        (changed(record={"a": 1}), "none of this version.*status: Field required"),
        (changed(epochs={"epoch": [1], "loss": [0.5, 0.4]}), "lists of one length"),
        (changed(epochs={"epoch": 3}), "lists of one length"),
        (changed(epochs={"epoch": ["one"]}), "'one' in `epochs` is no number"),
        (changed(epochs={"epoch": [True]}), "True in `epochs` is no number"),
        (changed(epochs={"loss": [math.nan]}), "NaN is no JSON"),
        (changed(), "as line 2 does"),
    ],
)
def test_a_damaged_line_is_named_with_what_can_be_done(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    good = [to_line(KeptRun(OTHER)).encode(), changed()]
    path.write_bytes(b"\n".join([*good, line]))
    runs, damaged = read_runs(path)
    assert [run.record.hash for run in runs] == [OTHER.hash, RECORD.hash]
    assert len(damaged) == 1
    with pytest.raises(ManymaxError, match=rf"a\.jsonl, line 3, is damaged: .*{reason}.*version control") as caught:
        read_all_runs(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ManymaxError, match=r"a\.jsonl cannot be read: No such file"):
        read_runs(tmp_path / "a.jsonl")
