"""Time and memory of a sweep of alternating least squares: RGFactorization against the package `implicit`.

    python benchmarks/als.py                 30k users x 40k items, 1M interactions, dim 64
    python benchmarks/als.py --quick         the same in seconds, on a tenth of the data
    python benchmarks/als.py --json FILE     also write every single time

A sweep updates all users and all items once. All contestants run in one process with the same number of threads, one
sweep each in turn; medians are compared. `implicit` minimises another objective, with a matrix per row: this compares
what a sweep costs, not what it achieves.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import implicit
import numpy as np
import scipy.sparse
import threadpoolctl
import torch
from implicit.cpu.als import AlternatingLeastSquares
from torch import Tensor

from manymax.members.rg.als import RGFactorization

NOTE = "implicit minimises another objective (weighted squares with a matrix per row), so this is a comparison of cost."
BARS = {"implicit, conjugate gradient": 7.0, "implicit, Cholesky": 20.0}  # how many times faster RG should be
OURS = "RG"


@dataclass(frozen=True)
class Size:
    """Sizes of the generated data."""

    num_users: int = 30_000
    num_items: int = 40_000
    interactions: int = 1_000_000
    dim: int = 64


QUICK = Size(3_000, 4_000, 100_000, 64)
Sweep = Callable[[], float]  # runs one sweep, returns its seconds


def generate(size: Size, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Distinct (user, item) pairs in random order; users uniform, items with Zipf-like popularity and shuffled ids."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(size.num_items, generator=generator)
    popularity = (rank.double() + 10) ** -0.9
    draws = size.interactions * 3 // 2
    users = torch.randint(size.num_users, (draws,), generator=generator)
    items = torch.multinomial(popularity, draws, replacement=True, generator=generator)
    pairs = (users * size.num_items + items).unique()
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[: size.interactions]]
    return pairs // size.num_items, pairs % size.num_items


def ours(size: Size, users: Tensor, items: Tensor, **keywords: Any) -> Sweep:
    """A function that runs one sweep of RGFactorization and returns its seconds."""
    generator = torch.Generator().manual_seed(0)
    model = RGFactorization(size.num_users, size.num_items, size.dim, generator=generator, **keywords)
    model.observe(users, items)

    def sweep() -> float:
        start = time.perf_counter()
        model.update_users()
        model.update_items()
        return time.perf_counter() - start

    return sweep


def peer(size: Size, users: Tensor, items: Tensor, *, use_cg: bool) -> Sweep:
    """A function that runs one sweep of implicit's solver and returns its seconds.

    The time is that of implicit's own clock, which leaves out the check and transposition of the matrix.
    """
    ones = np.ones(len(users), dtype=np.float32)
    matrix = scipy.sparse.csr_matrix((ones, (users.numpy(), items.numpy())), (size.num_users, size.num_items))
    threads = torch.get_num_threads()
    with one_blas_thread():
        model = AlternatingLeastSquares(size.dim, use_cg=use_cg, iterations=1, num_threads=threads, random_state=0)

    def sweep() -> float:
        seconds: list[float] = []
        with one_blas_thread():
            model.fit(matrix, show_progress=False, callback=lambda _, elapsed, __: seconds.append(elapsed))
        return seconds[0]

    return sweep


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit OpenBLAS to one thread: implicit divides the rows among threads of its own and asks for this."""
    with threadpoolctl.ThreadpoolController().select(internal_api="openblas").limit(limits=1):
        yield


def contestants(size: Size, users: Tensor, items: Tensor) -> dict[str, Callable[[], Sweep]]:
    """{name of a contestant: function that builds its sweep}."""
    prior = torch.bincount(items, minlength=size.num_items) + 1.0
    return {
        OURS: lambda: ours(size, users, items, ridge=1.0, ridge_power=0.0),
        "RG, frequency-scaled ridge": lambda: ours(size, users, items),
        "RG, prior": lambda: ours(size, users, items, ridge=10.0, ridge_power=0.0, prior=prior),
        "RG, positive weight": lambda: ours(size, users, items, positive_weight=0.01),
        "implicit, conjugate gradient": lambda: peer(size, users, items, use_cg=True),
        "implicit, Cholesky": lambda: peer(size, users, items, use_cg=False),
    }


def measure_times(size: Size, rounds: int) -> dict[str, list[float]]:
    """Seconds of every sweep; a round runs one sweep of each contestant, and the first round is not counted."""
    sweeps = {name: build() for name, build in contestants(size, *generate(size)).items()}
    times: dict[str, list[float]] = {name: [] for name in sweeps}
    for number in range(rounds + 1):
        for name, sweep in sweeps.items():
            seconds = sweep()
            if number:
                times[name].append(seconds)
    return times


def measure_memory(size: Size, name: str) -> float:
    """Peak MB above the inputs while one contestant is built and runs a sweep."""
    contestants(QUICK, *generate(QUICK))[name]()()  # a small run first: libraries, threads and their buffers then exist
    build = contestants(size, *generate(size))[name]
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    build()()
    return (status("VmHWM") - before) / 1024


def status(field: str) -> int:
    """A figure of this process's memory on Linux, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def memory_in_a_process_of_its_own(name: str, arguments: argparse.Namespace) -> float | None:
    """`measure_memory` in a fresh process, where nothing else was allocated; None where the system does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--memory-of", name, "--threads", str(arguments.threads)]
    answer = subprocess.run(command + ["--quick"] * arguments.quick, check=True, capture_output=True, text=True)
    return float(answer.stdout)


def report(size: Size, times: dict[str, list[float]], memory: dict[str, float | None]) -> dict[str, Any]:
    """Print the table of times and memory, and return all figures."""
    median = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{size.num_users} users x {size.num_items} items, {size.interactions} interactions, dim {size.dim}, ", end=""
    )
    print(f"{torch.get_num_threads()} threads; torch {torch.__version__}, implicit {implicit.__version__}")
    print(f"{'one sweep':30} {'median ms':>10} {'min ms':>8} {'x ' + OURS:>7} {'peak MB above inputs':>21}")
    for name, values in times.items():
        ratio, peak = median[name] / median[OURS], memory[name]
        peak_text = "unknown" if peak is None else f"{peak:.0f}"
        print(f"{name:30} {median[name] * 1e3:10.1f} {min(values) * 1e3:8.1f} {ratio:7.2f} {peak_text:>21}")
    ratios = {name: median[name] / median[OURS] for name in BARS}
    for name, bar in BARS.items():
        print(f"{OURS} is {ratios[name]:.1f} times faster than {name} (asked: {bar:.0f}).")
    print(f"Note: {NOTE}")
    return {
        "size": asdict(size),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "implicit": implicit.__version__},
        "seconds": times,
        "median_seconds": median,
        "times_faster": ratios,
        "asked": BARS,
        "peak_mb_above_inputs": memory,
        "note": NOTE,
    }


def main() -> None:
    """Read the options, measure, and print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, few rounds")
    parser.add_argument("--rounds", type=int, help="sweeps of each that are counted (default: 9, quick: 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of each library")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--memory-of", metavar="NAME", help="print one contestant's peak MB and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = QUICK if arguments.quick else Size()
    if arguments.memory_of:
        print(measure_memory(size, arguments.memory_of))
        return
    times = measure_times(size, arguments.rounds or (3 if arguments.quick else 9))
    memory = {name: memory_in_a_process_of_its_own(name, arguments) for name in times}
    figures = report(size, times, memory)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
