"""Measuring side by side: contestants take turns in one process, medians are compared, peaks are above the inputs.

Machines are noisy and their speed drifts, so a time alone says nothing: every figure that is printed is a ratio of
medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Contestants = Mapping[str, Callable[[], object]]


def interleave(contestants: Contestants, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant; a round runs each once, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            gc.collect()
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def median(times: list[float]) -> float:
    """The middle one."""
    return statistics.median(times)


def peak_mb(run: Callable[[], object]) -> float | None:
    """Peak of the process above what it holds now, in MB, while `run` runs; None where the system does not tell."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system and counts again when it is used
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        kept = run()
        peak = (_status("VmHWM") - before) / 1024
        del kept
        return peak
    except (OSError, AttributeError):
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def limits() -> dict[str, float]:
    """What this machine can do at most, in the same run: GFLOP/s of a matmul, GB/s of a copy, ns per first touch."""
    a = torch.randn(1024, 1024)
    big = torch.zeros(1 << 25)
    target = torch.empty_like(big)

    def best(run: Callable[[], object], rounds: int = 5) -> float:
        return min(interleave({"": run}, rounds)[""])

    return {
        "matmul_gflops": 2 * 1024**3 / best(lambda: a @ a) / 1e9,
        "head_matmul_gflops": 2 * 256 * 64 * 40960 / best(_head_matmul()) / 1e9,
        "copy_gb_per_s": 2 * big.numel() * 4 / best(lambda: target.copy_(big)) / 1e9,
        "first_touch_ns": best(lambda: torch.empty(1 << 25).zero_()) / big.numel() * 1e9,
    }


def _head_matmul() -> Callable[[], object]:
    x, w, out = torch.randn(256, 64), torch.randn(40960, 64), torch.empty(256, 40960)
    return lambda: torch.mm(x, w.T, out=out)


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a record needs to be understood later."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": _processor(),
        "arguments": {k: v for k, v in vars(arguments).items() if k != "json"},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes, under a minute: for a look, not for a record")
    made.add_argument("--json", metavar="FILE", help="also write every figure to FILE")
    made.add_argument("--rounds", type=int, default=5, help="interleaved runs of each contestant (default: 5)")
    made.add_argument("--threads", type=int, default=0, help="threads (default: torch's)")
    return made


def write(path: str, record: Mapping[str, Any]) -> None:
    """Write the record whole or not at all."""
    folder = Path(path).resolve().parent
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".tmp") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def scores_like(regime: str, rows: int, classes: int, dim: int = 64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries (rows, dim), class vectors (classes, dim) and labels.

    "trained": a spread of scores of about 4 and the label near the top, as at the end of a training.
    "fresh": small random vectors, as at its start, where the support of a sparse map is nearly everything.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(rows, dim, generator=generator)
    vectors = torch.randn(classes, dim, generator=generator)
    if regime == "fresh":
        queries, vectors = 0.1 * queries, 0.03 * vectors
        return queries, vectors, torch.randint(classes, (rows,), generator=generator)
    vectors *= 0.5
    labels = torch.randint(classes, (rows,), generator=generator)
    queries += 1.2 * vectors[labels]
    return queries, vectors, labels
