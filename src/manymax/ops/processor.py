"""What the processor of this machine is and has, as far as Python can tell without a library of its own."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from manymax.errors import ArgumentError

CPUINFO = Path("/proc/cpuinfo")
# Any of them multiplies matrices of bfloat16 as fast as those of float32, or faster. x86 names, then ARM's.
BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
ALLOW_SLOW = "MANYMAX_ALLOW_SLOW"  # of the environment: what `options.allow_slow` is for a single head


@cache
def features() -> frozenset[str]:
    """Names of the processor's instruction sets, in the spelling of Linux; empty if the system does not tell."""
    try:
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86 and ARM; the same for every core
                return frozenset(value.split())
    except OSError:  # not Linux
        pass
    # Public in new versions of torch alone, and the same on every system.
    told: Callable[[], dict[str, object]] | None = getattr(torch.cpu, "get_capabilities", None)
    return frozenset() if told is None else frozenset(name for name, value in told().items() if value is True)


@cache
def name() -> str:
    """The processor's name, as its maker writes it; the architecture where the system does not tell."""
    try:
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_bf16() -> bool:
    """Whether the processor is known to have instructions for bfloat16 products."""
    return bool(features() & BF16_FEATURES)


@cache  # once per process: it takes a tenth of a second where bfloat16 is slow
def bf16_slowdown() -> float:
    """How many times as long as one of float32 a small matrix product takes in bfloat16, measured."""
    queries, vectors = torch.ones(64, 64), torch.ones(64, 1024)

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        taken = []
        for _ in range(4):  # the first one also prepares the product
            began = time.perf_counter()
            left @ right
            taken.append(time.perf_counter() - began)
        return min(taken)  # a neighbour on the machine can only add to it

    return seconds(queries.bfloat16(), vectors.bfloat16()) / seconds(queries, vectors)


def check_bf16(device: torch.device, allow_slow: bool) -> None:
    """Refuse products in bfloat16 where the processor is slow at them, unless that is allowed.

    torch computes them anyway, without instructions for it: 26 times slower than float32 was seen, and more. Not every
    processor without the instructions is slow (some widen to float32 on the way), hence the measurement.
    """
    if device.type != "cpu" or allow_slow or os.environ.get(ALLOW_SLOW) == "1" or has_bf16():
        return
    factor = bf16_slowdown()
    if factor > 1.5:
        raise ArgumentError(
            f'`options.matmul` is "bf16", but this processor has no instructions for bfloat16: a matrix product took '
            f"{factor:.0f} times as long as in float32 here. Leave it out, or set `options.allow_slow` (for whole runs "
            f"{ALLOW_SLOW}=1 in the environment) to run it all the same."
        )
