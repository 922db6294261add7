"""What docs/platforms.md promises of machines that are not this one, as far as this one can show it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.exact import Case, cases

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "manymax").rglob("*.py"))

# A machine without the modules that only POSIX has and without the native library: train, stop, evaluate, recommend.
ELSEWHERE = """
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import torch, manymax
from pathlib import Path
from manymax.engine import native_library
from manymax.study.config import RunConfig
from manymax.study.run import run
native_library.LIBRARIES = Path(sys.argv[1])  # as a wheel that was built without a compiler: no library in it
assert not native_library.available()
for name in ("LinearSparsemaxLoss", "LinearRankmaxLoss", "LinearEntmaxLoss"):
    head = getattr(manymax, name)(4, 50)
    head(torch.randn(8, 4), torch.arange(8)).backward()
record = run(RunConfig(loss="sparsemax", size="60x30x6", epochs=1), Path(sys.argv[1]))
print(record.status, record.peak_memory_mb)
"""


def test_pure_python_without_what_only_linux_has(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path), "MANYMAX_BACKEND": "auto"}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done None\n"


def private_names(tree: ast.Module) -> set[str]:
    """Private parts of torch that a module imports or reaches outside of a `try`."""
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found |= {name for name in names if re.match(r"torch\.(\w+\.)*_[a-zA-Z]", name)}
    return found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from torch._C import x", {"torch._C.x"}),
        ("import torch.utils._pytree", {"torch.utils._pytree"}),
        ("torch.utils._pytree.tree_leaves(x)", {"torch.utils._pytree", "torch.utils._pytree.tree_leaves"}),
        ("from torch.nn import Module", set()),
        ("try:\n    from torch._C import x\nexcept ImportError:\n    x = None", set()),
    ],
)
def test_a_private_name_would_be_noticed(line: str, found: set[str]) -> None:
    assert private_names(ast.parse(line)) == found


def test_private_names_of_torch_are_guarded() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    found = {str(path.relative_to(ROOT)): names for path, tree in trees.items() if (names := private_names(tree))}
    assert found == {}, "private parts of torch may be gone in another version: use a public name, or guard the import"


@pytest.mark.parametrize("case", cases())
def test_losses_do_not_look_at_values_on_a_device(case: Case) -> None:
    """A fake CUDA tensor has a shape, a dtype and a device, and is an error where a value is looked at.

    Without gradients: a build of torch without CUDA ends the process where autograd asks for a stream of the device.
    """
    with torch.no_grad(), FakeTensorMode():
        scores, target = torch.empty(4, 7, device="cuda"), torch.empty(4, dtype=torch.long, device="cuda")
        loss = case.member.loss(scores, target, reduction="none", **case.setting)
        assert (loss.device.type, loss.dtype, loss.shape) == ("cuda", torch.float32, (4,))


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/platforms.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page} names {file}::{test}"
