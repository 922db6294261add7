"""Benchmarks are not run by tests, but each of them can be started, says what it measures, and is in their README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
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
