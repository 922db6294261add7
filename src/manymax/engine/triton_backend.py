"""The Triton back end of exact members: where it serves, and how its kernels are launched.

A member's kernel_triton.py works on blocks of scores on a GPU, row by row, as its kernel.cpp does on a processor: what
takes a dozen launches in plain torch is one. The products before and after it stay torch's. Triton is imported where a
kernel is launched for the first time and not before; without it, and on every device where `triton_check` finds a
difference, plain torch computes the same.

With TRITON_INTERPRET=1 in the environment Triton runs its kernels on tensors of the CPU, statement by statement: slow,
and good for tests. It is then served to who asks for `options.backend="triton"`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from manymax.ops.checks import readable

BACKEND = "triton"  # its name among the back ends
# Scores of a row that a program holds at a time: with 4 warps one load of 16 bytes in each thread. It does not depend
# on the length of a row, which is a run-time argument: a kernel is compiled once for all of them.
BLOCK = 512
WARPS = 4
# Of a thread on NVIDIA at most: three programs find room on a multiprocessor. Without a number the assembler aims at
# more of them, and puts numbers that every class of a row needs into slow memory.
REGISTERS = 168
# Positives that are looked at together; rows with more take several turns.
POSITIVES = 16
# A row whose gradient has one class in SPARSE, or fewer, may be kept as entries. An entry costs a whole class vector
# read and another one added to in no order, where a dense row goes through two products at the speed of the device.
SPARSE = 16
# Columns are int32 numbers, also beyond the end of a row by less than a block.
MOST_CLASSES = (1 << 31) - (1 << 17)
DTYPES = (torch.float32, torch.float64)


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def installed() -> bool:
    """Whether Triton is there, without importing it."""
    return importlib.util.find_spec("triton") is not None


def missing(device: torch.device) -> str | None:
    """Why Triton kernels do not run on a device, as a sentence with the way out; None if they may."""
    if not installed():
        return "Triton is not installed: `pip install 'manymax[gpu]'`."
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return (
            f"its kernels run on a GPU; the tensors are on {device.type}. To try them on a CPU, slowly, set "
            "TRITON_INTERPRET=1 in the environment before Python starts."
        )
    return None


def refuses(scores: Tensor, num_classes: int) -> str | None:
    """Why Triton kernels do not take a call with tensors like `scores`, as a sentence; None if they do."""
    if (why := missing(scores.device)) is not None:
        return why
    if not readable(scores):
        return "it takes tensors with values, in eager mode."
    if scores.dtype not in DTYPES:
        return f"it computes in float32 and float64; got {scores.dtype}."
    if num_classes > MOST_CLASSES:
        return f"it takes up to {MOST_CLASSES} classes; got {num_classes}."
    return None


def plain(values: Tensor | None, like: Tensor) -> Tensor:
    """A tensor as a kernel reads it, contiguous and in the dtype of the scores; the scores in place of None.

    A kernel does not touch an argument that its constants say is absent, but needs some pointer for it.
    """
    return like if values is None else values.to(like.dtype).contiguous()


def compiled_with(nvidia: bool) -> dict[str, int]:
    """What the compiler is told about every kernel."""
    return {"num_warps": WARPS, "maxnreg": REGISTERS} if nvidia else {"num_warps": WARPS}


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel, one program for each place of a grid."""
    if 0 in programs:
        return
    device = next(value.device for value in arguments if isinstance(value, Tensor))
    if device.type == "cuda":
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(device):
            kernel[programs](*arguments, **compiled_with(torch.version.hip is None), **constants)
        return
    kernel[programs](*arguments, **constants)
