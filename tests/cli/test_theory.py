"""`manymax theory`: its table, its JSON and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from manymax.cli import console as display
from manymax.cli.app import app
from manymax.paper import claims
from manymax.paper.claims import CLAIMS, Claim
from manymax.paper.evidence import CheckResult

KEYS = {"table", "member", "property", "printed", "value", "source", "status", "holds", "measured"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["theory", *arguments])


def use(monkeypatch: pytest.MonkeyPatch, *rows: Claim) -> None:
    monkeypatch.setattr(claims, "CLAIMS", rows)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim, with a check that takes no time."""
    use(monkeypatch, *(replace(claim, check=lambda: CheckResult(True, "3 of [bold]3[/bold]")) for claim in CLAIMS))


@pytest.mark.usefixtures("quick")
class TestOutput:
    def test_every_cell_is_one_line(self) -> None:
        result = run()
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        for claim in CLAIMS:
            parts = (claim.member, claim.property, claim.printed, claim.value, claim.status, claim.source)
            assert any(all(part in line for part in parts) for line in lines), claim
        titles = ["Table 1: exact members", "Table 2: approximations", "Table 4: cost of an epoch"]
        assert all(title in lines for title in titles)
        assert lines[-1].startswith(f"{len(CLAIMS)} cells: ")
        assert lines[-1].endswith(f"{len(CLAIMS)} checks of {len(CLAIMS)} hold.")
        assert "3 of [bold]3[/bold]" in result.stdout

    def test_json_has_every_cell(self) -> None:
        cells = json.loads(run("--json").stdout)
        assert [(cell["table"], cell["member"], cell["property"]) for cell in cells] == [
            (claim.table, claim.member, claim.property) for claim in CLAIMS
        ]
        assert all(set(cell) == KEYS for cell in cells)
        assert all(cell["holds"] is True for cell in cells)

    def test_one_table(self) -> None:
        assert {cell["table"] for cell in json.loads(run("--table", "2", "--json").stdout)} == {"Table 2"}

    @pytest.mark.parametrize("table", ["0", "5", "two"])
    def test_there_are_four_tables(self, table: str) -> None:
        result = run("--table", table)
        assert result.exit_code == 2
        assert "--table" in result.stderr

    @pytest.mark.parametrize("width", [60, 100, 300])
    def test_nothing_is_cut_off_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        screen = StringIO()
        terminal = Console(
            file=screen, force_terminal=True, color_system=None, width=width, markup=False, highlight=False
        )
        monkeypatch.setattr(display, "open_console", lambda: terminal)
        assert run().exit_code == 0
        assert max(map(len, screen.getvalue().splitlines())) <= width
        assert "…" not in screen.getvalue()
        words = " ".join(screen.getvalue().split())
        assert words.count("contradicted") > sum(claim.status == "contradicted" for claim in CLAIMS)

    def test_help_gives_examples_that_work(self) -> None:
        lines = [line.strip() for line in run("--help").stdout.splitlines()]
        examples = [line.split()[2:] for line in lines if line.startswith("manymax theory")]
        assert len(examples) == 3
        assert all(run(*example).exit_code == 0 for example in examples)


@pytest.mark.parametrize("status", ["confirmed", "corrected", "contradicted"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_claim_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, status: str, options: tuple[str, ...]) -> None:
    false = replace(CLAIMS[0], status=status, check=lambda: CheckResult(False, "0.7 found"))
    use(monkeypatch, replace(CLAIMS[1], check=lambda: CheckResult(True, "fine")), false)
    result = run(*options)
    assert result.exit_code == 1
    assert f"softmax, consistency: marked {status}, but the check does not hold: 0.7 found" in result.stderr
    if options:
        assert [cell["holds"] for cell in json.loads(result.stdout)] == [True, False]
    else:
        assert "DOES NOT HOLD: 0.7 found" in result.stdout
        assert "1 checks of 2 hold" in result.stdout


def test_a_check_that_raises_is_reported_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> CheckResult:
        raise RuntimeError("out of luck")

    use(monkeypatch, replace(CLAIMS[0], check=breaks))
    result = run()
    assert result.exit_code == 1
    assert "the check broke: RuntimeError: out of luck" in result.stderr
    assert "Traceback" not in result.output


def test_the_checks_of_a_table_run() -> None:
    result = run("--table", "3")
    assert result.exit_code == 0, result.stderr
    assert "18 cells" in result.stdout
