"""The native back end of members with a sparse map: `options={"compiled": True}`, on a CPU, where a C++ compiler is.

A member's kernel.cpp is compiled at its first use and kept in the user's cache, under a name that holds everything it
was made of. Nothing needs it: what it does not do (smoothing, float rows, a learned setting, other devices) is done by
the member's kernel.py, which is also what its results are tested against.
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
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from manymax.engine.blocks import Block, Dense, Sparse
from manymax.errors import ManymaxError
from manymax.ops import simplex
from manymax.ops.checks import check_finite

ENTRIES = Path(__file__).with_name("entries.cpp")  # what all members share
HEADER = Path(__file__).with_name("rows.h")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
NAMES = {torch.float32: "float32", torch.float64: "float64"}
SPARSE = 48  # as in rows.h: a row with one class in so many, or fewer, above a cut gives them as a list


def available() -> bool:
    """Whether the native back end can be had on this machine; compiles a part of it if that has not been done yet."""
    try:
        library(ENTRIES)
    except ManymaxError:
        return False
    return True


@cache
def library(source: Path) -> ctypes.CDLL:
    """A source file, compiled and loaded."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise ManymaxError(
            "`options.compiled` needs a C++ compiler, and none was found: install one, name it in $CXX, or leave the "
            "option out."
        )
    path = _cache() / f"{source.parent.name}-{_fingerprint(compiler, source)}.so"
    if not path.exists():
        _build([compiler, *FLAGS, f"-I{HEADER.parent}", str(source)], path)
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


def _fingerprint(compiler: str, source: Path) -> str:
    """Hash of the sources, compiler version, flags and CPU features: the cache key of the compiled library."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ManymaxError(f"`options.compiled`: {compiler} does not work: {error}.") from None
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    flags = " ".join((*FLAGS, platform.platform(), *features)).encode()
    return hashlib.sha256(b"\0".join([source.read_bytes(), HEADER.read_bytes(), version, flags])).hexdigest()[:16]


def _build(command: Sequence[str], path: Path) -> None:
    """Compile into a file of its own, which takes its name when it is whole: two processes may do it at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        result = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ManymaxError(f"`options.compiled`: {command[0]} failed:\n{result.stderr[-2000:]}")
        new.replace(path)


def serves(block: Block) -> bool:
    """Whether a native kernel can take a block: it is asked for, on a CPU, in float32 or float64."""
    scores = block.scores
    here = scores.device.type == "cpu" and scores.dtype in NAMES and scores.is_contiguous()
    return block.keywords.options.compiled and here and scores.shape[1] < 1 << 31


def lists_positives(block: Block) -> bool:
    """Whether a block has listed positives and spreads nothing over all classes, as gradients in place need."""
    return block.target.ids is not None and block.target.share is None


def run(
    block: Block, source: Path, variant: int = 0, labels: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Dense | Sparse]]:
    """Maxima (n, 1), values of the rows (n,), and parts of the gradient, which take the place of the scores.

    Args:
        block: of all classes of its rows.
        source: the member's kernel.cpp, which has `rows_float32` and `rows_float64`.
        variant: a number that it understands.
        labels: (n, P) scores of the positives, sorted, of a member that needs them.

    Returns:
        The values are Omega*(s) - max s, or the losses; that is the member's business.
    """
    target, scores = block.target, block.scores
    assert target.ids is not None
    n, stride = scores.shape
    maximum, count = scores.new_empty(n, 1), torch.empty(n, dtype=torch.long)
    value = torch.empty(n, dtype=torch.float64)
    ids, weights, total = (x.contiguous() for x in (target.ids, target.weights.to(scores), target.total.to(scores)))
    coefficient = None if target.coefficient is None else target.coefficient.to(scores).contiguous()
    labels = None if labels is None else labels.contiguous()
    given = scores, n, stride, block.num_classes, ids, weights, ids.shape[1], total, coefficient
    call(source, "rows", scores, *given, maximum, value, count, labels, numbers=(variant,), threads=True)
    check_finite(maximum)
    if coefficient is None:
        return maximum, value, []
    parts: list[Dense | Sparse] = []
    wide, entries = (count < 0).nonzero().squeeze(1), count.clamp(min=0)
    size = int(entries.sum())
    rows, classes, values = entries.new_empty(size), entries.new_empty(size), scores.new_empty(size)
    call(ENTRIES, "entries", scores, scores, n, stride, count, rows, classes, values)
    if len(wide) > n // 2:  # a copy of them would be as large as the block
        if len(wide) < n:
            scores[count >= 0] = 0
        parts.append(Dense(scores, scores.new_ones(n)))
    elif len(wide):
        parts.append(Dense(scores[wide], scores.new_ones(len(wide)), wide))
    if size:
        parts.append(Sparse(rows, classes, values))
    return maximum, value, parts


def collect(
    scores: Tensor, num_classes: int, maximum: Tensor, reference: Tensor, cut: Tensor
) -> tuple[list[simplex.Candidates], Tensor]:
    """`ops.simplex.collect`: the classes with s - reference > cut for the rows that have few of them; the other rows.

    Args:
        scores: (n, stride), with num_classes columns that count.
        maximum, reference, cut: (n, 1).
    """
    n, stride = scores.shape
    count = torch.empty(n, dtype=torch.long)
    where = scores, n, stride, num_classes, reference.to(scores).contiguous(), cut.to(scores).contiguous()
    call(ENTRIES, "count_above", scores, *where, count, threads=True)
    few = count * SPARSE <= num_classes
    rows, wide = few.nonzero().squeeze(1), (~few).nonzero().squeeze(1)
    if not len(rows):
        return [], wide
    width = max(1, int(count[rows].max()))
    place = torch.where(few, few.cumsum(0) - 1, -1)
    found = scores.new_full((len(rows), width), -torch.inf)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    call(ENTRIES, "gather_above", scores, *where, width, place, found, ids, threads=True)
    return [simplex.Candidates(rows, maximum[rows], found, ids)], wide


def call(
    source: Path,
    function: str,
    like: Tensor,
    *arguments: Tensor | int | None,
    numbers: Sequence[int] = (),
    threads: bool = False,
) -> None:
    """Call a function of a compiled source in the precision of `like`: numbers, and where tensors begin.

    Args:
        source, function: `function` is without its suffix of a precision.
        arguments: int64 numbers, tensors, or None for a tensor that is not there.
        numbers: int arguments at the end.
        threads: whether it takes the number of threads after those.
    """
    given: list[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_int] = [
        ctypes.c_int64(value)
        if isinstance(value, int)
        else ctypes.c_void_p(None if value is None else value.data_ptr())
        for value in arguments
    ]
    given += [ctypes.c_int(number) for number in numbers]
    if threads:
        given.append(ctypes.c_int(torch.get_num_threads()))
    getattr(library(source), f"{function}_{NAMES[like.dtype]}")(*given)
