"""What all benchmarks share: runs in turns, peaks of memory, limits of the machine, options, and files.

Machines are noisy and their speed drifts, so a time alone says little. Contestants take turns in one process, and what
is printed is a ratio of the medians of such interleaved runs. Peaks of memory are those above the inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

Contestants = Mapping[str, Callable[[], object]]
# Those on which the speed of float32 and bfloat16 arithmetic depends, as Linux names them.
INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")


def interleave(
    contestants: Contestants, rounds: int, may_leave: Collection[str] = (), budget: float = 20.0
) -> dict[str, list[float]]:
    """Seconds of every run of each contestant; a round runs each once, and the first round is not counted.

    Args:
        contestants: {name: what to run}.
        rounds: runs of each that are counted.
        may_leave: contestants that leave after three counted runs once they have taken `budget` seconds in all, so that
            a slow one does not take most of a benchmark's time.
        budget: in seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            if name in may_leave and len(times[name]) >= 3 and sum(times[name]) > budget:
                continue
            taken = seconds(run)
            if number:
                times[name].append(taken)
        if not number:
            gc.freeze()  # the collector then skips what the first round has imported: a tenth of a second per run
    return times


def seconds(run: Callable[[], object]) -> float:
    """Seconds that one run takes."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def busy_neighbour() -> Iterator[Callable[[bool], None]]:
    """A process that keeps one core busy for as long as the block lasts.

    Yields:
        A function that lets the process work (True) or pauses it (False); it begins paused.
    """
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def set_busy(busy: bool) -> None:
        process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
        time.sleep(0.05)  # until the system has moved it

    try:
        set_busy(False)
        yield set_busy
    finally:
        process.kill()
        process.wait()


def median(times: list[float]) -> float:
    """The median."""
    return statistics.median(times)


def peak_mb(run: Callable[[], object]) -> float | None:
    """Peak MB that the process uses during `run` above what it uses now; None where the system does not tell."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system, so that its next use counts
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
        kept = run()
        peak = (_status("VmHWM") - before) / 1024
        del kept
        return peak
    except (OSError, AttributeError):
        return None


def _status(field: str) -> int:
    """A figure of this process's memory on Linux, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def limits() -> dict[str, float]:
    """Limits of this machine: GFLOP/s of two matrix products, GB/s of a copy, ns per float of memory used first."""
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
    """The product of a block of queries with class vectors, as the heads make it."""
    x, w, out = torch.randn(256, 64), torch.randn(40960, 64), torch.empty(256, 40960)
    return lambda: torch.mm(x, w.T, out=out)


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Versions, threads, processor and arguments: what one needs to know to read the figures later."""
    import manymax  # here, because trees.py imports this module before it knows which checkout to measure

    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(_without_folders(word) for word in ("python", *sys.argv)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "manymax": manymax.__version__,
        "threads": torch.get_num_threads(),
        "machine": _processor("model name"),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in _processor("flags").split()],
        "backend": _backend(),
        "arguments": {k: _without_folders(v) for k, v in vars(arguments).items() if k != "json"},
    }


def _without_folders(value: Any) -> Any:
    """A path without the folders above it, which are of no use on another machine; anything else as it is."""
    if isinstance(value, Path) or (isinstance(value, str) and os.sep in value):
        return Path(value).name
    return value


def _processor(field: str) -> str:
    """A field of /proc/cpuinfo: the name of the processor or its instruction sets; what Python knows elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _backend() -> str | None:
    """The back end that heads use here if nothing else is asked for; None in a version that has no choice."""
    try:
        from manymax.engine import native_library
    except ImportError:
        return None
    return native_library.resolved_name("auto")


def parser(description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has; `rounds` is the default of --rounds."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, under a minute: to see that it runs, not to keep",
    )
    made.add_argument("--json", metavar="FILE", help="also write every figure to FILE")
    made.add_argument(
        "--rounds", type=int, default=rounds, help=f"interleaved runs of each contestant (default: {rounds})"
    )
    made.add_argument("--threads", type=int, default=0, help="threads (default: torch's)")
    return made


def write(path: str, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON; an interrupted call leaves the old file as it was."""
    folder = Path(path).resolve().parent
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".tmp") as file:
        json.dump(figures, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def write_between_marks(page: Path, name: str, lines: list[str]) -> None:
    """Replace what is between the marks `<!-- name: begin ... -->` and `<!-- name: end` of a page by lines.

    An interrupted call leaves the page as it was.
    """
    begin, end = f"<!-- {name}: begin", f"<!-- {name}: end"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    mark, after = rest.split("-->", 1)
    text = "\n".join([f"{before}{begin}{mark}-->", *lines, f"{end}{after.split(end)[1]}"])
    new = page.with_suffix(".tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(page)


def scores_like(regime: str, rows: int, classes: int, dim: int = 64, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random queries (rows, dim), class vectors (classes, dim) and labels (rows,).

    Args:
        regime: "peaked" (or "trained", its older name) for scores of a confident model, with a spread of about 4 and
            the label near the top; "fresh" for small scores like those of a new model, of which a sparse map keeps
            nearly all classes.
        rows, classes, dim: the sizes.
        seed: of the random numbers.
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
