"""Two checkouts of manymax side by side: what a change of the code costs or saves in time and memory.

    python benchmarks/trees.py BEFORE AFTER --json FILE     about 40 minutes on 2 cores
    python benchmarks/trees.py BEFORE AFTER --quick         small sizes, under two minutes

BEFORE and AFTER are folders, each with a checkout. One process per checkout sets up the same problems; the two take
turns at every line, so that a slow minute of the machine slows both. A line is a training step of manymax from
benchmarks/heads.py, maps.py or sampled.py. It shows the ratio after / before of the median times, and that of the peaks
of memory above what was in use before the step. Peaks are measured in two more processes, whose allocator returns freed
memory to the system at once; otherwise the peaks would be those of the allocator. FILE is written after every line, and
lines that it already holds are not measured again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BAR = 1.05
DIM = 64
# Settings of glibc under which freed memory goes back to the system at once.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class CheckoutProcess:
    """A process that imports manymax from one checkout and runs its steps when asked."""

    def __init__(self, folder: Path, quick: bool, threads: int, **more: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *(["--quick"] if quick else [])]
        environment = (
            os.environ | {"PYTHONPATH": str((folder / "src").resolve()), "OMP_NUM_THREADS": str(threads)} | more
        )
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, name: str = "") -> Any:
        """Ask for the "names" of all steps, or for "seconds" or "peak" of the step `name`; returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, name]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main(arguments: argparse.Namespace) -> int:
    """Measure every line, and print which are above the bar."""
    folders, options = (Path(arguments.before), Path(arguments.after)), (arguments.quick, arguments.threads)
    trees = [CheckoutProcess(folder, *options) for folder in folders]
    holders = [CheckoutProcess(folder, *options, **RETURNS_MEMORY) for folder in folders]
    (names, about), _ = (tree.ask("names") for tree in trees)
    lines = json.loads(Path(arguments.json).read_text())["lines"] if _exists(arguments.json) else []
    done = {line["name"] for line in lines}
    for name in names:
        if name in done or (arguments.only and arguments.only not in name):
            continue
        rounds = 1 if arguments.quick else arguments.rounds
        for tree in trees:
            tree.ask("seconds", name)  # the first run of each is not counted
        taken = [[tree.ask("seconds", name) for tree in trees] for _ in range(rounds)]
        times = [sorted(row[side] for row in taken) for side in (0, 1)]
        for tree in holders:
            tree.ask("seconds", name)
        peaks = [tree.ask("peak", name) for tree in holders]
        before, after = (each[len(each) // 2] for each in times)
        memory = None if None in peaks or peaks[0] < 1 else peaks[1] / peaks[0]
        lines.append({"name": name, "ratio": after / before, "memory": memory, "times": times, "peak_mb": peaks})
        shown = "" if memory is None else f"memory {memory:6.3f}"
        print(f"{name:58s} {after / before:6.3f}   {1e3 * after:9.2f} ms   {shown}", flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps({"environment": about, "bar": BAR, "lines": lines}, indent=1))
    high = [line["name"] for line in lines if line["ratio"] > BAR or (line["memory"] or 0) > BAR]
    print(f"{len(lines) - len(high)} of {len(lines)} lines at most {BAR}" + "".join(f"\n  above: {n}" for n in high))
    return 0


def _exists(path: str | None) -> bool:
    """Whether a file was named and exists."""
    return path is not None and Path(path).exists()


# In the process of a checkout --------------------------------------------------------------------

Step = Callable[[], object]


def cases(quick: bool) -> Iterator[tuple[str, Callable[[], Step]]]:
    """(name, function that sets up the step) of every line; a step is set up when it is asked for, one at a time."""
    sizes = (500, 2_001) if quick else (3_307, 40_981, 200_000)
    rows = 128 if quick else 2048
    for regime in ("trained", "fresh"):
        for classes in sizes:
            for loss in _heads():
                yield f"heads: {regime} C={classes:,} {loss}", partial(_head, loss, regime, rows, classes)
    million = 20_000 if quick else 1_000_000
    for loss in _heads():
        yield f"heads: trained C={million:,} N=128 {loss}", partial(_head, loss, "trained", 128, million)
    yield "heads: linear_topk", partial(_rank, 1_000 if quick else 30_000, 5_001 if quick else 41_000)
    yield "heads: softmax of grouped pairs", partial(_grouped, 2_001 if quick else 40_981)
    for regime in ("trained", "fresh"):
        for loss in ("sparsemax_loss", "entmax_loss", "softmax_loss", "rankmax_loss", "sparsemax", "entmax"):
            yield f"maps: {regime} {loss}", partial(_map, loss, regime, rows, sizes[1])
    for classes in (1_000,) if quick else (10_000, 100_000, 1_000_000):
        for loss in ("sampled_softmax", "nce"):
            for form in ("sparse", "dense", "shared"):
                yield f"sampled: C={classes:,} {loss}, {form}", partial(_sampled, loss, form, rows, classes)


def _heads() -> dict[str, Callable[..., Any]]:
    """{name: head}; imports of manymax are inside functions, because the main process has none of the two checkouts."""
    import manymax

    compiled = {"options": {"compiled": True}}
    return {
        "softmax": manymax.linear_softmax_loss,
        "sparsemax": manymax.linear_sparsemax_loss,
        "entmax-1.5": partial(manymax.linear_entmax_loss, alpha=1.5),
        "entmax-1.3": partial(manymax.linear_entmax_loss, alpha=1.3),
        "rankmax": manymax.linear_rankmax_loss,
        "taylor_softmax": manymax.linear_taylor_softmax_loss,
        "rg": manymax.linear_rg_loss,
        "sparsemax, compiled": partial(manymax.linear_sparsemax_loss, **compiled),
        "entmax-1.5, compiled": partial(manymax.linear_entmax_loss, alpha=1.5, **compiled),
        "rankmax, compiled": partial(manymax.linear_rankmax_loss, **compiled),
    }


def _head(loss: str, regime: str, rows: int, classes: int) -> Step:
    """A step of a linear head."""
    from measure import scores_like

    queries, vectors, target = scores_like(regime, rows, classes, DIM)
    queries.requires_grad_()
    vectors.requires_grad_()
    function = _heads()[loss]

    def run() -> object:
        queries.grad = vectors.grad = None
        return function(queries, vectors, target).backward()

    return run


def _rank(users: int, items: int) -> Step:
    """The 20 highest of all items for every user, with 27 masked."""
    import torch

    import manymax

    x, w, exclude = torch.randn(users, DIM), torch.randn(items, DIM), torch.randint(items, (users, 27))
    return lambda: manymax.linear_topk(x, w, 20, exclude=exclude)[1]


def _grouped(classes: int) -> Step:
    """A softmax step of pairs grouped by user."""
    import torch

    import manymax

    x, w = torch.randn(512, DIM, requires_grad=True), torch.randn(classes, DIM, requires_grad=True)
    user, item = torch.arange(512).repeat_interleave(27), torch.randint(classes, (512 * 27,))

    def run() -> object:
        x.grad = w.grad = None
        rows, target = manymax.group_pairs(user, item)
        return manymax.linear_softmax_loss(x[rows], w, target).backward()

    return run


def _map(name: str, regime: str, rows: int, classes: int) -> Step:
    """A map or loss of a table of scores, forward and backward."""
    from measure import scores_like

    import manymax

    queries, vectors, target = scores_like(regime, rows, classes)
    scores = (queries @ vectors.T).requires_grad_()
    function = getattr(manymax, name)

    def run() -> object:
        scores.grad = None
        value = function(scores, target) if name.endswith("_loss") else function(scores)[:, 0].sum()
        return value.backward()

    return run


def _sampled(loss: str, form: str, rows: int, classes: int) -> Step:
    """A step of a sampled head."""
    import torch

    import manymax

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, DIM, generator=generator).requires_grad_()
    w = (0.1 * torch.randn(classes, DIM, generator=generator)).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    sampler, function = manymax.samplers.UniformSampler(classes), getattr(manymax, f"linear_{loss}_loss")
    options: dict[str, Any] = {"shared": form == "shared", "num_negatives": 1000 if form == "shared" else 100}
    if form != "dense":
        new = "sparse_grad" in inspect.signature(function).parameters
        options["sparse_grad" if new else "sparse"] = True

    def run() -> object:
        x.grad = w.grad = None
        return function(x, w, target, sampler, **options).backward()

    return run


def serve(quick: bool) -> None:
    """Answer questions from standard input until it ends."""
    import torch
    from measure import environment, peak_mb

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    makers = dict(cases(quick))
    held: tuple[str, Step | None] = ("", None)
    for line in sys.stdin:
        what, name = json.loads(line)
        answer: Any = None
        if what == "names":
            answer = [list(makers), environment(argparse.Namespace(quick=quick))]
        else:
            if held[0] != name:
                held = ("", None)  # free the last problem before the next one is set up
                held = (name, makers[name]())
            assert held[1] is not None
            answer = _seconds(held[1]) if what == "seconds" else peak_mb(held[1])
        print(json.dumps(answer), flush=True)


def _seconds(step: Step) -> float:
    """Seconds of one run."""
    import gc
    import time

    gc.collect()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve("--quick" in sys.argv)
        sys.exit()
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("before", help="folder of a checkout")
    read.add_argument("after", help="folder of another checkout")
    read.add_argument("--json", metavar="FILE", help="write every figure to FILE, and skip lines that it holds")
    read.add_argument("--quick", action="store_true", help="small sizes and one round: to see that it runs")
    read.add_argument("--only", default="", help="measure only lines with this text in their name")
    read.add_argument("--rounds", type=int, default=9, help="turns of each checkout at a line (default: 9)")
    read.add_argument("--threads", type=int, default=2, help="threads of each process (default: 2)")
    sys.exit(main(read.parse_args()))
