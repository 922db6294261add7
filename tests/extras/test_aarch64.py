"""The native kernels for 64-bit ARM, cross-compiled and run in an emulator: skipped where either is missing."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax.engine import native, native_library
from manymax.engine.filter import Filter
from manymax.engine.ranks import Ranks, Shards
from manymax.engine.row_target import RowTarget
from manymax.heads import machine_report
from manymax.heads.build import head_class
from manymax.members import FAMILY
from manymax.members.entmax.filter import rule_out_below

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")

Call = tuple[str, list[Any]]


def memory(tensor: Tensor) -> bytes:
    """The bytes from a tensor's first element to the end of its storage: a kernel steps over rows by itself."""
    rest = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return rest[tensor.storage_offset() * tensor.element_size() :].numpy().tobytes()


def read(text: bytes | memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=dtype) if len(text) else torch.empty(0, dtype=dtype)


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

    parts = [number(len(calls))]
    for name, arguments in calls:
        parts += [number(len(name)), name.encode(), number(len(arguments))]
        for value in arguments:
            if isinstance(value, bytes):
                parts += [number(len(value)), value]
            else:
                parts += [number(-2)] if value is None else [number(-1), number(value)]
    return b"".join(parts)


class Pretended(Ranks):
    """The first of two ranks, of which the other holds classes that add nothing: every exchange is the identity."""

    size = 2


def call_everything() -> None:
    """Heads of all kinds on the native library: on one process and on shards, with dense and with sparse gradients."""
    torch.manual_seed(0)  # near a tie the two processors could round to different supports
    for member in FAMILY.values():
        if not member.native or member.kind != "exact":
            continue
        for setting, dtype in itertools.product(member.examples, machine_report.CHECK_TOLERANCE):
            machine_report._results(member, setting, dtype, "native-plain")
            kinds = (False, True) if member.sparse else (False,)
            for scale, shards, sparse in itertools.product((0.05, 0.5, 3.0), (None, Pretended()), kinds):
                options = {"backend": "native-plain", "sparse_grad": sparse}
                head = head_class(member)(8, 600, dtype=dtype, options=options, **setting)
                queries = (scale * 3 * torch.randn(24, 8, dtype=dtype)).mul_(torch.linspace(0.1, 1, 24).unsqueeze(1))
                held = Shards((600,)) if shards is None else Shards((600, 0), shards)
                target = torch.randint(600, (24, 2))
                call = head.read(queries.to(dtype).requires_grad_(), head.linear.weight, None, target, held)
                head.compute(call).backward()
    # And what keywords do to scores and their gradients, with the statistics of rows.
    for name, dtype in itertools.product(("softmax", "entmax"), machine_report.CHECK_TOLERANCE):
        queries, vectors = (torch.randn(n, 8, dtype=dtype).requires_grad_() for n in (24, 600))
        keywords = {"normalize": True, "temperature": 0.1, "softcap": 5.0, "stats": ("entropy", "support")}
        target, options = torch.randint(600, (24,)), {"backend": "native-plain"}
        manymax.linear_loss(name, queries, vectors, target, options=options, **keywords).loss.backward()
    # And the scores of classes that are drawn, with their gradients.
    sampler = manymax.samplers.UniformSampler(600)
    for dtype, shared in itertools.product(machine_report.CHECK_TOLERANCE, (False, True)):
        queries, vectors = (torch.randn(n, 8, dtype=dtype).requires_grad_() for n in (24, 600))
        manymax.linear_sampled_softmax_loss(
            *(queries, vectors, torch.randint(600, (24, 2)), sampler),
            num_negatives=20,
            shared=shared,
            options={"backend": "native-plain"},
        ).backward()
    # And the products, which this level leaves to torch, and the optimiser.
    for dtype in machine_report.CHECK_TOLERANCE:
        table = torch.nn.Embedding(50, 8, sparse=True, dtype=dtype)
        optimizer = manymax.optim.SparseAdam(table.parameters())
        table(torch.tensor([3, 7, 7, 20])).sum().backward()
        optimizer.step()
        queries, vectors, bias = (torch.randn(*size, dtype=dtype) for size in ((24, 21), (603, 21), (603,)))
        scores = torch.zeros(24, 608, dtype=dtype)
        native.block_scores("plain", queries, vectors, bias, scores)
        native.leave_out("plain", scores, torch.randint(-1, 603, (24, 5)), None, 603)
        sums = torch.zeros_like(vectors), torch.zeros_like(bias)
        native.dense_gradients("plain", scores, None, vectors, torch.ones(24, dtype=dtype), queries, *sums, True)


def rule_out_classes() -> None:
    """What the filter of sparse members calls: scores of whole numbers, which every processor computes alike."""
    queries, vectors = (torch.randint(-3, 4, size).float() for size in ((24, 8), (1100, 8)))
    vectors[::100] *= 10  # a few classes far above the others, as in a trained model
    rule_out = rule_out_below(2.0)
    assert rule_out is not None
    given = Filter.of(vectors, None, "plain", rule_out)
    assert given is not None
    target = RowTarget(torch.randint(1100, (24, 2)), torch.ones(24, 2), None, None, torch.ones(24), None)
    assert given.candidates(queries, target, torch.zeros(24, 1104)) is not None


def functions(library: Path) -> set[str]:
    """The names of all functions that a library offers for a precision, from its table of names."""
    names = set(re.findall(rb"\0([a-z_]+_float(?:32|64))(?=\0)", library.read_bytes()))
    return {name.decode() for name in names}


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
    call_everything()
    rule_out_classes()
    exported = {name for name, _ in calls}
    # A name that is the end of another one is not in the table of names: the linker keeps the longer one alone.
    assert exported >= functions(native_library.LIBRARIES / "manymax_plain.so")
    (tmp_path / "calls").write_bytes(packed(calls))
    emulator = [EMULATOR, "-L", "/usr/aarch64-linux-gnu"]  # where distributions put the libraries of the other machine
    command = [*emulator, str(program), str(library), str(tmp_path / "calls"), str(tmp_path / "left")]
    subprocess.run([str(part) for part in command], check=True)
    found = memoryview((tmp_path / "left").read_bytes())
    for (name, _), tensors in zip(calls, left, strict=True):
        for expected in tensors:
            size = expected.numel() * expected.element_size()
            actual, found = read(found[:size], expected.dtype), found[size:]
            # The processor rounds a product that is added to only once, so that digits at the end differ.
            tolerance = 1e-5 if "float32" in name else 1e-12
            assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True), name
    assert not found
