"""What every sampler of the table must do; a new row is under test without a word here.

The law of a sampler is `log_probs` where it is exact. Where it depends on a pool of candidates, `POOL_LAWS` has the
slow reference: enumeration of all pools.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.samplers import SAMPLERS, Draw, FixedSampler, Sampler, SamplerEntry

C, DIM, BATCH, NEGATIVES = 6, 3, 3, 2
COUNTS = torch.tensor([5.0, 0.0, 1.0, 8.0, 3.0, 3.0])
FOUR_SIGMA = 6.3e-5  # two-sided
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
    random = torch.Generator().manual_seed(5)
    queries = torch.randn(BATCH, DIM, generator=random, dtype=torch.float64)
    return {
        "input": queries.to(dtype),
        "linear_weight": torch.randn(C, DIM, generator=random, dtype=torch.float64).to(dtype),
    }


def positives(generator: torch.Generator) -> Tensor:
    return COUNTS.multinomial(BATCH, replacement=True, generator=generator)


def call(sampler: Sampler, *, shared: bool = False, seed: int = 0, **changes: Any) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {"target": positives(generator), **vectors(), "shared": shared, "generator": generator}
    arguments.update(changes)
    return sampler(arguments.pop("num_negatives", NEGATIVES), **arguments)


def best_of_pool(scores: np.ndarray, num_negatives: int) -> np.ndarray:
    """Share of each candidate among the kept: (rows or 1, M) -> (rows, M)."""
    kept = np.zeros_like(scores)
    for row, order in zip(kept, np.argsort(-scores, axis=1, kind="stable"), strict=True):
        row[order[:num_negatives]] = 1 / num_negatives
    return kept


def resampled(scores: np.ndarray, num_negatives: int) -> np.ndarray:
    """Probability of each candidate when it is drawn again (uniform candidates: weights exp(s))."""
    weights = np.exp(scores)
    return weights / weights.sum(1, keepdims=True)


def enumerated_law(
    choose: Callable[[np.ndarray, int], np.ndarray], scores: np.ndarray, num_candidates: int, num_negatives: int
) -> np.ndarray:
    """The marginal law over the classes, (rows, C): the mean over all C^M pools of what is chosen from them."""
    law = np.zeros_like(scores)
    pools = list(itertools.product(range(scores.shape[1]), repeat=num_candidates))
    for pool in pools:
        share = choose(scores[:, list(pool)], num_negatives)
        for position, class_id in enumerate(pool):
            law[:, class_id] += share[:, position] / len(pools)
    return law


# How a pool's candidates are chosen, and whether shared draws do it once for the mean score or average the rows' laws.
POOL_LAWS = {"dns": (best_of_pool, "mean score"), "two_pass": (resampled, "mean law")}


def stated_law(entry: SamplerEntry, sampler: Sampler, shared: bool) -> np.ndarray:
    """(rows, C); one row if shared."""
    if entry.exact_log_q:
        log_probs = sampler.log_probs(input=vectors()["input"], shared=shared, dtype=torch.float64)
        return log_probs.exp().expand(1 if shared else BATCH, C).numpy()
    assert entry.name in POOL_LAWS, f"give the law of {entry.name} by enumeration in POOL_LAWS"
    choose, sharing = POOL_LAWS[entry.name]
    scores = (vectors()["input"] @ vectors()["linear_weight"].T).numpy()
    if shared and sharing == "mean score":
        scores = scores.mean(0, keepdims=True)
    law = enumerated_law(choose, scores, sampler.num_candidates, NEGATIVES)  # type: ignore[arg-type]
    return law.mean(0, keepdims=True) if shared else law


def p_value_of_mean(samples: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square test (Hotelling's) that independent rows have the mean `expected`, whatever their covariance.

    Along a direction in which they do not vary, as the sum of all shares, the mean must be met to the last digits.
    """
    variances, directions = np.linalg.eigh(np.cov(samples, rowvar=False))
    gap, varies = (samples.mean(0) - expected) @ directions, variances > 1e-10 * variances[-1]
    assert np.abs(gap[~varies]).max(initial=0) < 1e-10
    num, dof = len(samples), int(varies.sum())
    statistic = num * (gap[varies] ** 2 / variances[varies]).sum()
    return float(stats.f.sf(statistic * (num - dof) / (dof * (num - 1)), dof, num - dof))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), CASES)
def test_drawn_frequencies_follow_the_stated_law(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
    # One call is one observation: the draws of a call may depend on each other (best of a pool, in-batch).
    sampler, generator, calls = make(entry, options), torch.Generator().manual_seed(11), 600
    law = stated_law(entry, sampler, shared)
    arguments = {**vectors(), "shared": shared, "generator": generator}
    ids = torch.stack([sampler(NEGATIVES, target=positives(generator), **arguments).ids for _ in range(calls)])
    drawn = torch.nn.functional.one_hot(ids.view(calls, -1, NEGATIVES), C).double().mean(2).numpy()  # (calls, rows, C)
    possible = law > 0
    assert (drawn[:, ~possible] == 0).all()
    assert p_value_of_mean(drawn[:, possible], law[possible]) > FOUR_SIGMA


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("entry", "options"), FIXED)
def test_many_draws_pass_a_chi_square_test(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
    sampler = make(entry, options)
    generator = torch.Generator().manual_seed(2)
    ids = sampler(200_000 if shared else 20, batch=10_000, shared=shared, generator=generator).ids
    probs = sampler.log_probs(dtype=torch.float64).exp().numpy()
    drawn = ids.reshape(-1).bincount(minlength=C).numpy()
    assert (drawn[probs == 0] == 0).all()
    assert stats.chisquare(drawn[probs > 0], probs[probs > 0] * ids.numel()).pvalue > FOUR_SIGMA


@pytest.mark.parametrize(("entry", "options"), EXACT)
def test_probabilities_sum_to_one(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = make(entry, options)
    for shared in (False, True):
        total = sampler.log_probs(input=vectors()["input"], shared=shared, dtype=torch.float64).exp().sum(-1)
        assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-12)


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
def test_the_seed_decides(entry: SamplerEntry, options: Mapping[str, Any], shared: bool) -> None:
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
def test_casting_the_model_does_not_change_the_law(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
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
                value = value.values()  # as many as its places
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
def test_wrong_arguments_say_which(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
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


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_log_q_of_any_ids_or_a_clear_refusal(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
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
def test_the_table_answers_to_names_and_aliases(name: str) -> None:
    entry = SAMPLERS[name]
    assert all(SAMPLERS[alias] is entry for alias in entry.aliases)
    assert isinstance(entry.make(C, COUNTS, **entry.examples[0]), entry.module)
    if not entry.needs_counts:
        entry.make(C, None)
    assert entry.title
    assert entry.law
    assert entry.citation
    assert f"num_classes={C}" in repr(entry.make(C, COUNTS))


@pytest.mark.parametrize("num_classes", [0, -3])
def test_at_least_one_class(num_classes: int) -> None:
    for entry in SAMPLERS.values():
        if not entry.needs_counts:
            with pytest.raises(ArgumentError, match="num_classes"):
                entry.make(num_classes, None)


@pytest.mark.parametrize(("entry", "options"), CASES)
def test_one_class(entry: SamplerEntry, options: Mapping[str, Any]) -> None:
    sampler = entry.make(1, torch.ones(1), **options)
    draw = call(sampler, target=torch.zeros(BATCH, dtype=torch.int64), linear_weight=vectors()["linear_weight"][:1])
    assert (draw.ids == 0).all()
    if draw.log_q is not None:
        assert torch.allclose(draw.log_q, torch.zeros(()).double(), atol=1e-12)
        assert torch.allclose(draw.log_q_target, torch.zeros(()).double(), atol=1e-12)


def test_rows_must_be_known_unless_shared() -> None:
    sampler = SAMPLERS["uniform"].make(C)
    with pytest.raises(ArgumentError, match="batch"):
        sampler(2)
    assert sampler(2, shared=True).ids.shape == (2,)
    assert sampler(2, batch=(4, 5)).ids.shape == (4, 5, 2)


def test_sampler_and_batch_on_different_devices() -> None:
    with pytest.raises(ArgumentError, match="on cpu"):
        SAMPLERS["popularity"].make(C, COUNTS)(2, target=torch.zeros(3, dtype=torch.int64, device="meta"))


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


@pytest.mark.parametrize("entry", SAMPLERS.values(), ids=list(SAMPLERS))
def test_no_rows(entry: SamplerEntry) -> None:
    """Nothing is drawn for no rows, or it is said that there are none."""
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
