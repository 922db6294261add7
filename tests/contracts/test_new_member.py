"""A member that is added to `FAMILY` works everywhere: heads, advisor, planner and commands read only its entry."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import manymax
from manymax import FAMILY, ManymaxError
from manymax.cli.app import build_app
from manymax.distributed import Network, plan, traffic
from manymax.engine.cost import Machine, Shape
from manymax.engine.member import Member
from manymax.heads import head_class, head_function
from manymax.study.records import read_record
from tests.contracts import marginmax
from tests.contracts.marginmax import MEMBER, NAME
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
RUN = ["--data", "planted", "--size", "60x60x10", "--dim", "4", "--epochs", "4", "--batch-size", "64", "--loss", NAME]


@pytest.fixture
def added() -> Iterator[None]:
    """`FAMILY` with marginmax during a test."""
    with FAMILY.extended(MEMBER):
        yield


def command(*arguments: str) -> Result:
    """The result of `manymax` with these arguments, run in this process."""
    return CliRunner().invoke(build_app(), [*arguments])


def test_it_has_a_head_as_a_function_and_as_a_module() -> None:
    queries, vectors = torch.randn(5, 3).requires_grad_(), torch.randn(40, 3)
    target = torch.arange(5)
    value = head_function(MEMBER)(queries, vectors, target, margin=2.0)
    expected = manymax.linear_rankmax_loss(queries / 2, vectors, target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(head_class(MEMBER)(None, 40, 2.0)(queries, target, vectors), expected)
    weight = vectors.clone().requires_grad_()
    head_function(MEMBER)(queries, weight, target, options={"sparse_grad": True}).backward()
    assert weight.grad is not None
    assert weight.grad.is_sparse
    with pytest.raises(ManymaxError, match=r"`margin` must be a number in \(0, 10\]; got 11"):
        head_function(MEMBER)(queries, vectors, target, margin=11)
    with pytest.raises(ManymaxError, match=r"`target` of marginmax must be ids or bool rows"):
        head_function(MEMBER)(queries, vectors, torch.full((5, 40), 1 / 40))


@pytest.mark.slow
def test_its_head_on_two_ranks_equals_that_of_one_process(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    try:
        for differences in pool.run(2, marginmax.on_ranks):
            assert max(float(difference.abs().max()) for difference in differences) < 1e-12
    finally:
        pool.stop()


@pytest.mark.usefixtures("added")
def test_the_advisor_and_the_planner_know_what_it_costs() -> None:
    machine = Machine(flops=1e-11, streamed=1e-10, exponentials=1e-9, passes=1e-10, near=1e-9, far=1e-9)
    advice = manymax.advise(500, machine=machine)
    (choice,) = [choice for choice in advice.ranked if choice.member == NAME]
    assert choice.step_seconds > 0
    shape = Shape(batch=1000, num_classes=10**6, dim=64)
    assert traffic(NAME, shape, 4).bytes == traffic("rankmax", shape, 4).bytes
    row = plan(NAME, shape, 4, machine, Network(latency=1e-5, bandwidth=1e10))
    assert row.sharded
    assert row.exchanging > 0


@pytest.mark.usefixtures("added")
def test_its_setting_is_an_option_and_a_toml_key_and_its_range_is_checked(tmp_path: Path) -> None:
    assert "--margin" in command("train", "--help").stdout
    (tmp_path / "run.toml").write_text(f'[loss]\nname = "{NAME}"\nmargin = 11.0\n', encoding="utf-8")
    for arguments in (["--config", str(tmp_path / "run.toml")], ["--loss", NAME, "--margin", "11"]):
        result = command("train", *arguments, "--out", str(tmp_path / "run"))
        assert "`margin` must be a number in (0, 10]; got 11" in str(result.exception)


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_a_run_finishes_and_a_killed_run_resumes_with_the_same_result(tmp_path: Path) -> None:
    whole = command("train", *RUN, "--margin", "0.25", "--out", str(tmp_path / "whole"))
    assert whole.exit_code == 0, whole.output
    record = read_record(tmp_path / "whole")
    assert record.settings["loss"]["margin"] == 0.25
    script = (
        "from manymax import FAMILY; from tests.contracts.marginmax import MEMBER; FAMILY.add(MEMBER);"
        "from manymax.study.config import RunConfig; from manymax.study.supervisor import ProgressReporter;"
        "from manymax.study.run import run; from pathlib import Path; import os, signal, sys;"
        "step = lambda self, state, loss, of: state.step == 7 and os.kill(os.getpid(), signal.SIGKILL);"
        "run(RunConfig(data='planted', size='60x60x10', dim=4, epochs=4, batch_size=64, loss='marginmax', margin=0.25),"
        " Path(sys.argv[1]), progress=type('Kill', (ProgressReporter,), {'step': step})(), checkpoint_seconds=0)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "cut")], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert (tmp_path / "cut" / "checkpoint.safetensors").exists()
    assert command("train", *RUN, "--margin", "0.25", "--out", str(tmp_path / "cut")).exit_code == 0
    resumed = read_record(tmp_path / "cut")
    assert (resumed.test, resumed.best_epoch) == (record.test, record.best_epoch)


@pytest.mark.usefixtures("added")
def test_losses_and_show_print_it() -> None:
    assert NAME in command("losses").stdout
    assert "log(S / m)" in command("show", NAME).stdout
    assert "How far the label must lead" in command("show", NAME).stdout


@pytest.mark.slow
def test_it_passes_the_contract_tests_of_losses_and_heads() -> None:
    """The tests of the members of the package, collected with one more row in `FAMILY`."""
    patterns = ("contracts/test_family*.py", "contracts/test_heads.py", "heads/test_exact*.py")
    files = [str(path) for pattern in patterns for path in sorted((ROOT / "tests").glob(pattern))]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "tests.contracts.marginmax", "-p", "no:cacheprovider"]
    result = subprocess.run([*run, "-k", NAME, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) > 100


def test_an_entry_without_a_field_is_an_error_that_names_the_field() -> None:
    for field, needed in (("kernel", head_function), ("kernel", head_class)):
        bare: Member = replace(MEMBER, name="bare", **{field: None})
        with pytest.raises(ManymaxError, match=f"bare has no `{field}`: its entry must give this field"):
            needed(bare)
    bare = replace(MEMBER, name="bare", cost=None)
    with FAMILY.extended(bare), pytest.raises(ManymaxError, match="bare has no `cost`"):
        manymax.advise(500, machine=Machine(flops=1e-11))
