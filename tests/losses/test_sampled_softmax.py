"""Sampled softmax: values and gradients in 50 digits, masks, shapes, dtypes and function transforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import SampledSoftmaxLoss, sampled_softmax_loss, softmax_loss
from tests.losses.sampled_softmax_cases import (
    DEBIASED,
    IDS,
    TARGET,
    VARIANTS,
    Q,
    each_derived,
    each_variant,
    hessian,
    loss_of_classes,
)

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types


# --- values and gradients, against the definitions in 50 digits ---


def high_precision_loss(
    scores: list[Number],
    target: int,
    ids: list[int],
    log_q: list[float],
    variant: tuple[str, str, str | None],
    held: list[Number] | None = None,
) -> Number:
    """The loss by its definition; k counts all draws, masked ones included. Weights are those of the scores `held`."""
    correction, policy, debias = variant
    k = len(ids)
    if correction == "corrected_logq":
        misses = [j for j in ids if j != target]
        if not misses:
            return mp.mpf(0)

        def sum_of_others(s: list[Number]) -> Number:
            q = [mp.exp(value) for value in log_q]
            return mp.fsum(mp.exp(s[j]) / q[j] for j in misses) * (1 - q[target]) / len(misses)

        base = scores if held is None else held
        weight = sum_of_others(base) / (mp.exp(base[target]) + sum_of_others(base))
        return weight * (mp.log(sum_of_others(scores)) - scores[target])
    first = mp.exp(scores[target])
    if correction == "logq":
        first /= mp.exp(log_q[target])
    terms = []
    for j in ids:
        term = mp.exp(scores[j])
        if correction != "none":
            term /= mp.exp(log_q[j])
        terms.append(0 if policy == "mask" and j == target else term)
    total = mp.log(first + mp.fsum(terms) / (k if correction == "partition" else 1))
    if debias == "delta":
        mean = mp.fsum(terms) / k
        variance = mp.fsum((term - mean) ** 2 for term in terms) / (k - 1)
        total += variance / (2 * k * (first + mean) ** 2)
    if debias == "jackknife":
        without = [mp.log(first + mp.fsum(terms[:j] + terms[j + 1 :]) / (k - 1)) for j in range(k)]
        total = k * total - (k - 1) * mp.fsum(without) / k
    return total - mp.log(first)


def high_precision_gradient(scores: list[Number], *draws: Any) -> list[Number]:
    """The gradient of `high_precision_loss` in the scores, by numerical differentiation."""

    def along(i: int) -> Number:
        return mp.diff(lambda x: high_precision_loss([*scores[:i], x, *scores[i + 1 :]], *draws, scores), scores[i])

    return [along(i) for i in range(len(scores))]


SCORES = torch.tensor([[0.3, -1.2, 2.5, 0.0, -0.7], [4.0, 1.0, -3.0, 2.0, 0.1], [-2.0, 0.5, 1.0, 3.0, -1.0], [0.1] * 5])


@each_variant
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_value_and_gradient_in_50_digits(
    correction: str, policy: str, debias: str | None, dtype: torch.dtype, tolerance: float, scale: float
) -> None:
    variant = (correction, policy, debias)
    scores, log_q = (scale * SCORES).to(dtype).requires_grad_(), Q.log().to(dtype)
    loss = loss_of_classes(scores, TARGET, IDS, log_q, variant)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    for row in range(len(TARGET)):
        arguments = scores[row].tolist(), int(TARGET[row]), IDS[row].tolist(), log_q.tolist(), variant
        expected = high_precision_loss(*arguments)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(gradient[row].tolist(), high_precision_gradient(*arguments), strict=True):
            assert abs(entry - slope) <= tolerance


@each_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_of_ten_thousand(correction: str, policy: str, debias: str | None, dtype: torch.dtype) -> None:
    variant = (correction, policy, debias)
    rows = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], repeat=3)), dtype=dtype)
    scores = torch.cat([rows, rows[:, :2].flip(-1)], -1).requires_grad_()  # (27, 5)
    target, ids = torch.zeros(27, dtype=torch.long), torch.tensor([1, 2, 3, 2, 0]).expand(27, 5)
    loss = loss_of_classes(scores, target, ids, Q.log().to(dtype), variant)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.isfinite().all()
    for row, value in enumerate(loss.tolist()):
        expected = high_precision_loss(scores[row].tolist(), 0, ids[row].tolist(), Q.log().tolist(), variant)
        assert abs(value - expected) <= (1e-10 if dtype == torch.float64 else 1e-5) * max(1, abs(expected))


@each_variant
def test_an_offset_of_the_scores_costs_no_digits(correction: str, policy: str, debias: str | None) -> None:
    exact = (SCORES * 64).round() / 64  # so that the shifted scores are float32 numbers too
    arguments = TARGET, IDS, Q.log().float(), (correction, policy, debias)
    at_zero, shifted = (loss_of_classes(scores.float(), *arguments) for scores in (exact, exact + 1000))
    torch.testing.assert_close(shifted, at_zero, rtol=0, atol=1e-6)


def test_the_paper_s_loss_by_hand() -> None:
    positive, negative = torch.tensor(1.0), torch.tensor([1.0, 1.0])
    common = {"log_q_positive": math.log(0.5), "log_q_negative": math.log(0.25), "hit_policy": "keep"}
    expected = {"none": math.log(3), "logq": math.log(1 + 2 * 2), "partition": math.log(1 + 4)}
    for correction, value in expected.items():
        assert sampled_softmax_loss(positive, negative, correction=correction, **common).item() == pytest.approx(value)


def test_under_a_uniform_proposal_the_correction_cancels(seed: int) -> None:
    positive, negative = torch.randn(5), torch.randn(5, 3)
    corrected = sampled_softmax_loss(positive, negative, log_q_positive=-7.0, log_q_negative=-7.0)
    torch.testing.assert_close(corrected, sampled_softmax_loss(positive, negative, correction="none"))


# --- masks ---


@each_variant
def test_nothing_left_but_the_positive(correction: str, policy: str, debias: str | None, seed: int) -> None:
    positive, negative = torch.randn(2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    masks = {"hits": torch.ones(2, 3, dtype=torch.bool)}
    scores = negative
    if policy == "keep":  # then by -inf
        scores = negative + torch.tensor(-math.inf)
    loss = sampled_softmax_loss(
        positive,
        scores,
        log_q_positive=-1.0,
        log_q_negative=-2.0,
        correction=correction,
        hit_policy=policy,
        debias=debias,
        **masks,
    )
    gradients = torch.autograd.grad(loss, (positive, negative))
    assert loss.item() == 0
    assert all((gradient.abs() <= 1e-15).all() for gradient in gradients)


@each_derived
def test_a_negative_at_minus_infinity_is_a_masked_hit(
    correction: str, policy: str, debias: str | None, seed: int
) -> None:
    positive, negative = torch.randn(4).double(), torch.randn(4, 5).double()
    masked = torch.rand(4, 5) < 0.4
    options: dict[str, Any] = {
        "log_q_positive": -1.0,
        "log_q_negative": -2.0,
        "correction": correction,
        "debias": debias,
    }
    by_score = negative.masked_fill(masked, -math.inf).requires_grad_()
    loss = sampled_softmax_loss(positive, by_score, hit_policy=policy, hits=torch.zeros_like(masked), **options)
    by_hits = negative.clone().requires_grad_()
    other = sampled_softmax_loss(positive, by_hits, hit_policy="mask", hits=masked, **options)
    torch.testing.assert_close(loss, other)
    for gradient in torch.autograd.grad(loss, by_score) + torch.autograd.grad(other, by_hits):
        assert (gradient[masked] == 0).all()
        assert gradient.isfinite().all()


def test_hit_policy_defaults() -> None:
    positive, negative, hits = torch.tensor([0.5]), torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    for correction, policy in (("none", "keep"), ("logq", "keep"), ("partition", "mask")):
        options: dict[str, Any] = {
            "log_q_positive": -1.0,
            "log_q_negative": -2.0,
            "hits": hits,
            "correction": correction,
        }
        default = sampled_softmax_loss(positive, negative, **options)
        other = {"keep": "mask", "mask": "keep"}[policy]
        assert default == sampled_softmax_loss(positive, negative, hit_policy=policy, **options)
        assert default != sampled_softmax_loss(positive, negative, hit_policy=other, **options)


def test_partition_divides_by_all_draws_masked_ones_included() -> None:
    positive, negative, hits = torch.tensor(0.0), torch.tensor([0.0, 5.0]), torch.tensor([False, True])
    loss = sampled_softmax_loss(positive, negative, log_q_negative=0.0, hits=hits, correction="partition")
    assert loss.item() == pytest.approx(math.log(1 + 1 / 2))


# --- shapes, dtypes, transforms ---


@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    num_negatives=st.integers(2, 4),
    variant=st.sampled_from(VARIANTS),
    shared=st.booleans(),
    scalar_q=st.booleans(),
)
def test_a_batch_is_its_rows(
    batch: list[int], num_negatives: int, variant: tuple[str, str, str | None], shared: bool, scalar_q: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = [num_negatives] if shared else [*batch, num_negatives]
    positive = torch.randn(batch, generator=generator)
    negative = torch.randn(shape, generator=generator)
    hits = torch.rand(*batch, num_negatives, generator=generator) < 0.3
    q_positive = -1.5 if scalar_q else torch.rand(batch, generator=generator).log()
    q_negative = -0.5 if scalar_q else torch.rand(shape, generator=generator).log()
    options: dict[str, Any] = dict(zip(("correction", "hit_policy", "debias"), variant, strict=True))

    def loss(*rows: Any, reduction: str = "none") -> Tensor:
        names = ("positive", "negative", "log_q_positive", "log_q_negative", "hits")
        return sampled_softmax_loss(**dict(zip(names, rows, strict=True)), **options, reduction=reduction)

    value = loss(positive, negative, q_positive, q_negative, hits)
    assert value.shape == tuple(batch)
    for index in itertools.product(*map(range, batch)):
        at = [part if isinstance(part, float) else part[index] for part in (positive, q_positive, hits)]
        rows = [part if isinstance(part, float) or shared else part[index] for part in (negative, q_negative)]
        torch.testing.assert_close(value[index], loss(at[0], rows[0], at[1], rows[1], at[2]))
    everything = positive, negative, q_positive, q_negative, hits
    torch.testing.assert_close(loss(*everything, reduction="sum"), value.sum())
    mean = value.mean() if value.numel() else torch.tensor(0.0)
    torch.testing.assert_close(loss(*everything, reduction="mean"), mean)


def sample(num_negatives: int = 4, batch: int = 3) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Scores that require gradients; and log q and hits of the draws, which are all hits in the first row."""
    generator = torch.Generator().manual_seed(3)
    positive = torch.randn(batch, generator=generator).double().requires_grad_()
    negative = torch.randn(batch, num_negatives, generator=generator).double().requires_grad_()
    hits = torch.rand(batch, num_negatives, generator=generator) < 0.3
    hits[0] = True
    log_q = torch.rand(batch, num_negatives, generator=generator).double().log()
    return positive, negative, {"log_q_positive": log_q[:, 0], "log_q_negative": log_q, "hits": hits}


def loss_on_draws(
    correction: str, policy: str, debias: str | None, draws: dict[str, Any]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as a function of the scores, for given log q and hits."""

    def loss(positive: Tensor, negative: Tensor) -> Tensor:
        return sampled_softmax_loss(
            positive, negative, **draws, correction=correction, hit_policy=policy, debias=debias, reduction="none"
        )

    return loss


@each_derived
@pytest.mark.parametrize("num_negatives", [2, 4])
def test_derivatives_by_finite_differences(
    correction: str, policy: str, debias: str | None, num_negatives: int
) -> None:
    positive, negative, draws = sample(num_negatives)
    loss = loss_on_draws(correction, policy, debias, draws)
    assert gradcheck(loss, (positive, negative))
    assert gradgradcheck(loss, (positive, negative))


@each_derived
def test_derivatives_where_terms_tie(correction: str, policy: str, debias: str | None) -> None:
    _, _, draws = sample()
    equal = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.zeros(3, 4).double().requires_grad_()
    loss = loss_on_draws(correction, policy, debias, draws | {"log_q_negative": -1.0})
    assert gradcheck(loss, equal)
    assert gradgradcheck(loss, equal)


@each_variant
def test_function_transforms(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, draws = sample()
    loss = loss_on_draws(correction, policy, debias, draws)
    expected = torch.autograd.grad(loss(positive, negative).sum(), (positive, negative))
    got = torch.func.grad(lambda p, n: loss(p, n).sum(), argnums=(0, 1))(positive, negative)
    torch.testing.assert_close(got, expected)

    def row(p: Tensor, n: Tensor, q: Tensor, h: Tensor) -> Tensor:
        return loss_on_draws(correction, policy, debias, {"log_q_positive": q[0], "log_q_negative": q, "hits": h})(p, n)

    rows = positive, negative, draws["log_q_negative"], draws["hits"]
    torch.testing.assert_close(torch.vmap(row)(*rows), loss(positive, negative))
    per_row = torch.vmap(torch.func.grad(row, argnums=1))(*rows)
    torch.testing.assert_close(per_row, expected[1])
    jacobian = torch.func.jacrev(loss, argnums=1)(positive, negative)  # (3, 3, 4)
    torch.testing.assert_close(jacobian.sum(0), expected[1])
    curvature = torch.vmap(hessian(row, argnums=1))(*rows)
    torch.testing.assert_close(curvature, curvature.mT)


@pytest.mark.slow
@pytest.mark.parametrize(("correction", "policy", "debias"), [VARIANTS[1], VARIANTS[2], *DEBIASED[2:]])
def test_compiles_in_one_graph(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, draws = sample()
    loss = loss_on_draws(correction, policy, debias, draws)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(positive, negative).sum(), (positive, negative))
    value = compiled(positive, negative)
    torch.testing.assert_close(value, loss(positive, negative))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), (positive, negative)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_variant
def test_half_precision(correction: str, policy: str, debias: str | None, dtype: torch.dtype) -> None:
    positive, negative, draws = sample()
    positive, negative = positive.to(dtype), negative.to(dtype)
    loss = loss_on_draws(correction, policy, debias, draws)
    exact = loss(positive.double(), negative.double())
    assert loss(positive, negative).dtype == dtype
    torch.testing.assert_close(loss(positive, negative), exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = loss(positive, negative)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact.float())


def test_negatives_may_have_another_dtype() -> None:
    positive, negative, draws = sample()
    loss = loss_on_draws("logq", "keep", None, draws)
    assert loss(positive.float(), negative).dtype == torch.float32
    torch.testing.assert_close(loss(positive, negative.float()), loss(positive, negative), rtol=1e-6, atol=1e-6)


@each_variant
def test_module_is_the_function(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, draws = sample()
    module = SampledSoftmaxLoss(correction=correction, hit_policy=policy, debias=debias, reduction="none")
    assert torch.equal(
        module(positive, negative, **draws), loss_on_draws(correction, policy, debias, draws)(positive, negative)
    )


def test_partition_on_all_classes_is_the_full_loss() -> None:
    """Every class once, q uniform: the estimate has no error left."""
    scores = torch.tensor([0.3, -1.0, 2.0])
    every = sampled_softmax_loss(
        scores[0], scores, log_q_negative=-math.log(3), hits=torch.arange(3) == 0, correction="partition"
    )
    torch.testing.assert_close(every, softmax_loss(scores, torch.tensor(0)))
