"""What every sampler says about arguments that it cannot use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.samplers import SAMPLERS, FixedSampler, SamplerEntry
from tests.samplers.sampler_cases import BATCH, CASES, COUNTS, C, call, make, vectors


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_errors_name_the_wrong_argument(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = make(entry, options)
    weight, queries = vectors()["linear_weight"], vectors()["input"]
    wrong: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("num_negatives", ArgumentError, {"num_negatives": 0}),
        ("num_negatives", ArgumentError, {"num_negatives": -1}),
        ("num_negatives", ArgumentTypeError, {"num_negatives": 2.0}),
        ("num_negatives", ArgumentTypeError, {"num_negatives": True}),
        ("target", ArgumentError, {"target": torch.tensor([0, 3, C])}),
        ("target", ArgumentError, {"target": torch.tensor([0, -100, 2])}),
        ("target", ArgumentError, {"target": torch.zeros(BATCH, 1, 1, dtype=torch.int64)}),
        ("target", ArgumentTypeError, {"target": torch.zeros(BATCH)}),
        ("target", ArgumentTypeError, {"target": torch.zeros(BATCH, dtype=torch.bool)}),
        ("input", ArgumentError, {"input": queries[0]}),
        ("same rows", ArgumentError, {"batch": BATCH + 1}),
        ("linear_weight", ArgumentError, {"linear_weight": weight[:-1]}),
        ("linear_weight", ArgumentError, {"linear_weight": weight[:, :-1]}),
    ]
    if entry.needs_scores:
        wrong.append(("input", ArgumentError, {"input": None, "linear_weight": None}))
    if entry.needs_target:
        wrong.append(("target", ArgumentError, {"target": None}))
    else:
        wrong.append(("num_negatives", ArgumentError, {"num_negatives": None}))
    for argument, error, changes in wrong:
        with pytest.raises(error, match=argument):
            call(sampler, **changes)


@pytest.mark.parametrize("num_classes", [0, -3])
def test_no_classes(num_classes: int) -> None:
    for entry in SAMPLERS.values():
        if not entry.needs_counts:
            with pytest.raises(ArgumentError, match="num_classes"):
                entry.make(num_classes, None)


def test_rows_must_be_known_unless_shared() -> None:
    sampler = SAMPLERS["uniform"].make(C)
    with pytest.raises(ArgumentError, match="batch"):
        sampler(2)
    assert sampler(2, shared=True).ids.shape == (2,)
    assert sampler(2, batch=(4, 5)).ids.shape == (4, 5, 2)


def test_sampler_and_batch_on_different_devices() -> None:
    with pytest.raises(ArgumentError, match="on cpu"):
        SAMPLERS["popularity"].make(C, COUNTS)(2, target=torch.zeros(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("entry", SAMPLERS.values(), ids=list(SAMPLERS))
def test_no_rows(entry: SamplerEntry) -> None:
    """Fixed samplers draw nothing for no rows; for the others, whose draws depend on the rows, it is an error."""
    sampler = entry.make(7, torch.ones(7))
    call = {"target": torch.zeros(0, dtype=torch.long), "input": torch.zeros(0, 2), "linear_weight": torch.zeros(7, 2)}
    if isinstance(sampler, FixedSampler):
        assert sampler(3, **call).ids.shape == (0, 3)
    else:
        with pytest.raises(ArgumentError, match="at least one row"):
            sampler(3, **call)


@pytest.mark.parametrize("entry", [entry for entry in SAMPLERS.values() if entry.needs_scores], ids=lambda e: e.name)
def test_targets_in_any_memory_order_and_biases_that_do_not_fit(entry: SamplerEntry) -> None:
    target, call = torch.arange(6).view(2, 3).T, {"input": torch.ones(3, 4), "linear_weight": torch.ones(7, 4)}
    for setting in entry.examples:
        sampler = entry.make(7, None, **setting)
        draws = [
            entry.make(7, None, **setting)(2, target=each, generator=torch.Generator().manual_seed(0), **call)
            for each in (target, target.contiguous())
        ]
        assert torch.equal(draws[0].ids, draws[1].ids)
        with pytest.raises(ArgumentError, match=r"`linear_bias` must be \(7,\)"):
            sampler(2, target=target, linear_bias=torch.zeros(3), **call)
