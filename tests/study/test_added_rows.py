"""Settings of a row that is added to a table are known on the command line, in files, in records and in runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import build_app
from manymax.errors import ManymaxError
from manymax.members import FAMILY
from manymax.samplers import SAMPLERS
from manymax.study.backbones import BACKBONES
from manymax.study.checkpoint import TrainingState
from manymax.study.config import RunConfig
from manymax.study.records import read_record
from manymax.study.run import load_model, run
from manymax.study.run_options import flat
from manymax.study.study_file import StudyConfig, expand
from manymax.study.supervisor import ProgressReporter

# Taylor-softmax under other names: a member that nothing in the project names.
KNOWN = FAMILY["taylor_softmax"]
DEGREE = replace(KNOWN.settings[0], option="degree", most=6, help="Of the polynomial; even.")
MINE = replace(KNOWN, name="mine", class_name="Mine", aliases=("own",), settings=(DEGREE,))
SETTINGS = {"data": "planted", "size": "60x60x10", "dim": 4, "epochs": 3, "batch_size": 64, "loss": "own", "degree": 4}
OUT_OF_RANGE = (
    "`degree` must be an even integer in [2, 6] (odd orders turn negative, higher ones lose their digits); got 8."
)


@pytest.fixture
def added() -> Iterator[None]:
    with FAMILY.extended(MINE):
        yield


def command(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), [*arguments])


def options(settings: dict[str, object]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_the_setting_of_an_added_member_becomes_a_command_line_option() -> None:
    before = command("train", "--help").stdout
    with FAMILY.extended(MINE):
        during = command("train", "--help").stdout
    assert "--degree" in during
    assert "Of the polynomial; even. [default: 2]" in " ".join(during.split())
    assert before == command("train", "--help").stdout
    assert "--degree" not in before


@pytest.mark.usefixtures("added")
def test_out_of_range_is_refused_in_python_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ManymaxError) as caught:
        RunConfig(loss="mine", degree=8)
    assert str(caught.value) == OUT_OF_RANGE
    with pytest.raises(ManymaxError) as caught:
        expand(StudyConfig(grid=[{"loss": {"name": "mine", "degree": [4, 8]}}]))
    assert str(caught.value) == OUT_OF_RANGE
    (tmp_path / "run.toml").write_text('[loss]\nname = "mine"\ndegree = 8\n', encoding="utf-8")
    for arguments in (["--config", str(tmp_path / "run.toml")], ["--loss", "mine", "--degree", "8"]):
        result = command("train", *arguments, "--out", str(tmp_path / "run"))
        assert str(result.exception) == OUT_OF_RANGE
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("added")
def test_a_grid_takes_it_flat_nested_and_with_losses_that_do_not_have_it() -> None:
    flat_names = expand(StudyConfig(grid=[{"loss": ["softmax", "mine"], "degree": [2, 4]}]))
    assert [(c.loss.name, c.loss.own) for c in flat_names] == [
        ("softmax", {}),
        ("mine", {"degree": 2}),
        ("mine", {"degree": 4}),
    ]
    nested = expand(StudyConfig(grid=[{"loss": {"name": ["softmax", "mine"], "degree": [2, 4]}}]))
    assert nested == flat_names
    assert expand(StudyConfig(grid=[{"loss": "mine"}]), **{"loss.degree": "6"})[0].loss.own == {"degree": 6}


class Interrupting(ProgressReporter):
    """Raises SIGINT, the signal of Ctrl-C, at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, state: TrainingState, loss: float, of: int) -> None:
        if state.step == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("added")
def test_a_run_is_finished_recorded_and_resumed(tmp_path: Path) -> None:
    result = command("train", *options(SETTINGS), "--out", str(tmp_path / "whole"))
    assert result.exit_code == 0, result.output
    config = RunConfig(**SETTINGS)
    assert run(config, tmp_path / "cut", progress=Interrupting(5)).status == "stopped"
    assert run(config, tmp_path / "cut").status == "done"
    whole, cut = (read_record(tmp_path / name) for name in ("whole", "cut"))
    assert (cut.test, cut.valid, cut.best_epoch) == (whole.test, whole.valid, whole.best_epoch)
    assert cut.settings["loss"] == {"name": "mine", "label_smoothing": 0.0, "exclude": "none", "degree": 4}
    assert flat(cut.settings)["degree"] == 4
    assert load_model(tmp_path / "cut")[0] == config
    same = run(
        RunConfig(**{k: v for k, v in SETTINGS.items() if k != "degree"} | {"loss": KNOWN.name, "order": 4}),
        tmp_path / "known",
    )
    assert same.test == whole.test


def test_settings_of_other_members_keep_their_hash_and_their_records() -> None:
    before, form = RunConfig(loss="entmax"), RunConfig(loss="entmax").flat()
    with FAMILY.extended(MINE):
        assert RunConfig(loss="entmax").content_hash() == before.content_hash()
        assert RunConfig(loss="entmax").flat() == form


def test_settings_of_added_samplers_and_backbones_become_options() -> None:
    sampler = replace(SAMPLERS["popularity"], name="mine", aliases=(), settings=(DEGREE,))
    with SAMPLERS.extended(sampler):
        assert RunConfig(loss="ssm", sampler="mine", degree="4").sampler.own == {"degree": 4}
        with pytest.raises(
            ManymaxError, match="`degree` has no effect with sampler 'uniform': it belongs to sampler 'mi"
        ):
            RunConfig(loss="ssm", degree=4)
    with BACKBONES.extended(replace(BACKBONES["mf"], name="mine", aliases=(), settings=(DEGREE,))):
        assert RunConfig(backbone={"name": "mine", "degree": 6}).backbone.own == {"degree": 6}
        assert "--degree" in command("train", "--help").stdout


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ManymaxError, match="loss 'ssm' is in the table already, as 'sampled_softmax'"):
        FAMILY.add(replace(MINE, aliases=("ssm",)))
    assert "mine" not in FAMILY
    with pytest.raises(ManymaxError, match="unknown loss 'mine'"):
        RunConfig(loss="mine")
