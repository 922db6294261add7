"""Other people's tests, from the packages that are installed: nothing of them is in this repository."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def counted(*command: object, folder: Path) -> dict[str, dict[str, Any]]:
    """What a command prints in its last line of JSON."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert lines, result.stdout[-2000:] + result.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(lines[-1])
    return found


def check(groups: dict[str, dict[str, Any]], record_property: Any) -> None:
    """Fail where a case failed; the numbers are printed at the end of the session."""
    for name, group in groups.items():
        record_property("others", {"group": name, **{key: group[key] for key in ("agreed", "changed", "left_out")}})
    failed = [text for group in groups.values() for text in group["failed"]]
    assert not failed, "\n".join(failed[:20])


@pytest.mark.slow
def test_cases_of_torch(record_property: Any, tmp_path: Path) -> None:
    groups = counted(HERE / "torch_cases.py", folder=tmp_path)
    check(groups, record_property)
    assert sum(group["agreed"] for group in groups.values()) >= 1300
    assert groups["errors"]["agreed"] >= 10


@pytest.mark.slow
def test_tests_of_entmax(record_property: Any, tmp_path: Path) -> None:
    found = importlib.util.find_spec("entmax")
    if found is None or found.origin is None:
        pytest.skip("entmax is not installed")
    theirs = sorted(Path(found.origin).parent.glob("test_*.py"))
    if not theirs:
        pytest.skip("this version of entmax has no tests in its wheel")
    for path in theirs:  # beside their package they would import it
        shutil.copy(path, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    groups = counted("-m", "pytest", "-q", "-p", "tests.others.entmax_names", "-p", "no:cacheprovider", folder=tmp_path)
    check(groups, record_property)
    assert groups["entmax"]["agreed"] >= 60
