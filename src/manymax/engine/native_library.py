"""The native library: which of its levels this machine can run, which one a back end means, and calls into it.

The library is compiled where the package is built (hatch_build.py), once for each level of `NATIVE_LEVELS`, and loaded
here at its first use, through ctypes. Nothing needs it: where it is missing, everything runs in plain torch. It has no
part of Python or torch in it, so that one file serves every version of both.
"""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manymax.engine.native_levels import FOLDER, NATIVE_LEVELS, Level, fingerprint, levels_of, sources
from manymax.errors import ManymaxError, check_choice

PACKAGE = Path(__file__).parents[1]
LIBRARIES = PACKAGE / FOLDER
# "auto" and "native" leave the level open; levels of several architectures share a name. "triton" is no native
# code: see triton_backend.py.
BACKENDS = ("auto", "torch", "triton", "native", *dict.fromkeys(level.backend for level in NATIVE_LEVELS))
VARIABLE = "MANYMAX_BACKEND"  # of the environment: what "auto" stands for
SUFFIXES = {torch.float32: "float32", torch.float64: "float64"}  # of the C functions, by dtype
# Tried one after the other until the kernels find their OpenMP functions. None is for what torch has loaded already.
OPENMP = (None, "libgomp.so.1", "libomp.so.5", "libomp.so", "libomp.dylib")


def resolve(backend: str) -> str | None:
    """The level that a back end means on this machine; None for plain torch.

    Args:
        backend: "auto" is the best level that has been tested, plain torch where there is none, or what the environment
            variable MANYMAX_BACKEND says; "torch" is plain torch; "native" is the best level that runs here, one that
            has been tested if possible; "native-avx2" and the like are that level. An error says why one that was
            demanded cannot be had.

    >>> resolve("torch") is None
    True
    """
    # The option wins: the variable only says what "auto" means, so that code which names a back end keeps it.
    return _resolve(os.environ.get(VARIABLE, "auto"), f"${VARIABLE}") if backend == "auto" else _resolve(backend)


@cache
def _resolve(backend: str, name: str = "options.backend") -> str | None:
    check_choice(name, backend, BACKENDS)
    if backend in ("torch", "triton"):
        return None
    if backend not in ("auto", "native"):
        wanted = backend.removeprefix("native-")
        if why := missing(wanted):
            raise ManymaxError(f"`{name}` is {backend!r}, which cannot be had: {why}")
        return wanted
    if backend == "auto":
        _warn_if_stale()
    here = [level for level in levels_of(platform.machine()) if missing(level.name) is None]
    best = [level for level in here if level.tested] or (here if backend == "native" else [])
    if best:
        return best[-1].name
    if backend == "native":
        raise ManymaxError(f"`{name}` is 'native', which cannot be had: {missing('plain')}")
    return None


def resolved_name(backend: str) -> str:
    """The name of what a back end means on this machine: "torch", or "native-" and a level."""
    level = resolve(backend)
    return "torch" if level is None else f"native-{level}"


def available() -> bool:
    """Whether any level of the native library runs on this machine."""
    return bool(levels_here())


def levels_here() -> tuple[str, ...]:
    """The names of all levels that run on this machine, tested or not, the best one last."""
    return tuple(level.name for level in levels_of(platform.machine()) if missing(level.name) is None)


@cache
def find_level(name: str) -> Level:
    """The row of `NATIVE_LEVELS` of a level that this machine has."""
    return next(row for row in levels_of(platform.machine()) if row.name == name)


def missing(level: str) -> str | None:
    """Why a level does not run on this machine, as a sentence with the way out; None if it runs."""
    machine = platform.machine()
    table = {row.name: row for row in levels_of(machine)}
    if level not in table:
        return f"there is no level {level!r} for processors of the kind {machine}."
    # The plain library tells the features of the processor, so that it comes first: another level may hold code that
    # this processor cannot run, in the part that runs while it is loaded as well.
    for name in dict.fromkeys(("plain", level)):
        lacking = [feature for feature in table[name].features if feature not in features()]
        if lacking:
            return f"this processor has no {', '.join(lacking)}. Leave the option out to use the best level it has."
        found = _load(table[name])
        if isinstance(found, str):
            return found
    return None


@cache
def features() -> frozenset[str]:
    """Features of this processor that the levels ask for; none where there is no plain library to ask."""
    plain = next(iter(levels_of(platform.machine())), None)
    library = None if plain is None else _load(plain)
    if not isinstance(library, ctypes.CDLL):
        return frozenset()
    return frozenset(_text(library, "manymax_features").split())


@cache  # a process loads a library once; an outcome that is a sentence stays as it is, too
def _load(level: Level) -> ctypes.CDLL | str:
    """The library of a level, or a sentence that says why there is none."""
    path = LIBRARIES / level.file
    if not path.exists():
        return (
            "this installation has no native library: it was built where no C++ compiler was found, or without asking "
            "for one. Install a compiler (g++ or clang++) and the package again; in a checkout, run `make native`."
        )
    found = _open(path)
    if isinstance(found, str):
        return (
            f"the native library cannot be loaded: {found}. Install the package from source, with g++ as the compiler "
            "($CXX); code of clang needs its own OpenMP library, libomp."
        )
    # In a checkout sources change, and functions with other arguments than those in the library would be called. An
    # installed wheel has no sources: library and Python files came together.
    if sources(PACKAGE) and _text(found, "manymax_sources") != fingerprint(PACKAGE):
        return "the native library is older than its sources: run `make native` (or `python hatch_build.py`)."
    return found


def _open(path: Path) -> ctypes.CDLL | str:
    """A shared library, opened so that it finds OpenMP; or what the loader says."""
    problem = ""
    for openmp in OPENMP:
        try:
            if openmp is not None:
                ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        try:
            # The OpenMP library is not linked: functions of the one that torch has loaded are found by their names. A
            # second one would have threads of its own, which would fight with torch's for the cores.
            return ctypes.CDLL(str(path))
        except OSError as error:
            problem = problem or str(error)  # the first one is about what torch has; the others only follow from it
    return problem


def _text(library: ctypes.CDLL, function: str) -> str:
    """What a function without arguments returns, a C string."""
    pointer = getattr(library, function)
    pointer.restype = ctypes.c_char_p
    return pointer().decode()


def openmp() -> str | None:
    """The file of the OpenMP library that the kernels share with torch; None if there is none, or it is not known."""
    if not levels_here() or os.name != "posix":
        return None
    # gcc and clang begin a parallel region by functions of different names, and the file of a library holds the names
    # of what it calls. OpenMP libraries of clang have both.
    text = (LIBRARIES / levels_of(platform.machine())[0].file).read_bytes()
    name = "__kmpc_fork_call" if b"__kmpc_fork_call" in text else "GOMP_parallel"

    class Found(ctypes.Structure):  # what `dladdr` tells of an address: the file that it is in comes first
        _fields_ = (("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "symbol", "address")))

    process, found = ctypes.CDLL(None), Found()
    function = getattr(process, name, None)
    if function is None or not process.dladdr(function, ctypes.byref(found)) or not found.file:
        return None
    return os.fsdecode(found.file)


@cache  # once per process
def _warn_if_stale() -> None:
    """Warn where "auto" falls back to plain torch because somebody has changed a kernel and not compiled it."""
    plain = next(iter(levels_of(platform.machine())), None)
    found = None if plain is None else _load(plain)
    if isinstance(found, str) and "older than its sources" in found:
        warnings.warn(f"{found} Until then everything runs in plain torch.", RuntimeWarning, stacklevel=2)


@cache  # looking a function up by its name takes longer than calling it
def _function(level: str, name: str) -> Any:
    found = _load(find_level(level))
    assert isinstance(found, ctypes.CDLL), found
    try:
        function = getattr(found, name)
    except AttributeError:
        raise ManymaxError(
            f"the native library has no function {name}: it must be defined with NATIVE, of export.h."
        ) from None
    function.restype = None
    return function


def call(
    level: str,
    function: str,
    like: Tensor,
    *arguments: Tensor | int | None,
    numbers: Sequence[int] = (),
    threads: bool = False,
) -> None:
    """Call a function of the native library. Tensors are passed as pointers to their first element.

    Args:
        level: as `resolve` gives it. function: the name without the suffix of its precision.
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
    _function(level, f"{function}_{SUFFIXES[like.dtype]}")(*given)
