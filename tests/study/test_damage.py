"""Bits that flip in the files of a run: an error that names the file, or the content as it was; never other content."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manymax.cli.recommend import note_unchecked
from manymax.errors import ManymaxError
from manymax.study.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from manymax.study.config import RunConfig
from manymax.study.probe import probe
from manymax.study.records import (
    EPOCHS,
    ITEMS,
    MODEL,
    PROBE,
    RECORD,
    USER_ITEMS,
    USER_METRICS,
    read_probe,
    read_record,
)
from manymax.study.report.runs import Run
from manymax.study.run import run
from manymax.study.serve import Served

TINY = {"data": "planted", "size": "30x20x6", "dim": 4, "batch_size": 50, "epochs": 2, "threads": 1}
TRIES = 25


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(RunConfig.trimmed(TINY), folder)
    probe(folder)
    return folder


def flipped(path: Path, rng: random.Random) -> None:
    """Flip one to three bits of a file."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def refusal(call: Callable[[], Any]) -> str | None:
    """What the error of the package says that a call raises; None if it raises none."""
    try:
        call()
    except ManymaxError as error:
        return str(error)
    return None


def curves(folder: Path) -> Any:
    one = Run(read_record(folder), folder)
    return {name: values.tolist() for name, values in one.epochs.items()}


def users(folder: Path) -> Any:
    found = Run(read_record(folder), folder).users("ndcg@20")
    assert found is not None
    return [part.tolist() for part in found]


def served(folder: Path) -> Any:
    model = Served.load(folder)
    scores, items = model.recommend(torch.arange(5), 3)
    return scores.tolist(), [[model.item_ids[i] for i in row] for row in items.tolist()], list(model.user_ids)


READERS: list[tuple[str, Callable[[Path], Any]]] = [
    (RECORD, lambda folder: read_record(folder).model_dump()),
    (PROBE, read_probe),
    (EPOCHS, curves),
    (USER_METRICS, users),
    (USER_ITEMS, served),
    (ITEMS, served),
    (MODEL, served),
]


@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_flipped_bits_are_seen(finished: Path, tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    expected, rng = read(finished), random.Random(3)
    folder, seen = tmp_path / "run", 0
    shutil.copytree(finished, folder)
    for _ in range(TRIES):
        shutil.copy(finished / name, folder / name)
        flipped(folder / name, rng)
        error = refusal(lambda: read(folder))
        if error is None:
            assert read(folder) == expected
        else:
            seen += 1
            assert str(folder) in error
            assert "emove" in error or "no record of this version" in error, error
    assert seen >= TRIES * 0.8  # a flip may change nothing, as that of a space


def test_flipped_bits_of_a_checkpoint_are_seen(tmp_path: Path) -> None:
    state = TrainingState(epoch=3, step=40, best_value=0.25, rows=[{"epoch": 1, "loss": 0.5}], backend="torch")
    path, tensors = tmp_path / "checkpoint.safetensors", {"model.a": torch.arange(4.0), "optimizer.b": torch.ones(3)}
    save_checkpoint(path, "hash", state, tensors)
    whole, rng = path.read_bytes(), random.Random(5)
    for _ in range(4 * TRIES):
        path.write_bytes(whole)
        flipped(path, rng)
        error = refusal(lambda: load_checkpoint(path, "hash"))
        if error is None:
            found, loaded = load_checkpoint(path, "hash")
            assert found == state
            assert all(torch.equal(value, tensors[name]) for name, value in loaded.items())
            assert loaded.keys() == tensors.keys()
        else:
            assert str(path) in error
            assert "Remove it to begin again" in error


def test_a_file_that_is_gone_is_an_error(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / ITEMS).unlink()
    with pytest.raises(ManymaxError, match=r"items.parquet has gone since its run ended"):
        Served.load(folder)


def test_records_without_checksums_are_read(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of version 0.1.0, of which nothing can be checked."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    content = json.loads((folder / RECORD).read_text())
    assert content.pop("checksum")
    assert set(content.pop("files")) == {EPOCHS, USER_METRICS, USER_ITEMS, ITEMS, MODEL}
    (folder / RECORD).write_text(json.dumps(content))
    assert read_record(folder).files == {}
    assert served(folder) == served(finished)
    note_unchecked(folder)
    assert "its files were read unchecked" in capsys.readouterr().err
    note_unchecked(finished)
    assert capsys.readouterr().err == ""
