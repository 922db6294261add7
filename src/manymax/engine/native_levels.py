"""The dispatch levels of the native back end: for which processors it is compiled, how, and where each was tested.

A level is one shared library with all native kernels, compiled for processors that have certain instructions. This file
is read by two programs: by hatch_build.py, which compiles the libraries where the package is built, and by
native_library.py, which loads one of them. The first runs without torch, so that nothing is imported here but the
standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

SOURCE_SUFFIXES = (".cpp", ".h")  # of the files that a library depends on
FOLDER = Path("engine") / "native_libraries"  # where the libraries are, seen from the folder of the package


class Level(NamedTuple):
    """One row of `NATIVE_LEVELS`.

    name: "native-" + this is its name among the back ends.
    machine: the architecture, as `platform.machine()` has it.
    flags: of the compiler, beside `FLAGS`, which all levels share.
    features: processor features that the code needs, by the names that `manymax_features` in library.cpp gives them.
    products: whether its matrix products are used. Without long registers those of torch, which chooses its
        instructions when it runs, are faster.
    tested: where the tests of the kernels have run on this level; empty if nowhere. `backend="auto"` never takes a
        level that has not been tested on any machine: code that a compiler accepts may still be wrong there.
    """

    name: str
    machine: str
    flags: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    products: bool = False
    tested: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """The name of this level among the back ends."""
        return f"native-{self.name}"

    @property
    def file(self) -> str:
        """The name of its library. Other systems have other suffixes, but a loader takes any name."""
        return f"manymax_{self.name}.so"


AVX512_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
# Compilers use 256-bit registers by default even where the processor has longer ones.
AVX512_FLAGS = (*(f"-m{feature}" for feature in AVX512_FEATURES), "-mprefer-vector-width=512")

# The best level comes last. A library has one level alone: templates and inline functions of several levels in one
# file would be merged by the linker, and the plain kernels could end up with instructions that the processor lacks.
NATIVE_LEVELS = (
    # What every x86-64 processor has, SSE2 among it.
    Level("plain", "x86_64", tested=("2026-11: AMD EPYC (Zen 4), Linux, torch 2.13",)),
    Level(
        *("avx2", "x86_64", ("-mavx2", "-mfma"), ("avx2", "fma")),
        products=True,
        tested=("2026-11: AMD EPYC (Zen 4), Linux, torch 2.13",),
    ),
    Level(
        *("avx512", "x86_64"),
        flags=AVX512_FLAGS,
        features=AVX512_FEATURES,
        products=True,
        tested=("2026-11: AMD EPYC (Zen 4), Linux, torch 2.13",),
    ),
    # Products of bytes in one instruction, for quantised.h.
    Level(
        *("avx512vnni", "x86_64"),
        flags=(*AVX512_FLAGS, "-mavx512vnni"),
        features=(*AVX512_FEATURES, "avx512vnni"),
        products=True,
        tested=("2026-11: AMD EPYC (Zen 4), Linux, torch 2.13",),
    ),
    # NEON is part of every 64-bit ARM processor.
    Level("plain", "aarch64"),
)

FLAGS = (
    *("-O3", "-std=c++17", "-fopenmp", "-fPIC"),
    # Only the functions that are marked by NATIVE (export.h) are visible outside, and calls within the library go
    # straight to their function: another library of the process cannot put its own in between.
    *("-fvisibility=hidden", "-fno-semantic-interposition"),
    # What keeps loops from being vectorised: errno, floating-point traps. Not -ffast-math, which would also assume that
    # there is no nan and no infinity: scores are masked by -inf, and nan must be found. And rows.h puts int32 classes
    # into rows of floats, which strict aliasing forbids.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)
# Without it, gcc marks some variables of templates so that all libraries of a process share one copy of them, whatever
# their visibility: two levels in one process would mix. clang has neither the marks nor the flag.
GCC_FLAGS = ("-fno-gnu-unique",)


def architecture(machine: str) -> str:
    """One name for each architecture, of the several that systems use: macOS says arm64 where Linux says aarch64."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine.lower())


def levels_of(machine: str) -> tuple[Level, ...]:
    """The levels that an architecture has, the best one last."""
    return tuple(level for level in NATIVE_LEVELS if level.machine == architecture(machine))


def sources(package: Path) -> list[Path]:
    """All C++ files and headers under the folder of the package; none in an installed wheel."""
    return sorted(path for path in package.rglob("*") if path.suffix in SOURCE_SUFFIXES)


def fingerprint(package: Path) -> str:
    """A hash of the C++ files and flags: two libraries with the same one were made from the same text.

    It is compiled into each library. In a checkout, where sources change, it tells a library that is out of date.
    """
    found = hashlib.sha256(repr((FLAGS, GCC_FLAGS, [(level.name, level.flags) for level in NATIVE_LEVELS])).encode())
    for path in sources(package):
        # The name too, and lengths by way of the separator: a line that moves between files changes the hash.
        found.update(f"\0{path.relative_to(package).as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]
