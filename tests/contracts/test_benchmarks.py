"""Benchmarks are not timed by tests, but each can be started, says what it measures, and is in their README."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
FILES = sorted(FOLDER.glob("*.py"))
# The files that are programs; the others are imported by them.
PROGRAMS = [path for path in FILES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_in_the_readme(path: Path) -> None:
    assert f"| `{path.name}` |" in README


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_started(path: Path) -> None:
    command = [sys.executable, str(path), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"python benchmarks/{path.name}" in result.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_readme_says_what_a_program_answers_how_long_it_takes_and_what_it_writes(path: Path) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{path.name}` |"))
    question, takes, writes = (cell.strip() for cell in row.split("|")[2:5])
    assert "?" in question
    assert takes.endswith(("minutes", "seconds"))
    assert "results/benchmarks/" in writes or "docs/" in writes


class TestHeads:
    """The record of heads.py: its bars, its page, and a run in small sizes from the first figure to the page."""

    @pytest.fixture(autouse=True)
    def importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))

    @pytest.fixture
    def record(self, tmp_path: Path) -> Any:
        module = import_module("head_record")
        arguments = argparse.Namespace(json=str(tmp_path / "figures.json"), quick=False)
        bars = {"limit": [module.Bar("ours / other", 1.2, classes=(50,), regimes=("fresh",))]}
        made = module.Record(arguments, bars)
        made.begin("limit")
        return made

    def test_a_figure_is_judged_by_the_bar_of_its_question_size_and_regime(self, record: Any, tmp_path: Path) -> None:
        problems = import_module("head_problems")
        for regime, classes, ratio in [("fresh", 50, 1.2), ("fresh", 50, 1.3), ("fresh", 60, 1.3), ("peaked", 50, 1.3)]:
            record.line(problems.Problem(regime, 4, classes, tmp_path), "ours / other", ratio)
        kept = json.loads((tmp_path / "figures.json").read_text())["questions"]["limit"]["lines"]
        assert [(line["bar"], line["verdict"]) for line in kept] == [
            (1.2, "reached"),
            (1.2, "not reached"),
            (None, ""),
            (None, ""),
        ]

    def test_products_are_those_of_the_whole_table(self) -> None:
        losses = import_module("head_losses")
        q, w = torch.randn(10, 8, dtype=torch.float64), torch.randn(37, 8, dtype=torch.float64)
        for rows in (10, 4, 3):
            grad_q, grad_w = losses._in_blocks(q, w, 3, rows)()
            torch.testing.assert_close(grad_q, q @ w.T @ w)
            torch.testing.assert_close(grad_w, (q @ w.T).T @ q)

    def test_the_page_is_that_of_the_record(self) -> None:
        page = import_module("head_page")
        figures = json.loads((ROOT / "results" / "benchmarks" / "heads.json").read_text(encoding="utf-8"))
        text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
        written = text.split("<!-- speed: begin")[1].split("-->\n", 1)[1].split("\n<!-- speed: end")[0]
        assert written.splitlines() == page.page_lines(figures, "../results/benchmarks/heads.svg"), (
            "run `python benchmarks/heads.py --json results/benchmarks/heads.json --page docs/speed.md`"
        )

    @pytest.mark.slow
    def test_a_quick_run_resumes_and_makes_a_page(self, tmp_path: Path) -> None:
        figures, page = tmp_path / "figures.json", tmp_path / "speed.md"
        page.write_text("before\n<!-- speed: begin -->\n<!-- speed: end -->\nafter\n")

        def start(*options: str) -> str:
            command = [sys.executable, str(FOLDER / "heads.py"), "--json", str(figures), *options]
            environment = os.environ | {"MANYMAX_CACHE": str(tmp_path / "cache")}
            result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            assert result.returncode == 0, result.stderr
            return result.stdout

        start("--quick", "--threads", "1", "--only", "limit,growth,sampled,unwanted,epoch")
        start("--page", str(page))
        text = page.read_text()
        assert text.startswith("before\n")
        assert "small sizes" in text
        assert text.count("<details>") == 5
        assert "<svg" in figures.with_suffix(".svg").read_text()
        assert not re.search(r'"(/|~)', figures.read_text()), "a path of this machine is in the record"
        # A question that the file holds is not asked again.
        record = json.loads(figures.read_text())
        for name in ("peers", "memory", "neighbour", "backends"):
            record["questions"][name] = record["questions"]["epoch"]
        figures.write_text(json.dumps(record))
        assert start("--quick", "--threads", "1").count(": kept from ") == 9
