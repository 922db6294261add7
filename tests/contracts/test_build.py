"""hatch_build.py as a command: what it compiles, what it leaves alone, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)
LIBRARY = """
#include "part.h"
extern "C" __attribute__((visibility("default"))) const char* manymax_sources() { return MANYMAX_SOURCES PART; }
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one small C++ file and a header, and the levels of the real one."""
    engine = tmp_path / "src" / "manymax" / "engine"
    engine.mkdir(parents=True)
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    shutil.copy(ROOT / "src" / "manymax" / "engine" / "native_levels.py", engine)
    (engine / "library.cpp").write_text(LIBRARY, encoding="utf-8")
    (engine / "part.h").write_text('#define PART " one"', encoding="utf-8")
    (engine / "other.cpp").write_text('#include "part.h"\nconst char* other() { return PART; }\n', encoding="utf-8")
    return tmp_path


def build(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "MANYMAX_BUILD")}
    command = [sys.executable, "hatch_build.py"]
    return subprocess.run(
        command, cwd=project, env=environment | variables, capture_output=True, text=True, check=False
    )


def libraries(project: Path) -> dict[str, bytes]:
    folder = project / "src" / "manymax" / "engine" / "native_libraries"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@needs_compiler
def test_only_what_has_changed_is_compiled(project: Path) -> None:
    assert "compiling" in build(project).stderr
    first = libraries(project)
    assert first
    assert all(b" one" in text for text in first.values())
    again = build(project)
    assert (again.returncode, again.stderr) == (0, "")
    # A header is in no list of files to compile, and yet both files depend on it.
    (project / "src" / "manymax" / "engine" / "part.h").write_text('#define PART " two"', encoding="utf-8")
    assert "compiling" in build(project).stderr
    second = libraries(project)
    assert all(b" two" in text and b" one" not in text for text in second.values())
    assert second.keys() == first.keys()


@needs_compiler
def test_what_does_not_compile_is_an_error_and_leaves_the_old_library(project: Path) -> None:
    build(project)
    before = libraries(project)
    (project / "src" / "manymax" / "engine" / "other.cpp").write_text("int other( {", encoding="utf-8")
    result = build(project)
    assert result.returncode == 1
    assert "other.cpp:1" in result.stderr
    assert libraries(project) == before


def test_without_a_compiler_it_says_so(project: Path) -> None:
    result = build(project, PATH=str(project / "nothing"))
    assert result.returncode == 0
    assert "built without its native kernels: " in result.stderr
    assert libraries(project) == {}
    assert build(project, PATH=str(project / "nothing"), MANYMAX_BUILD="native").returncode == 1
    assert "$MANYMAX_BUILD says so" in build(project, MANYMAX_BUILD="python").stderr
    assert "$MANYMAX_BUILD must be one of" in build(project, MANYMAX_BUILD="fast").stderr
    assert "no-such-compiler does not work" in build(project, CXX="no-such-compiler").stderr
