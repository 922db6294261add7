"""The programs in examples/ run; those that take minutes are run with less to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[2]
# The options that shorten an example, and words of what it prints.
EXAMPLES = {
    "recommender": ((), "the same after saving and loading: True"),
    "two_towers": ((), "in the batch, log q"),
    "language_model": (("--steps", "3"), "entmax head"),
    "extreme_classification": (("--seconds", "1"), "hierarchical_softmax"),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str) -> None:
    options, words = EXAMPLES[name]
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
