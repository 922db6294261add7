"""Predicted step times against measured ones: 100 steps of all members with their defaults.

    python benchmarks/advisor.py --json FILE           C = 10^3 ... 10^6: about 4 minutes on 2 quiet cores
    python benchmarks/advisor.py --quick               two sizes, under a minute: to see that it runs
    python benchmarks/advisor.py --json FILE --predict predict the steps of FILE again, and measure nothing
    MANYMAX_BACKEND=torch python benchmarks/advisor.py the same without the native back end

The machine is measured first, in the same process and in the way of `manymax.advise`; then the members take turns at
each size. A run that was interrupted is continued by the same command: FILE keeps the machine and all finished sizes.
Bars: 95 of 100 times are within a factor of 2, and Spearman's rank correlation of predicted and measured times is at
least 0.9. Measured peaks of memory above the inputs are kept beside the predicted ones.

Sparse members take as long as their supports are large. They run in three regimes: "fresh" scores of a new model, where
nearly every class is in the support; "modest" ones, the small skewed scores of a recommender that was trained with a
sparse loss; and "peaked" ones of a confident model, where a few classes are.

On a machine that others use, `--cpu-time` takes one thread and counts its processor time.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import environment, median, parser, peak_mb, scores_like, write
from torch import Tensor

import manymax
from manymax.engine.native_library import resolved_name
from manymax.theory.cost import Machine, Shape, cost, measure_machine, predict_seconds
from manymax.theory.order_preservation import member_map

DIM = 64
LEAST_CORRELATION, LEAST_SHARE, FACTOR = 0.9, 0.95, 2.0
REGIMES = ("modest", "fresh", "peaked")
# Rows and classes: fewer rows of more classes, so that no size takes much longer than another.
SIZES = ((256, 1_000), (1024, 10_000), (512, 41_000), (128, 200_000), (64, 1_000_000))
QUICK_SIZES = SIZES[:2]
SEVERAL = 5  # positives of a row, at the first three sizes
NEGATIVES = ((100, False), (1_000, True))  # how many, and whether all rows share them


@dataclass(frozen=True)
class Case:
    """One step that is both run and predicted."""

    name: str
    member: str
    shape: Shape
    run: Callable[[], object]
    forget: Callable[[], object]  # lets go of the gradients


class Problem:
    """Queries, class vectors and labels of one regime."""

    def __init__(self, regime: str, rows: int, classes: int) -> None:
        self.regime, self.shape = regime, {"batch": rows, "num_classes": classes, "dim": DIM}
        made = modest_scores(rows, classes) if regime == "modest" else scores_like(regime, rows, classes, DIM)
        queries, vectors, self.target = made
        self.queries, self.vectors = queries.requires_grad_(), vectors.requires_grad_()

    def case(self, member: str, loss: Callable[..., Tensor], target: Tensor, **sizes: Any) -> Case:
        """A step of a member's loss, which takes queries, class vectors and labels; `sizes` complete its shape."""

        def forget() -> None:
            self.queries.grad = self.vectors.grad = None
            if isinstance(loss, TreeStep):
                loss.head.zero_grad(set_to_none=True)

        def run() -> None:
            forget()
            loss(self.queries, self.vectors, target).backward()

        settings = "".join(f" {name}={value:.4g}" for name, value in sizes.items())
        name = f"{member} {self.regime} N={self.shape['batch']} C={self.shape['num_classes']:,}{settings}"
        return Case(name, member, Shape(**self.shape, **sizes), run, forget)

    def sizes(self, member: manymax.Member, target: Tensor) -> dict[str, float]:
        """What completes the shape of a step of an exact member: the support, on 64 of the rows, and the positives."""
        found: dict[str, float] = {}
        if member.sparse:
            with torch.no_grad():
                scores, labels = self.queries[:64] @ self.vectors.T, target[:64]
                if labels.dim() > 1:  # the support of several positives is that of the one with the lowest score
                    labels = labels.gather(1, scores.gather(1, labels).argmin(1, keepdim=True)).squeeze(1)
                found["support"] = float((member_map(member, labels)(scores) > 0).sum(1).float().mean())
        if target.dim() > 1:
            found["positives"] = float(target.shape[1])
        return found


def modest_scores(rows: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, class vectors and labels with the small skewed scores of a model that was trained with a sparse loss.

    The largest score is about .5, and all classes lie within 1 of it, as in a factorisation of Gowalla (40,981 items)
    trained with entmax: there 1,808 classes are in the support of entmax and 20 in that of sparsemax.
    """
    generator = torch.Generator().manual_seed(0)
    queries, vectors = (torch.randn(size, DIM, generator=generator) for size in (rows, classes))
    spread = 0.05
    queries *= spread * 0.6**0.5 / (DIM - 1) ** 0.5
    # One number of each vector is the popularity of the class, which all queries see alike.
    queries[:, 0] = 1
    vectors[:, 0] = spread * 0.4**0.5 * (torch.empty(classes).exponential_(generator=generator) - 1)
    labels = vectors[:, 0].topk(min(classes, 4 * rows)).indices[torch.randperm(4 * rows, generator=generator) % classes]
    return queries, vectors, labels[:rows].clone()


def cases(problem: Problem) -> Iterator[Case]:
    """The steps of a problem: sparse members in every regime, all others in one, because scores do not matter there."""
    rows, classes = problem.shape["batch"], problem.shape["num_classes"]
    first = problem.regime == REGIMES[0]
    generator = torch.Generator().manual_seed(1)
    others = torch.randint(classes, (rows, SEVERAL - 1), generator=generator)
    several = torch.cat([problem.target.unsqueeze(1), others], 1)
    sampler = manymax.samplers.UniformSampler(classes)
    for name, member in manymax.FAMILY.items():
        if member.kind in ("exact", "quadratic") and (first or member.sparse):
            loss = getattr(manymax, f"linear_{name}_loss")
            yield problem.case(name, loss, problem.target, **problem.sizes(member, problem.target))
            if first and member.kind == "exact" and (rows, classes) in SIZES[:3]:
                yield problem.case(name, loss, several, **problem.sizes(member, several))
        if member.kind == "sampled" and first:
            function = getattr(manymax, f"linear_{name}_loss")
            for k, shared in NEGATIVES:
                loss = partial(function, sampler=sampler, num_negatives=k, shared=shared)
                yield problem.case(name, loss, problem.target, num_negatives=k, shared=shared)
        if member.kind == "tree" and first:
            head = member.module(DIM, manymax.HuffmanTree(torch.ones(classes)))
            yield problem.case(name, TreeStep(head), problem.target)


@dataclass(frozen=True)
class TreeStep:
    """The loss of a head that has vectors of its own, called like the others."""

    head: torch.nn.Module

    def __call__(self, queries: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(queries, labels)
        return loss


def measure(made: list[Case], rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Time the cases in turns; returns a row per case with its measured times and peak of memory."""
    times: dict[str, list[float]] = {case.name: [] for case in made}
    for _ in range(rounds + 1):
        for case in made:
            gc.collect()
            start = clock()
            case.run()
            times[case.name].append(clock() - start)
    found = []
    for case in made:
        case.forget()  # gradients of the last run would make room for those of this one, and not be counted
        step = {
            "name": case.name,
            "member": case.member,
            "shape": asdict(case.shape),
            "seconds": times[case.name][1:],  # the first round warms up
            "peak_mb": peak_mb(case.run),
        }
        found.append(step)
    return found


def predict(step: dict[str, Any], machine: Machine) -> None:
    """Add the predictions to a measured step."""
    shape = Shape(**step["shape"])
    step["measured"], step["predicted"] = median(step["seconds"]), predict_seconds(step["member"], shape, machine)
    step["predicted_peak_mb"] = cost(step["member"], shape, machine.way).memory / 2**20


def show(step: dict[str, Any]) -> None:
    """Print a step, with a mark where the prediction is off by more than the factor."""
    ratio = step["predicted"] / step["measured"]
    mark = " " if 1 / FACTOR <= ratio <= FACTOR else "*"
    peak = "-" if step["peak_mb"] is None else f"{step['peak_mb']:.0f}"
    print(
        f"{step['name']:78s} {1e3 * step['measured']:9.2f} ms  predicted / measured {ratio:5.2f}{mark}"
        f"  peak {peak} MB, predicted {step['predicted_peak_mb']:.0f}",
        flush=True,
    )


def spearman(first: list[float], second: list[float]) -> float:
    """Spearman's correlation, that of the ranks."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """How well predicted and measured times agree."""
    measured, predicted = ([step[name] for step in steps] for name in ("measured", "predicted"))
    off = [max(m / p, p / m) for m, p in zip(measured, predicted, strict=True)]
    within = sum(factor <= FACTOR for factor in off)
    return {
        "steps": len(off),
        "within_2": within,
        "share_within_2": within / len(off),
        "spearman": spearman(measured, predicted),
        "median_factor": median(off),
        "largest_factor": max(off),
    }


def main(arguments: argparse.Namespace) -> int:
    """Measure the machine, then all sizes; the exit code is 1 if a bar was missed at full sizes."""
    if arguments.cpu_time or arguments.threads:
        torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    setup = {**environment(arguments), "backend": resolved_name("auto")}
    setup["arguments"] = {k: v for k, v in setup["arguments"].items() if k != "predict"}
    path = Path(arguments.json) if arguments.json else None
    figures: dict[str, Any] = {"environment": setup, "steps": []}
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
        if not arguments.predict and kept["environment"] != setup:
            raise SystemExit(f"{path} was measured in another environment: give another file, or remove it.")
        figures = kept
    if "machine" not in figures:
        figures["machine"] = asdict(measure_machine(2.0 if arguments.quick else 10.0, DIM, clock))
    machine = Machine(**figures["machine"])
    print("machine  ", "  ".join(f"{name} {value:.3g}" for name, value in figures["machine"].items()))
    done = figures.setdefault("problems", [])
    for rows, classes in QUICK_SIZES if arguments.quick else SIZES:
        for regime in REGIMES:
            if [regime, rows, classes] not in done and not arguments.predict:
                made = list(cases(Problem(regime, rows, classes)))
                figures["steps"] += measure(made, 3 if arguments.quick else arguments.rounds, clock)
                done.append([regime, rows, classes])
                if path is not None:
                    write(str(path), figures)
    for step in figures["steps"]:
        predict(step, machine)
        show(step)
    figures["summary"] = summary(figures["steps"])
    print("  ".join(f"{name} {value:.3g}" for name, value in figures["summary"].items()))
    if path is not None:
        write(str(path), figures)
    found = figures["summary"]
    reached = found["spearman"] >= LEAST_CORRELATION and found["share_within_2"] >= LEAST_SHARE
    return 0 if arguments.quick else not reached


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--predict", action="store_true", help="predict the steps of the file again, measure nothing")
    options.add_argument("--cpu-time", action="store_true", help="one thread and its processor time")
    sys.exit(main(options.parse_args()))
