"""The compiled path of the sparse heads: `options={"compiled": True}`, on a CPU, where there is a C++ compiler.

rows.cpp is compiled at its first use and kept in the user's cache, under a name that holds everything it was made of.
Nothing needs it: what it does not do (smoothing, float rows, a learned alpha, other alphas, other devices) is done by
heads/kernels.py, which is also what its results are tested against.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Dense, Sparse
from manymax.errors import ManymaxError
from manymax.ops.checks import check_finite

SOURCE = Path(__file__).with_name("rows.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
RANKMAX, ENTMAX, SPARSEMAX = 0, 1, 2  # as in rows.cpp
NAMES = {torch.float32: "float32", torch.float64: "float64"}


def available() -> bool:
    """Whether the compiled path can be had on this machine; compiles it if that has not been done yet."""
    try:
        library()
    except ManymaxError:
        return False
    return True


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """rows.cpp, compiled and loaded."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ManymaxError(
            "`options.compiled` needs a C++ compiler, and none was found: install one, name it in $CXX, or leave the "
            "option out."
        )
    path = _cache() / f"rows-{_fingerprint(compiler)}.so"
    if not path.exists():
        _build([compiler, *FLAGS, str(SOURCE)], path)
    return ctypes.CDLL(str(path))


def _cache() -> Path:
    """A folder that nobody else can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manymax"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise ManymaxError(f"`options.compiled` has no place for what it compiles: {error}.") from None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise ManymaxError(f"`options.compiled`: others can write to {folder}, so that nothing is loaded from it.")
    return folder


def _fingerprint(compiler: str) -> str:
    """Of all that a compiled file depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ManymaxError(f"`options.compiled`: {compiler} does not work: {error}.") from None
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    parts = [SOURCE.read_bytes(), version, " ".join((*FLAGS, platform.platform(), *features)).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(command: Sequence[str], path: Path) -> None:
    """Compile into a file of its own, which takes its name when it is whole: two processes may do it at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        result = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ManymaxError(f"`options.compiled`: {command[0]} failed:\n{result.stderr[-2000:]}")
        new.replace(path)


def serves(block: Block) -> bool:
    """Whether rows.cpp can take a block: listed positives, nothing spread over all classes, float on a CPU."""
    scores = block.scores
    here = scores.device.type == "cpu" and scores.dtype in NAMES and scores.is_contiguous()
    return here and block.target.ids is not None and block.target.share is None and scores.shape[1] < 1 << 31


def run(block: Block, member: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor, list[Dense | Sparse]]:
    """Maxima (n, 1), values of the rows (n,), and parts of the gradient, which take the place of the scores.

    The values are Omega*(s) - max s, or for rankmax, whose labels come sorted, the losses.
    """
    code, target, scores = library(), block.target, block.scores
    assert target.ids is not None
    n, stride = scores.shape
    kind, maximum, count = NAMES[scores.dtype], scores.new_empty(n, 1), torch.empty(n, dtype=torch.long)
    value = torch.empty(n, dtype=torch.float64)
    ids, weights, total = (x.contiguous() for x in (target.ids, target.weights.to(scores), target.total.to(scores)))
    coefficient = None if target.coefficient is None else target.coefficient.to(scores).contiguous()
    labels = None if labels is None else labels.contiguous()
    given = _pass(scores, n, stride, block.num_classes, ids, weights, ids.shape[1], total, coefficient)
    made = _pass(maximum, value, count)
    numbers = ctypes.c_int(member), ctypes.c_int(torch.get_num_threads())
    getattr(code, f"rows_{kind}")(*given, *made, *_pass(labels), *numbers)
    check_finite(maximum)
    if coefficient is None:
        return maximum, value, []
    parts: list[Dense | Sparse] = []
    wide, entries = (count < 0).nonzero().squeeze(1), count.clamp(min=0)
    size = int(entries.sum())
    rows, classes, values = entries.new_empty(size), entries.new_empty(size), scores.new_empty(size)
    getattr(code, f"entries_{kind}")(*_pass(scores, n, stride, count, rows, classes, values))
    if len(wide) > n // 2:  # a copy of them would be as large as the block
        if len(wide) < n:
            scores[count >= 0] = 0
        parts.append(Dense(scores, scores.new_ones(n)))
    elif len(wide):
        parts.append(Dense(scores[wide], scores.new_ones(len(wide)), wide))
    if size:
        parts.append(Sparse(rows, classes, values))
    return maximum, value, parts


def _pass(*values: Tensor | int | None) -> list[ctypes.c_void_p | ctypes.c_int64]:
    """Arguments of a function in rows.cpp: numbers, and where tensors begin."""
    return [
        ctypes.c_int64(value)
        if isinstance(value, int)
        else ctypes.c_void_p(None if value is None else value.data_ptr())
        for value in values
    ]
