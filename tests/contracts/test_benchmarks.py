"""The benchmarks are not run here, but each of them can be started and says what it measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("measure", "bias"))
)
def test_a_benchmark_can_be_started(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "python benchmarks/" in result.stdout
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text(encoding="utf-8")
