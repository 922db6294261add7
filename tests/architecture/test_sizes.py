"""No Python file is longer than 400 lines and no function body longer than 60.

A longer file has more than one subject, and a longer function does more than one thing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks")
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_BODY = 60


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; its signature, decorators and docstring are not counted."""
    first, last = function.body[0], function.body[-1]
    if ast.get_docstring(function) is None:
        start = first.lineno
    else:
        start = (first.end_lineno or first.lineno) + 1
    return (last.end_lineno or last.lineno) - start + 1


def long_bodies(source: str) -> Iterator[str]:
    """Names of the functions and methods of a module whose body is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_body(node) > MOST_LINES_OF_A_BODY:
            yield node.name


def python_files(root: Path) -> dict[str, str]:
    """{path below the root: source} of the Python files of all folders."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def too_long(files: dict[str, str]) -> list[str]:
    """'path: lines' of every file that is too long."""
    sizes = {path: len(source.splitlines()) for path, source in files.items()}
    return [f"{path}: {lines} lines" for path, lines in sizes.items() if lines > MOST_LINES_OF_A_FILE]


FILES = python_files(ROOT)


def test_no_file_is_too_long() -> None:
    assert too_long(FILES) == []


def test_no_function_body_is_too_long() -> None:
    assert [f"{path}: {name}" for path, source in FILES.items() for name in long_bodies(source)] == []


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "src" / "room").mkdir(parents=True)
    (tmp_path / "src" / "room" / "good.py").write_text("x = 1\n" * 400)
    (tmp_path / "src" / "room" / "bad.py").write_text("x = 1\n" * 401)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "elsewhere.py").write_text("x = 1\n" * 999)
    assert too_long(python_files(tmp_path)) == ["src/room/bad.py: 401 lines"]


@pytest.mark.parametrize("opening", ["def f(\n    a,\n    b,\n):\n", "async def f():\n", "@decorated\ndef f():\n"])
@pytest.mark.parametrize("docstring", ["", '    """One line."""\n', '    """Two\n\n    lines."""\n'])
def test_a_long_body_is_found_whatever_its_signature_and_docstring(opening: str, docstring: str) -> None:
    assert list(long_bodies(opening + docstring + "    x = 1\n" * 60)) == []
    assert list(long_bodies(opening + docstring + "    x = 1\n" * 61)) == ["f"]


def test_a_long_method_and_a_long_inner_function_are_found() -> None:
    inner = "    def g(self):\n" + "        x = 1\n" * 61
    assert list(long_bodies(f"class A:\n{inner}")) == ["g"]
    assert list(long_bodies(f"def f():\n{inner}")) == ["f", "g"]


def test_a_function_of_nothing_but_a_docstring_has_no_lines() -> None:
    assert list(long_bodies('def f():\n    """' + "Words.\n" * 80 + '"""\n')) == []
