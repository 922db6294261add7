"""Exponential, logarithms, arctangent and tanh near 0 of engine/vector_math.h, compiled for each level that runs here.

The libraries do not offer these functions, so that a small library is compiled that does. Errors are counted in units
in the last place of the result, against mpmath.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.engine import native_library
from manymax.engine.native_levels import FLAGS, levels_of
from tests.high_precision import mp

COMPILER = (
    shlex.split(os.environ.get("CXX", ""))
    or [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))][:1]
)
SOURCE = """
#include "vector_math.h"
#define EXPORT(T, FUNCTION)                                                              \\
  extern "C" void FUNCTION##_##T(const T* x, T* y, int64_t n) {                          \\
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) y[i] = FUNCTION##_of(x[i]);      \\
  }
EXPORT(float, exp)
EXPORT(double, exp)
EXPORT(float, log)
EXPORT(double, log)
EXPORT(float, log1p)
EXPORT(double, log1p)
EXPORT(float, atan)
EXPORT(double, atan)
EXPORT(float, small_tanh)
EXPORT(double, small_tanh)
"""
LEVELS = [level for level in levels_of(native_library.platform.machine()) if level.name in native_library.levels_here()]
DTYPES = {"float": torch.float32, "double": torch.float64}
Function = Callable[[str, Tensor], Tensor]


@pytest.fixture(scope="module", params=LEVELS, ids=lambda level: level.name)
def function(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Function:
    """Calls one of the functions, by its name, on a tensor."""
    if not COMPILER:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("vector_math")
    source, path = folder / "functions.cpp", folder / "functions.so"
    source.write_text(SOURCE, encoding="utf-8")
    # Without the OpenMP library: only its vector loops are used here.
    flags = ["-fopenmp-simd" if flag == "-fopenmp" else flag for flag in FLAGS if flag != "-fvisibility=hidden"]
    include = f"-I{Path(native_library.__file__).parent}"
    command = [*COMPILER, *flags, *request.param.flags, include, "-shared", str(source), "-o", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    library = ctypes.CDLL(str(path))

    def call(name: str, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kind = "float" if x.dtype == torch.float32 else "double"
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
        getattr(library, f"{name}_{kind}")(*pointers, ctypes.c_int64(len(x)))
        return y

    return call


def units(found: Tensor, exact: list[Any]) -> float:
    """The largest error, in units in the last place of the exact result."""
    digits = {torch.float32: 23, torch.float64: 52}[found.dtype]
    worst = 0.0
    for ours, theirs in zip(found.tolist(), exact, strict=True):
        place = mp.mpf(2) ** (mp.floor(mp.log(abs(theirs), 2)) - digits) if theirs else mp.mpf(1)
        worst = max(worst, float(abs(ours - theirs) / place))
    return worst


def around(*values: float, dtype: torch.dtype) -> Tensor:
    """These values and the four numbers of the dtype on either side of each."""
    unit = torch.finfo(dtype).eps * torch.arange(-4, 5, dtype=dtype)
    return torch.cat([value * (1 + unit) for value in values])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_errors_are_a_few_units_in_the_last_place(function: Function, dtype: torch.dtype) -> None:
    random, finfo = torch.Generator().manual_seed(0), torch.finfo(dtype)
    lowest = -87.0 if dtype == torch.float32 else -708.0
    share = torch.rand(700, generator=random, dtype=dtype)
    small = 10 ** (-share * (30 if dtype == torch.float32 else 200))
    halves = torch.arange(1, 40, dtype=dtype).mul(-0.34657359027997264).tolist()  # where x = n log 2 + r changes n
    normal = 2 ** (share * 2 - 1).mul(125 if dtype == torch.float32 else 1020)
    points = {
        "exp": torch.cat([share * lowest * 0.999, -small, -share, around(*halves, dtype=dtype)]),
        "log": torch.cat([normal, share + 0.5, around(0.5**0.5, 2**0.5, 1.0, 2.0, finfo.tiny * 4, dtype=dtype)]),
        "log1p": torch.cat([-small, -share * (1 - 1e-6), small, around(-0.5, -0.29289321881, -1e-3, dtype=dtype)]),
        "atan": torch.cat([-small, 1 / small, 8 * share - 4, around(-(2**0.5) - 1, 2**0.5 - 1, 1.0, dtype=dtype)]),
        "small_tanh": torch.cat([-small / 2, share - 0.5, around(0.125, dtype=dtype)]),
    }
    for name, x in points.items():
        exact = [getattr(mp, name.removeprefix("small_"))(mp.mpf(value)) for value in x.tolist()]
        worst = units(function(name, x), exact)
        assert worst < (3 if name in ("log1p", "atan") else 2), (name, worst)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_ends_are_exact(function: Function, dtype: torch.dtype) -> None:
    """A masked class has probability 0 and not a small one, and the class with the maximum has exponential 1."""
    x = torch.tensor([-torch.inf, 0.0, -0.0, -1e5, torch.finfo(dtype).min], dtype=dtype)
    assert function("exp", x.repeat(7)).tolist() == [0.0, 1.0, 1.0, 0.0, 0.0] * 7
    one, zero = torch.ones(9, dtype=dtype), torch.zeros(9, dtype=dtype)
    assert (function("log", one) == 0).all()
    assert (function("log1p", zero) == 0).all()
    half_pi = function("atan", torch.tensor([torch.inf, -torch.inf] * 5, dtype=dtype)).abs()
    assert (half_pi == torch.tensor(torch.pi / 2, dtype=dtype)).all()
    assert (function("atan", zero) == 0).all()
