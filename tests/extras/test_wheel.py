"""The built wheel in a fresh environment, without the extras: what somebody gets who types `pip install manymax`."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from manymax.engine import native_library
from manymax.engine.native_levels import levels_of

ROOT = Path(__file__).parents[2]

# Runs the Python lines of a Markdown file as a doctest, with nothing but the standard library to help.
RUN_README = """
import doctest, pathlib, re, sys
text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"^```python\\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
parsed = doctest.DocTestParser().get_doctest("\\n".join(blocks), {}, "README.md", None, 0)
result = doctest.DocTestRunner().run(parsed)
print(result.attempted, result.failed)
"""

# One training step of a head, and where the package was imported from.
RUN_HEAD = """
import torch, manymax
head = manymax.LinearSparsemaxLoss(4, 1000)
head(torch.randn(8, 4), torch.arange(8)).backward()
print(manymax.__file__)
"""


def try_to_run(*command: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    # No PYTHONPATH: the checkout must not stand in for what was installed. And no choices of whoever runs the tests.
    ours = ("PYTHONPATH", "CXX", "MANYMAX_BUILD", "MANYMAX_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    given = [str(part) for part in command]
    return subprocess.run(given, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def run(*command: object, cwd: Path | None = None, **variables: str) -> str:
    result = try_to_run(*command, cwd=cwd, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has torch and the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    (wheel,) = built.glob("*.whl")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    run(*pip, "torch")  # first and alone, so that its pin is settled before the package asks for it
    run(*pip, wheel)
    return python


@pytest.mark.extras
def test_the_lines_of_the_readme_run(python: Path, tmp_path: Path) -> None:
    attempted, failed = run(python, "-c", RUN_README, ROOT / "README.md", cwd=tmp_path).split()
    assert int(attempted) >= 7
    assert failed == "0"


@pytest.mark.extras
def test_a_head_needs_torch_alone(python: Path, tmp_path: Path) -> None:
    place = run(python, "-c", RUN_HEAD, cwd=tmp_path)
    assert str(ROOT / "src") not in place
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert not re.search(r"^(pyarrow|typer|rich|pydantic|scipy|matplotlib)==", installed, flags=re.MULTILINE)


@pytest.mark.extras
def test_the_command_says_which_extra_it_needs(python: Path, tmp_path: Path) -> None:
    command = [str(python.with_name("manymax")), "losses"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 1
    assert re.search(r'pip install "manymax\[study\]"', result.stderr)


@pytest.mark.extras
def test_what_is_shipped(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("manymax/py.typed", "manymax/heads/__init__.pyi", "manymax/study/report/page.html"):
        assert wanted in names
    # The wheel has what was compiled from the C++ files, the source distribution the files themselves.
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    with tarfile.open(sdist) as archive:
        shipped = [name.partition("/")[2] for name in archive.getnames()]
    for name in (*names, *shipped):
        assert not name.startswith(("results/", ".venv/", "studies/")), name
    assert any(name.startswith("tests/contracts/") for name in shipped)
    assert "hatch_build.py" in shipped
    assert sum(name.endswith((".cpp", ".h")) for name in shipped) >= 4
    assert not [name for name in shipped if name.endswith((".so", ".o"))]


@pytest.mark.extras
@pytest.mark.skipif(not native_library.available(), reason="no compiler that works")
def test_the_wheel_carries_its_native_kernels(built: Path, python: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    machine = platform.machine()
    # Of one platform, and of every version of Python.
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(libraries) == len(levels_of(machine))
    report = json.loads(run(python.with_name("manymax"), "doctor", "--json", cwd=tmp_path))
    assert report["backend"] == native_library.resolved_name("auto")
    assert {one["backend"] for one in report["checks"]} == {f"native-{name}" for name in native_library.levels_here()}
    assert all(one["passed"] for one in report["checks"])
    # One pool of threads in the process: the OpenMP library is the one in torch's own folder.
    assert "torch" in Path(report["openmp"]).parts


@pytest.mark.extras
def test_without_a_compiler_the_wheel_is_pure(python: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT]
    refused = try_to_run(*build, PATH=str(tmp_path), MANYMAX_BUILD="native")
    assert refused.returncode != 0
    assert "cannot be compiled: no C++ compiler was found. Install one" in refused.stdout + refused.stderr
    said = try_to_run(*build, PATH=str(tmp_path))
    assert "manymax is built without its native kernels: no C++ compiler was found" in said.stdout + said.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "pure")
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path / "pure")}  # before what the environment has installed
    assert str(tmp_path / "pure") in run(python, "-c", RUN_HEAD, **elsewhere)
    report = json.loads(run(python, "-m", "manymax", "doctor", "--json", **elsewhere))
    assert (report["backend"], report["checks"], report["problems"]) == ("torch", [], [])
    assert "Install a compiler" in report["because"]
