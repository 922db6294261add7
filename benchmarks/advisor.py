"""Predicted step times against measured ones, over a grid of numbers of classes and of negatives.

    python benchmarks/advisor.py              N = 1024, C = 10^3 ... 10^6, k = 10 ... 1000: some minutes on 2 cores
    python benchmarks/advisor.py --quick      N = 256, C up to 30,000

The machine is measured first, in the same process and in the way of `manymax.advise`; then the heads run in turns.
Bars: Spearman's rank correlation of predicted and measured times is at least 0.9, and no time is off by more than a
factor of 2. Measured peaks of memory above the inputs are printed beside the predicted ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from measure import environment, interleave, median, parser, peak_mb, scores_like, write
from torch import Tensor

import manymax
from manymax.theory.cost import Machine, Shape, cost, measure_machine, predict_seconds

DIM = 64
LEAST_CORRELATION, LARGEST_FACTOR = 0.9, 2.0
REGIMES = ("trained", "fresh")


@dataclass(frozen=True)
class Case:
    """One step that is both run and predicted."""

    name: str
    member: str
    shape: Shape
    run: Callable[[], object]


class Problem:
    """Queries, class vectors and labels of one regime, "trained" or "fresh"."""

    def __init__(self, regime: str, rows: int, classes: int) -> None:
        self.regime, self.shape = regime, {"batch": rows, "num_classes": classes, "dim": DIM}
        queries, vectors, self.target = scores_like(regime, rows, classes, DIM)
        self.queries, self.vectors = queries.requires_grad_(), vectors.requires_grad_()

    def case(self, member: str, loss: Callable[..., Tensor], **sizes: Any) -> Case:
        """A step of a member's loss, which takes queries, class vectors and labels; `sizes` complete its shape."""

        def run() -> object:
            self.queries.grad = self.vectors.grad = None
            loss(self.queries, self.vectors, self.target).backward()
            return None

        settings = "".join(f" {name}={value:.4g}" for name, value in sizes.items())
        name = f"{member} {self.regime} C={self.shape['num_classes']:,}{settings}"
        return Case(name, member, Shape(**self.shape, **sizes), run)

    def support(self, member: str) -> float:
        """Average number of classes that the member's map keeps, on 64 of the rows."""
        map = manymax.FAMILY[member].map
        assert map is not None
        with torch.no_grad():
            scores = self.queries[:64] @ self.vectors.T
            probs = map(scores, self.target[:64]) if member == "rankmax" else map(scores)
        return float((probs > 0).sum(1).float().mean())


def exact_cases(problem: Problem) -> Iterator[Case]:
    """A step of every exact member and of RG."""
    for name, member in manymax.FAMILY.items():
        if member.kind in ("exact", "quadratic"):
            sizes = {"support": problem.support(name)} if member.sparse else {}
            yield problem.case(name, getattr(manymax, f"linear_{name}_loss"), **sizes)


def other_cases(problem: Problem, negatives: tuple[int, ...]) -> Iterator[Case]:
    """Steps of the sampled members at several k, with negatives per row and shared ones, and of the tree."""
    classes = problem.shape["num_classes"]
    sampler = manymax.samplers.UniformSampler(classes)
    for name, member in manymax.FAMILY.items():
        if member.kind == "sampled":
            function = getattr(manymax, f"linear_{name}_loss")
            for k in (k for k in negatives if k <= classes):
                for shared in (False, True):
                    loss = partial(function, sampler=sampler, num_negatives=k, shared=shared, sparse_grad=True)
                    yield problem.case(name, loss, num_negatives=k, shared=shared)
        if member.kind == "tree":
            head = manymax.HierarchicalSoftmaxLoss(DIM, manymax.HuffmanTree(torch.ones(classes)), sparse_grad=True)
            yield problem.case(name, lambda x, w, y, head=head: head(x, y))


def ranks(values: list[float]) -> Tensor:
    """The rank of each value: 0 for the smallest, 1 for the next, ..."""
    return torch.tensor(values, dtype=torch.float64).argsort().argsort().double()


def spearman(first: list[float], second: list[float]) -> float:
    """Spearman's correlation, that of the ranks."""
    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


def measure(cases: list[Case], machine: Machine, rounds: int) -> list[dict[str, Any]]:
    """Time the cases in turns; returns a row per case with its measured and predicted time and memory."""
    times = interleave({case.name: case.run for case in cases}, rounds)
    found = []
    for case in cases:
        measured, predicted = median(times[case.name]), predict_seconds(case.member, case.shape, machine)
        row = {"name": case.name, "member": case.member, "shape": asdict(case.shape), "seconds": times[case.name]}
        row |= {"measured": measured, "predicted": predicted, "peak_mb": peak_mb(case.run)}
        row["predicted_peak_mb"] = cost(case.member, case.shape).memory / 2**20
        found.append(row)
        peak = "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
        print(
            f"{case.name:64s} {1e3 * measured:9.2f} ms  predicted / measured {predicted / measured:5.2f}"
            f"   peak {peak} MB, predicted {row['predicted_peak_mb']:.0f}",
            flush=True,
        )
    return found


def main(arguments: argparse.Namespace) -> int:
    """Measure the machine, then the grid; the exit code is 1 if a bar was missed at full sizes."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = 256 if arguments.quick else 1024
    sizes = (1_000, 5_000, 30_000) if arguments.quick else (1_000, 10_000, 100_000, 1_000_000)
    rounds = 3 if arguments.quick else arguments.rounds
    machine = measure_machine(2.0 if arguments.quick else 10.0, DIM)
    print("machine  ", "  ".join(f"{name} {value:.3g}" for name, value in asdict(machine).items()))
    found: list[dict[str, Any]] = []
    for classes in sizes:
        for regime in REGIMES:
            problem = Problem(regime, rows if classes < 1_000_000 else 128, classes)
            found += measure(list(exact_cases(problem)), machine, rounds)
            if regime == REGIMES[0]:
                found += measure(list(other_cases(problem, (10, 100, 1_000))), machine, rounds)
    measured, predicted = [row["measured"] for row in found], [row["predicted"] for row in found]
    off = [max(m / p, p / m) for m, p in zip(measured, predicted, strict=True)]
    summary = {
        "spearman": spearman(measured, predicted),
        "share_within_2": sum(factor <= LARGEST_FACTOR for factor in off) / len(off),
        "largest_factor": max(off),
        "median_factor": median(off),
        "steps": len(off),
    }
    print("  ".join(f"{name} {value:.3g}" for name, value in summary.items()))
    if arguments.json:
        figures = {
            "environment": environment(arguments),
            "machine": asdict(machine),
            "summary": summary,
            "steps": found,
        }
        write(arguments.json, figures)
    reached = summary["spearman"] >= LEAST_CORRELATION and summary["largest_factor"] <= LARGEST_FACTOR
    return 0 if arguments.quick else not reached


if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "").parse_args()))
