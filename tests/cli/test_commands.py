"""`manymax losses`, `show` and `docs`: their text, their JSON and their help."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import manymax
from manymax.cli import console as display
from manymax.cli import docs as docs_command
from manymax.cli import losses as losses_command
from manymax.cli import show as show_command
from manymax.cli.app import app
from manymax.cli.member_text import fact_cell, fact_word, member_as_json, stated_facts
from manymax.engine.member import Fact, Member
from manymax.errors import ManymaxError
from manymax.members import FAMILY
from manymax.table import Table

FACT_KEYS = {"value", "text", "source", "status", "printed", "computable"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def odd_one(monkeypatch: pytest.MonkeyPatch) -> Member:
    """A family of one member with everything that is hard to print: markup, bars, infinity, nan, missing parts."""
    first = next(iter(FAMILY.values()))
    facts = replace(
        first.facts,
        order_preservation=None,
        smoothness=Fact(math.inf, "no | bound", "derived", "contradicted", printed="[bold]m/S[/bold]"),
        bias=Fact(None, "computed", "section 3", "derived", fn=lambda num_classes: 0.0),
        variance=Fact(None, "not known", "section 3", "derived"),
    )
    formulas = replace(first.formulas, map=None, omega=None, loss="Ω*(s) - [s]_y :smile:")
    member = replace(
        first, name="odd", aliases=("strange",), facts=facts, formulas=formulas, map=None, examples=({"a": math.nan},)
    )
    for command in (losses_command, show_command, docs_command):
        monkeypatch.setattr(command, "FAMILY", Table("loss", member))
    return member


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> StringIO:
    """Make the commands print into a terminal of this width."""
    screen = StringIO()
    monkeypatch.setattr(
        display,
        "open_console",
        lambda: Console(
            file=screen, force_terminal=True, color_system=None, width=width, markup=False, highlight=False
        ),
    )
    return screen


class TestLosses:
    def test_one_line_per_member_where_there_is_no_terminal(self) -> None:
        lines = output("losses").splitlines()
        header, _, *rows, note = lines
        assert header.split()[:2] == ["member", "order"]
        assert [row.split()[0] for row in rows] == list(FAMILY)
        assert "manymax show NAME" in note
        assert lines == [line.rstrip() for line in lines]

    def test_cells_are_the_facts(self) -> None:
        names = stated_facts(FAMILY.values())
        for row, member in zip(output("losses").splitlines()[2:], FAMILY.values(), strict=False):
            expected = [fact_cell(getattr(member.facts, name)) for name in names]
            assert [text.strip() for text in row.split("   ") if text.strip()] == [member.name, *expected]

    @pytest.mark.parametrize("width", [30, 60, 80, 200])
    def test_every_word_can_be_read_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        screen = terminal(monkeypatch, width)
        output("losses")
        lines = screen.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in screen.getvalue()
        assert [line.split()[0] for line in lines if line.split() and line.split()[0] in FAMILY] == list(FAMILY)

    def test_json_has_everything(self) -> None:
        family = json.loads(output("losses", "--json"))
        assert [member["name"] for member in family] == list(FAMILY)
        assert family == [member_as_json(member) for member in FAMILY.values()]
        for entry, member in zip(family, FAMILY.values(), strict=True):
            assert entry["formulas"]["loss"] == member.formulas.loss
            assert entry["kind"] == member.kind
            assert list(entry["facts"]) == [name for name, _ in member.facts.items()]
            assert all(set(fact) == FACT_KEYS for fact in entry["facts"].values())

    def test_infinity_and_nan_are_words(self, odd_one: Member) -> None:
        assert "inf*" in output("losses")
        (entry,) = json.loads(output("losses", "--json"), parse_constant=pytest.fail)
        assert entry["facts"]["smoothness"]["value"] == "inf"
        assert entry["settings"] == [{"a": "nan"}]
        assert "order_preservation" not in entry["facts"]
        assert entry["facts"]["bias"]["computable"]
        assert not entry["facts"]["variance"]["computable"]


class TestShow:
    @pytest.mark.parametrize("name", FAMILY)
    def test_prints_every_formula_and_fact(self, name: str) -> None:
        member, text = FAMILY[name], output("show", name)
        formulas = [member.formulas.map, member.formulas.loss, member.formulas.gradient, member.formulas.omega]
        for part in [*formulas, member.title, member.citation, *member.aliases]:
            assert part is None or part in text
        for _, fact in member.facts.items():
            assert fact.text in text
            assert f"{fact.status}; source: {fact.source}" in text
            assert fact.printed is None or f"the paper prints: {fact.printed}" in text

    @pytest.mark.parametrize("name", FAMILY)
    def test_the_calls_it_shows_exist(self, name: str) -> None:
        calls = json.loads(output("show", name, "--json"))["calls"]
        assert "loss" in calls
        for call in calls.values():
            module, _, function = call.partition("(")[0].rpartition(".")
            assert hasattr(importlib.import_module(module), function)

    def test_json_has_everything_about_the_member(self) -> None:
        assert json.loads(output("show", "softmax", "--json")) == member_as_json(FAMILY["softmax"])

    def test_aliases_work(self, odd_one: Member) -> None:
        assert output("show", "strange") == output("show", "odd")
        assert "strange" in output("show", "odd")

    def test_markup_is_printed_as_it_is(self, odd_one: Member) -> None:
        text = output("show", "odd")
        assert "the paper prints: [bold]m/S[/bold]" in text
        assert "Ω*(s) - [s]_y :smile:" in text
        assert "manymax.softmax(" not in text

    @pytest.mark.parametrize("width", [40, 80])
    def test_nothing_is_cut_off_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        screen = terminal(monkeypatch, width)
        output("show", "rankmax")
        assert max(map(len, screen.getvalue().splitlines())) <= width
        assert "…" not in screen.getvalue()

    def test_unknown_name(self) -> None:
        error = run("show", "sparsmax").exception
        assert isinstance(error, ManymaxError)
        assert "did you mean 'sparsemax'?" in str(error)


class TestDocs:
    def test_writes_page_and_types(self, tmp_path: Path) -> None:
        for page in (docs_command.FAMILY_PAGE, docs_command.TYPE_STUB):
            (tmp_path / page).parent.mkdir(parents=True)
        (tmp_path / "README.md").write_text("of a checkout")
        output("docs", "--root", str(tmp_path))
        assert (tmp_path / docs_command.FAMILY_PAGE).read_text().count("\n## ") == len(FAMILY) + 1
        assert "class LinearSoftmaxLoss(ExactHead):" in (tmp_path / docs_command.TYPE_STUB).read_text()

    def test_a_bar_does_not_break_a_row(self, odd_one: Member) -> None:
        page = docs_command.family_page()
        rows = [line for line in page.splitlines() if line.startswith("|")]
        assert any("no \\| bound" in row for row in rows)
        columns = [row.replace("\\|", "").count("|") for row in rows]
        sections = page[page.index("\n## ") :].splitlines()
        assert {row.replace("\\|", "").count("|") for row in sections if row.startswith("|")} == {7}
        assert len(set(columns)) == 2  # those of the table of all members, and of the tables of one

    def test_refuses_a_folder_without_a_readme(self, tmp_path: Path) -> None:
        assert "`--root` must be the top folder" in str(run("docs", "--root", str(tmp_path)).exception)


class TestHelp:
    def test_version(self) -> None:
        assert output("--version") == f"manymax {manymax.__version__}\n"

    @pytest.mark.parametrize("command", [(), ("losses",), ("show",)])
    def test_help_gives_examples_that_work(self, command: tuple[str, ...]) -> None:
        lines = [line.strip() for line in output(*command, "--help").splitlines()]
        examples = [line.split("  ")[0].split("|")[0].split() for line in lines if line.startswith("manymax ")]
        assert examples
        for _, name, *arguments in examples:
            output(
                name, *(arguments if name in ("losses", "show") else ["--help"])
            )  # the other commands take minutes: their help must do

    def test_docs_is_hidden_because_it_is_for_contributors(self) -> None:
        assert "docs" not in output("--help")


def test_ascii_only_output_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(raw, encoding="ascii", write_through=True))
    display.put(display.open_console(), display.table(["Ω"], [["[α]"]]))
    assert raw.getvalue().split() == [b"?", b"---", b"[?]"]


def test_values_of_facts_as_words() -> None:
    words = {True: "yes", False: "no", 0.5: "0.5", 2.0: "2", math.inf: "inf", "weak": "weak", None: "unknown"}
    assert {value: fact_word(Fact(value, "", "", "derived")) for value in words} == words
    assert fact_word(Fact(None, "", "", "derived", fn=lambda num_classes: 0.0)) == "depends"
