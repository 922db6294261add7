"""`manymax doctor`: what it finds, what it says about faults, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from manymax.cli.app import app
from manymax.engine import native_library
from manymax.heads import machine_report
from manymax.members import FAMILY
from manymax.ops import processor

ROOT = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(not native_library.available(), reason="no native library: run `make native`")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native_library.VARIABLE, raising=False)


@needs_library
def test_it_checks_every_kernel_at_every_level() -> None:
    found = json.loads(run("--json").stdout)
    here = [f"native-{level}" for level in native_library.levels_here()]
    members = {name for name, member in FAMILY.items() if member.native and member.kind == "exact"}
    cases = {(one["backend"], one["member"], one["dtype"]) for one in found["checks"]}
    assert cases == {(b, m, d) for b in here for m in members for d in ("float32", "float64")}
    assert all(one["passed"] and 0 <= one["difference"] < 1e-4 for one in found["checks"])
    assert found["backend"] == native_library.resolved_name("auto")
    assert [level["name"] for level in found["levels"] if level["used"]] == [found["backend"]]
    assert found["problems"] == []


@needs_library
def test_its_text() -> None:
    result = run()
    assert result.exit_code == 0
    assert f"auto       {native_library.resolved_name('auto')}: it is the best level" in result.stdout
    assert "nowhere: used on demand alone" in result.stdout  # aarch64
    assert "agrees with plain torch to" in result.stdout


@needs_library
@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_kernel_that_is_wrong_is_named(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine_report._results

    def results(member: object, setting: object, dtype: object, backend: str) -> list[torch.Tensor]:
        found = real(member, setting, dtype, backend)  # type: ignore[arg-type]
        if backend == "native-plain" and member is FAMILY["rankmax"]:
            found[2][0, 0] += wrong
        return found

    monkeypatch.setattr(machine_report, "_results", results)
    result = run()
    assert result.exit_code == 1
    assert "native-plain DIFFERS FROM PLAIN TORCH" in result.stdout
    assert "wrong      native-plain computes rankmax wrongly in float32" in result.stdout
    assert "MANYMAX_BACKEND=torch" in result.stdout
    found = json.loads(run("--json").stdout)  # strict JSON, without NaN
    assert [one["backend"] for one in found["checks"] if not one["passed"]] == ["native-plain"] * 2


def test_an_installation_without_native_code_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "LIBRARIES", tmp_path)
    monkeypatch.setattr(native_library, "missing", lambda level: "there is none.")
    native_library._resolve.cache_clear()
    try:
        result = run()
    finally:
        native_library._resolve.cache_clear()
    assert result.exit_code == 0
    assert "auto       torch: there is none." in result.stdout
    assert "install from source where there is a C++ compiler" in result.stdout
    assert "there is only plain torch" in result.stdout


def test_a_library_that_cannot_be_used_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manymax_plain.so").touch()
    monkeypatch.setattr(native_library, "LIBRARIES", tmp_path)
    monkeypatch.setattr(native_library, "missing", lambda level: "it is broken.")
    native_library._resolve.cache_clear()
    try:
        result = run()
    finally:
        native_library._resolve.cache_clear()
    assert result.exit_code == 1
    assert "wrong      it is broken." in result.stdout


def test_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYMAX_BACKEND", "torch")
    assert "auto       torch: MANYMAX_BACKEND is 'torch' in the environment." in run().stdout
    monkeypatch.setenv("MANYMAX_BACKEND", "fast")
    result = run()
    assert result.exit_code == 1
    assert "wrong      `$MANYMAX_BACKEND` must be one of" in result.stdout


def test_slow_bfloat16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "features", lambda: frozenset(["avx2"]))
    report = machine_report.machine_report(check=False)
    assert report.instructions == {"AVX2": True, "AVX-512": False, "bf16": False, "VNNI": False}
    assert any("bfloat16" in sentence for sentence in report.advice)


def test_it_works_without_the_extra() -> None:
    """Somebody with torch alone can ask, too: the packages of the command line are not there."""
    code = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None\n"
        "from manymax.cli import main; sys.argv = ['manymax', 'doctor', '--json']; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["versions"]["torch"] == torch.__version__
