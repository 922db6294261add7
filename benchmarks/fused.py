"""What does a fused head cost, whose backward updates the class vectors, against a head and an optimiser of torch?

    python benchmarks/fused.py              2,000,000 classes x 128, 512 queries
    python benchmarks/fused.py --quick      small sizes

A step is the loss, the gradient of the queries, and the update of the class vectors. Times are ratios of medians of
interleaved runs in one process. Peaks are of memory above the class vectors and the state of the optimiser, as a share
of the class vectors; each is measured in a process of its own, whose allocator gives memory back at once.
`BARS` are the goals that were set beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from head_record import RETURNS_MEMORY
from measure import environment, interleave, median, parser, peak_mb, scores_like, write

import manymax

Step = Callable[[], object]
BARS = {"time": 1.5, "peak": 0.1}  # fused / two steps; fused / class vectors
CASES = [
    ("softmax", "sgd"),
    ("softmax", "adagrad"),
    ("softmax", "adam"),
    ("sparsemax", "adagrad"),
    ("sparsemax", "adam"),
    ("entmax", "adam"),
]
MODULES = {
    "softmax": manymax.LinearSoftmaxLoss,
    "sparsemax": manymax.LinearSparsemaxLoss,
    "entmax": manymax.LinearEntmaxLoss,
}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adam, touched": manymax.optim.SparseAdam,
}
LR = 1e-4  # so small that the regime of the scores stays as it is


def make_step(loss: str, optimizer: str, way: str, a: argparse.Namespace) -> Step:
    """A step of a loss with an optimiser, in the way "fused" or "two steps"."""
    queries, vectors, labels = scores_like("peaked", a.tokens, a.classes, a.dim)
    queries.requires_grad_()
    sparse = loss != "softmax"
    options = {"sparse_grad": True} if sparse and way == "two steps" else None
    head = MODULES[loss](a.dim, a.classes, device="meta", options=options)
    head.linear.weight = torch.nn.Parameter(vectors)
    if way == "fused":
        head = head.fused(optimizer, lr=LR)

    touched = "adam, touched" if sparse and optimizer == "adam" else optimizer
    own = None if way == "fused" else OPTIMIZERS[touched](head.parameters(), lr=LR)

    def run() -> None:
        queries.grad = None
        if own is not None:
            own.zero_grad()
        head(queries, labels).backward()
        if own is not None:
            own.step()

    return run


def peak(loss: str, optimizer: str, way: str, a: argparse.Namespace) -> float | None:
    """Peak of a step above class vectors and state, as a share of the class vectors; in a process of its own."""
    sizes = ["--classes", str(a.classes), "--dim", str(a.dim), "--tokens", str(a.tokens), "--threads", str(a.threads)]
    command = [sys.executable, __file__, *sizes, "--peak-of", f"{loss}/{optimizer}/{way}"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **RETURNS_MEMORY})
    found = json.loads(run.stdout)
    return None if found is None else found / (4 * a.classes * a.dim / 2**20)


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases."""
    lines = []
    for loss, optimizer in CASES:
        if a.only and loss not in a.only.split(","):
            continue
        steps = {way: make_step(loss, optimizer, way, a) for way in ("fused", "two steps")}
        times = {way: median(each) for way, each in interleave(steps, a.rounds).items()}
        del steps
        line: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "seconds": times}
        line["time"] = times["fused"] / times["two steps"]
        line["peak"], line["peak of two steps"] = (peak(loss, optimizer, way, a) for way in ("fused", "two steps"))
        lines.append(line)
        words = [f"{loss:10} {optimizer:8} {times['fused']:7.2f} s fused"]
        words += [f"{name} {line[name]:.3f} (bar {bar})" for name, bar in BARS.items() if line[name] is not None]
        print("  ".join([*words, f"peak of two steps {line['peak of two steps']:.3f}"]), flush=True)
    return lines


def main() -> int:
    """Measure what the arguments ask for."""
    made = parser(__doc__ or "", rounds=3)
    made.add_argument("--only", help="losses, comma-separated")
    made.add_argument("--classes", type=int, default=2_000_000)
    made.add_argument("--dim", type=int, default=128)
    made.add_argument("--tokens", type=int, default=512, help="queries of a step")
    made.add_argument("--peak-of", help=argparse.SUPPRESS)
    a = made.parse_args()
    if a.quick:
        a.classes, a.dim, a.tokens = 20_000, 32, 64
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.peak_of:
        step = make_step(*a.peak_of.split("/"), a)
        step()  # the state of the optimiser is there, and all code loaded
        print(json.dumps(peak_mb(step)))
        return 0
    lines = measure(a)
    if a.json:
        write(a.json, {"environment": environment(a), "lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
