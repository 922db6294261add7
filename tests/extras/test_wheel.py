"""The built wheel in a fresh environment, without the extras: what somebody gets who types `pip install manymax`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

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


def run(*command: object, **keywords: object) -> str:
    # No PYTHONPATH: the checkout must not stand in for what was installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, check=False, **keywords
    )
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
    # The native kernels are compiled from these on the machine that uses them.
    assert sum(name.endswith((".cpp", ".h")) for name in names) >= 4
    with tarfile.open(sdist) as archive:
        shipped = [name.partition("/")[2] for name in archive.getnames()]
    for name in (*names, *shipped):
        assert not name.startswith(("results/", ".venv/", "studies/")), name
    assert any(name.startswith("tests/contracts/") for name in shipped)
