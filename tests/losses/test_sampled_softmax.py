"""Sampled softmax: its values, what it estimates, and what minimises it."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import FAMILY, ArgumentError, ArgumentTypeError, SampledSoftmaxLoss, sampled_softmax_loss, softmax_loss

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types

FACTS = FAMILY["sampled_softmax"].facts

PLAIN = [(correction, policy, None) for correction in ("none", "logq", "partition") for policy in ("keep", "mask")]
DEBIASED = [("partition", policy, debias) for policy in ("keep", "mask") for debias in ("delta", "jackknife")]
VARIANTS = PLAIN + DEBIASED
each_variant = pytest.mark.parametrize(("correction", "policy", "debias"), VARIANTS)


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bias = load_benchmark("bias")


def loss_of_classes(
    scores: Tensor, target: Tensor, ids: Tensor, log_q: Tensor, variant: tuple[str, str, str | None]
) -> Tensor:
    """The loss of each row from the scores (..., C) of all classes: positives target (...), negatives ids (..., k)."""
    correction, policy, debias = variant
    rows = scores.expand(*target.shape, scores.shape[-1])
    return sampled_softmax_loss(
        rows.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        rows.gather(-1, ids),
        log_q_positive=log_q[target],
        log_q_negative=log_q[ids],
        hits=ids == target.unsqueeze(-1),
        correction=correction,
        hit_policy=policy,
        debias=debias,
        reduction="none",
    )


def hessian(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Tensor]:
    """Reverse over reverse: torch's own takes a forward mode that warns about its insides."""
    return torch.func.jacrev(torch.func.grad(function, argnums), argnums)


# --- values and gradients, against the definitions in 50 digits ---


def reference(
    scores: list[Number], target: int, ids: list[int], log_q: list[float], variant: tuple[str, str, str | None]
) -> Number:
    """The loss by its definition; k counts the drawn."""
    correction, policy, debias = variant
    k = len(ids)
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


def reference_gradient(scores: list[Number], *rest: Any) -> list[Number]:
    def along(i: int) -> Number:
        return mp.diff(lambda x: reference([*scores[:i], x, *scores[i + 1 :]], *rest), scores[i])

    return [along(i) for i in range(len(scores))]


# classes drawn twice, a hit, two hits, no hit, nothing but hits
TARGET = torch.tensor([0, 2, 4, 1])
IDS = torch.tensor([[1, 1, 3, 0], [2, 0, 2, 4], [1, 3, 0, 1], [1, 1, 1, 1]])
SCORES = torch.tensor([[0.3, -1.2, 2.5, 0.0, -0.7], [4.0, 1.0, -3.0, 2.0, 0.1], [-2.0, 0.5, 1.0, 3.0, -1.0], [0.1] * 5])
Q = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)


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
        expected = reference(*arguments)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(gradient[row].tolist(), reference_gradient(*arguments), strict=True):
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
        expected = reference(scores[row].tolist(), 0, ids[row].tolist(), Q.log().tolist(), variant)
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


@each_variant
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


def test_partition_divides_by_the_drawn_not_by_the_left() -> None:
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
    """Scores that ask for gradients, and the rest of a sample with hits, among them a row with nothing else."""
    generator = torch.Generator().manual_seed(3)
    positive = torch.randn(batch, generator=generator).double().requires_grad_()
    negative = torch.randn(batch, num_negatives, generator=generator).double().requires_grad_()
    hits = torch.rand(batch, num_negatives, generator=generator) < 0.3
    hits[0] = True
    log_q = torch.rand(batch, num_negatives, generator=generator).double().log()
    return positive, negative, {"log_q_positive": log_q[:, 0], "log_q_negative": log_q, "hits": hits}


def bound(correction: str, policy: str, debias: str | None, rest: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(positive: Tensor, negative: Tensor) -> Tensor:
        return sampled_softmax_loss(
            positive, negative, **rest, correction=correction, hit_policy=policy, debias=debias, reduction="none"
        )

    return loss


@each_variant
@pytest.mark.parametrize("num_negatives", [2, 4])
def test_derivatives_by_finite_differences(
    correction: str, policy: str, debias: str | None, num_negatives: int
) -> None:
    positive, negative, rest = sample(num_negatives)
    loss = bound(correction, policy, debias, rest)
    assert gradcheck(loss, (positive, negative))
    assert gradgradcheck(loss, (positive, negative))


@each_variant
def test_derivatives_where_terms_tie(correction: str, policy: str, debias: str | None) -> None:
    _, _, rest = sample()
    equal = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.zeros(3, 4).double().requires_grad_()
    loss = bound(correction, policy, debias, rest | {"log_q_negative": -1.0})
    assert gradcheck(loss, equal)
    assert gradgradcheck(loss, equal)


@each_variant
def test_function_transforms(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, rest = sample()
    loss = bound(correction, policy, debias, rest)
    expected = torch.autograd.grad(loss(positive, negative).sum(), (positive, negative))
    got = torch.func.grad(lambda p, n: loss(p, n).sum(), argnums=(0, 1))(positive, negative)
    torch.testing.assert_close(got, expected)

    def row(p: Tensor, n: Tensor, q: Tensor, h: Tensor) -> Tensor:
        return bound(correction, policy, debias, {"log_q_positive": q[0], "log_q_negative": q, "hits": h})(p, n)

    rows = positive, negative, rest["log_q_negative"], rest["hits"]
    torch.testing.assert_close(torch.vmap(row)(*rows), loss(positive, negative))
    per_row = torch.vmap(torch.func.grad(row, argnums=1))(*rows)
    torch.testing.assert_close(per_row, expected[1])
    jacobian = torch.func.jacrev(loss, argnums=1)(positive, negative)  # (3, 3, 4)
    torch.testing.assert_close(jacobian.sum(0), expected[1])
    curvature = torch.vmap(hessian(row, argnums=1))(*rows)
    torch.testing.assert_close(curvature, curvature.mT)


@pytest.mark.parametrize(("correction", "policy", "debias"), [VARIANTS[1], VARIANTS[2], *DEBIASED[2:]])
def test_compiles_in_one_graph(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, rest = sample()
    loss = bound(correction, policy, debias, rest)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(positive, negative).sum(), (positive, negative))
    value = compiled(positive, negative)
    torch.testing.assert_close(value, loss(positive, negative))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), (positive, negative)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_variant
def test_half_precision(correction: str, policy: str, debias: str | None, dtype: torch.dtype) -> None:
    positive, negative, rest = sample()
    positive, negative = positive.to(dtype), negative.to(dtype)
    loss = bound(correction, policy, debias, rest)
    exact = loss(positive.double(), negative.double())
    assert loss(positive, negative).dtype == dtype
    torch.testing.assert_close(loss(positive, negative), exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = loss(positive, negative)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact.float())


def test_negatives_may_have_another_dtype() -> None:
    positive, negative, rest = sample()
    loss = bound("logq", "keep", None, rest)
    assert loss(positive.float(), negative).dtype == torch.float32
    torch.testing.assert_close(loss(positive, negative.float()), loss(positive, negative), rtol=1e-6, atol=1e-6)


@each_variant
def test_module_is_the_function(correction: str, policy: str, debias: str | None) -> None:
    positive, negative, rest = sample()
    module = SampledSoftmaxLoss(correction=correction, hit_policy=policy, debias=debias, reduction="none")
    assert torch.equal(module(positive, negative, **rest), bound(correction, policy, debias, rest)(positive, negative))


# --- what the population minimises ---

P3 = torch.tensor([0.4, 0.32, 0.28], dtype=torch.float64)
Q3 = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
P4 = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
Q4 = torch.tensor([0.15, 0.4, 0.05, 0.4], dtype=torch.float64)


def expected_loss(scores: Tensor, probs: Tensor, q: Tensor, num_negatives: int, variant: Any) -> Tensor:
    """The risk: the mean of the loss over every y and every sample, enumerated."""
    ids, weights = bias.all_samples(q, num_negatives)
    risks = []
    for y in range(len(probs)):
        target = torch.full((len(ids),), y)
        risks.append((weights * loss_of_classes(scores, target, ids, q.log(), variant)).sum())
    return (probs * torch.stack(risks)).sum()


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """log-probabilities of the minimiser of a convex, shift invariant risk, by Newton steps that never go up."""
    scores = torch.zeros(num_classes, dtype=torch.float64)
    for _ in range(100):
        slope = torch.func.grad(risk)(scores)
        if slope.norm() < 1e-12:
            break
        step = torch.linalg.pinv(hessian(risk)(scores), rtol=1e-12) @ slope
        length = 1.0
        while risk(scores - length * step) > risk(scores) + 1e-15:
            length /= 2
        scores = scores - length * step
    assert slope.norm() < 1e-9
    return scores.log_softmax(-1)


def minimises(probs: Tensor, q: Tensor, num_negatives: int, variant: Any) -> Tensor:
    return minimiser(lambda scores: expected_loss(scores, probs, q, num_negatives, variant), len(probs))


def test_samples_are_all_that_can_be_drawn() -> None:
    ids, weights = bias.all_samples(Q3, 3)
    ordered = list(itertools.product(range(3), repeat=3))
    for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        same = [draw for draw in ordered if sorted(draw) == sorted(row)]
        assert weight == pytest.approx(sum(math.prod(Q3[j].item() for j in draw) for draw in same), rel=1e-13)
    assert len(ids) == len({tuple(sorted(draw)) for draw in ordered})
    assert weights.sum().item() == pytest.approx(1, abs=1e-13)


each_population = pytest.mark.parametrize(("probs", "q"), [(P3, Q3), (P4, Q4)], ids=["C=3", "C=4"])
each_size = pytest.mark.parametrize("num_negatives", [1, 2, 4])


@each_population
@each_size
def test_corrected_with_hits_kept_reaches_log_p(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    best = minimises(probs, q, num_negatives, ("logq", "keep", None))
    torch.testing.assert_close(best, probs.log(), rtol=0, atol=1e-7)


@each_population
@each_size
def test_simple_reaches_log_p_over_q(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    best = minimises(probs, q, num_negatives, ("none", "keep", None))
    torch.testing.assert_close(best, (probs / q).log().log_softmax(-1), rtol=0, atol=1e-7)


@each_size
def test_masking_hits_moves_corrected_off_log_p(num_negatives: int) -> None:
    best = minimises(P3, Q3, num_negatives, ("logq", "mask", None))
    gap = (best - P3.log()).abs().max().item()
    assert gap < 1e-7 if num_negatives == 1 else gap > 1e-3


def test_partition_reaches_log_p_only_as_k_grows() -> None:
    gaps = [(minimises(P3, Q3, k, ("partition", "mask", None)) - P3.log()).abs().max().item() for k in (1, 4, 16, 64)]
    assert gaps[0] > 0.3
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.25 * gaps[1]
    assert gaps[-1] == pytest.approx(gaps[-2] / 4, rel=0.25)  # O(1/k)


def test_partition_with_hits_kept_tends_elsewhere() -> None:
    """P (1 + P) is proportional to p in the limit: the right order, the wrong values."""
    limits = []
    for k in (32, 64):
        limits.append(minimises(P3, Q3, k, ("partition", "keep", None)).exp())
    probs = 2 * limits[1] - limits[0]  # without its 1/k
    torch.testing.assert_close(probs * (1 + probs) / (probs * (1 + probs)).sum(), P3, rtol=0, atol=3e-3)
    assert (probs - P3).abs().max() > 0.01


def test_which_variants_keep_the_order_of_p(seed: int) -> None:
    """ "logq" with hits kept always does; under a uniform proposal all do; "none" follows p / q."""
    variants = [("logq", "keep", None), ("none", "keep", None), ("partition", "mask", None)]
    wrong = dict.fromkeys(variants, 0)
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    for _ in range(8):
        probs, q = torch.distributions.Dirichlet(torch.ones(2, 4).double()).sample()
        q = 0.9 * q + 0.1 * uniform  # so that the Newton steps stay well conditioned
        for variant in variants:
            wrong[variant] += not torch.equal(minimises(probs, q, 2, variant).argsort(), probs.argsort())
            assert torch.equal(minimises(probs, uniform, 2, variant).argsort(), probs.argsort())
    assert wrong["logq", "keep", None] == 0
    assert wrong["none", "keep", None] > 0


# --- bias and variance of the estimates of log Z ---


def distribution(name: str, num_classes: int) -> Tensor:
    ranks = torch.arange(1, num_classes + 1, dtype=torch.float64)
    weights = {"uniform": ranks**0, "zipf": 1 / ranks, "reversed": ranks}[name]
    return weights / weights.sum()


def estimates(scores: Tensor, q: Tensor, target: int, num_negatives: int) -> dict[str, tuple[Tensor, Tensor]]:
    """{estimate: (first, terms)}: what is inside of the logarithm, first + the sum of k terms that are drawn."""
    weights = scores.exp()
    others = torch.arange(len(q)) != target
    return {
        "importance": (torch.zeros(()).double(), weights / (num_negatives * q)),
        "partition": (weights[target], others * weights / (num_negatives * q)),
        "logq": (weights[target] / q[target], weights / q),
        "none": (weights[target], weights),
    }


def log_partition(name: str, scores: Tensor, q: Tensor, target: int, ids: Tensor) -> Tensor:
    """The estimate of log Z on samples ids (n, k), from the library's losses; only importance sampling is written out.

    "logq" is shifted by log q_y as in `estimates`, that is, log((k + 1) q_y) is still in it.
    """
    if name == "importance":
        return (scores[ids] - q.log()[ids]).logsumexp(-1) - math.log(ids.shape[-1])
    policy = "mask" if name == "partition" else "keep"
    loss = loss_of_classes(scores, torch.full((len(ids),), target), ids, q.log(), (name, policy, None))
    return loss + scores[target] - (q[target].log() if name == "logq" else 0)


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
@pytest.mark.parametrize("num_negatives", [1, 2, 7])
def test_moments_by_quadrature_are_those_by_enumeration(name: str, num_negatives: int) -> None:
    scores, target = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64), 1
    ids, weights = bias.all_samples(Q4, num_negatives)
    values = log_partition(name, scores, Q4, target, ids)
    mean = (weights * values).sum().item()
    variance = (weights * (values - mean) ** 2).sum().item()
    first, terms = estimates(scores, Q4, target, num_negatives)[name]
    assert bias.log_sum_moments(first, terms, Q4, num_negatives) == pytest.approx((mean, variance), rel=1e-9)


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
@pytest.mark.parametrize("num_classes", [5, 60])
@pytest.mark.parametrize("proposal", ["uniform", "zipf", "reversed"])
def test_moments_agree_with_draws(name: str, num_classes: int, proposal: str, seed: int) -> None:
    draws = 20_000
    scores = 1.5 * distribution("zipf", num_classes).log()
    q, target = distribution(proposal, num_classes), num_classes // 2
    for num_negatives in (1, 6, 40):
        ids = torch.multinomial(q, draws * num_negatives, replacement=True).view(draws, num_negatives)
        values = log_partition(name, scores, q, target, ids)
        mean, variance = bias.log_sum_moments(*estimates(scores, q, target, num_negatives)[name], q, num_negatives)
        squares = (values - mean) ** 2
        assert abs(values.mean().item() - mean) <= 4 * math.sqrt(variance / draws) + 1e-9
        assert abs(squares.mean().item() - variance) <= 4 * squares.std().item() / math.sqrt(draws) + 1e-9


def predictions(scores: Tensor, q: Tensor, target: int, k: int) -> dict[str, tuple[float, float, float]]:
    """{estimate: (limit of the bias, its 1/k term, variance)} by the Delta method."""
    probs = scores.softmax(-1)
    ratio = probs / q
    chi2 = (q * (ratio - 1) ** 2).sum()
    others = torch.arange(len(q)) != target
    v = (others * probs**2 / q).sum() - (1 - probs[target]) ** 2
    weights = scores.exp()
    mean = (q * weights).sum()
    total = weights[target] + k * mean
    spread = k * (q * (weights - mean) ** 2).sum() / total**2
    logq = (ratio[target] - 1) / (k + 1) - k * chi2 / (2 * (k + 1) ** 2)
    table = {
        "importance": (0.0, -chi2 / (2 * k), chi2 / k),
        "partition": (0.0, -v / (2 * k), v / k),
        "logq": (math.log(k + 1), logq, k * chi2 / (k + 1) ** 2),
        "none": ((total / weights.sum()).log(), -spread / 2, spread),
    }
    return {name: tuple(float(part) for part in row) for name, row in table.items()}  # type: ignore[misc]


@pytest.mark.parametrize("name", ["importance", "partition", "logq", "none"])
def test_the_delta_method_inside_its_range(name: str) -> None:
    """Within 12 % of the exact values wherever chi2 / k <= 0.2 and k q_j >= 20 for the likeliest class."""
    scores = 1.5 * distribution("zipf", 60).log()
    log_z, probs, inside, worst_outside = scores.logsumexp(-1).item(), scores.softmax(-1), 0, 0.0
    for proposal, k in itertools.product(("uniform", "zipf", "reversed"), (3, 30, 300, 3000, 60_000)):
        q, target = distribution(proposal, 60), 30
        mean, variance = bias.log_sum_moments(*estimates(scores, q, target, k)[name], q, k)
        limit, curvature, spread = predictions(scores, q, target, k)[name]
        # the bias of "logq" is a difference of two terms, so it is held to their size
        scale = max(abs(curvature), spread / 2)
        off = max(abs(mean - log_z - limit - curvature) / scale, abs(variance - spread) / spread)
        if bias.delta_holds(probs, q, k):
            inside += 1
            assert off < 0.12, (proposal, k)
        else:
            worst_outside = max(worst_outside, off)
    assert inside >= 5
    assert worst_outside > 0.5


def test_the_rule_of_thumb_is_no_guarantee() -> None:
    """A class that carries chi2 and is hardly drawn escapes the rule, which looks at the likeliest class."""
    probs, q = bias.delta_pairs()["starved class"]
    exact, delta, _, _ = bias.delta_row(probs, q, 50)
    assert bias.delta_holds(probs, q, 50)
    assert delta / exact > 1.9


def test_the_rule_of_thumb_needs_both_halves() -> None:
    """Many draws of the likeliest class, or a small chi2 / k, are not enough alone."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    starved, even = torch.tensor([[0.9, 0.0005, 0.0995], [0.4, 0.3, 0.3]], dtype=torch.float64)
    exact, delta, _, _ = bias.delta_row(probs, starved, 50)
    assert delta / exact > 2
    assert not bias.delta_holds(probs, starved, 50)
    assert not bias.delta_holds(probs, even, 40)
    assert bias.delta_holds(probs, even, 60)


def test_importance_sampling_at_one_negative_is_off_by_a_divergence() -> None:
    scores, q = distribution("zipf", 7).log(), distribution("reversed", 7)
    probs = scores.exp()
    means = [bias.log_sum_moments(*estimates(scores, q, 0, k)["importance"], q, k)[0] for k in (1, 2, 3, 10)]
    assert means[0] == pytest.approx((q * (probs / q).log()).sum().item(), rel=1e-9)  # -KL(q || P)
    assert means == sorted(means)
    assert means[-1] < 0


def test_the_partition_function_itself_is_unbiased() -> None:
    scores = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    for target, k in itertools.product(range(4), (1, 3)):
        ids, weights = bias.all_samples(Q4, k)
        mean = (weights * log_partition("partition", scores, Q4, target, ids).exp()).sum()
        torch.testing.assert_close(mean, scores.exp().sum())


# --- bias against k, with and without debias ---


def slope(values: list[float], sizes: list[int]) -> float:
    """The exponent a of |value| ~ k^a, by least squares in the logarithms."""
    x = torch.tensor([[math.log(k), 1.0] for k in sizes], dtype=torch.float64)
    y = torch.tensor([[math.log(abs(value))] for value in values], dtype=torch.float64)
    return torch.linalg.lstsq(x, y).solution[0].item()


FAIR = tuple(torch.tensor(values, dtype=torch.float64) for values in bias.PAIRS["fair"])


MILD = tuple(torch.tensor(values, dtype=torch.float64) for values in ((0.5, 0.3, 0.2), (0.3, 0.3, 0.4)))


@pytest.mark.parametrize(
    ("pair", "debias", "order"),
    [(MILD, None, -1), (FAIR, None, -1), (MILD, "delta", -2), (MILD, "jackknife", -2), (FAIR, "jackknife", -2)],
    ids=["mild", "fair", "mild-delta", "mild-jackknife", "fair-jackknife"],
)
def test_order_of_the_bias(pair: tuple[Tensor, Tensor], debias: str | None, order: int) -> None:
    """ "delta" on the fair pair is left out: its 1/k^2 term nearly cancels there, so it falls faster than that."""
    sizes = [24, 48, 96]
    values = [bias.partition_bias(*pair, k, debias) for k in sizes]
    assert slope(values, sizes) == pytest.approx(order, abs=0.06)


@pytest.mark.parametrize("debias", [None, "delta", "jackknife"])
@pytest.mark.parametrize("pair", ["fair", "poor"])
def test_constants_of_the_bias(debias: str | None, pair: str) -> None:
    """k bias, or k^2 bias, tends to the constant of the leading term; extrapolated once in 1/k."""
    probs, q = (torch.tensor(values, dtype=torch.float64) for values in bias.PAIRS[pair])
    power = 1 if debias is None else 2
    constant = sum(p * bias.next_orders(probs, q, y)[debias] for y, p in enumerate(probs.tolist()))
    scaled = [k**power * bias.partition_bias(probs, q, k, debias) for k in (45, 90)]
    size = sum(p * abs(bias.next_orders(probs, q, y)["jackknife"]) for y, p in enumerate(probs.tolist()))
    scale = abs(constant) if debias is None else size
    assert abs(2 * scaled[1] - scaled[0] - constant) < (0.02 if pair == "fair" else 0.25) * scale


@pytest.mark.parametrize("num_negatives", [2, 3, 9])
def test_mean_of_the_jackknife_is_what_resampling_promises(num_negatives: int) -> None:
    k, fewer = num_negatives, num_negatives - 1
    expected = k * bias.partition_bias(*FAIR, k, None) - fewer * bias.partition_bias(*FAIR, fewer, None)
    assert bias.partition_bias(*FAIR, k, "jackknife") == pytest.approx(expected, abs=1e-12)


def test_debias_brings_the_mean_nearer() -> None:
    for k in (2, 4, 8, 16, 32):
        plain, delta, jackknife = (abs(bias.partition_bias(*FAIR, k, debias)) for debias in bias.DEBIAS)
        assert delta < plain / 2
        assert jackknife < plain / 2


def test_debias_only_adds_and_is_not_convex(seed: int) -> None:
    def loss(scores: Tensor, log_q: Tensor, debias: str | None) -> Tensor:
        options: dict[str, Any] = {"hit_policy": "keep", "correction": "partition", "debias": debias}
        return sampled_softmax_loss(scores[0], scores[1:], log_q_negative=log_q, **options)

    lowest = dict.fromkeys(("delta", "jackknife"), 0.0)
    for _ in range(50):
        scores, log_q = 3 * torch.randn(4).double(), torch.rand(3).double().log()
        for debias in lowest:
            assert loss(scores, log_q, debias) >= loss(scores, log_q, None)
            curvature = torch.linalg.eigvalsh(hessian(loss)(scores, log_q, debias))[0].item()
            lowest[debias] = min(lowest[debias], curvature)
    assert max(lowest.values()) < -0.01


def test_what_the_page_says_of_variance() -> None:
    """At k = 2 and the fair pair, for y ~ P: a third more with the jackknife, less than that with delta."""
    probs, q = FAIR
    ids, weights = bias.all_samples(q, 2)
    spread = dict.fromkeys(bias.DEBIAS, 0.0)
    for debias, y in itertools.product(bias.DEBIAS, range(3)):
        values = loss_of_classes(probs.log(), torch.full((len(ids),), y), ids, q.log(), ("partition", "mask", debias))
        mean = (weights * values).sum()
        spread[debias] += (probs[y] * (weights * (values - mean) ** 2).sum()).item()
    assert spread["jackknife"] / spread[None] == pytest.approx(4 / 3, abs=0.02)
    assert 1 < spread["delta"] / spread[None] < 4 / 3


def test_what_the_page_says_of_the_rule() -> None:
    """Safe in every Zipf row of the table."""
    rows = [(name, k) for name in bias.delta_pairs() if name.startswith("Zipf") for k in (5, 50, 500, 5000)]
    inside = [(name, k) for name, k in rows if bias.delta_holds(*bias.delta_pairs()[name], k)]
    assert 0 < len(inside) < len(rows)
    for name, k in inside:
        exact, delta, variance, delta_variance = bias.delta_row(*bias.delta_pairs()[name], k)
        assert (delta, delta_variance) == pytest.approx((exact, variance), rel=0.03, abs=0)


def test_page_has_what_the_script_computes() -> None:
    text = bias.PAGE.read_text(encoding="utf-8")
    assert bias.with_tables(text) == text, "run `python benchmarks/bias.py`"


# --- gradients ---


def mean_gradient(scores: Tensor, q: Tensor, target: int, num_negatives: int, variant: Any) -> Tensor:
    ids, weights = bias.all_samples(q, num_negatives)
    targets = torch.full((len(ids),), target)
    return torch.func.grad(lambda s: (weights * loss_of_classes(s, targets, ids, q.log(), variant)).sum())(scores)


def test_gradients_of_the_model_s_own_proposal() -> None:
    """With q = P the mean gradient is k / (k + 1) of the full one: not unbiased, whatever is printed."""
    scores = P4.log()
    full = P4 - torch.eye(4, dtype=torch.float64)[1]
    for k in (1, 2, 5):
        torch.testing.assert_close(mean_gradient(scores, P4, 1, k, ("logq", "keep", None)), k / (k + 1) * full)
    assert FACTS.fenchel_young.value is False
    assert FACTS.fenchel_young.status == "contradicted"


@pytest.mark.parametrize(("correction", "policy"), [("logq", "keep"), ("partition", "mask")])
def test_bias_of_the_gradient_falls_like_one_over_k(correction: str, policy: str) -> None:
    scores, full = P3.log(), P3 - torch.eye(3, dtype=torch.float64)[0]
    sizes = [16, 32, 64]
    gaps = [(mean_gradient(scores, Q3, 0, k, (correction, policy, None)) - full).norm().item() for k in [1, *sizes]]
    assert gaps[0] > 0.15
    assert slope(gaps[1:], sizes) == pytest.approx(-1, abs=0.15)


# --- facts ---


def merged_hessian(scores: Tensor, target: int, ids: Tensor, correction: str) -> Tensor:
    """The Hessian in the scores of the classes, duplicates and hits added up."""
    q = torch.full((len(scores),), 1 / len(scores), dtype=torch.float64)
    variant = (correction, "mask" if correction == "partition" else "keep", None)
    loss = lambda s: loss_of_classes(s, torch.tensor([target]), ids, q.log(), variant).sum()  # noqa: E731
    return hessian(loss)(scores)


def test_fact_convex_and_smoothness(seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    claimed = FACTS.smoothness.fn(num_classes=4)
    lowest, highest = 0.0, 0.0
    for _ in range(100):
        correction = ("none", "logq", "partition")[torch.randint(3, ()).item()]
        scores, ids = 3 * torch.randn(4).double(), torch.randint(4, (1, 6))
        eigenvalues = torch.linalg.eigvalsh(merged_hessian(scores, 0, ids, correction))
        lowest, highest = min(lowest, eigenvalues[0].item()), max(highest, eigenvalues[-1].item())
    two = torch.linalg.eigvalsh(merged_hessian(torch.zeros(4).double(), 0, torch.tensor([[1, 1, 0, 0, 1]]), "none"))
    assert (lowest >= -1e-12) is FACTS.convex.value
    assert max(highest, two[-1].item()) <= claimed + 1e-12
    assert two[-1].item() == pytest.approx(claimed)  # three ones and three zeros: a fair coin, reached
    assert FACTS.smoothness.value == claimed
    assert FACTS.smoothness.fn(num_classes=1) == merged_hessian(torch.zeros(1).double(), 0, torch.tensor([[0]]), "none")


@pytest.mark.parametrize("correction", ["none", "logq", "partition"])
def test_fact_shift_invariant(correction: str, seed: int) -> None:
    variant = (correction, "mask", None)
    scores = torch.randn(4, 5).double()
    moved, still = (loss_of_classes(s, TARGET, IDS, Q.log(), variant) for s in (scores + 3.7, scores))
    assert torch.allclose(moved, still, rtol=0, atol=1e-12) is FACTS.shift_invariant.value


def test_fact_calibrated() -> None:
    """The default ranks like p for every k, which the paper grants only as k grows."""
    best = [minimises(P4, Q4, k, ("logq", "keep", None)) for k in (1, 3)]
    assert all(torch.equal(s.argsort(), P4.argsort()) for s in best) is FACTS.calibrated.value
    simple = minimises(P4, Q4, 3, ("none", "keep", None))
    assert not torch.equal(simple.argsort(), P4.argsort())
    assert FACTS.calibrated.printed == "asymptotic"


def test_fact_cost_is_the_number_of_scores() -> None:
    assert FACTS.cost.fn is not None
    positive, negative = torch.randn(8), torch.randn(8, 20)
    for num_classes in (10, 10**6):
        cost = FACTS.cost.fn(batch=8, num_classes=num_classes, num_negatives=20)
        assert cost == positive.numel() + negative.numel()
    assert FACTS.cost.value == "constant"


def test_fact_bias_and_variance() -> None:
    """Of "logq" with log((k + 1) q_y) taken off, for y ~ P, to leading order."""
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    probs, q, k = distribution("zipf", 12), distribution("reversed", 12), 2000
    moments = [bias.log_sum_moments(*estimates(probs.log(), q, y, k)["logq"], q, k) for y in range(12)]
    mean = sum(p * (m - math.log(k + 1)) for p, (m, _) in zip(probs.tolist(), moments, strict=True))
    variance = sum(p * v for p, (_, v) in zip(probs.tolist(), moments, strict=True))
    assert FACTS.bias.fn(probs=probs, q=q, num_negatives=k) == pytest.approx(mean, rel=0.02)
    assert FACTS.variance.fn(probs=probs, q=q, num_negatives=k) == pytest.approx(variance, rel=0.02)
    assert mean > 0  # the printed bias is negative
    assert FACTS.bias.status == "contradicted"


# --- bad input ---

GOOD: dict[str, Any] = {
    "positive": torch.zeros(2),
    "negative": torch.zeros(2, 3),
    "log_q_positive": -1.0,
    "log_q_negative": -1.0,
    "hits": torch.zeros(2, 3, dtype=torch.bool),
}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"negative": torch.zeros(2, 0), "hits": None}, ArgumentError, "`negative`"),
    ({"negative": torch.tensor(0.0), "hits": None}, ArgumentError, "`negative`"),
    ({"negative": torch.zeros(3, 3)}, ArgumentError, "`negative`"),
    ({"negative": [0.0, 1.0]}, ArgumentTypeError, "`negative`"),
    ({"negative": [0.0, 1.0], "correction": "partition", "debias": "delta"}, ArgumentTypeError, "`negative`"),
    ({"negative": torch.zeros(2, 3, dtype=torch.long)}, ArgumentTypeError, "`negative`"),
    ({"positive": torch.zeros(2, dtype=torch.long)}, ArgumentTypeError, "`positive`"),
    ({"positive": 0.0}, ArgumentTypeError, "`positive`"),
    ({"positive": torch.tensor([0.0, math.nan])}, ArgumentError, "`positive`.*nan"),
    ({"positive": torch.tensor([0.0, math.inf])}, ArgumentError, "`positive`.*inf"),
    ({"positive": torch.tensor([0.0, -math.inf])}, ArgumentError, "`positive`.*-inf"),
    ({"negative": torch.tensor([0.0, math.nan, 1.0])}, ArgumentError, "`negative`.*nan"),
    ({"negative": torch.tensor([0.0, math.inf, 1.0])}, ArgumentError, "`negative`.*inf"),
    ({"log_q_positive": None}, ArgumentError, "`log_q_positive`"),
    ({"log_q_negative": None}, ArgumentError, "`log_q_negative`"),
    ({"log_q_negative": None, "correction": "partition"}, ArgumentError, "`log_q_negative`"),
    ({"log_q_positive": torch.tensor([0.0, -math.inf])}, ArgumentError, "`log_q_positive`.*q = 0"),
    ({"log_q_negative": torch.tensor([0.0, -math.inf, 0.0])}, ArgumentError, "`log_q_negative`.*q = 0"),
    ({"log_q_negative": math.nan}, ArgumentError, "`log_q_negative`"),
    ({"log_q_positive": torch.zeros(3)}, ArgumentError, "`log_q_positive`"),
    ({"log_q_negative": torch.zeros(2, 4)}, ArgumentError, "`log_q_negative`"),
    ({"log_q_negative": "uniform"}, ArgumentTypeError, "`log_q_negative`"),
    ({"hits": None, "correction": "partition"}, ArgumentError, "`hits`"),
    ({"hits": None, "hit_policy": "mask"}, ArgumentError, "`hits`"),
    ({"hits": torch.zeros(2, 3)}, ArgumentTypeError, "`hits`"),
    ({"hits": [False]}, ArgumentTypeError, "`hits`"),
    ({"hits": torch.zeros(3, 3, dtype=torch.bool)}, ArgumentError, "`hits`"),
    ({"correction": "logQ"}, ArgumentError, "`correction`.*Did you mean 'logq'"),
    ({"correction": None}, ArgumentError, "`correction`"),
    ({"hit_policy": "drop"}, ArgumentError, "`hit_policy`"),
    ({"hit_policy": ""}, ArgumentError, "`hit_policy`"),
    ({"reduction": "average"}, ArgumentError, "`reduction`"),
    ({"correction": "partition", "debias": "jacknife"}, ArgumentError, "`debias`.*Did you mean 'jackknife'"),
    ({"correction": "logq", "debias": "delta"}, ArgumentError, "`debias`.*'logq'"),
    ({"correction": "none", "debias": "jackknife"}, ArgumentError, "`debias`.*'none'"),
    (
        {"correction": "partition", "debias": "delta", "negative": torch.zeros(2, 1), "hits": torch.ones(2, 1).bool()},
        ArgumentError,
        "`negative`.*at least 2.*`debias='delta'`",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampled_softmax_loss(**(GOOD | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "log"}, "`correction`"),
        ({"reduction": "average"}, "`reduction`"),
        ({"hit_policy": "drop"}, "`hit_policy`"),
        ({"debias": "delta"}, "`debias`"),
        ({"correction": "partition", "debias": "twice"}, "`debias`"),
    ],
)
def test_a_module_refuses_at_once(options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SampledSoftmaxLoss(**options)  # type: ignore[arg-type]


def test_partition_on_all_classes_is_the_full_loss() -> None:
    """Every class once, q uniform: the estimate has no error left."""
    scores = torch.tensor([0.3, -1.0, 2.0])
    every = sampled_softmax_loss(
        scores[0], scores, log_q_negative=-math.log(3), hits=torch.arange(3) == 0, correction="partition"
    )
    torch.testing.assert_close(every, softmax_loss(scores, torch.tensor(0)))
