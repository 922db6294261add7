"""What every sampler of the table must do: shapes, dtypes, log q, randomness, state and memory.

A new row of `SAMPLERS` is tested without a change here.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.samplers import SAMPLERS, Draw, Sampler, SamplerEntry
from tests.samplers.sampler_cases import BATCH, CASES, COUNTS, EXACT, NEGATIVES, C, call, make, positives, vectors


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), EXACT)
def test_a_draw_states_the_log_q_of_its_ids_and_of_the_target(
    entry: SamplerEntry, options: Mapping[str, Any], shared: bool
) -> None:
    sampler, queries = make(entry, options), vectors()["input"]
    target = torch.tensor([[3, 0], [4, 4], [2, 5]])
    for positive in (target, target[:, 0]):
        draw = call(sampler, shared=shared, target=positive)
        assert torch.allclose(draw.log_q, sampler.log_q(draw.ids, input=queries, shared=shared, dtype=torch.float64))
        flat = positive.reshape(-1) if shared else positive.reshape(BATCH, -1)
        expected = sampler.log_q(flat, input=queries, shared=shared, dtype=torch.float64)
        assert torch.allclose(draw.log_q_target, expected.view(positive.shape))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), CASES)
def test_shapes_and_dtypes(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
    sampler = make(entry, options)
    shape = (NEGATIVES,) if shared else (BATCH, NEGATIVES)
    for dtype, log_dtype in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        draw = call(sampler, shared=shared, **vectors(dtype))
        assert draw.ids.shape == shape
        assert draw.ids.dtype == torch.int64
        assert draw.shared == shared
        assert draw.note
        assert (draw.log_q is not None) == (draw.log_q_target is not None) == entry.knows_log_q
        if entry.knows_log_q:
            assert draw.log_q.shape == shape
            assert draw.log_q_target.shape == (BATCH,)
            assert draw.log_q.dtype == draw.log_q_target.dtype == log_dtype


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_int32_targets_and_no_target(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = make(entry, options)
    wide, narrow = call(sampler), call(sampler, target=call_target().int())
    assert torch.equal(wide.ids, narrow.ids)
    assert narrow.ids.dtype == torch.int64
    if entry.exact_log_q:
        queries = vectors()["input"]
        expected = sampler.log_q(wide.ids, input=queries)
        assert torch.equal(sampler.log_q(wide.ids.int(), input=queries), expected)
    if not entry.needs_target:
        assert call(sampler, target=None).log_q_target is None


def call_target() -> Tensor:
    return positives(torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), CASES)
def test_draws_depend_on_the_seed_of_the_generator(
    entry: SamplerEntry, options: Mapping[str, Any], shared: bool
) -> None:
    sampler = make(entry, options)
    target = torch.arange(BATCH).mul(2)
    draws = [
        torch.stack([call(sampler, shared=shared, seed=seed + i, target=target).ids for i in range(30)])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_state_dict_round_trip(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler, other = make(entry, options), entry.make(C, torch.ones(C), **options)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    same_draws(sampler, other)
    same_draws(sampler, copy.deepcopy(sampler))


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_casting_the_model_does_not_change_the_distribution(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    cast = torch.nn.ModuleList([make(entry, options)]).half()[0]
    same_draws(make(entry, options), cast)
    assert {name: b.dtype for name, b in cast.named_buffers()} == {
        name: b.dtype for name, b in make(entry, options).named_buffers()
    }


def same_draws(sampler: Sampler, other: Sampler) -> None:
    for seed in range(20):
        first, second = call(sampler, seed=seed), call(other, seed=seed)
        assert torch.equal(first.ids, second.ids)
        if first.log_q is not None:
            assert torch.equal(first.log_q, second.log_q)
            assert torch.equal(first.log_q_target, second.log_q_target)


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_draws_carry_no_gradient(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    with_gradient = {name: value.requires_grad_() for name, value in vectors().items()}
    draw = call(make(entry, options), **with_gradient)
    assert draw.log_q is None or not (draw.log_q.requires_grad or draw.log_q_target.requires_grad)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
                value = value.values()  # a sparse matrix holds as many numbers as it has places
            if isinstance(value, Tensor) and value.untyped_storage().size():
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), CASES)
def test_no_table_of_rows_by_classes(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
    num_classes, rows, dim = 20_000, 64, 4  # views of the class vectors themselves are allowed
    sampler = entry.make(num_classes, torch.ones(num_classes), **options)
    weight, queries = torch.randn(num_classes, dim), torch.randn(rows, dim)
    sampler.refresh(weight)
    with LargestTensor() as largest:
        sampler(NEGATIVES, target=torch.arange(rows), input=queries, linear_weight=weight, shared=shared)
    assert 0 < largest.elements <= weight.numel() < rows * num_classes / 10


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_log_q_of_any_ids_or_an_error_that_says_why_not(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler, queries = make(entry, options), vectors()["input"]
    if not entry.exact_log_q:
        with pytest.raises(ManymaxError, match="no log q"):
            sampler.log_q(torch.arange(C), input=queries)
        return
    assert sampler.log_q(torch.arange(C), input=queries).dtype == torch.get_default_dtype()
    with pytest.raises(ArgumentError, match="ids"):
        sampler.log_q(torch.tensor([C]), input=queries)
    with pytest.raises(ArgumentTypeError, match="ids"):
        sampler.log_q(torch.tensor([0.0]), input=queries)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_table_finds_names_and_aliases(name: str) -> None:
    entry = SAMPLERS[name]
    assert all(SAMPLERS[alias] is entry for alias in entry.aliases)
    assert isinstance(entry.make(C, COUNTS, **entry.examples[0]), entry.module)
    if not entry.needs_counts:
        entry.make(C, None)
    assert entry.title
    assert entry.law
    assert entry.citation
    assert f"num_classes={C}" in repr(entry.make(C, COUNTS))


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_one_class(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = entry.make(1, torch.ones(1), **options)
    draw = call(sampler, target=torch.zeros(BATCH, dtype=torch.int64), linear_weight=vectors()["linear_weight"][:1])
    assert (draw.ids == 0).all()
    if draw.log_q is not None:
        assert torch.allclose(draw.log_q, torch.zeros(()).double(), atol=1e-12)
        assert torch.allclose(draw.log_q_target, torch.zeros(()).double(), atol=1e-12)


def test_hits_and_copies() -> None:
    draw = Draw(torch.tensor([[0, 1], [2, 2]]), None, None, "")
    assert draw.hits(torch.tensor([1, 2])).tolist() == [[False, True], [True, True]]
    assert draw.hits(torch.tensor([[1, 0], [3, 2]])).tolist() == [
        [[False, True], [True, False]],
        [[False, False], [True, True]],
    ]
    shared = Draw(torch.tensor([0, 1, 0]), None, None, "", source_row=torch.tensor([1, 0, 0]))
    assert shared.hits(torch.tensor([0, 5])).tolist() == [[True, False, True], [False, False, False]]
    assert shared.hits(torch.tensor([[0, 1]])).tolist() == [[[True, False, True], [False, True, False]]]
    assert shared.copies(2).tolist() == [[False, True, True], [True, False, False]]
    assert draw.copies(2) is None
