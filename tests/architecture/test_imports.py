"""Each part of the package imports only parts below it, and the library needs nothing but torch.

Import statements are read from the source, not run: those inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import copy
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# The parts that make up the library; the others (study, paper, cli) are applications of it.
LIBRARY = {
    "errors",
    "table",
    "settings",
    "ops",
    "engine",
    "members",
    "samplers",
    "heads",
    "metrics",
    "optim",
    "distributed",
    "theory",
    "advisor",
}

# {part: the parts of this package that it may import, besides itself and those in `FOR_ALL`}. For a module the row
# with the longest matching name counts: `study.data.split` has the row of `study.data`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "table": set(),
    "settings": set(),
    "ops": set(),
    "engine": {"ops", "samplers"},  # heads that draw are run there too
    "members": {"engine", "samplers", "ops"},
    "samplers": {"ops"},
    "heads": {"members", "engine", "samplers", "ops"},
    "metrics": {"engine", "ops"},
    "optim": {"engine", "ops"},
    "distributed": {"heads", "theory", "members", "engine", "samplers", "ops"},
    "theory": {"members", "engine", "samplers", "ops"},
    "advisor": {"members", "engine", "heads", "ops", "theory"},
    "integrations": {"heads", "members", "engine", "samplers", "ops"},
    "study.data": {"study.files", "study.seeds"},
    "study.data.batches": {"engine", "study.data"},
    "study.metrics": {"metrics", "ops"},
    "study.computations": {"engine", "heads"},
    "study.records": {"study.config", "study.data", "study.files", "study.memory"},
    "study.backbones": {"study.data", "ops"},
    "study.parallel": {"distributed", "engine", "samplers", "study.data"},
    "study.train": {"engine", "heads", "samplers"}
    | {f"study.{n}" for n in ("backbones", "config", "supervisor", "data", "parallel", "seeds")},
    "study.train_als": {f"study.{n}" for n in ("supervisor", "data", "run_head", "train")},
    "study.evaluate": {"engine", "heads", "study.backbones", "study.data", "study.metrics"},
    "study.record_files": {"study.config", "study.files", "study.records"},
    "study.report": {"members"}
    | {
        f"study.{n}"
        for n in ("backbones", "files", "metrics", "plain_text", "run_options", "records", "record_files", "agenda")
    },
    "study": {*LIBRARY, "study"},
    "paper": {*LIBRARY, "study"},
    "cli": {"members", "engine", "heads", "samplers", "distributed", "theory", "advisor", "study", "paper", ""},
    "": LIBRARY,  # manymax/__init__.py: the public names
    "__main__": {"cli"},
}
FOR_ALL = {"errors", "table", "settings"}

# The commands that speak of the paper; `report` hands the page of a study its sections on it.
PAPER_COMMANDS = {"cli.theory", "cli.reproduction", "cli.report"}

# Members that other members may import, because one is a special case of the other.
SPECIAL_CASES = {"softmax", "entmax"}


def parse(source: Path) -> dict[str, ast.Module]:
    """{dotted name of a module below the package: its syntax tree}; the package itself has the name ''."""
    package = source / "manymax"
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        trees[".".join(p for p in parts if p != "__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Absolute names of the imported modules; `from a import b` imports a.b if that is a module, otherwise a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                yield longer if longer.removeprefix("manymax.") in modules else str(node.module)


def ours(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of this package that are imported, by their names below the package."""
    names = imported(tree, modules)
    return {name.partition(".")[2] for name in names if name.partition(".")[0] == "manymax"}


def part(module: str) -> str:
    """The row of MAY_IMPORT that holds for a module: the longest prefix of its name that has a row."""
    prefixes = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)]
    rows = [prefix for prefix in prefixes if prefix in MAY_IMPORT]
    assert rows, f"{module} belongs to no row of MAY_IMPORT: say there what it may import"
    return rows[0]


def below(module: str, row: str) -> bool:
    """Whether a module is the part `row` or inside it."""
    return module == row or (row != "" and module.startswith(f"{row}."))


def wrong_direction(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' for every import inside the package that MAY_IMPORT does not allow."""
    found = []
    for module, tree in trees.items():
        allowed = MAY_IMPORT[part(module)] | FOR_ALL | {part(module)}
        for name in sorted(ours(tree, set(trees))):
            if not any(below(name, row) for row in allowed):
                found.append(f"{module} imports {name or 'manymax'}")
    return found


def foreign(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' for every import in the library of anything but torch, the standard library and the package.

    Files of Triton kernels import Triton; they are imported themselves by a statement inside of the function that
    launches a kernel (see `loads_triton`).
    """
    known = {"manymax", "torch", *sys.stdlib_module_names}
    return [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if module.partition(".")[0] in {*LIBRARY, ""}
        for name in imported(tree, set(trees))
        if name.partition(".")[0] not in known and not (name.partition(".")[0] == "triton" and has_kernels(module))
    ]


def has_kernels(module: str) -> bool:
    """Whether a module is a file of Triton kernels."""
    return module in {"engine.triton_rows", "engine.triton_levels", "engine.triton_entries"} or module.endswith(
        ".kernel_triton"
    )


def loads_triton(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' for every file of Triton kernels that is loaded when a module of another kind is."""
    return [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if not has_kernels(module)
        for name in sorted(ours(at_import(tree), set(trees)))
        if has_kernels(name)
    ]


def entangled(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' for every module of a member that imports FAMILY, or a member that is no special case."""
    found = []
    for module, tree in trees.items():
        if not module.startswith("members."):
            continue
        own = module.split(".")[1]
        for name in sorted(ours(tree, set(trees))):
            other = name.split(".")[1] if name.startswith("members.") else None
            if name == "members" or (other is not None and other not in {own, *SPECIAL_CASES}):
                found.append(f"{module} imports {name}")
    return found


def knows_the_paper(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' or 'a names b' for every module that knows `paper`, those of `paper` and its commands aside."""
    found = []
    for module, tree in trees.items():
        if below(module, "paper") or module in PAPER_COMMANDS:
            continue
        found += [f"{module} imports {name}" for name in sorted(ours(tree, set(trees))) if below(name, "paper")]
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found += [f"{module} names manymax.paper" for text in texts if "manymax.paper" in text]
    return found


def loads_the_paper(trees: dict[str, ast.Module]) -> list[str]:
    """'a imports b' for every import of `paper` that happens when a command's module is imported, not when it runs."""
    return [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if below(module, "cli")
        for name in sorted(ours(at_import(tree), set(trees)))
        if below(name, "paper")
    ]


def at_import(tree: ast.Module) -> ast.Module:
    """The statements that run when a module is imported: no bodies of functions, nothing for type checkers alone."""

    class Run(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return ast.fix_missing_locations(Run().visit(copy.deepcopy(tree)))


TREES = parse(SOURCE)


def test_every_part_imports_only_what_lies_below_it() -> None:
    assert wrong_direction(TREES) == []


def test_the_library_imports_nothing_but_torch_and_the_standard_library() -> None:
    assert foreign(TREES) == []
    assert loads_triton(TREES) == []


def test_members_do_not_import_one_another() -> None:
    assert entangled(TREES) == []


def test_only_its_own_commands_know_the_paper() -> None:
    assert knows_the_paper(TREES) == []
    assert loads_the_paper(TREES) == []


def test_neither_a_study_nor_the_command_line_loads_the_paper() -> None:
    script = (
        "import sys, manymax, manymax.study.run, manymax.study.sweep, manymax.cli.app as cli\n"
        "from manymax.study.config import RunConfig\n"
        "cli.build_app(), RunConfig(loss='sparsemax', computation='compiled')\n"
        "print(*(name for name in sys.modules if name.startswith('manymax.')))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    loaded = result.stdout.split()
    assert "manymax.cli.theory" in loaded
    assert [name for name in loaded if name.startswith("manymax.paper")] == []


def test_there_are_no_import_cycles() -> None:
    graph = {module: ours(tree, set(TREES)) - {module} for module, tree in TREES.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises on a cycle


def test_importing_the_library_loads_neither_the_command_nor_the_study() -> None:
    script = "import sys, manymax; print(*sorted(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert "manymax.members" in loaded
    assert not loaded & {"manymax.cli", "manymax.study", "typer", "rich", "scipy", "entmax", "implicit"}


@pytest.mark.parametrize(
    ("check", "module", "statement", "complaint"),
    [
        (wrong_direction, "ops.simplex", "from manymax.members import FAMILY", "ops.simplex imports members"),
        (wrong_direction, "members.softmax.loss", "import manymax", "members.softmax.loss imports manymax"),
        (wrong_direction, "engine.target", "def f():\n    from manymax.cli import main", "engine.target imports cli"),
        (wrong_direction, "theory.cost", "import manymax.heads.dense", "theory.cost imports heads.dense"),
        (wrong_direction, "study.data.split", "from manymax.study import run", "study.data.split imports study"),
        (
            knows_the_paper,
            "study.report.page",
            "def f():\n    from manymax.paper.findings import judge",
            "study.report.page imports paper.findings",
        ),
        (knows_the_paper, "study.run", 'X = ["manymax.paper.whole_table"]', "study.run names manymax.paper"),
        (knows_the_paper, "cli.study", "def f():\n    import manymax.paper", "cli.study imports paper"),
        (loads_the_paper, "cli.theory", "import manymax.paper.claims", "cli.theory imports paper.claims"),
        (loads_the_paper, "cli.report", "if True:\n    import manymax.paper", "cli.report imports paper"),
        (foreign, "ops", "import scipy.sparse", "ops imports scipy.sparse"),
        (foreign, "", "import typer", " imports typer"),
        (foreign, "engine.blocks", "import triton", "engine.blocks imports triton"),
        (
            loads_triton,
            "members.rankmax.kernel",
            "import manymax.engine.triton_rows",
            "members.rankmax.kernel imports engine.triton_rows",
        ),
        (entangled, "members.nce.loss", "from manymax.members import FAMILY", "members.nce.loss imports members"),
        (
            entangled,
            "members.rg.loss",
            "import manymax.members.rankmax.loss",
            "members.rg.loss imports members.rankmax.loss",
        ),
    ],
)
def test_a_forbidden_import_is_found(check, module: str, statement: str, complaint: str) -> None:
    trees = {"members.rankmax.loss": ast.parse(""), "heads.dense": ast.parse(""), module: ast.parse(statement)}
    assert check(trees) == [complaint]


def test_commands_print_by_the_console_that_shows_control_characters() -> None:
    """Names from data go to the terminal in many places; none of them has a way of its own."""
    ways = {"typer.echo", "click.echo", "print", "Console", "sys.stdout.write", "sys.stderr.write"}
    for path in sorted((SOURCE / "manymax" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if path.name != "console.py" and isinstance(node, ast.Call) and ast.unparse(node.func) in ways:
                assert "in_lines(" in ast.unparse(node), f"{path.name}, line {node.lineno}: {ast.unparse(node)}"
