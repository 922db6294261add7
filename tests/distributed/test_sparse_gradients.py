"""Row-sparse gradients averaged over ranks beside DistributedDataParallel, against one process with the whole batch."""

from __future__ import annotations

import pytest

from tests.distributed import jobs_sparse
from tests.distributed.pool import Pool


@pytest.mark.parametrize("name", jobs_sparse.HEADS)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_they_are_those_of_one_process_and_only_touched_rows_travel(pool: Pool, name: str, ranks: int) -> None:
    sent = pool.run(ranks, jobs_sparse.averages, name, 500)
    (vectors, bias), *_ = pool.run(ranks, jobs_sparse.touched, name, 500)
    # What each rank has for two parameters, the ids of its rows, and the rows: vectors and single numbers.
    assert sent == [[4, vectors + bias, jobs_sparse.DIM * vectors + bias]] * ranks
    assert sum(sent[0]) < 500 * jobs_sparse.DIM / 4


@pytest.mark.parametrize("name", jobs_sparse.HEADS)
def test_wide_gradients_travel_as_tables(pool: Pool, name: str) -> None:
    """Of 8 classes most are touched on each rank: a sum of the tables, and one of marks of touched rows."""
    size = 7 if name == "tree" else 8
    sent = pool.run(2, jobs_sparse.averages, name, 8)
    assert sent == [[4, *(size * jobs_sparse.DIM, size), *(size, size)]] * 2


@pytest.mark.parametrize("name", jobs_sparse.HEADS)
def test_steps_are_those_of_one_process(pool: Pool, name: str) -> None:
    pool.run(2, jobs_sparse.training, name)


@pytest.mark.parametrize("name", ["sparsemax", "sampled"])
def test_ranks_without_rows_take_part(pool: Pool, name: str) -> None:
    pool.run(2, jobs_sparse.ranks_without_rows, name)


def test_a_shared_parameter_may_have_a_dense_gradient(pool: Pool) -> None:
    pool.run(2, jobs_sparse.tied)


def test_a_fault_of_one_rank_is_heard_by_all(pool: Pool) -> None:
    pool.run(2, jobs_sparse.refusals)


def test_half_precision_is_rounded_once(pool: Pool) -> None:
    pool.run(3, jobs_sparse.half_precision)
