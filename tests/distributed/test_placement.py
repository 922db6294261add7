"""Heads with what torch itself spreads over ranks: class vectors that are a DTensor, and models under `fully_shard`."""

from __future__ import annotations

import pytest

from tests.distributed import jobs_placement
from tests.distributed.pool import Pool


def test_class_vectors_that_are_a_dtensor(pool: Pool) -> None:
    assert pool.run(2, jobs_placement.class_vectors) == [2, 2]


@pytest.mark.slow
def test_class_vectors_on_three_ranks(pool: Pool) -> None:
    assert pool.run(3, jobs_placement.class_vectors) == [3] * 3


@pytest.mark.parametrize("wraps_head", [False, True])
def test_fully_shard_is_one_machine(pool: Pool, wraps_head: bool) -> None:
    assert pool.run(2, jobs_placement.fully_sharded, wraps_head) == [2, 2]


def test_fully_shard_in_the_wrong_place_is_refused(pool: Pool) -> None:
    assert pool.run(2, jobs_placement.misplaced) == [2, 2]
