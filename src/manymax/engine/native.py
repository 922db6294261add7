"""The native back end of members with a sparse map: `options={"compiled": True}`, on a CPU with a C++ compiler.

A member's kernel.cpp is compiled at its first use and kept in the account's cache folder, under a name that is a hash
of everything that the result depends on. Nothing needs the native back end: what it does not do (smoothing, float rows,
a learned setting, other devices) is done by the member's kernel.py, which is also what its results are tested against.
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
    # For this processor alone: the file is made where it is used, and its CPU features are in its name.
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    # What keeps loops from being vectorised: errno, floating-point traps. Not -ffast-math, which would also assume that
    # there is no nan and no infinity: scores are masked by -inf, and nan must be found. And rows.h puts int32 classes
    # into rows of floats, which strict aliasing forbids.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    # Compilers use 256-bit registers by default even where the processor has longer ones.
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}  # of the C functions, by dtype
SPARSE = 48  # as in rows.h: a row with one class in so many, or fewer, above a cut gives them as a list


def available() -> bool:
    """Whether the native back end works on this machine; compiles the part that all members share, if that is new."""
    try:
        library(ENTRIES)
    except ManymaxError:
        return False
    return True


@cache  # a process loads a file once, and asks the compiler for its version once
def library(source: Path) -> ctypes.CDLL:
    """A source file, compiled if its cache has no library of it, and loaded."""
    # $CXX first, as build tools do: whoever sets it wants that one and no other.
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
    """The cache folder, one that no other account can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manymax"
    try:
        # Loading a library runs its code: whoever can put a file here can run code as this account. The name of a file
        # proves nothing, because anybody can compute it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise ManymaxError(f"`options.compiled` has no place for what it compiles: {error}.") from None
    # The folder may have been there before, made by someone else or open to a group: `mode` has no effect then.
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise ManymaxError(
            f"`options.compiled`: others can write to {folder}, and loading a library from there would run their code."
        )
    return folder


def _fingerprint(compiler: str, source: Path) -> str:
    """Hash of the sources, compiler version, flags and CPU features: the cache key of the compiled library."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ManymaxError(f"`options.compiled`: {compiler} does not work: {error}.") from None
    # -march=native makes code for this processor: in a home folder that machines share, another one with fewer features
    # would crash on it. Where there is no /proc/cpuinfo, the name of the platform must do.
    cpu = Path("/proc/cpuinfo")
    features = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1] if cpu.exists() else []
    flags = " ".join((*FLAGS, platform.platform(), *features)).encode()
    return hashlib.sha256(b"\0".join([source.read_bytes(), HEADER.read_bytes(), version, flags])).hexdigest()[:16]


def _build(command: Sequence[str], path: Path) -> None:
    """Compile into a file of its own and rename it to `path` when it is complete.

    Several processes may compile at once, the ranks of a job for example. A rename is atomic, so that none of them
    loads half a file; the last one wins, with the same content. A failed compilation leaves nothing behind.
    """
    # Inside of the cache folder: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        result = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ManymaxError(f"`options.compiled`: {command[0]} failed:\n{result.stderr[-2000:]}")
        new.replace(path)


def serves(block: Block) -> bool:
    """Whether a native kernel can take a block: it is asked for, on a CPU, in float32 or float64."""
    scores = block.scores
    fits = scores.device.type == "cpu" and scores.dtype in SUFFIXES and scores.is_contiguous()
    return block.keywords.options.compiled and fits and scores.shape[1] < 1 << 31  # classes of entries are int32


def lists_positives(block: Block) -> bool:
    """Whether a block has listed positives and no label smoothing.

    The C++ kernels read lists of ids; and smoothing gives every class a part of the target, so that no gradient has
    few entries.
    """
    return block.target.ids is not None and block.target.share is None


def run(
    block: Block, source: Path, variant: int = 0, labels: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Dense | Sparse]]:
    """Run a member's native kernel on a block; the gradient takes the place of the scores.

    Args:
        block: with all classes of its rows: a rank that holds some of them cannot finish a row by itself.
        source: the member's kernel.cpp, which has `rows_float32` and `rows_float64`.
        variant: a number that tells the kernel which of its formulas to use.
        labels: (n, P) scores of the positives, lowest first, for a member that needs them.

    Returns:
        Maxima (n, 1), values of the rows (n,) in float64, and the parts of the gradient. The values are Omega*(s) -
        max s, or the losses, as the member's kernel defines them.
    """
    target, scores = block.target, block.scores
    assert target.ids is not None
    n, stride = scores.shape  # the stride counts padding, which the kernel must step over but not look at
    maximum, count = scores.new_empty(n, 1), torch.empty(n, dtype=torch.long)
    value = torch.empty(n, dtype=torch.float64)  # as the kernel sums them; the member rounds them at the end
    # C reads memory as it lies: one dtype, no strides. The names also keep the copies alive until the call returns.
    ids, weights, total = (x.contiguous() for x in (target.ids, target.weights.to(scores), target.total.to(scores)))
    coefficient = None if target.coefficient is None else target.coefficient.to(scores).contiguous()
    labels = None if labels is None else labels.contiguous()
    given = scores, n, stride, block.num_classes, ids, weights, ids.shape[1], total, coefficient
    call(source, "rows", scores, *given, maximum, value, count, labels, numbers=(variant,), threads=True)
    check_finite(maximum)  # a row with nan or +inf was left alone
    if coefficient is None:
        return maximum, value, []
    parts: list[Dense | Sparse] = []
    wide, entries = (count < 0).nonzero().squeeze(1), count.clamp(min=0)
    size = int(entries.sum())
    rows, classes, values = entries.new_empty(size), entries.new_empty(size), scores.new_empty(size)
    # Before any row is cleared below: entries are stored in the rows themselves.
    call(ENTRIES, "entries", scores, scores, n, stride, count, rows, classes, values)
    # The coefficient of the dense parts is 1: the C code has multiplied it in.
    if len(wide) > n // 2:
        # Most rows are dense. The whole block goes into the products, with zeros for the sparse rows: a copy of the
        # dense rows would be almost as large as the block.
        if len(wide) < n:
            scores[count >= 0] = 0
        parts.append(Dense(scores, scores.new_ones(n)))
    elif len(wide):
        parts.append(Dense(scores[wide], scores.new_ones(len(wide)), wide))
    if size:
        parts.append(Sparse(rows, classes, values))
    return maximum, value, parts


def collect(
    scores: Tensor, num_classes: int, maximum: Tensor, origin: Tensor, cut: Tensor
) -> tuple[list[simplex.Candidates], Tensor]:
    """The native form of `ops.simplex.collect`: the classes with s - origin > cut, for rows that have few of them.

    For ranks that share the classes of a row: which of them can be in the support is decided by a bound that all ranks
    know, before any of them can finish the row.

    Args:
        scores: (n, stride), of which the first num_classes columns are classes.
        num_classes: classes of this rank.
        maximum, origin, cut: (n, 1).

    Returns:
        Candidates of the rows with at most one class in `SPARSE` above the cut, and the other rows (m,).
    """
    n, stride = scores.shape
    count = torch.empty(n, dtype=torch.long)
    where = scores, n, stride, num_classes, origin.to(scores).contiguous(), cut.to(scores).contiguous()
    call(ENTRIES, "count_above", scores, *where, count, threads=True)
    few = count * SPARSE <= num_classes  # counted first, so that the table below has as many columns as are needed
    rows, wide = few.nonzero().squeeze(1), (~few).nonzero().squeeze(1)
    if not len(rows):
        return [], wide
    width = max(1, int(count[rows].max()))
    place = torch.where(few, few.cumsum(0) - 1, -1)  # the rows that are taken are numbered; -1 leaves a row out
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
    """Call a function of a compiled source file. Tensors are passed as pointers to their first element.

    Args:
        source: the file. function: the name without the suffix of its precision.
        like: a tensor whose dtype is that precision.
        arguments: int64 numbers, contiguous CPU tensors, or None for a tensor that is left out.
        numbers: int arguments after these.
        threads: whether the number of threads comes last. It is torch's own, so that `torch.set_num_threads` holds here
            too.
    """
    # ctypes knows nothing of the C signature: every argument is given its width, or 64-bit numbers would be cut to 32.
    given: list[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_int] = [
        ctypes.c_int64(value)
        if isinstance(value, int)
        else ctypes.c_void_p(None if value is None else value.data_ptr())
        for value in arguments
    ]
    given += [ctypes.c_int(number) for number in numbers]
    if threads:
        given.append(ctypes.c_int(torch.get_num_threads()))
    getattr(library(source), f"{function}_{SUFFIXES[like.dtype]}")(*given)
