"""No member is named outside its own folder: the rest of the package reads the fields of its entry in FAMILY.

The syntax tree of each file is checked: identifiers (names of variables, functions, classes, arguments and keyword
arguments), imported names and modules, attributes, and string literals except docstrings. All are split into words, at
underscores, at capitals and at characters that are no letters, and a member is named only by whole words: "once" does
not name nce. Names that belong to torch, such as `torch.softmax`, are allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manymax.members import FAMILY, REFERENCE_LOSSES

PACKAGE = Path(__file__).parents[2] / "src" / "manymax"

# Files that may name members: `paper` speaks of the paper's losses, and `FAMILY` lists its rows.
FREE = ("paper/", "members/__init__.py")

# Members of which one is a special case of the other: entmax is softmax at alpha = 1 and sparsemax at alpha = 2. Their
# folders share formulas and kernels and may name one another.
SPECIAL_CASES = {"softmax", "sparsemax", "entmax"}

# Members whose kernel calls that of another one and adds something: gates, or a function of the scores before it; and
# generalised ones, whose title has the name of what they generalise.
BUILT_ON = {"sl_at_k": {"softmax"}, "bsl": {"softmax"}, "talos": {"softmax"}, "gbce": {"bce"}}

# At most eight files, each with its reason.
EXEMPT: dict[str, str] = {
    "__init__.py": "the public names",
    "metrics/__init__.py": "the sparsemax score, a metric of any map that is published under this name",
    "metrics/probabilities.py": "defines the sparsemax score",
}

TORCH = {name for home in (torch, Tensor, nn, functional) for name in dir(home)}
Name = tuple[str, ...]


def words(text: str) -> list[str]:
    """The words of an identifier or a text, in lower case.

    >>> words("LinearNCELoss"), words("sampled_softmax-2")
    (['linear', 'nce', 'loss'], ['sampled', 'softmax', '2'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", text)]


def names_of_members() -> dict[Name, str]:
    """{words of a name, class name or alias: name of the member}, longer names first."""
    rows = [*FAMILY.values(), *REFERENCE_LOSSES.values()]
    found = {tuple(words(name)): row.name for row in rows for name in (row.name, row.class_name, *row.aliases)}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


MEMBERS = names_of_members()


def named(text: str) -> set[str]:
    """The members that a text names. Longer names are matched first: `sampled_softmax` does not also name softmax."""
    remaining, found = words(text), set()
    for name, member in MEMBERS.items():
        size = len(name)
        for start in range(len(remaining) - size + 1):
            if tuple(remaining[start : start + size]) == name:
                found.add(member)
                remaining[start : start + size] = [""] * size
    return found


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """The nodes of all docstrings of a module."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, holders) and node.body]
    return {body[0].value for body in bodies if isinstance(body[0], ast.Expr)}


def imports(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names that a file imports from other packages, and names that it imports from this one."""
    foreign: set[str] = set()
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                (ours if alias.name.partition(".")[0] == "manymax" else foreign).add(bound)
        elif isinstance(node, ast.ImportFrom):
            home = ours if node.level or str(node.module).partition(".")[0] == "manymax" else foreign
            home.update(alias.asname or alias.name for alias in node.names)
    return foreign, ours


def root(node: ast.expr) -> str | None:
    """The name at the start of a chain of attributes: `a` of a.b.c; None if it starts with another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and string in a file that could name a member."""
    prose, (foreign, ours) = docstrings(tree), imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node not in prose:
                yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            if node.id not in foreign:
                yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            if node.attr not in TORCH or root(node) in ours:
                yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.keyword):
            if node.arg is not None:
                yield node.value.lineno, node.arg
        elif isinstance(node, ast.alias):
            if node.asname is not None:
                yield node.lineno, node.asname
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("manymax"))
        elif isinstance(node, ast.ImportFrom):
            if node.level or str(node.module).partition(".")[0] == "manymax":
                yield node.lineno, str(node.module)
                yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from ((node.lineno, name) for name in node.names)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.lineno, node.name


def allowed(path: str) -> set[str]:
    """The members that a file may name: its own, those whose name is a part of its own, and special cases of it."""
    parts = path.split("/")
    if parts[0] != "members" or len(parts) < 3:
        return set()
    own = parts[1]
    within = {member for name, member in MEMBERS.items() if f"_{'_'.join(name)}_" in f"_{own}_"}
    return within | (SPECIAL_CASES if own in SPECIAL_CASES else set()) | BUILT_ON.get(own, set())


def wrongly_named(path: str, source: str) -> list[str]:
    """'path:line names member' for every member that a file names and may not."""
    if path.startswith(FREE):
        return []
    found = {(line, member) for line, text in texts(ast.parse(source)) for member in named(text) - allowed(path)}
    return [f"{path}:{line} names {member}" for line, member in sorted(found)]


FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_no_member_is_named_outside_its_folder() -> None:
    checked = {path: source for path, source in FILES.items() if path not in EXEMPT}
    assert [complaint for path, source in sorted(checked.items()) for complaint in wrongly_named(path, source)] == []


def test_exemptions_are_few_and_needed() -> None:
    assert len(EXEMPT) <= 8
    assert all(EXEMPT.values())
    assert [path for path in EXEMPT if not wrongly_named(path, FILES[path])] == []


@pytest.mark.parametrize(
    ("source", "member"),
    [
        ('KNOWN = {"rankmax": 1}', "rankmax"),
        ('raise ValueError(f"for the nce of {x}")', "nce"),
        ('"""What it is."""\nHELP = "Of NCE."', "nce"),
        ('aliases = ["ssm"]', "sampled_softmax"),
        ('title = "Hierarchical softmax"', "hierarchical_softmax"),
        ("nce_offset = 1", "nce"),
        ("def _rg(x): ...", "rg"),
        ("class LinearTaylorSoftmaxLoss: ...", "taylor_softmax"),
        ("class LinearNCELoss: ...", "nce"),
        ("def f(entmax): ...", "entmax"),
        ("f(sparsemax=2)", "sparsemax"),
        ("x = thing.softmax_loss", "softmax"),
        ("from manymax.members.entmax.loss import smoothness", "entmax"),
        ("from manymax.members import softmax", "softmax"),
        ("from manymax import softmax as map", "softmax"),
        ("import manymax.members.bpr.loss", "bpr"),
        ("import manymax\nmanymax.softmax(x)", "softmax"),
        ("from manymax import members\nmembers.softmax", "softmax"),
        ("def f():\n    from manymax.members.rg import als", "rg"),
        ("import torch as entmax", "entmax"),
    ],
)
def test_a_name_outside_its_folder_is_found(source: str, member: str) -> None:
    line = source.count("\n") + 1
    assert wrongly_named("theory/new.py", source) == [f"theory/new.py:{line} names {member}"]


@pytest.mark.parametrize(
    "source",
    [
        "once = 1",
        "EXIT_DIVERGED = PATIENCE = 3",
        'print("at once, in argmax order: large, merge, variance")',
        "import torch\ntorch.softmax(x, 1)",
        "import torch\ntorch.nn.functional.log_softmax(x, 1)",
        "probs = scores.softmax(-1) + scores.log_softmax(-1) + (a + b).softmax(0)",
        "from torch.nn.functional import log_softmax\nlog_softmax(x, -1)",
        '"""Of entmax."""\ndef f():\n    """Of rankmax."""\nclass A:\n    """Of rg."""',
        "from manymax.members import BASELINE, FAMILY\nBASELINE.loss",
        "x = config.urgency + pairs.nuance",
    ],
)
def test_what_only_looks_like_a_name_is_not(source: str) -> None:
    assert wrongly_named("theory/new.py", source) == []


@pytest.mark.parametrize(
    ("path", "source", "members"),
    [
        ("members/nce/loss.py", "def nce_loss(): ...", []),
        ("members/nce/loss.py", "def rankmax(softmax): ...", ["rankmax", "softmax"]),
        ("members/sampled_softmax/loss.py", 'text = "softmax(c) over the sample"', []),
        ("members/sparsemax/loss.py", "from manymax.members.entmax.loss import entmax", []),
        ("members/rankmax/loss.py", "entmax = 2", ["entmax"]),
        ("members/__init__.py", "from manymax.members import rg", []),
        ("paper/claims.py", 'x = "rg"', []),
        ("cli/paper.py", 'x = "rg"', ["rg"]),
    ],
)
def test_a_folder_may_name_its_own_member(path: str, source: str, members: list[str]) -> None:
    assert wrongly_named(path, source) == [f"{path}:1 names {member}" for member in members]
