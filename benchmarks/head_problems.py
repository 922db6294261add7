"""What the groups of heads.py share: the problem that a step is run on, runs in turns, and the file of figures."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import environment, median, peak_mb, scores_like, write
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (N, d), class vectors (C, d) and labels (N,) to a scalar
DIM = 64
SECONDS_PER_CONTESTANT = 20.0  # for all rounds of one contestant: slow peers get fewer rounds


class Figures:
    """The figures of all groups. They are written to the file after every line, so that nothing measured is lost."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.path = arguments.json
        self.groups: dict[str, Any] = {}
        self.current: dict[str, Any] = {}
        self.about = {"environment": environment(arguments), "quick": arguments.quick}
        if self.path and Path(self.path).exists():
            found = json.loads(Path(self.path).read_text(encoding="utf-8"))
            if found.get("quick") != arguments.quick:
                sys.exit(f"{self.path} holds figures of other sizes (--quick): name another file or remove it.")
            self.groups = found["groups"]

    def begin(self, group: str, peaks: dict[str, float]) -> None:
        """Start a group anew; `peaks` are the limits of this machine, see `measure.limits`."""
        self.current = self.groups[group] = {"complete": False, "limits": peaks, "lines": []}

    def save(self) -> None:
        """Write all figures so far, if a file was named."""
        if self.path:
            write(self.path, self.about | {"groups": self.groups})

    def line(self, problem: str, what: str, ratio: float, bar: float | None, **more: Any) -> None:
        """Print and keep one comparison.

        Args:
            problem: what it was measured on.
            what: what was compared, as "ours / other".
            ratio: the figure.
            bar: the largest ratio that counts as reached; None for no bar. Bars are meant for the full sizes.
            more: other figures to keep; floats are printed too.
        """
        bar = None if self.about["quick"] else bar
        verdict = "" if bar is None else ("reached" if ratio <= bar else "not reached")
        bound = "" if bar is None else f"(bar {bar:.3g})"
        notes = "  ".join(f"{k} {v:.4g}" for k, v in more.items() if isinstance(v, float))
        print(f"{problem:22s} {what:54s} {ratio:8.3f} {bound:12s} {verdict:11s} {notes}", flush=True)
        kept = {"problem": problem, "what": what, "ratio": ratio, "bar": bar, "verdict": verdict}
        self.current["lines"].append(kept | more)
        self.save()


class Problem:
    """Queries, class vectors and labels of one regime, "trained" or "fresh"; see `measure.scores_like`."""

    def __init__(self, regime: str, rows: int, classes: int) -> None:
        self.name = f"{regime} C={classes:,}"
        queries, vectors, self.target = scores_like(regime, rows, classes, DIM)
        self.queries, self.vectors = queries.requires_grad_(), vectors.requires_grad_()

    def step(self, loss: Loss, parts: int = 1) -> Callable[[], object]:
        """A function that computes the loss and both gradients.

        Args:
            loss: of queries, class vectors and labels.
            parts: into how many parts the rows are cut, for a peer whose tables of all rows would not fit.
        """

        def run() -> object:
            self.queries.grad = self.vectors.grad = None
            total = torch.zeros(())
            for x, y in zip(self.queries.chunk(parts), self.target.chunk(parts), strict=True):
                value = loss(x, self.vectors, y) / parts
                value.backward()
                total += value.detach()
            return total

        return run

    def memory(self, loss: Loss) -> float | None:
        """Peak MB of a step above inputs and gradients; None where the system does not tell."""
        self.queries.grad = self.vectors.grad = None
        peak = peak_mb(self.step(loss))
        return None if peak is None else peak - 4 * (self.queries.numel() + self.vectors.numel()) / 2**20


def seconds(run: Callable[[], object]) -> float:
    """Seconds that one run takes."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def race(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of runs in turns, after a first one that is not counted; fewer rounds where the slowest takes long."""
    slowest = max([seconds(run) for run in runs.values()])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(1, min(rounds, int(SECONDS_PER_CONTESTANT / slowest)))):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


def fastest(problem: Problem, settings: Mapping[str, Loss]) -> tuple[str, Loss]:
    """The fastest of several settings of a peer, by one run each: its name and its loss."""
    times = race({name: problem.step(loss) for name, loss in settings.items()}, 1)
    name = min(times, key=lambda n: min(times[n]))
    return name, settings[name]


def compare(
    figures: Figures,
    problem: Problem,
    ours: Mapping[str, Loss],
    peer: tuple[str, Loss],
    bar: float,
    rounds: int,
    memory_bar: float | None = None,
    parts: int = 1,
) -> None:
    """Print and keep our times as shares of a peer's, and our peaks of memory as shares of its peak.

    Args:
        figures: where the lines go.
        problem: what the steps run on.
        ours: {name: loss}.
        peer: name and loss.
        bar: of the times.
        rounds: runs of each contestant.
        memory_bar: of the peaks; None leaves them out.
        parts: parts of the rows for the peer, see `Problem.step`.
    """
    runs = {name: problem.step(loss) for name, loss in ours.items()}
    times = race(runs | {"peer": problem.step(peer[1], parts)}, rounds)
    for name in ours:
        taken = {who: times[who] for who in (name, "peer")}
        ratio = median(times[name]) / median(times["peer"])
        figures.line(problem.name, f"{name} / {peer[0]}", ratio, bar, times=taken)
    peer_peak = None if memory_bar is None else problem.memory(peer[1])
    for name, loss in ours.items():
        if peer_peak is not None and (peak := problem.memory(loss)) is not None:
            what, mb = f"{name} / {peer[0]}: memory", {"peak_mb": peak, "peer_peak_mb": peer_peak}
            figures.line(problem.name, what, peak / peer_peak, memory_bar, **mb)
