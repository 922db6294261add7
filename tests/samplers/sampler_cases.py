"""What the tests of all samplers share: a sampler for each row of `SAMPLERS` and its examples, and calls of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax.samplers import SAMPLERS, Draw, FixedSampler, Sampler, SamplerEntry

C, DIM, BATCH, NEGATIVES = 6, 3, 3, 2
COUNTS = torch.tensor([5.0, 0.0, 1.0, 8.0, 3.0, 3.0])
CASES = [
    pytest.param(entry, options, id=f"{name}-{i}")
    for name, entry in SAMPLERS.items()
    for i, options in enumerate(entry.examples)
]
EXACT = [case for case in CASES if case.values[0].exact_log_q]
FIXED = [case for case in CASES if issubclass(case.values[0].module, FixedSampler)]


def make(entry: SamplerEntry, options: Mapping[str, Any]) -> Sampler:
    """A sampler for C classes that is ready to draw."""
    sampler = entry.make(C, COUNTS, **options)
    sampler.refresh(vectors()["linear_weight"], torch.Generator().manual_seed(1))
    return sampler


def vectors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The arguments `input` (BATCH, DIM) and `linear_weight` (C, DIM), always the same numbers."""
    random = torch.Generator().manual_seed(5)
    queries = torch.randn(BATCH, DIM, generator=random, dtype=torch.float64)
    return {
        "input": queries.to(dtype),
        "linear_weight": torch.randn(C, DIM, generator=random, dtype=torch.float64).to(dtype),
    }


def positives(generator: torch.Generator) -> Tensor:
    """Positives (BATCH,) that follow COUNTS, as the in-batch sampler assumes."""
    return COUNTS.multinomial(BATCH, replacement=True, generator=generator)


def call(sampler: Sampler, *, shared: bool = False, seed: int = 0, **changes: Any) -> Draw:
    """The draw of a call with all arguments, some of them changed."""
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {"target": positives(generator), **vectors(), "shared": shared, "generator": generator}
    arguments.update(changes)
    return sampler(arguments.pop("num_negatives", NEGATIVES), **arguments)
