"""What heads compute on, on this machine: the levels of the native library, the choice of "auto", and a self-check.

This is what `manymax doctor` prints. It needs torch alone, so that it can be had from an installation without extras:

    >>> from manymax.heads.machine_report import machine_report
    >>> machine_report(check=False).backend.partition("-")[0] in ("torch", "native")
    True
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine import native_library
from manymax.engine.member import Member
from manymax.engine.native_levels import NATIVE_LEVELS, levels_of
from manymax.errors import ManymaxError
from manymax.heads.build import head_function
from manymax.members import FAMILY
from manymax.ops import processor

# The instruction sets that somebody who asks about speed wants to know of, and the names that systems have for them.
INSTRUCTIONS = {
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f", "avx512_f"},
    "bf16": processor.BF16_FEATURES,
    "VNNI": {"avx512_vnni", "avx_vnni", "i8mm"},
}
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the self-check, relative to the largest number


@dataclass(frozen=True)
class LevelReport:
    """One row of the table of levels, as it is on this machine.

    name: among the back ends. machine: the architecture that it is for. missing: why it does not run here, or None.
    tested: where its tests have run. used: whether "auto" is this level.
    """

    name: str
    machine: str
    missing: str | None
    tested: tuple[str, ...]
    used: bool


@dataclass(frozen=True)
class CheckReport:
    """One self-check: how far loss and gradients of a head on some back end are from those in plain torch.

    difference: the largest one, relative to the largest number of the tensor it is in; None if it is no number.
    passed: whether it is rounding.
    """

    backend: str
    member: str
    setting: Mapping[str, Any]
    dtype: str
    difference: float | None
    passed: bool


@dataclass(frozen=True)
class MachineReport:
    """Everything that decides how fast heads are on this machine, and what is wrong with it.

    versions: of Python, torch and this package. openmp: the file of the OpenMP library, or None if it is not known.
    backend: what "auto" is here. because: why, in a sentence. problems: what is wrong. advice: what could be better.
    """

    versions: dict[str, str]
    system: str
    processor: str
    instructions: dict[str, bool]
    cores: int | None
    threads: int
    openmp: str | None
    backend: str
    because: str
    levels: tuple[LevelReport, ...]
    checks: tuple[CheckReport, ...]
    problems: tuple[str, ...]
    advice: tuple[str, ...]


def machine_report(check: bool = True) -> MachineReport:
    """Look at this machine and this installation.

    Args:
        check: whether to run the self-check, which takes about a second.
    """
    problems = []
    try:
        backend = native_library.resolved_name("auto")
    except ManymaxError as error:  # of the variable MANYMAX_BACKEND: nothing else can be wrong with "auto"
        problems.append(f"{error} Until then, every head fails that is not told its back end.")
        backend = "torch"
    levels = tuple(_levels(backend))
    checks = tuple(_checks([level.name for level in levels if level.missing is None])) if check else ()
    problems += [
        f"{one.backend} computes {one.member} wrongly in {one.dtype}: it is off by {_number(one.difference)}. Set "
        "MANYMAX_BACKEND=torch in the environment, and please report this."
        for one in checks
        if not one.passed
    ]
    # A file that is there and cannot be used is a fault; one that is not there is a choice.
    here = levels_of(platform.machine())
    if here and (native_library.LIBRARIES / here[0].file).exists() and (why := native_library.missing(here[0].name)):
        problems.append(why)
    found = processor.features()
    return MachineReport(
        versions={"python": platform.python_version(), "torch": torch.__version__, "manymax": _version()},
        system=platform.platform(),
        processor=processor.name(),
        instructions={name: bool(found & names) for name, names in INSTRUCTIONS.items()},
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        openmp=native_library.openmp(),
        backend=backend,
        because=_because(backend),
        levels=levels,
        checks=checks,
        problems=tuple(problems),
        advice=tuple(_advice(levels, problems)),
    )


def _number(difference: float | None) -> str:
    return "something that is no number" if difference is None else f"{difference:.0e}"


def _version() -> str:
    return str(sys.modules["manymax"].__version__)  # imported by now: this module is a part of it


def _levels(used: str) -> Iterator[LevelReport]:
    for level in NATIVE_LEVELS:
        of_this_machine = level in levels_of(platform.machine())
        missing = native_library.missing(level.name) if of_this_machine else f"it is for {level.machine}."
        yield LevelReport(
            level.backend, level.machine, missing, level.tested, of_this_machine and level.backend == used
        )


def _because(backend: str) -> str:
    """Why "auto" is this back end here."""
    if given := os.environ.get(native_library.VARIABLE):
        return f"{native_library.VARIABLE} is {given!r} in the environment."
    if backend != "torch":
        return "it is the best level that this processor has and whose tests have run on some machine."
    here = native_library.levels_here()
    if here:
        return f"the tests of {', '.join(here)} have not run on any machine yet, so that it is used on demand alone."
    plain = next(iter(levels_of(platform.machine())), None)
    return native_library.missing("plain" if plain is None else plain.name) or ""


def _advice(levels: tuple[LevelReport, ...], problems: list[str]) -> Iterator[str]:
    if not problems and all(level.missing for level in levels):
        yield (
            "Everything works in plain torch, sparse losses more slowly than they could. For native kernels install a "
            "wheel for your platform, or install from source where there is a C++ compiler."
        )
    if torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1:
        yield "torch uses one thread of several cores: OMP_NUM_THREADS or torch.set_num_threads changes that."
    if not processor.has_bf16():
        yield 'No instructions for bfloat16 are known of this processor: matmul="bf16" is refused where it is slow.'


def _checks(backends: list[str]) -> Iterator[CheckReport]:
    """Every native kernel at every level that runs here, on a case with small and one with large supports."""
    for member in FAMILY.values():
        if not member.native or member.kind != "exact":
            continue
        for setting in member.examples:
            for dtype in CHECK_TOLERANCE:
                expected = _results(member, setting, dtype, "torch")
                for backend in backends:
                    found = _results(member, setting, dtype, backend)
                    # By torch's maximum, which keeps a nan; Python's may pass over it.
                    gaps = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
                    difference = float(torch.stack(gaps).max())
                    name = str(dtype).removeprefix("torch.")
                    passed = difference <= CHECK_TOLERANCE[dtype]  # false for nan
                    told = difference if math.isfinite(difference) else None
                    yield CheckReport(backend, member.name, dict(setting), name, told, passed)


def _results(member: Member, setting: Mapping[str, Any], dtype: torch.dtype, backend: str) -> list[Tensor]:
    """The loss and the gradients of a head, in queries and class vectors, for supports of a few and of all classes."""
    random = torch.Generator().manual_seed(0)  # its own: a check must not change what the caller draws next
    found = []
    for scale in (0.05, 3.0):
        queries = (scale * torch.randn(24, 8, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()
        vectors = torch.randn(600, 8, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
        target = torch.randint(600, (24, 2), generator=random)
        with torch.enable_grad():
            loss = head_function(member)(queries, vectors, target, options={"backend": backend}, **setting)
            found += [loss.detach(), *torch.autograd.grad(loss, (queries, vectors))]
    return found
