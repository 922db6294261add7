"""How long an epoch of a loss takes on this machine: a few steps are trained and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from manymax.study.config import RunConfig
from manymax.study.data.prepare import Prepared
from manymax.study.evaluate import evaluate
from manymax.study.parallel import Team
from manymax.study.run import build_model
from manymax.study.train import (
    build_optimizer,
    compute_gradients,
    epoch_batches,
    next_group,
    refresh_bounds,
    refresh_samplers,
    take_step,
)

MOST_SECONDS = 0.7  # of the timed steps of a loss
LEAST_STEPS = 3  # timed; one more before them fills caches


@contextmanager
def _one_thread() -> Iterator[None]:
    """As the runs themselves: one thread each, as many at a time as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def epoch_seconds(config: RunConfig, prepared: Prepared) -> float:
    """Seconds that an epoch of training takes, by some of its steps."""
    with _one_thread():
        split = prepared.split
        model = build_model(config, split)
        optimizer = build_optimizer(config, model)
        batches = epoch_batches(config, split, model, 0)
        refresh_samplers(model, config.seed, 0)
        refresh_bounds(model, config, 0)
        start, steps = time.perf_counter(), 0
        for number in range(len(batches)):
            optimizer.zero_grad(set_to_none=True)
            compute_gradients(model, next_group(batches, number, config), config, number, Team())
            take_step(model, optimizer, config)
            if number == 0 and len(batches) > 1:
                start = time.perf_counter()
                continue
            steps += 1
            if steps >= LEAST_STEPS and time.perf_counter() - start > MOST_SECONDS:
                break
        return (time.perf_counter() - start) / steps * len(batches)


def evaluation_seconds(config: RunConfig, prepared: Prepared) -> float:
    """Seconds that an evaluation on the validation part takes."""
    with _one_thread():
        model = build_model(config, prepared.split)
        start = time.perf_counter()
        cutoff = int(config.monitored.partition("@")[2])
        evaluate(model.backbone, model.head, prepared.split, "valid", cutoffs=(cutoff,))
        return time.perf_counter() - start
