"""`manymax plan`: its table, its JSON, and what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.cli.plan import local_network
from manymax.distributed import Network, plan
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.theory.cost import Machine, Shape

MACHINE = Machine(flops=1e-11, exponentials=1e-9, fresh=2e-9, near=4e-10, far=1e-9, sorted=2e-8, calls=1e-6)
LINK = ("--latency", "20", "--bandwidth", "12")


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(MACHINE)))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_has_a_row_per_member(machine: str) -> None:
    lines = output("--classes", "1e9", "--dim", "128", "--ranks", "64", "--machine", machine, *LINK).splitlines()
    assert lines[0].split("  ")[0] == "member"
    assert [line.split()[0] for line in lines[2 : 2 + len(FAMILY)]] == list(FAMILY)
    rows = {line.split()[0]: line for line in lines[2:]}
    assert rows["softmax"].split()[1:5] == ["36", "GB", "1.08", "MB"]
    assert rows["hierarchical_softmax"].endswith("whole on every rank")
    assert lines[-1].startswith("20 us and 12 GB/s between ranks; float32")


def test_json_holds_what_it_was_made_from(machine: str) -> None:
    options = ("--batch", "256", "--positives", "2", "--num-negatives", "50", "--support", "30", "--json")
    content = json.loads(
        output("--classes", "40981", "--dim", "64", "--ranks", "4", "--machine", machine, *LINK, *options)
    )
    shape = Shape(batch=256, num_classes=40981, dim=64, positives=2, num_negatives=50, support=30)
    assert Shape(**content["shape"]) == shape
    assert Machine(**content["machine"]) == MACHINE
    assert Network(**content["network"]) == Network(2e-5, 1.2e10)
    assert content["ranks"] == 4
    for row, name in zip(content["members"], FAMILY, strict=True):
        expected = plan(name, shape, 4, MACHINE, Network(2e-5, 1.2e10))
        assert row == asdict(expected) | {"seconds": expected.seconds}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--classes", "many"), "`--classes` must be a whole number of at least 1, like 40981 or 1e9; got 'many'"),
        (("--classes", "1.5"), "got '1.5'"),
        (("--classes", "0"), "got '0'"),
        (("--classes", "nan"), "got 'nan'"),
        (("--classes", "1e400"), "got '1e400'"),
        (("--classes", "100", "--latency", "3"), "`--latency` and `--bandwidth` belong together"),
        (("--classes", "100", "--latency", "-3", "--bandwidth", "1"), "`latency` must be seconds, at least 0"),
        (("--classes", "3", *LINK), "`ranks` must be an integer from 1 to the number of classes; got 4"),
    ],
)
def test_wrong_arguments_end_in_a_message(machine: str, arguments: tuple[str, ...], message: str) -> None:
    result = run("--ranks", "4", "--machine", machine, *arguments)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_the_speed_between_two_processes() -> None:
    network = local_network()
    assert 0 < network.latency < 1
    assert network.bandwidth > 1e5


@pytest.mark.slow
def test_ranks_that_torchrun_starts_measure_between_them_and_one_prints(machine: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "manymax"]
    arguments = ["plan", "--classes", "1000", "--ranks", "2", "--machine", machine, "--json"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["network"]["latency"] > 0
