"""Write docs/gpu.md: what can be known about the Triton kernels without a GPU. Nothing is timed.

    python benchmarks/gpu.py                 compile, count and write docs/gpu.md
    python benchmarks/gpu.py --json FILE     the same, and all numbers

Two processes look at the kernels, because Triton decides when it is imported whether it interprets or compiles. One
interprets them on small problems and counts the bytes that they load and store; what each launch was given says how the
kernel is specialised. The other compiles all of these specialisations for devices that are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_texts import INTRODUCTION, RESOURCES, TRAFFIC
from benchmarks.interpreter import as_on_a_device

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
ROWS, CLASSES = 8, 6000

# What the compiler is asked for: (name in the table, backend, architecture, threads of a warp).
TARGETS = (
    ("sm_80", "cuda", 80, 32),
    ("sm_90", "cuda", 90, 32),
    ("sm_100", "cuda", 100, 32),
    ("gfx942", "hip", "gfx942", 64),
)
# Bytes of shared memory that a program can have without asking for more than the usual 48 KB (64 KB on AMD).
SHARED_LIMIT = 48 * 1024
TYPES = {
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
    "torch.bfloat16": "*bf16",
    "torch.float16": "*fp16",
    "torch.int64": "*i64",
    "torch.int32": "*i32",
}


class Case(NamedTuple):
    """One row of the table of traffic: a loss on random scores.

    title: in the table. member, setting: which loss. spread: of the scores; small for large supports. floor: bytes per
    score that no kernel can do without, given that the product has written the scores: (read, written).
    keywords: of the head; with "best" the target is the class of the largest score, and "positives" says how many;
        "bias" is a bias of zeros.
    """

    title: str
    member: str
    setting: dict[str, Any]
    spread: float
    floor: tuple[float, float]
    keywords: dict[str, Any]


DENSE, SPARSE = (4.0, 4.0), (4.0, 0.0)
PRODUCTS = "manymax.engine.triton_entries"  # the module of kernels that take the place of matrix products
OF_THE_TARGET = ("best", "positives")
CAPPED = {"softcap": 5.0, "stats": ("nll", "entropy")}
ALL = CAPPED | {"z_loss": 0.1}
LEARNED = torch.tensor(1.1, requires_grad=True)
CASES = (
    Case("softmax", "softmax", {}, 1.0, DENSE, {}),
    Case("softmax, label smoothing", "softmax", {}, 1.0, DENSE, {"label_smoothing": 0.1}),
    Case("softmax, soft cap, z_loss, statistics", "softmax", {}, 1.0, DENSE, ALL),
    Case("softmax, decoupled", "softmax", {}, 1.0, DENSE, {"decoupled": True}),
    Case("sparsemax, small supports", "sparsemax", {}, 4.0, SPARSE, {}),
    Case("sparsemax, large supports", "sparsemax", {}, 1e-4, DENSE, {}),
    Case("entmax, alpha 1.5, small supports, a bias", "entmax", {"alpha": 1.5}, 4.0, SPARSE, {"bias": True}),
    Case("entmax, alpha 1.5, label smoothing", "entmax", {"alpha": 1.5}, 1.0, DENSE, {"label_smoothing": 0.1}),
    Case("entmax, alpha 1.7, soft cap, statistics", "entmax", {"alpha": 1.7}, 4.0, SPARSE, CAPPED),
    Case("entmax, alpha 1.1", "entmax", {"alpha": 1.1}, 1.0, DENSE, {}),
    Case("entmax, alpha 1.1 and learned", "entmax", {"alpha": LEARNED}, 1.0, DENSE, {}),
    Case("rankmax, few above the cut", "rankmax", {}, 8.0, SPARSE, {"best": True}),
    Case("rankmax, many above the cut", "rankmax", {}, 0.1, DENSE, {}),
    Case("rankmax, 16 positives", "rankmax", {}, 0.1, DENSE, {"positives": 16}),
    Case("psl", "psl", {}, 0.1, DENSE, {}),
    Case("psl, tanh, 16 positives", "psl", {"activation": "tanh"}, 0.1, DENSE, {"positives": 16}),
    Case("sl_at_k", "sl_at_k", {}, 1.0, DENSE, {}),
    Case("talos", "talos", {}, 1.0, DENSE, {}),
)


# Counting, in a process that interprets ------------------------------------------------------------


def count() -> list[dict[str, Any]]:
    """Every launch of every case: how it is specialised and bytes moved; and the bytes that plain torch moves."""
    from triton.runtime import interpreter

    from benchmarks.interpreter import patch_once
    from manymax.engine import triton_backend

    patch_once()
    launches: list[dict[str, Any]] = []
    moved = {"read": 0, "written": 0}
    builder = interpreter.InterpreterBuilder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def counted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        result = load(self, pointers, mask, *more)
        moved["read"] += int(mask.data.sum()) * result.data.itemsize
        return result

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        moved["written"] += int(mask.data.sum()) * value.data.itemsize
        return store(self, pointers, value, mask, *more)

    def counted_atomic(self: Any, how: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        size = int(mask.data.sum()) * value.data.itemsize
        moved["read"] += size
        moved["written"] += size
        return atomic(self, how, pointers, value, mask, *more)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    builder.create_atomic_rmw = counted_atomic
    real = triton_backend.launch

    def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        before = dict(moved)
        real(kernel, programs, *arguments, **constants)
        told = {
            "kernel": kernel.fn.__name__,
            "module": kernel.fn.__module__,
            "signature": [_type_of(value) for value in arguments],
            "constants": constants,
        }
        launches[-1]["launches"].append(told | {way: moved[way] - before[way] for way in moved})

    return _run_cases(launches, launch)


def _run_cases(launches: list[dict[str, Any]], launch: Any) -> list[dict[str, Any]]:
    """Run every case with a `launch` that appends to the last of `launches`."""
    from manymax.heads import head_function
    from manymax.members import FAMILY

    def call(case: Case, backend: str, *given: torch.Tensor) -> None:
        keywords = {**case.setting, **case.keywords}
        for name in OF_THE_TARGET:
            keywords.pop(name, None)
        if keywords.pop("bias", False):
            keywords["linear_bias"] = torch.zeros(CLASSES, requires_grad=True)
        head_function(FAMILY[case.member])(*given, options={"backend": backend}, **keywords)

    for case in CASES:
        call(case, "triton", *_problem(case))  # the self-check, which is not counted
    for name, module in list(sys.modules.items()):
        if name.startswith("manymax.") and hasattr(module, "launch") and name != "manymax.engine.triton_backend":
            module.launch = launch  # type: ignore[attr-defined]
    for case in CASES:
        input, vectors, target = _problem(case)
        leaves = [tensor.clone().requires_grad_() for tensor in (input, vectors)]
        launches.append({"title": case.title, "launches": []})
        call(case, "triton", *leaves, target)
        with as_on_a_device(), Passes() as passes:
            call(case, "torch", *leaves, target)
        launches[-1]["torch"] = {"read": passes.read, "written": passes.written, "operations": passes.operations}
    return launches


def _problem(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    input = case.spread * torch.randn(ROWS, 16, generator=random) / 4
    vectors = torch.randn(CLASSES, 16, generator=random)
    if "best" in case.keywords:
        return input, vectors, (input @ vectors.T).argmax(1)
    shape = (ROWS, case.keywords["positives"]) if "positives" in case.keywords else (ROWS,)
    return input, vectors, torch.randint(CLASSES, shape, generator=random)


def _type_of(value: Any) -> str:
    """The type of an argument as a signature of Triton has it."""
    if isinstance(value, torch.Tensor):
        return TYPES[str(value.dtype)]
    return "fp64" if isinstance(value, float) else "i32"


class Passes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of tables of scores that the operations of plain torch read and write, products aside."""

    PRODUCTS = ("mm", "addmm", "bmm", "matmul")

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name in self.PRODUCTS or getattr(function, "is_view", False):
            return result
        self.operations += 1
        flat = torch.utils._pytree.tree_leaves
        fresh = name in ("empty", "new_empty", "empty_like", "empty_strided")
        if not fresh:
            # An operation with an `out`, or in place, reads it only where it is an operand too.
            self.read += sum(map(self._bytes, flat(args)))
            self.written += sum(map(self._bytes, flat(result)))
        return result

    @staticmethod
    def _bytes(value: Any) -> int:
        """Bytes of a tensor that is as large as a table of scores, or a good part of it."""
        if not isinstance(value, torch.Tensor) or value.numel() < ROWS * CLASSES // 32 or value.shape[:1] == (CLASSES,):
            return 0
        return value.numel() * value.element_size()


def counted() -> list[dict[str, Any]]:
    """`count` in a process that interprets."""
    script = "import json, sys; from benchmarks import gpu; json.dump(gpu.count(), sys.stdout)"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(text)
    return found


# Compiling -----------------------------------------------------------------------------------------


class Build(NamedTuple):
    """A kernel compiled for a target.

    registers: of a thread. spilled: bytes (or, on AMD, registers) that did not fit. shared: bytes of shared memory.
    ttir: the code before it knows of a device.
    """

    registers: int
    spilled: int
    shared: int
    ttir: str

    @property
    def fits(self) -> bool:
        """Whether nothing spills and the shared memory is within the limit."""
        return self.spilled == 0 and self.shared <= SHARED_LIMIT


def compile_for(kernel: Any, signature: list[str], constants: dict[str, Any], target: tuple[Any, ...]) -> Build:
    """Compile a kernel for one of `TARGETS`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from manymax.engine.triton_backend import compiled_with

    types = dict(zip(kernel.arg_names, signature, strict=False)) | dict.fromkeys(constants, "constexpr")
    # What a launch finds out about its arguments: pointers and strides of rows are multiples of 16.
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature) if type_.startswith("*")}
    source = ASTSource(kernel, types, constants, aligned)
    built = triton.compile(source, target=GPUTarget(*target[1:]), options=compiled_with(target[1] == "cuda"))
    shared, ttir = built.metadata.shared, built.asm["ttir"]
    if "ptx" in built.asm:
        return Build(*_ask_ptxas(built.asm["ptx"]), shared, ttir)
    text = built.asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)", text)}
    spilled = numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]
    return Build(numbers["vgpr_count"], spilled, shared, ttir)


def _ask_ptxas(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes of a kernel, as the assembler reports them."""
    import triton

    match = re.search(r"\.target (sm_\w+)", ptx)
    assert match is not None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # Two assemblers come with Triton; each refuses what is too new or too old for it.
    for program in ("ptxas", "ptxas-blackwell"):
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "kernel.ptx"
            file.write_text(ptx, encoding="utf-8")
            command = [folder / program, "-v", f"-arch={match[1]}", file, "-o", Path(place) / "kernel.cubin"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            used, spilled = (
                re.search(r"Used (\d+) registers", done.stderr),
                re.findall(r"(\d+) bytes spill", done.stderr),
            )
            assert used is not None, done.stderr
            return int(used[1]), max(map(int, spilled), default=0)
    raise RuntimeError(done.stderr)


def specialisations(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The different specialisations among all launches, in the order of their kernels."""
    unique = {
        json.dumps([one[name] for name in ("module", "kernel", "signature", "constants")]): one
        for case in found
        for one in case["launches"]
    }
    return sorted(unique.values(), key=lambda one: (one["module"], one["kernel"], json.dumps(one["constants"])))


def kernel_of(one: dict[str, Any]) -> Any:
    """The kernel of a specialisation."""
    import importlib

    return getattr(importlib.import_module(one["module"]), one["kernel"])


# The page ------------------------------------------------------------------------------------------


def page(found: list[dict[str, Any]], builds: list[dict[str, Any]]) -> str:
    """The text of docs/gpu.md."""
    import triton

    from manymax.engine.triton_backend import WARPS

    scores = ROWS * CLASSES
    traffic = []
    for case, one in zip(CASES, found, strict=True):
        own = [launch for launch in one["launches"] if launch["module"] != PRODUCTS]
        ours = [sum(launch[way] for launch in own) / scores for way in ("read", "written")]
        theirs = [one["torch"][way] / scores for way in ("read", "written")]
        cells = [f"{a:.1f} + {b:.1f}" for a, b in (ours, theirs, case.floor)]
        traffic.append([case.title, *cells, str(len(one["launches"])), str(one["torch"]["operations"])])
    head = ["loss", "Triton: read + written", "plain torch", "lower bound", "kernels", "operations of plain torch"]
    resources = [
        [
            build["kernel"],
            build["constants"],
            *(
                f"{build[name]['registers']} / {build[name]['spilled']} / {build[name]['shared']}"
                for name, *_ in TARGETS
            ),
        ]
        for build in builds
    ]
    names = ["kernel", "specialised to", *(f"{name}: registers / spilled / shared" for name, *_ in TARGETS)]
    return "\n\n".join(
        [
            INTRODUCTION,
            TRAFFIC,
            f"{ROWS} rows and {CLASSES:,} classes, float32.",
            _table(head, traffic),
            RESOURCES.format(version=triton.__version__, warps=WARPS),
            _table(names, resources) + "\n",
        ]
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def compiled(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every specialisation with its registers, spills and shared memory on every target."""
    for one in specialisations(found):
        constants = ", ".join(f"{name}={value}" for name, value in one["constants"].items())
        types = {name.lstrip("*") for name in one["signature"] if name.startswith("*fp")}
        row: dict[str, Any] = {"kernel": one["kernel"], "constants": constants, "types": sorted(types)}
        for target in TARGETS:
            build = compile_for(kernel_of(one), one["signature"], one["constants"], target)
            row[target[0]] = {"registers": build.registers, "spilled": build.spilled, "shared": build.shared}
        yield row


def main() -> None:
    """Count, compile, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    arguments = parser.parse_args()
    found = counted()
    builds = list(compiled(found))
    PAGE.write_text(page(found, builds), encoding="utf-8")
    print(f"wrote {PAGE}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": found, "builds": builds}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default, which it announces to change
    sys.path.insert(0, str(ROOT / "src"))
    main()
