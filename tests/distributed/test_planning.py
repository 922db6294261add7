"""What a plan predicts against what sharded heads send, and against itself."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from manymax.distributed import Network, measure_network, plan, traffic
from manymax.distributed.collectives import ProcessRanks
from manymax.errors import ArgumentError, ManymaxError
from manymax.members import FAMILY
from manymax.theory.cost import Machine, Shape, cost
from tests.distributed import jobs_messages
from tests.distributed.pool import Pool

SHAPE = Shape(batch=512, num_classes=10**6, dim=64, support=50, positives=2)
MACHINE = Machine(flops=1e-11, exponentials=1e-9, fresh=2e-9, near=4e-10, far=1e-9, sorted=2e-8, calls=1e-6)
NETWORK = Network(latency=5e-5, bandwidth=1e9)
HEADS = {
    "softmax": "Softmax",
    "taylor_softmax": "TaylorSoftmax",
    "rankmax": "Rankmax",
    "psl": "Psl",
    "rg": "RG",
    "sampled_softmax": "SampledSoftmax",
    "nce": "NCE",
    "sparsemax": "Sparsemax",
    "entmax": "Entmax",
}


# What these exchange grows with the ranks: each sends the K best of its classes.
LISTS = {"sl_at_k": "SlAtK", "talos": "Talos"}


@pytest.mark.parametrize("member", [*HEADS, *LISTS])
def test_as_many_sums_and_bytes_as_predicted(pool: Pool, member: str) -> None:
    """Exact, but for threshold searches: they need between half and twice the 8 steps that are predicted."""
    for batch, num_classes, positives in ((40, 300, 1), (70, 3000, 3)):
        shape = Shape(batch=batch, num_classes=num_classes, dim=6, positives=positives)
        expected = traffic(member, shape, 2)
        for sums, size in pool.run(
            2, jobs_messages.step_traffic, {**HEADS, **LISTS}[member], batch, num_classes, positives
        ):
            if member in ("sparsemax", "entmax"):
                assert 0.5 <= sums / expected.sums <= 2
                assert 0.5 <= size / expected.bytes <= 2
            else:
                assert (sums, size) == (expected.sums, expected.bytes)


def test_there_is_a_prediction_for_every_member_with_a_head() -> None:
    for name, member in FAMILY.items():
        row = plan(name, SHAPE, 8, MACHINE, NETWORK)
        assert row.sharded == (member.unsharded is None)
        assert (row.sent > 0) == row.sharded
        assert 0 < row.computing < math.inf
        assert row.memory > 0


@pytest.mark.parametrize("member", HEADS)
@pytest.mark.parametrize("machine", [MACHINE, replace(MACHINE, native=True)], ids=["torch", "native"])
def test_more_ranks(member: str, machine: Machine) -> None:
    """With more ranks each has less to hold and to compute, and sends a little more."""
    rows = [plan(member, SHAPE, ranks, machine, NETWORK) for ranks in (1, 2, 8, 64)]
    assert rows[0].sent == rows[0].exchanging == 0
    alone = cost(member, SHAPE, "native" if machine.native else "torch")
    assert rows[0].computing == alone.work.seconds(machine)
    assert rows[0].memory == 3 * 4 * SHAPE.vectors + alone.memory
    for fewer, more in itertools.pairwise(rows[1:]):
        assert more.memory < fewer.memory
        assert more.computing <= fewer.computing
        assert fewer.sent < more.sent < 2 * fewer.sent
        assert more.exchanging > fewer.exchanging
    assert plan(member, SHAPE, 4, machine, NETWORK, optimizer_states=0).memory == pytest.approx(
        plan(member, SHAPE, 4, machine, NETWORK).memory - 2 * SHAPE.vectors
    )


def test_a_support_is_split_too() -> None:
    sorting = Machine(sorted=1.0)  # entries of a sparse gradient are sorted, and nothing else takes time
    alone, together = (plan("entmax", SHAPE, ranks, sorting, NETWORK).computing for ranks in (1, 8))
    assert together == pytest.approx(alone / 8)


def test_a_ring_by_hand() -> None:
    """4 ranks, softmax, 1000 rows of 10 numbers in one block: 4 sums of 24, 40,000, 8,000 and 16,000 bytes."""
    found = traffic("softmax", Shape(batch=1000, num_classes=4000, dim=10), 4)
    assert (found.sums, found.bytes) == (4, 24 + 40_000 + 8_000 + 16_000)
    assert found.sent(4) == 1.5 * 64_024
    assert Network(1e-3, 1e6).seconds(found, 4) == pytest.approx(4 * 6 * 1e-3 + 0.096036)
    more_blocks = traffic("softmax", Shape(batch=1000, num_classes=4_000_000, dim=10), 4)
    assert (more_blocks.sums, more_blocks.bytes) == (2 + 2 * 16, found.bytes)


def test_a_measured_network(pool: Pool) -> None:
    first, second = pool.run(2, jobs_messages.network)
    assert first == second
    assert 0 < first.latency < 1
    assert 1e5 < first.bandwidth < 1e13


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="`ranks` must be at least 2 to measure what is between them; got 1"):
        measure_network(ProcessRanks())
    with pytest.raises(ArgumentError, match="`latency` must be seconds, at least 0; got -1"):
        Network(-1, 1e9)
    with pytest.raises(ArgumentError, match="`bandwidth` must be a number; got nan"):
        Network(0.0, math.nan)
    for ranks in (0, True, 2.0, 10**6 + 1):
        with pytest.raises(ManymaxError, match="`ranks` must be an integer"):
            plan("softmax", SHAPE, ranks, MACHINE, NETWORK)  # type: ignore[arg-type]
    with pytest.raises(ManymaxError, match="did you mean 'softmax'"):
        plan("softmacks", SHAPE, 2, MACHINE, NETWORK)
