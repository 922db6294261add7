"""The record of heads.py: its figures with their bars, written to a file after every line; and peaks of memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from head_losses import ALL_LOSSES
from head_problems import REGIMES, Problem
from measure import Contestants, environment, interleave, median, peak_mb, write

# Settings of glibc under which freed memory goes back to the system at once: a peak is then that of the step alone.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Bar:
    """A goal that was set beforehand: a figure is at most `most`, in some regimes and at some numbers of classes.

    An empty `classes` or `regimes` stands for all.
    """

    figure: str
    most: float
    classes: Collection[int] = ()
    regimes: Collection[str] = REGIMES


class Record:
    """The figures of all questions: {question: {"lines": [...], "facts": {...}, "complete": bool}}."""

    def __init__(self, arguments: argparse.Namespace, bars: Mapping[str, list[Bar]]) -> None:
        self.path, self.bars = arguments.json, {} if arguments.quick else bars
        self.questions: dict[str, Any] = {}
        self.question = ""
        self.about = {"environment": environment(arguments), "quick": arguments.quick}
        if self.path and Path(self.path).exists():
            found = json.loads(Path(self.path).read_text(encoding="utf-8"))
            if found.get("quick") != arguments.quick or "questions" not in found:
                sys.exit(
                    f"{self.path} holds other figures (--quick, or an older form): name another file or remove it."
                )
            self.questions = found["questions"]

    def begin(self, question: str) -> None:
        """Start a question anew."""
        self.question = question
        self.questions[question] = {
            "complete": False,
            "environment": self.about["environment"],
            "facts": {},
            "lines": [],
        }

    @property
    def current(self) -> dict[str, Any]:
        """The figures of the question that was begun last."""
        found: dict[str, Any] = self.questions[self.question]
        return found

    def end(self) -> None:
        """Mark the question as complete: the next run keeps its figures."""
        self.current["complete"] = True
        self.save()

    def save(self) -> None:
        """Write all figures so far, if a file was named."""
        if self.path:
            write(self.path, self.about | {"questions": self.questions})

    def facts(self, problem: Problem) -> None:
        """Print and keep what is to be known of a problem's scores."""
        facts = self.current["facts"][problem.name] = problem.facts()
        support = ", ".join(f"{name} {count:,.0f}" for name, count in facts["support"].items())
        print(
            f"  {problem.name}: {facts['source']}; largest score {facts['largest_score']:.2f}, share within 1 of it "
            f"{facts['within_1_of_it']:.3f}; classes with a part in the gradient: {support}",
            flush=True,
        )
        self.save()

    def line(self, problem: Problem | str, figure: str, ratio: float, **more: Any) -> None:
        """Print and keep one figure, next to its bar if it has one.

        Args:
            problem: what it was measured on.
            figure: what was measured, as "ours / other".
            ratio: its value.
            more: other figures to keep.
        """
        bar = self._bar(problem, figure)
        verdict = "" if bar is None else ("reached" if ratio <= bar else "not reached")
        bound = "" if bar is None else f"bar {bar:.3g}"
        name = problem if isinstance(problem, str) else problem.name
        print(f"  {name:20s} {figure:52s} {ratio:8.3f}  {bound:9s} {verdict}", flush=True)
        kept = {"problem": name, "figure": figure, "ratio": ratio, "bar": bar, "verdict": verdict}
        self.current["lines"].append(kept | more)
        self.save()

    def _bar(self, problem: Problem | str, figure: str) -> float | None:
        for bar in self.bars.get(self.question, ()):
            fits = isinstance(problem, str) or (
                problem.regime in bar.regimes and (not bar.classes or problem.classes in bar.classes)
            )
            if bar.figure == figure and fits:
                return bar.most
        return None

    def race(
        self,
        problem: Problem | str,
        runs: Contestants,
        pairs: list[tuple[str, str]],
        rounds: int,
        may_leave: Collection[str] = (),
    ) -> dict[str, list[float]]:
        """Run contestants in turns, and print and keep the ratio of medians of each pair (ours, other).

        `may_leave` names slow peers, which may have fewer repeats; the number of repeats is kept with each figure.
        """
        times = interleave(runs, rounds, may_leave)
        for pair in pairs:
            medians = [median(times[name]) for name in pair]
            taken = {name: {"seconds": median(times[name]), "repeats": len(times[name])} for name in pair}
            self.line(problem, " / ".join(pair), medians[0] / medians[1], times=taken)
        return times


# Peaks of memory ---------------------------------------------------------------------------------


def peaks(problem: Problem, losses: list[str], threads: int) -> dict[str, float | None]:
    """{loss: peak MB of a step above inputs and gradients}, measured in a process of its own.

    There the allocator returns freed memory at once, which would distort times; here, memory that earlier steps have
    left would hide what a step needs.
    """
    task = [problem.regime, problem.rows, problem.classes, str(problem.folder), losses, threads]
    program = Path(__file__).with_name("heads.py")
    command = [sys.executable, str(program), "--peaks", json.dumps(task)]
    done = subprocess.run(command, env=os.environ | RETURNS_MEMORY, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_peaks(task: str) -> None:
    """The work of the process that `peaks` starts."""
    regime, rows, classes, folder, losses, threads = json.loads(task)
    import torch

    torch.set_num_threads(threads)
    problem = Problem(regime, rows, classes, Path(folder))
    given = 4 * (problem.queries.numel() + problem.vectors.numel()) / 2**20
    found: dict[str, float | None] = {}
    for name in losses:
        step = problem.step(ALL_LOSSES[name])
        step()  # the first run loads code and makes tables that are kept
        problem.queries.grad = problem.vectors.grad = None
        peak = peak_mb(step)
        found[name] = None if peak is None else peak - given
    print(json.dumps(found))
