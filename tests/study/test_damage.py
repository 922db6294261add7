"""Files of a run that are damaged: an error that names the file, or the content as it was; never other content."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from manymax.cli.recommend import note_unchecked
from manymax.cli.tensors import read_tensor
from manymax.errors import ManymaxError
from manymax.study.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from manymax.study.config import RunConfig
from manymax.study.data.load import load
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


def truncated(path: Path, rng: random.Random) -> None:
    """Cut a file off somewhere."""
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


HARMS = [
    pytest.param(flipped, TRIES, id="flipped"),
    pytest.param(flipped, 60, id="flipped often", marks=pytest.mark.extras),
    pytest.param(truncated, 60, id="truncated", marks=pytest.mark.extras),
]
Harm = Callable[[Path, random.Random], None]


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


@pytest.mark.parametrize(("harm", "tries"), HARMS)
@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_damage_is_seen(
    finished: Path, tmp_path: Path, name: str, read: Callable[[Path], Any], harm: Harm, tries: int
) -> None:
    expected, rng = read(finished), random.Random(3)
    folder, seen = tmp_path / "run", 0
    shutil.copytree(finished, folder)
    for _ in range(tries):
        shutil.copy(finished / name, folder / name)
        harm(folder / name, rng)
        error = refusal(lambda: read(folder))
        if error is None:
            assert read(folder) == expected
        else:
            seen += 1
            assert str(folder) in error
            assert "emove" in error or "no record of this version" in error, error
    assert seen >= tries * 0.8  # a flip may change nothing, as that of a space


@pytest.mark.parametrize("harm", [flipped, truncated])
def test_damage_of_a_checkpoint_is_seen(tmp_path: Path, harm: Harm) -> None:
    state = TrainingState(epoch=3, step=40, best_value=0.25, rows=[{"epoch": 1, "loss": 0.5}], backend="torch")
    path, tensors = tmp_path / "checkpoint.safetensors", {"model.a": torch.arange(4.0), "optimizer.b": torch.ones(3)}
    save_checkpoint(path, "hash", state, tensors)
    whole, rng = path.read_bytes(), random.Random(5)
    for _ in range(4 * TRIES):
        path.write_bytes(whole)
        harm(path, rng)
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


PICKLED = pickle.dumps(SystemExit("a pickle was loaded"))  # loading it is harmless; what a stranger sends is not


@pytest.mark.parametrize("name", [MODEL, "checkpoint.safetensors"])
def test_a_pickle_in_place_of_tensors_is_refused(finished: Path, tmp_path: Path, name: str) -> None:
    """Not even where it begins like a file of torch."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    mark = tmp_path / "loaded"
    for content in (PICKLED, _archive(mark, tmp_path)):
        (folder / name).write_bytes(content)
        read = served if name == MODEL else lambda folder: load_checkpoint(folder / name, "hash")
        error = refusal(lambda read=read: read(folder))
        assert error is not None
        assert str(folder / name) in error
        assert not mark.exists()


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _archive(mark: Path, folder: Path) -> bytes:
    torch.save({"a": Touch(mark)}, folder / "a.pt")
    return (folder / "a.pt").read_bytes()


# Files of data, of which nothing says what they should hold: an error of the package, or what stands there.
TABLE = "user,item,rating,time\n" + "".join(f"u{i % 13},i{i % 7},{i % 5},{1_000_000 + i}\n" for i in range(80))
LINES = "".join(json.dumps({"user": f"u{i % 13}", "item": f"i{i % 7}", "time": i}) + "\n" for i in range(80))


def write_data(folder: Path) -> list[Path]:
    """A file of each kind that `load` reads."""
    (folder / "a.csv").write_text(TABLE)
    (folder / "b.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    (folder / "c.jsonl").write_text(LINES)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    rows = [line.split(",") for line in TABLE.splitlines()[1:]]
    names = ("user", "item")
    pq.write_table(pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)}), folder / "e.parquet")
    with zipfile.ZipFile(folder / "f.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ml/u.data", "".join(f"{i % 13}\t{i % 7}\t{i % 5}\t{i}\n" for i in range(80)))
    return sorted(folder.iterdir())


@pytest.mark.extras
@pytest.mark.parametrize("harm", [flipped, truncated])
def test_damaged_data_ends_in_an_error_of_the_package_or_is_read(tmp_path: Path, harm: Harm) -> None:
    rng = random.Random(7)
    for path in write_data(tmp_path):
        whole, refused = path.read_bytes(), 0
        load(path)
        for _ in range(60):
            path.write_bytes(whole)
            harm(path, rng)
            error = refusal(lambda path=path: load(path))  # any other error ends the test
            refused += error is not None
            assert error is None or path.name in error or "ml/u.data" in error or "u.data" in error, error
        path.write_bytes(whole)
        packed = path.suffix in (".gz", ".zip", ".parquet")
        assert refused >= (30 if packed else 1), path.name


@pytest.mark.extras
@pytest.mark.parametrize("harm", [flipped, truncated])
def test_damaged_scores_end_in_an_error_of_the_package_or_are_read(tmp_path: Path, harm: Harm) -> None:
    """The files that `manymax diagnose` reads."""
    rng, scores = random.Random(9), torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "a.npy", scores.numpy())
    torch.save(scores, tmp_path / "b.pt")
    save_file({"scores": scores}, tmp_path / "c.safetensors")
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        read_tensor("scores", path)
        for _ in range(60):
            path.write_bytes(whole)
            harm(path, rng)
            error = refusal(lambda path=path: read_tensor("scores", path))
            assert error is None or path.name in error, error
