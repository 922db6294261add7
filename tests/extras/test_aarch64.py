"""The native kernels for 64-bit ARM, cross-compiled and run in an emulator: skipped where either is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.engine import native_library
from manymax.heads import machine_report
from manymax.members import FAMILY

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")

Call = tuple[str, list[Any]]


def memory(tensor: Tensor) -> bytes:
    """The bytes from a tensor's first element to the end of its storage: a kernel steps over rows by itself."""
    rest = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return rest[tensor.storage_offset() * tensor.element_size() :].numpy().tobytes()


def read(text: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=dtype) if text else torch.empty(0, dtype=dtype)


def record(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[list[Tensor]]]:
    """From here on: (name, arguments) of every call of a native function, and what each leaves in its tensors."""
    real, calls, left = native_library.call, list[Call](), list[list[Tensor]]()

    def call(level: str, function: str, like: Tensor, *given: Any, numbers: Any = (), threads: bool = False) -> None:
        arguments = [memory(value) if isinstance(value, Tensor) else value for value in given]
        name = f"{function}_{native_library.SUFFIXES[like.dtype]}"
        calls.append((name, [*arguments, *numbers, *([2] if threads else [])]))
        real(level, function, like, *given, numbers=numbers, threads=threads)
        tensors = (value for value in given if isinstance(value, Tensor))
        left.append([read(memory(value), value.dtype) for value in tensors])

    for name, module in list(sys.modules.items()):
        if name.startswith("manymax.") and getattr(module, "call", None) is real:
            monkeypatch.setattr(module, "call", call)
    return calls, left


def packed(calls: list[Call]) -> bytes:
    """Calls in the form that replay.cpp reads."""

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    text = number(len(calls))
    for name, arguments in calls:
        text += number(len(name)) + name.encode() + number(len(arguments))
        for value in arguments:
            if isinstance(value, bytes):
                text += number(len(value)) + value
            else:
                text += number(-2) if value is None else number(-1) + number(value)
    return text


@pytest.mark.extras
@pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="no cross compiler, or no emulator, for aarch64")
@pytest.mark.skipif(not native_library.available(), reason="no native library to compare with")
def test_every_call_leaves_what_it_leaves_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "checkout"
    for name in native_library.sources(native_library.PACKAGE):
        target = copy / "src" / "manymax" / name.relative_to(native_library.PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, target)
    for name in ("hatch_build.py", "src/manymax/engine/native_levels.py"):
        shutil.copy(ROOT / name, copy / name)
    environment = os.environ | {
        "CXX": str(COMPILER),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "MANYMAX_BUILD": "native",
    }
    subprocess.run([sys.executable, "hatch_build.py"], cwd=copy, env=environment, check=True)
    (library,) = (copy / "src" / "manymax" / native_library.FOLDER).iterdir()
    program = tmp_path / "replay"
    source = Path(__file__).with_name("replay.cpp")
    subprocess.run([COMPILER, "-O1", "-fopenmp", str(source), "-ldl", "-o", str(program)], check=True)

    calls, left = record(monkeypatch)
    for member in FAMILY.values():
        if member.native and member.kind == "exact":
            for setting in member.examples:
                for dtype in machine_report.CHECK_TOLERANCE:
                    machine_report._results(member, setting, dtype, "native-plain")
    assert calls
    (tmp_path / "calls").write_bytes(packed(calls))
    emulator = [EMULATOR, "-L", "/usr/aarch64-linux-gnu"]  # where distributions put the libraries of the other machine
    command = [*emulator, str(program), str(library), str(tmp_path / "calls"), str(tmp_path / "left")]
    subprocess.run([str(part) for part in command], check=True)
    found = (tmp_path / "left").read_bytes()
    for (name, _), tensors in zip(calls, left, strict=True):
        for expected in tensors:
            size = expected.numel() * expected.element_size()
            actual, found = read(found[:size], expected.dtype), found[size:]
            # The processor rounds a product that is added to only once, so that digits at the end differ.
            tolerance = 1e-5 if "float32" in name else 1e-12
            assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True), name
    assert not found
