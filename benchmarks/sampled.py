"""Sampled losses against the number of classes: how much a step's time depends on C, which it hardly should.

    python benchmarks/sampled.py              N = 2048, k = 100, d = 64, C = 10^4, 10^5, 10^6
    python benchmarks/sampled.py --quick      N = 256, C = 10^3, 10^4, 10^5

A step draws negatives and computes loss and gradients. With `sparse_grad=True` the gradient has one row per drawn
class, so the optimizer (SparseAdam here) touches only those rows; a dense gradient, and Adam with it, grow with C.

Even a sparse step takes longer at a larger C, because it touches more distinct vectors, of which fewer are in cache. To
separate this, the lines "from 10,000 classes" draw labels and negatives from the same number of classes at every C. By
how much they still take longer is the cost of C itself; the rest is the cost of more distinct vectors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import environment, interleave, limits, median, parser, peak_mb, write

import manymax

DIM, NEGATIVES, FEW_CLASSES = 64, 100, 10_000


def steps(rows: int, classes: int) -> dict[str, Callable[[], object]]:
    """{name: one training step} for a number of classes."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(rows, DIM, generator=generator).requires_grad_()
    vectors = (0.1 * torch.randn(classes, DIM, generator=generator)).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    counts = torch.randint(1, 100, (classes,), generator=generator)
    drawn = torch.randperm(classes, generator=generator)[: min(FEW_CLASSES, classes)]
    few = manymax.samplers.PopularitySampler(torch.zeros(classes).index_fill_(0, drawn, 1.0))
    few_target = drawn[torch.randint(len(drawn), (rows,), generator=generator)]
    uniform = manymax.samplers.UniformSampler(classes)
    popular = manymax.samplers.PopularitySampler(counts, power=0.75)
    sparse_adam, adam = torch.optim.SparseAdam([vectors], lr=1e-4), torch.optim.Adam([vectors], lr=1e-4, fused=True)

    def step(loss: Callable[..., Any], optimizer: torch.optim.Optimizer | None, **options: Any) -> Callable[[], object]:
        def run() -> object:
            input.grad = vectors.grad = None
            labels = few_target if options["sampler"] is few else target
            loss(input, vectors, labels, **options).backward()
            if optimizer is not None:
                optimizer.step()
            return None

        return run

    softmax, nce = manymax.linear_sampled_softmax_loss, manymax.linear_nce_loss
    own = {"num_negatives": NEGATIVES}
    return {
        "sampled softmax, sparse": step(softmax, None, sampler=uniform, sparse_grad=True, **own),
        "... from 10,000 classes": step(softmax, None, sampler=few, sparse_grad=True, **own),
        "sampled softmax, sparse, popularity": step(softmax, None, sampler=popular, sparse_grad=True, **own),
        "sampled softmax, sparse, shared 1000": step(
            softmax, None, sampler=uniform, sparse_grad=True, shared=True, num_negatives=1000
        ),
        "nce, sparse": step(nce, None, sampler=uniform, sparse_grad=True, **own),
        "nce ... from 10,000 classes": step(nce, None, sampler=few, sparse_grad=True, **own),
        "sampled softmax, sparse + SparseAdam": step(softmax, sparse_adam, sampler=uniform, sparse_grad=True, **own),
        "sampled softmax, dense + fused Adam": step(softmax, adam, sampler=uniform, **own),
    }


def main(arguments: argparse.Namespace) -> int:
    """Time every step at every size; times are printed as multiples of those at the smallest C."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = 256 if arguments.quick else 2048
    sizes = (1_000, 10_000, 100_000) if arguments.quick else (10_000, 100_000, 1_000_000)
    by_size = {classes: steps(rows, classes) for classes in sizes}
    names = list(by_size[sizes[0]])
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[float | None]] = {}
    for name in names:  # the sizes of a step take turns, so that a slow minute of the machine slows all of them
        times = interleave({f"{classes}": by_size[classes][name] for classes in sizes}, 3 * arguments.rounds)
        seconds[name] = [median(times[f"{classes}"]) for classes in sizes]
        peaks[name] = [peak_mb(by_size[classes][name]) for classes in sizes]
    listed = ", ".join(f"{c:,}" for c in sizes)
    print(f"time of a step / time at C = {sizes[0]:,}, and peak MB above inputs, for C = {listed}")
    for name, values in seconds.items():
        relative = "  ".join(f"{v / values[0]:7.2f}" for v in values)
        memory = "  ".join("      -" if p is None else f"{p:7.0f}" for p in peaks[name])
        print(f"{name:38s} {relative}   peak {memory}")
    if arguments.json:
        figures = {"sizes": sizes, "seconds": seconds, "peak_mb": peaks}
        write(arguments.json, {"environment": environment(arguments), "limits": limits()} | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "").parse_args()))
