"""Steps of sampled losses: their parts, their growth with C, class vectors in half precision, in-batch negatives.

    python benchmarks/sampled.py              N = 2048, k = 100, d = 64, C = 10^4, 10^5, 10^6
    python benchmarks/sampled.py --quick      N = 256, C = 10^3, 10^4, 10^5

Each function below is a question and makes one table. A step draws negatives, computes loss and gradients, and where a
line says so updates the class vectors. With `sparse_grad=True` the gradient has one row per drawn class, so that the
optimiser touches only those rows; a dense gradient, and Adam with it, grow with C. `benchmarks/heads.py --only sampled`
compares a whole step with torch's own parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from measure import environment, interleave, limits, median, parser, peak_mb, write
from torch import Tensor

import manymax

DIM, NEGATIVES, FEW_CLASSES = 64, 100, 10_000
Step = Callable[[], object]


class Problem:
    """Queries, class vectors and labels of `classes` classes with p(c) ~ 1 / rank(c)."""

    def __init__(self, rows: int, classes: int, dtype: torch.dtype = torch.float32) -> None:
        self.rng = torch.Generator().manual_seed(0)
        self.rows, self.classes = rows, classes
        self.input = torch.randn(rows, DIM, generator=self.rng).requires_grad_()
        self.vectors = (0.1 * torch.randn(classes, DIM, generator=self.rng)).to(dtype).requires_grad_()
        ranks = torch.randperm(classes, generator=self.rng) + 1
        self.zipf = manymax.samplers.PopularitySampler(1 / ranks)
        self.labels = self.zipf.draw_ids((rows,), torch.device("cpu"), self.rng)

    def loss(self, sampler: Any = None, negatives: int | None = NEGATIVES, name: str = "sampled_softmax", **more: Any):
        """The loss of a fresh draw; row-sparse gradients unless `more` says otherwise."""
        head = getattr(manymax, f"linear_{name}_loss")
        options = {"target": self.labels, "sparse_grad": True, "generator": self.rng, **more}
        return head(self.input, self.vectors, sampler=sampler or self.zipf, num_negatives=negatives, **options)

    def step(self, optimizer: torch.optim.Optimizer | None = None, **how: Any) -> Step:
        """A step: loss, gradients and, with an optimiser, the update of the class vectors."""

        def run() -> None:
            self.input.grad = self.vectors.grad = None
            self.loss(**how).backward()
            if optimizer is not None:
                optimizer.step()

        return run


def parts(a: argparse.Namespace) -> dict[str, Any]:
    """Where does the time of a step go? Own negatives, Zipf(1); milliseconds, and the share of the step."""
    figures = {}
    for classes in a.sizes[1:]:
        problem = Problem(a.rows, classes)
        optimizers = {f"{m.__name__}.SparseAdam": m.SparseAdam for m in (manymax.optim, torch.optim)}
        for name, make in optimizers.items():
            optimizer, times = make([problem.vectors], lr=1e-4), []
            for _ in range(3 * a.rounds + 1):
                times.append(_timed_parts(problem, optimizer))
            found = {part: median([each[part] for each in times[1:]]) for part in times[0]}
            whole = sum(found.values())
            cells = ", ".join(f"{part} {1e3 * value:.1f} ({value / whole:.0%})" for part, value in found.items())
            print(f"C = {classes:9,}  {name:26s} {1e3 * whole:6.1f} ms: {cells}")
            figures[f"C = {classes:,}, {name}"] = found
    return figures


def _timed_parts(problem: Problem, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Seconds of the parts of one step. Drawing is a part of the loss, and timed once more by itself."""
    problem.input.grad = problem.vectors.grad = None
    marks = [time.perf_counter()]
    problem.zipf(NEGATIVES, target=problem.labels, generator=problem.rng)
    marks.append(time.perf_counter())
    loss: Tensor = problem.loss()
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    draw, forward, backward, update = (after - before for before, after in pairwise(marks))
    return {"draw": draw, "scores and loss": forward - draw, "gradients": backward, "optimiser": update}


def growth(a: argparse.Namespace) -> dict[str, Any]:
    """How much does a step grow with C? Times over that at the smallest C, and peaks of memory.

    Even a sparse step takes longer at a larger C, because it touches more distinct vectors, of which fewer are in
    cache. The line "from 10,000 classes" draws labels and negatives from as many classes at every C: what is left is
    the cost of C itself.
    """
    by_size = {classes: _growing(Problem(a.rows, classes)) for classes in a.sizes}
    figures = {}
    for name in by_size[a.sizes[0]]:  # the sizes take turns, so that a slow minute of the machine slows all of them
        times = interleave({f"{classes}": by_size[classes][name] for classes in a.sizes}, 3 * a.rounds)
        seconds = [median(times[f"{classes}"]) for classes in a.sizes]
        peaks = [peak_mb(by_size[classes][name]) for classes in a.sizes]
        relative = "  ".join(f"{value / seconds[0]:7.2f}" for value in seconds)
        memory = "  ".join("      -" if peak is None else f"{peak:7.0f}" for peak in peaks)
        print(f"{name:38s} {relative}   peak MB {memory}")
        figures[name] = {"seconds": seconds, "peak_mb": peaks}
    return figures


def _growing(problem: Problem) -> dict[str, Step]:
    """{name: one step} for a number of classes."""
    classes, rng = problem.classes, problem.rng
    uniform = manymax.samplers.UniformSampler(classes)
    drawn = torch.randperm(classes, generator=rng)[: min(FEW_CLASSES, classes)]
    few = manymax.samplers.PopularitySampler(torch.zeros(classes).index_fill_(0, drawn, 1.0))
    few_labels = drawn[torch.randint(len(drawn), (problem.rows,), generator=rng)]
    adam = torch.optim.Adam([problem.vectors], lr=1e-4, fused=True)
    return {
        "sampled softmax": problem.step(sampler=uniform),
        "... from 10,000 classes": problem.step(sampler=few, target=few_labels),
        "... Zipf(1)": problem.step(),
        "... Zipf(1) + SparseAdam": problem.step(manymax.optim.SparseAdam([problem.vectors], lr=1e-4)),
        "... dense gradient + fused Adam": problem.step(adam, sampler=uniform, sparse_grad=False),
        "... 1000 shared negatives": problem.step(sampler=uniform, shared=True, negatives=1000),
        "nce": problem.step(sampler=uniform, name="nce"),
    }


def precision(a: argparse.Namespace) -> dict[str, Any]:
    """What do class vectors in half precision cost? Times and peaks over those of float32, at the largest C."""
    problems = {str(dtype)[6:]: Problem(a.rows, a.sizes[-1], dtype) for dtype in (torch.float32, torch.bfloat16)}
    problems["float16"] = Problem(a.rows, a.sizes[-1], torch.float16)
    return _race({name: problem.step() for name, problem in problems.items()}, "float32", 3 * a.rounds)


def in_batch(a: argparse.Namespace) -> dict[str, Any]:
    """What do in-batch negatives cost? Times and peaks over those of softmax over as many classes as rows."""
    rows = 4 * a.rows
    problem = Problem(rows, a.sizes[-1])
    exact = Problem(rows, rows)
    labels = torch.arange(rows)
    sampler = manymax.samplers.InBatchSampler(problem.classes, counts=problem.zipf.log_prob.exp())

    def softmax() -> None:
        exact.input.grad = exact.vectors.grad = None
        manymax.linear_softmax_loss(exact.input, exact.vectors, labels).backward()

    runs = {"softmax": softmax}
    for name, more in (("sampled_softmax", {}), ("sampled_softmax", {"correction": "partition"}), ("nce", {})):
        runs[f"{name} {more or ''}".strip()] = problem.step(sampler=sampler, negatives=None, name=name, **more)
    return _race(runs, "softmax", a.rounds)


def _race(runs: dict[str, Step], base: str, rounds: int) -> dict[str, Any]:
    """Print the times and peaks of some steps over those of one of them."""
    times = {name: median(found) for name, found in interleave(runs, rounds).items()}
    figures = {name: {"seconds": times[name], "peak_mb": peak_mb(run)} for name, run in runs.items()}
    for name, found in figures.items():
        peak = "-" if found["peak_mb"] is None else f"{found['peak_mb']:.0f}"
        ratio = times[name] / times[base]
        print(f"{name:42s} {ratio:6.2f} of {base}   {1e3 * times[name]:8.1f} ms   peak {peak} MB")
    return figures


def main(arguments: argparse.Namespace) -> int:
    """Ask every question."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.rows = 256 if arguments.quick else 2048
    arguments.sizes = (1_000, 10_000, 100_000) if arguments.quick else (10_000, 100_000, 1_000_000)
    figures = {}
    for question in (parts, growth, precision, in_batch):
        print(f"\n{(question.__doc__ or '').splitlines()[0]}")
        figures[question.__name__] = question(arguments)
    if arguments.json:
        write(arguments.json, {"environment": environment(arguments), "limits": limits(), "questions": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "").parse_args()))
