"""Seeds: one number per purpose and step, the same on every machine and in every version."""

from __future__ import annotations

import torch

from manymax.study.seeds import derive, generator


def test_derived_seeds_do_not_change() -> None:
    """A run that is continued by a later version must draw what the earlier one would have drawn."""
    assert derive(0, "shuffle") == 2995637889862494312
    assert derive(7, "negatives", 12) == 4173702197684263744


def test_seeds_differ_in_each_argument() -> None:
    names = ("split", "init", "shuffle", "negatives", "dropout")
    found = {derive(seed, name, step) for seed in range(20) for name in names for step in range(50)}
    assert len(found) == 20 * len(names) * 50
    assert all(0 <= value < 2**63 for value in found)
    assert derive(1, "a", 23) != derive(12, "a", 3)
    assert len({value % 2**32 for value in found}) == len(found)  # torch's generator uses only these bits


def test_generators_are_fresh_and_leave_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    first = torch.rand(5, generator=generator(3, "init"))
    assert torch.equal(first, torch.rand(5, generator=generator(3, "init", step=0)))
    assert not torch.equal(first, torch.rand(5, generator=generator(3, "init", step=1)))
    assert torch.equal(before, torch.get_rng_state())
