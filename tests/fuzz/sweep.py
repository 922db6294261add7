"""Runs the calls of the sweep in a process of their own, which may hang, die or ask for all memory."""

from __future__ import annotations

import multiprocessing
import random
import resource
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from tests.fuzz.outcome import Finding, outcome
from tests.fuzz.subjects import Subject, subjects
from tests.fuzz.values import Bad, values_for

SECONDS = 20.0  # for one call; the slowest takes a tenth of a second on an idle machine
MEMORY = 6 << 30  # bytes of address space, most of which torch reserves

Case = tuple[Subject, str, Bad]


def cases(only: str = "") -> list[Case]:
    """All calls, or those whose name holds a text."""
    return [
        (subject, argument, bad)
        for subject in subjects()
        for argument in subject.varied
        for bad in values_for(subject.good_value(argument))
        if only in f"{subject.name} {argument} {bad.name}"
    ]


def sample(every: Sequence[Case], size: int, seed: int) -> list[Case]:
    """Some of the calls: subjects first, so that one with many arguments has no larger share than others."""
    rng, by_subject = random.Random(seed), {}
    for case in every:
        by_subject.setdefault((case[0].name, case[1]), []).append(case)
    chosen = [by_subject[key].pop(rng.randrange(len(by_subject[key]))) for key in sorted(by_subject)]
    rng.shuffle(chosen)
    rest = [case for group in by_subject.values() for case in group]
    return (chosen + rng.sample(rest, max(0, min(size - len(chosen), len(rest)))))[:size]


def sweep(chosen: Sequence[Case]) -> Iterator[Finding]:
    """The findings of these calls, in their order."""
    start = 0
    while start < len(chosen):
        parent, child = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_work, args=(chosen, start, child), daemon=True)
        process.start()
        child.close()
        position, stopped = start, ""
        try:
            while True:
                if not parent.poll(SECONDS):
                    stopped = f"it took more than {SECONDS:.0f} seconds"
                    process.kill()
                    break
                position, found = parent.recv()
                if found is not None:
                    yield found
        except EOFError:
            process.join()
            stopped = f"the process ended with {process.exitcode}" if process.exitcode else ""
        process.join()
        if not stopped:
            return
        subject, argument, bad = chosen[position]
        yield Finding(subject.name, argument, bad.name, "stopped", stopped)
        start = position + 1


def _work(chosen: Sequence[Case], start: int, pipe: Connection) -> None:
    """Run calls and send what they came to; the number of a call before it, so that a death can be told."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for position in range(start, len(chosen)):
        pipe.send((position, None))
        found = outcome(*chosen[position])
        if found is not None:
            pipe.send((position, found))
