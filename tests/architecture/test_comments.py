"""The numerics are commented: more than 8 % of the lines of `engine`, of `ops` and of all kernels carry a comment.

Whether a comment says why, no test can tell; that there are next to none, this one can.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "manymax"
LEAST_SHARE = 0.08
NATIVE = (".cpp", ".h")

# {part: patterns of its files, below the package}.
PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("engine/**/*.py", "engine/**/*.cpp", "engine/**/*.h"),
    "ops": ("ops/**/*.py",),
    "kernels": ("members/*/kernel*.py", "**/*.cpp", "**/*.h"),
}


def commented_lines(name: str, text: str) -> int:
    """Number of lines that carry a comment: `#` in Python, where a string is no comment; `//` in C++."""
    if name.endswith(NATIVE):
        return sum("//" in line for line in text.splitlines())
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def share_of_comments(package: Path, patterns: tuple[str, ...]) -> float:
    """Commented lines over all lines of the files that match any of the patterns."""
    paths = {path for pattern in patterns for path in package.glob(pattern)}
    assert paths, f"no file matches {', '.join(patterns)}"
    texts = {str(path): path.read_text(encoding="utf-8") for path in paths}
    commented = sum(commented_lines(name, text) for name, text in texts.items())
    return commented / max(1, sum(len(text.splitlines()) for text in texts.values()))


@pytest.mark.parametrize("part", PARTS)
def test_the_numerics_are_commented(part: str) -> None:
    assert share_of_comments(PACKAGE, PARTS[part]) > LEAST_SHARE


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", "x = 1  # why\n# and why\ny = 2\n", 2),
        ("a.py", 'x = "# no comment"\n"""# nor this\n# nor this\n"""\n', 0),
        ("a.py", "x = 7 // 2\n", 0),
        ("a.cpp", "int x; // why\n// and why\nint y;\n", 2),
        ("a.h", "#include <math.h>\n", 0),
    ],
)
def test_lines_with_comments_are_counted(name: str, text: str, lines: int) -> None:
    assert commented_lines(name, text) == lines


def test_a_part_with_too_few_comments_is_found(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bare.py").write_text("x = 1\n" * 92 + "# why\n" * 8)
    assert share_of_comments(tmp_path, PARTS["ops"]) <= LEAST_SHARE
    (tmp_path / "ops" / "commented.py").write_text("# why\n")
    assert share_of_comments(tmp_path, PARTS["ops"]) > LEAST_SHARE


def test_a_part_without_files_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no file matches"):
        share_of_comments(tmp_path, PARTS["ops"])
