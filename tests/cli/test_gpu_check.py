"""`manymax gpu-check`: what it says with a GPU, without one, and of kernels that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from manymax.cli import gpu_check
from manymax.cli.app import app
from manymax.heads import gpu_report

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["gpu-check", *arguments])


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_device", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_without_a_gpu_and_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    result = run()
    assert result.exit_code == 0
    assert "No GPU" in result.stdout
    assert "nothing to interpret" in result.stdout


@pytest.mark.extras
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: `pip install --no-deps triton`")
def test_without_a_gpu_the_kernels_are_interpreted(tmp_path: Path) -> None:
    """Every member that has kernels, in a process of its own, which Triton needs."""
    file, env = tmp_path / "gpu.json", os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "manymax", "gpu-check", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("No GPU")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert {one["member"] for one in found["values"]} == {member.name for member, _ in gpu_report.with_kernels()}
    assert all(one["passed"] and one["difference"] < 1e-5 for one in found["values"])
    assert found["times"] == []
    assert found["machine"]["device"] is None


@pytest.mark.parametrize(("difference", "why"), [(3e-3, None), (None, None), (None, "RuntimeError: no compiler")])
def test_what_is_wrong_is_named(difference: float | None, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    good = gpu_report.ValueReport("softmax", {}, "one positive", "float32", 130, 1e-7, 1e-5)
    bad = gpu_report.ValueReport("entmax", {"alpha": 1.5}, "soft cap", "float32", 130, difference, 1e-5, why)
    monkeypatch.setattr(gpu_check, "compare_values", lambda device, **keywords: iter([good, bad]))
    monkeypatch.setattr(gpu_check, "interpreted", lambda: True)
    result = run()
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("WRONG")]
    assert len(lines) == 1
    told = why or ("off by 3e-03" if difference else "not a number")
    assert lines[0] == f"WRONG: entmax {{'alpha': 1.5}}, soft cap, 130 classes, float32: {told}"


class Event:
    """As that of torch.cuda."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 2.5


def test_every_way_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a device that is none: Triton refuses it, and every other way runs."""
    monkeypatch.setattr(gpu_check, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2**20)
    monkeypatch.setattr(gpu_report, "REPEATS", 1)
    monkeypatch.setattr(gpu_report, "WARM_UP", 1)
    monkeypatch.setitem(gpu_check.ON_DEVICE, "sizes", (1, 20))
    result = run("--rows", "4", "--classes", "20", "--features", "3", "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1
    assert "4 rows, 20 classes, 3 features" in result.stdout
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    # Of no kernel is a value claimed that was not computed.
    assert all("cannot serve this call" in one["why"] and not one["passed"] for one in found["values"])
    for one in found["times"]:
        assert (one["milliseconds"] is None) == (one["way"] == "head, triton"), one
        if one["milliseconds"] is not None:
            assert one["milliseconds"] == 2.5
    ways = {one["way"] for one in found["times"]}
    assert ways >= {"head, triton", "head, torch", "eager, the whole table"}
    assert ("torch's linear head" in ways) == hasattr(torch.nn.functional, "linear_cross_entropy")
    assert found["size"] == {"rows": 4, "classes": 20, "features": 3}
