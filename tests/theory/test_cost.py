"""Counts of work against counts by hand and by torch, and properties that predictions have on any machine."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import manymax
from manymax.engine.cost import KEPT, gather, written
from manymax.engine.native_library import resolve
from manymax.engine.options import HeadOptions
from manymax.errors import ArgumentError, ManymaxError, UnknownNameError
from manymax.members import FAMILY
from manymax.ops.selected_scores import table_is_cheaper
from manymax.ops.tree import HuffmanTree
from manymax.theory import cost as module
from manymax.theory.cost import Machine, Shape, Work, cost, measure_machine, predict_seconds

# Seconds per unit of work, in the orders of magnitude of a processor; all different, so that no two can be swapped.
MACHINE = Machine(
    flops=1e-11,
    streamed=5e-10,
    exponentials=1e-9,
    passes=2e-10,
    fresh=2e-9,
    near=4e-10,
    far=1e-9,
    sorted=2e-8,
    calls=4e-6,
)
SHAPE = Shape(batch=256, num_classes=20_000, dim=32, num_negatives=50)


class Products(TorchDispatchMode):
    """Counts the flops of all matrix products, also of those that write into a given tensor."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].rstrip("_")
        if name in ("mm", "addmm", "bmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["softmax", "taylor_softmax"])
@pytest.mark.parametrize("way", ["blocked", "plain"])
def test_flops_of_the_dense_members_are_those_that_torch_counts(name: str, way: str) -> None:
    shape = Shape(batch=48, num_classes=160, dim=16)
    queries, vectors = torch.randn(48, 16, requires_grad=True), torch.randn(160, 16, requires_grad=True)
    target = torch.randint(160, (48,))
    with Products() as counter:
        if way == "plain":
            FAMILY[name].loss(queries @ vectors.T, target).backward()
        else:
            # torch counts its own products alone; those of native code have as many operations
            getattr(manymax, f"linear_{name}_loss")(queries, vectors, target, options={"backend": "torch"}).backward()
    assert cost(name, shape, way).flops == counter.flops


def test_flops_of_shared_negatives_are_those_that_torch_counts() -> None:
    shape = Shape(batch=48, num_classes=160, dim=16, num_negatives=20, shared=True)
    queries, vectors = torch.randn(48, 16, requires_grad=True), torch.randn(160, 16, requires_grad=True)
    sampler = manymax.samplers.UniformSampler(160)
    with Products() as counter:
        loss = manymax.linear_sampled_softmax_loss(
            queries, vectors, torch.randint(160, (48,)), sampler, 20, shared=True
        )
        loss.backward()
    positives = 6 * 48 * 16  # one inner product per positive, and two weighted sums for the gradients
    assert cost("ssm", shape).flops == counter.flops + positives


def test_shared_negatives_are_held_block_by_block() -> None:
    shape = Shape(batch=20_000, num_classes=10**6, dim=16, num_negatives=10_000, shared=True, sparse_grad=True)
    vectors = 16 * (20_000 + 10_000)
    # One table of 2^23 scores where the kernel has a closed form, a dozen of 2^20 where autograd has the graph.
    assert cost("ssm", shape).memory == 4 * ((1 << 23) + vectors + shape.queries)
    assert cost("nce", shape).memory == 4 * (12 * (1 << 20) + vectors + shape.queries)
    assert cost("nce", shape, "plain").memory > 4 * 12 * shape.pairs * shape.num_negatives


@pytest.mark.parametrize(("way", "most"), [("torch", 20_000 / 16), ("native", 20_000 / 6)])
def test_with_a_small_support_only_the_scores_need_a_full_product(way: str, most: float) -> None:
    table = 256 * 20_000
    for name in ("entmax", "sparsemax", "rankmax"):
        few, dense = (cost(name, replace(SHAPE, support=support), way) for support in (most, most + 1))
        assert few.flops == (2 * table + 4 * 256 * (most + 1)) * 32
        assert dense.flops == 6 * table * 32
        assert cost(name, replace(SHAPE, support=3.0), "plain").flops == 6 * table * 32
    seconds = [predict_seconds(name, replace(SHAPE, support=3.0), MACHINE, way) for name in ("entmax", "softmax")]
    assert seconds[0] < seconds[1]


def test_the_machine_says_which_back_end_is_predicted() -> None:
    shape = replace(SHAPE, support=800.0)
    with_native = replace(MACHINE, native=True)
    for name, member in FAMILY.items():
        here, torch_only = (predict_seconds(name, shape, machine) for machine in (with_native, MACHINE))
        assert here == predict_seconds(name, shape, MACHINE, "native")
        assert torch_only == predict_seconds(name, shape, MACHINE, "torch")
        # The native back end is there to be faster; a member without a kernel there costs the same.
        assert here < torch_only if member.native else here == torch_only
    assert cost("entmax", shape) == cost("entmax", shape, "torch" if resolve("auto") is None else "native")


@pytest.mark.parametrize("way", ["native", "torch"])
def test_a_general_power_costs_more_than_a_product(way: str) -> None:
    shape = replace(SHAPE, support=9000.0)
    general, square, default = (
        predict_seconds("entmax", shape, MACHINE, way, **alpha) for alpha in ({"alpha": 1.3}, {"alpha": 1.5}, {})
    )
    assert general > 1.1 * square
    assert square == default == predict_seconds("sparsemax", shape, MACHINE, way)
    assert predict_seconds("entmax", shape, MACHINE, way, alpha=1.0) == predict_seconds("softmax", shape, MACHINE, way)
    with pytest.raises(ManymaxError, match="softmax has no setting `alpha`"):
        cost("softmax", shape, way, alpha=1.5)


def test_a_dense_gradient_of_a_sampled_step_has_a_row_for_every_class() -> None:
    shape = replace(SHAPE, num_classes=10**6)
    for name in ("ssm", "nce", "hsm"):
        dense, sparse = cost(name, shape), cost(name, replace(shape, sparse_grad=True))
        # 10^6 x 32 numbers are 128 MB: no allocator keeps so much for the next step.
        assert dense.work.fresh - sparse.work.fresh == shape.vectors
        assert dense.memory > sparse.memory + 3 * shape.vectors
        assert dense.flops == sparse.flops


def test_table_4_of_the_paper_with_its_missing_factors() -> None:
    n, c, d, k = SHAPE.batch, SHAPE.num_classes, SHAPE.dim, SHAPE.num_negatives
    length = HuffmanTree(torch.ones(c)).mean_length()
    assert cost("softmax", SHAPE).flops == 6 * n * c * d
    assert cost("nce", SHAPE).flops == cost("ssm", SHAPE).flops == 6 * n * (k + 1) * d
    assert cost("hsm", SHAPE).flops == pytest.approx(6 * n * length * d)
    assert cost("rg", SHAPE).flops == (4 * c + 6 * n) * d**2
    assert cost("ssm", replace(SHAPE, positives=2.5)).flops == pytest.approx(2.5 * 6 * n * (k + 1) * d)
    assert cost("ssm", replace(SHAPE, num_candidates=200)).flops == 6 * n * (k + 1) * d + 2 * n * 200 * d


def test_rankmax_goes_over_its_scores_once_for_each_positive() -> None:
    shapes = [replace(SHAPE, positives=positives) for positives in (0.5, 1.0, 3.0)]
    native = [cost("rankmax", shape, "native").work.passes for shape in shapes]
    assert native[0] == native[1] == native[2] / 3 > 0
    in_torch = [cost("rankmax", shape, "torch").work.streamed - SHAPE.vectors / 2 for shape in shapes]
    block = HeadOptions().rows(SHAPE.num_classes) * SHAPE.num_classes  # written once: half a pass
    in_torch = [streamed - min(block, SHAPE.table) / 2 for streamed in in_torch]
    assert in_torch[0] == in_torch[1] == in_torch[2] / 3 > 0
    assert cost("softmax", shapes[2]).work == cost("softmax", SHAPE).work


def test_parameters_touched() -> None:
    n, c, d, k = SHAPE.batch, SHAPE.num_classes, SHAPE.dim, SHAPE.num_negatives
    assert cost("softmax", SHAPE).parameters == cost("rg", SHAPE).parameters == c * d
    assert cost("ssm", SHAPE).parameters == n * (k + 1) * d
    assert cost("ssm", replace(SHAPE, num_negatives=c)).parameters == c * d  # at most all class vectors
    assert cost("ssm", replace(SHAPE, shared=True)).parameters == (n + k) * d
    assert cost("ssm", replace(SHAPE, num_candidates=60)).parameters == n * (60 + 1) * d
    assert cost("ssm", replace(SHAPE, num_candidates=60, shared=True)).parameters == (n + 60) * d


def test_blocks_keep_memory_below_full_tables() -> None:
    shape = Shape(batch=4096, num_classes=50_000, dim=64)
    block = HeadOptions().rows(50_000) * 50_000
    gradients = 64 * (50_000 + 4096)
    assert cost("softmax", shape, "native").memory == cost("softmax", shape, "torch").memory == 4 * (block + gradients)
    assert cost("softmax", shape, "plain").memory == 4 * (2.5 * 4096 * 50_000 + gradients)
    for name in FAMILY:
        assert cost(name, shape).memory <= cost(name, shape, "plain").memory


def gathers_by_table(shape: Shape) -> tuple[bool, ...]:
    """Whether a sampled step takes the scores of its draws, and those of its candidates, from a table of all scores."""
    counts = (shape.pairs * (shape.num_negatives + 1), shape.pairs * shape.num_candidates)
    return tuple(table_is_cheaper(shape.batch, shape.num_classes, int(count)) for count in counts)


@pytest.mark.parametrize("name", list(FAMILY))
@pytest.mark.parametrize("way", module.WAYS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_larger_size_never_costs_less(name: str, way: str, data: st.DataObject) -> None:
    sizes = {
        "batch": data.draw(st.integers(1, 5000)),
        "num_classes": data.draw(st.integers(1, 10**7)),
        "dim": data.draw(st.integers(1, 512)),
        "num_negatives": data.draw(st.integers(1, 5000)),
        "positives": data.draw(st.floats(0, 50)),
        "num_candidates": data.draw(st.integers(0, 1000)),
    }
    shape = Shape(**sizes, shared=data.draw(st.booleans()), support=data.draw(st.none() | st.floats(1, 100)))
    larger = data.draw(st.sampled_from(sorted(sizes)))
    if larger == "num_classes" and FAMILY[name].sparse:
        larger = "dim"  # more classes may make the support relatively small, and another way of computing cheaper
    more = replace(shape, **{larger: 2 * sizes[larger] + 1})
    now, then = cost(name, shape, way), cost(name, more, way)
    # A step that gathers more single scores may switch to the table of all scores, and back: other work altogether.
    same_way = gathers_by_table(shape) == gathers_by_table(more)
    for figure in ("flops", "bytes", "parameters") if same_way else ("parameters",):
        assert 0 <= getattr(now, figure) <= getattr(then, figure) * (1 + 1e-9)
    seconds = [predict_seconds(name, sizes, MACHINE, way) for sizes in (shape, more)]
    assert 0 < seconds[0] <= seconds[1] * (1 + 1e-9) or not same_way
    assert now.memory > 0


def test_seconds_are_counts_times_seconds_for_one() -> None:
    work = Work(*range(1, 10))
    for position, f in enumerate(fields(Work)):
        assert work.seconds(Machine(**{f.name: 2.0})) == 2.0 * (position + 1)
    assert (work + 2 * work).seconds(MACHINE) == pytest.approx(3 * work.seconds(MACHINE))


def test_gathers_from_a_larger_table_take_longer() -> None:
    gathered = [gather(rows, 64, 10.0) for rows in (10, 1 << 12, 1 << 15, 1 << 19, 1 << 25)]
    assert [work.near + work.far for work in gathered] == pytest.approx([640.0] * 5)
    far = [work.far for work in gathered]
    assert far[:2] == [0, 0]
    assert 0 < far[2] < 640
    assert far[3:] == [640, 640]


def test_large_tensors_get_fresh_memory() -> None:
    small, large = written(KEPT / 4 - 1), written(KEPT / 4, tensors=2)
    assert (small.fresh, small.streamed) == (0, (KEPT / 4 - 1) / 2)
    assert (large.fresh, large.streamed) == (KEPT / 2, 0)


def test_measured_seconds_are_positive() -> None:
    machine = measure_machine(0.01, dim=8)
    assert all(getattr(machine, f.name) > 0 for f in fields(Work))
    assert machine.native == (resolve("auto") is not None)


def test_a_machine_whose_cores_are_taken_is_measured_on_one_thread() -> None:
    hours = itertools.count(step=3600)  # on this clock, that of several threads, every probe takes an hour
    threads = torch.get_num_threads()
    busy = measure_machine(0.01, dim=8, clock=lambda: float(next(hours)))
    assert all(0 < getattr(busy, f.name) < 1e-3 for f in fields(Work))
    assert torch.get_num_threads() == threads
    nothing = measure_machine(0.01, dim=8, clock=lambda: 0.0)  # on this one several threads take no time
    assert {getattr(nothing, f.name) for f in fields(Work)} == {0.0}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 0}, r"`batch` must be an integer of at least 1; got 0"),
        ({"num_classes": -5}, "`num_classes` must be an integer of at least 1; got -5"),
        ({"dim": 2.5}, "`dim` must be an integer; got 2.5"),
        ({"num_negatives": True}, r"`num_negatives` must be an integer; got True \(bool\)"),
        ({"num_candidates": -1}, "`num_candidates` must be an integer of at least 0; got -1"),
        ({"positives": -1.0}, "`positives` must be a finite number of at least 0; got -1.0"),
        ({"support": float("nan")}, "`support` must be a number; got nan"),
        ({"path": float("inf")}, "`path` must be a finite number of at least 0; got inf"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ManymaxError, match=message):
        Shape(**({"batch": 1, "num_classes": 1, "dim": 1} | sizes))


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"`way` must be one of 'blocked', 'native', 'torch', 'plain'; got 'plan'. Did you mean"
    ):
        cost("softmax", SHAPE, "plan")
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        cost("softmx", SHAPE)
    with pytest.raises(ArgumentError, match=r"`machine.flops` must be seconds, at least 0; got -1"):
        Machine(flops=-1)
    with pytest.raises(ArgumentError, match=r"`machine.native` must be true or false; got 1"):
        Machine(native=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="`seconds` must be a finite number above 0; got 0"):
        measure_machine(0)
