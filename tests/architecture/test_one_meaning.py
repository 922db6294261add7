"""One name, one meaning: no two classes share a name, and no two modules define a constant of the same name.

A reader who meets `Ranking` or `METRICS` should not have to ask which one is meant. Leading underscores do not make a
different name. Constants are names in capitals that a module assigns at its top level.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "manymax"

# {class name: why two classes may share it}.
SHARED_CLASSES: dict[str, str] = {}

# {constant: files that may each define it}. Such a constant is the same field of a pattern that every file follows:
# each member defines its `FACTS`, each sampler its `ENTRY`. Outside of these files the name may not be used again.
SAME_FIELD: dict[str, tuple[str, ...]] = {
    "MEMBER": ("members/*/__init__.py",),
    "FACTS": ("members/*.py",),
    "FORMULAS": ("members/*.py",),
    "SETTINGS": ("members/*.py",),
    "TAKES": ("members/*.py",),
    "THEORY": ("members/*/theory.py",),
    "COST": ("members/*/kernel.py",),
    "TRAFFIC": ("members/*/kernel.py",),
    "ENTRY": ("samplers/*.py", "study/backbones/*.py"),
}

Sources = dict[str, str]


def read_package(package: Path) -> Sources:
    """{path below the package: source} of its Python files."""
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))
    }


def assigned_names(target: ast.expr) -> Iterator[str]:
    """The names that an assignment to `target` binds: one, or several in a tuple."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from assigned_names(element)


def top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, those within `if`, `try` and `with` included."""
    for statement in statements:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from top_level(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            yield from top_level(handler.body)


@cache
def constants(source: str) -> set[str]:
    """Names in capitals that a module assigns at its top level, without leading underscores; no type variables."""
    found = set()
    for statement in top_level(ast.parse(source).body):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func).endswith("TypeVar"):
            continue
        names = (name.lstrip("_") for target in targets for name in assigned_names(target))
        found |= {name for name in names if name.isupper()}
    return found


def classes(source: str) -> list[str]:
    """Names of all classes of a module, nested ones included, without leading underscores."""
    return [node.name.lstrip("_") for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def shared_classes(sources: Sources) -> dict[str, list[str]]:
    """{class name: files that define it} of every name that more than one class has."""
    homes = defaultdict(list)
    for path, source in sources.items():
        for name in classes(source):
            homes[name].append(path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def shared_constants(sources: Sources) -> dict[str, set[str]]:
    """{constant: files that define it} of every name that two modules define; the files of one pattern count once."""
    homes = defaultdict(set)
    for path, source in sources.items():
        for name in constants(source):
            homes[name].add(path)
    found = {}
    for name, paths in homes.items():
        by_pattern = {p for p in paths if any(fnmatch(p, pattern) for pattern in SAME_FIELD.get(name, ()))}
        others = paths - by_pattern
        if len(others) + bool(by_pattern) > 1:
            found[name] = others
    return found


SOURCES = read_package(PACKAGE)


def test_no_two_classes_have_the_same_name() -> None:
    found = shared_classes(SOURCES)
    assert {name: paths for name, paths in found.items() if name not in SHARED_CLASSES} == {}
    assert [name for name in SHARED_CLASSES if name not in found] == []


def test_no_two_modules_define_the_same_constant() -> None:
    found = shared_constants(SOURCES)
    assert found == {}


def test_every_field_of_a_pattern_is_defined_by_several_files() -> None:
    definers = {name: [path for path, source in SOURCES.items() if name in constants(source)] for name in SAME_FIELD}
    assert [name for name, paths in definers.items() if len(paths) < 2] == []


def test_the_most_ambiguous_names_are_never_exempt() -> None:
    assert not {"METRICS", "BLOCK"} & {*SAME_FIELD}


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("class Ranking: ...", "class Ranking: ...", "Ranking"),
        ("class Ranking: ...", "class _Ranking: ...", "Ranking"),
        ("def f():\n    class Row: ...", "class A:\n    class Row: ...", "Row"),
    ],
)
def test_a_class_name_that_is_used_twice_is_found(first: str, second: str, name: str) -> None:
    sources = {"engine/a.py": first, "study/b.py": second, "study/c.py": "class Other: ..."}
    assert shared_classes(sources) == {name: ["engine/a.py", "study/b.py"]}


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("METRICS = 1", "METRICS = ()", "METRICS"),
        ("BLOCK = 1", "BLOCK = 1", "BLOCK"),
        ("_BLOCK = 1", "BLOCK: int = 2", "BLOCK"),
        ("NEAR, FAR = 1, 2", "if True:\n    FAR = 3", "FAR"),
        ("try:\n    A = 1\nexcept ImportError:\n    LOCK = None", "LOCK = 2", "LOCK"),
        ("FACTS = 1", "FACTS = 2", "FACTS"),
    ],
)
def test_a_constant_that_is_defined_twice_is_found(first: str, second: str, name: str) -> None:
    sources = {"engine/a.py": first, "study/b.py": second, "study/c.py": "OTHER = 1"}
    assert shared_constants(sources) == {name: {"engine/a.py", "study/b.py"}}


def test_a_field_of_members_may_not_get_a_second_meaning_elsewhere() -> None:
    members = {f"members/{name}/loss.py": "FACTS = 1" for name in ("a", "b")}
    assert shared_constants(members) == {}
    assert shared_constants(members | {"study/facts.py": "FACTS = 2"}) == {"FACTS": {"study/facts.py"}}


@pytest.mark.parametrize("source", ["def f():\n    BLOCK = 2", "block = 1", "T = TypeVar('T')\nBLOCK.x = 1"])
def test_local_names_and_type_variables_are_no_constants(source: str) -> None:
    assert constants(source) == set()


def test_files_are_read_from_the_package(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("METRICS = 1")
    (tmp_path / "c.py").write_text("METRICS = 2")
    assert shared_constants(read_package(tmp_path)) == {"METRICS": {"a/b.py", "c.py"}}
