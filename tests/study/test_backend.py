"""The back end of a run: chosen when it begins, kept in checkpoint and record, and demanded by a run that goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from manymax.engine import native_library
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY
from manymax.study import run_head
from manymax.study.checkpoint import TrainingState, read_training_state, save_checkpoint
from manymax.study.computations import has_native_code
from manymax.study.config import RunConfig
from manymax.study.data.prepare import Prepared
from manymax.study.records import CHECKPOINT, new_record, read_record, write_record
from manymax.study.report.page import report
from manymax.study.run import prepare_data, run
from manymax.study.run_head import build_head, resolve_backend
from manymax.study.run_options import options
from tests.study.test_run import Events, outcome

TINY = {"data": "planted-tiny", "dim": 8, "batch_size": 500, "epochs": 3, "lr": 0.01, "loss": "entmax"}
needs_library = pytest.mark.skipif(not native_library.available(), reason="no native library: run `make native`")


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_data(RunConfig(**TINY))


def stopped(folder: Path, prepared: Prepared, **settings: object) -> None:
    """Begin a run and stop it at its third step."""
    events = Events(3, lambda: signal.raise_signal(signal.SIGINT))
    assert run(RunConfig(**TINY | settings), folder, prepared=prepared, progress=events).status == "stopped"


# Settings ----------------------------------------------------------------------------------------


def test_the_default_leaves_hashes_as_they_were() -> None:
    """Folders and checkpoints of version 0.1.0 are found by them; a back end that is named makes another run."""
    usual, named = RunConfig(loss="entmax", backend="auto"), RunConfig(loss="entmax", backend="torch")
    assert usual.content_hash() == RunConfig(loss="entmax").content_hash() == "644931172df44b00"
    assert named.content_hash() != usual.content_hash()
    assert named.nested()["machine"]["backend"] == "torch"


def test_it_is_an_option_of_every_run_with_native_code() -> None:
    (option,) = (option for option in options() if option.name == "backend")
    assert (option.group, option.default, option.choices) == ("machine", "auto", native_library.BACKENDS)
    with pytest.raises(ArgumentError, match="`backend` has no effect with loss 'rg'"):
        RunConfig(loss="rg", backend="torch")
    for member in FAMILY.values():
        assert ("backend" in RunConfig(loss=member.name).nested()["machine"]) == has_native_code(member)
    with pytest.raises(ArgumentError, match=r"`backend` must be one of .*Did you mean 'native-avx2'\?"):
        RunConfig(loss="entmax", backend="native-avx")


@pytest.mark.parametrize(
    ("backend", "computation"), [("torch", "compiled"), ("native", "table"), ("native-avx2", "detached")]
)
def test_contradictions_are_refused(backend: str, computation: str) -> None:
    with pytest.raises(ArgumentError, match=f"`backend='{backend}'` contradicts `computation='{computation}'`"):
        RunConfig(loss="sparsemax", backend=backend, computation=computation)


def test_what_it_means_here(monkeypatch: pytest.MonkeyPatch, prepared: Prepared) -> None:
    """What the environment says where nothing is named; torch for losses and ways of computing without native code."""
    monkeypatch.setenv(native_library.VARIABLE, "torch")
    assert resolve_backend(RunConfig(loss="entmax")) == "torch"
    monkeypatch.delenv(native_library.VARIABLE)
    here = native_library.resolved_name("auto")
    assert resolve_backend(RunConfig(loss="entmax")) == here
    assert resolve_backend(RunConfig(loss="entmax", computation="table")) == "torch"
    assert resolve_backend(RunConfig(loss="rg")) == resolve_backend(RunConfig(loss="hsm")) == "torch"
    assert build_head(RunConfig(loss="entmax"), prepared.split, here).options.backend == here


@needs_library
def test_levels_and_the_old_way_to_ask() -> None:
    here = native_library.resolved_name("native")
    assert resolve_backend(RunConfig(loss="sparsemax", computation="compiled")) == here
    assert resolve_backend(RunConfig(loss="sparsemax", backend="native")) == here
    assert resolve_backend(RunConfig(loss="sparsemax", backend="native-plain")) == "native-plain"
    both = RunConfig(loss="sparsemax", backend="native-plain", computation="compiled")
    assert resolve_backend(both) == "native-plain"


# Records and checkpoints -------------------------------------------------------------------------


@needs_library
def test_a_resumed_run_keeps_what_it_began_with(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although "auto" means something else by then; and it ends like a run that was never interrupted."""
    monkeypatch.setenv(native_library.VARIABLE, "native-plain")
    assert run(RunConfig(**TINY), tmp_path / "whole", prepared=prepared).backend == "native-plain"
    stopped(tmp_path / "parts", prepared)
    assert read_record(tmp_path / "parts").backend == "native-plain"
    state = read_training_state(tmp_path / "parts" / CHECKPOINT)
    assert state is not None
    assert state.backend == "native-plain"
    monkeypatch.setenv(native_library.VARIABLE, "torch")
    used = []
    monkeypatch.setattr(
        native_library, "_function", lambda *name, found=native_library._function: used.append(name) or found(*name)
    )
    assert run(RunConfig(**TINY), tmp_path / "parts", prepared=prepared).backend == "native-plain"
    assert {level for level, _ in used} == {"plain"}
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_plain_torch_stays_plain_torch(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_library.VARIABLE, "torch")
    stopped(tmp_path, prepared)
    monkeypatch.delenv(native_library.VARIABLE)
    monkeypatch.setattr(native_library, "call", None)  # native code would fail
    assert run(RunConfig(**TINY), tmp_path, prepared=prepared).backend == "torch"


def test_a_machine_without_it_says_what_to_do(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the folder is changed, so that the run can go on elsewhere."""
    monkeypatch.setenv(native_library.VARIABLE, "torch")
    stopped(tmp_path, prepared)
    path, config = tmp_path / CHECKPOINT, RunConfig(**TINY)
    save_checkpoint(path, config.content_hash(), TrainingState(step=3, backend="native-avx2"), {})
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    monkeypatch.setattr(run_head, "missing", lambda level: f"this processor has no {level}.")
    words = r"made with the back end 'native-avx2'.*this processor has no avx2\. .* on a machine .*`backend` \"torch\""
    with pytest.raises(ManymaxError, match=words):
        run(config, tmp_path, prepared=prepared)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_failed_run_says_it_too(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manymax.study.run.build_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(RunConfig(**TINY), tmp_path, prepared=prepared)
    record = read_record(tmp_path)
    assert (record.status, record.backend) == ("failed", resolve_backend(RunConfig(**TINY)))


def test_a_report_names_the_back_ends(tmp_path: Path) -> None:
    for seed, backend in enumerate(("torch", "native-avx512", None)):
        config = RunConfig(loss="entmax", seed=seed)
        folder = tmp_path / config.content_hash()
        folder.mkdir()
        write_record(folder, new_record(config, "diverged", backend=backend))
    report(tmp_path, images=False)
    assert "Back ends: native-avx512; torch." in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_the_record_is_json_with_the_back_end(prepared: Prepared, tmp_path: Path) -> None:
    record = run(RunConfig(**TINY | {"epochs": 1}), tmp_path, prepared=prepared)
    assert (
        json.loads((tmp_path / "record.json").read_text())["backend"]
        == record.backend
        == resolve_backend(RunConfig(**TINY))
    )
