"""Noise contrastive estimation: its values, its exact mean and variance, and what minimises it."""

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
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from manymax import FAMILY, ArgumentError, ArgumentTypeError, NCELoss, nce_loss
from manymax.members.nce.loss import expected_loss, variance
from manymax.ops.divergences import chi_square, jensen_shannon, kl

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types

FACTS = FAMILY["nce"].facts
each_policy = pytest.mark.parametrize("policy", ["keep", "mask"])


def loss_of_classes(
    scores: Tensor, target: Tensor, ids: Tensor, log_q: Tensor, policy: str = "keep", log_z: Any = 0.0
) -> Tensor:
    """The loss of each row from the scores (..., C) of all classes: positives target (...), negatives ids (..., k)."""
    rows = scores.expand(*target.shape, scores.shape[-1])
    return nce_loss(
        rows.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        rows.gather(-1, ids),
        log_q_positive=log_q[target],
        log_q_negative=log_q[ids],
        hits=ids == target.unsqueeze(-1),
        hit_policy=policy,
        log_z=log_z,
        reduction="none",
    )


def hessian(function: Callable[..., Tensor], argnums: int = 0) -> Callable[..., Tensor]:
    """Reverse over reverse: torch's own takes a forward mode that warns about its insides."""
    return torch.func.jacrev(torch.func.grad(function, argnums), argnums)


# --- values and gradients, against the definition in 50 digits ---


def reference(scores: list[Number], target: int, ids: list[int], log_q: list[float], policy: str) -> Number:
    """-log P(data | y) - sum_j log P(noise | j) for odds exp(s) / Z0 to k q; scores ends with log Z0."""
    *scores, log_z = scores

    def odds(j: int) -> Number:
        return mp.exp(mp.mpf(scores[j]) - log_z) / (len(ids) * mp.exp(log_q[j]))

    kept = [j for j in ids if policy == "keep" or j != target]
    data, noise = odds(target), [odds(j) for j in kept]
    return -mp.log(data / (1 + data)) - mp.fsum(mp.log(1 / (1 + each)) for each in noise)


def reference_gradient(scores: list[Number], *rest: Any) -> list[Number]:
    def along(i: int) -> Number:
        return mp.diff(lambda x: reference([*scores[:i], x, *scores[i + 1 :]], *rest), scores[i])

    return [along(i) for i in range(len(scores))]


# classes drawn twice, a hit, two hits, no hit, nothing but hits
TARGET = torch.tensor([0, 2, 4, 1])
IDS = torch.tensor([[1, 1, 3, 0], [2, 0, 2, 4], [1, 3, 0, 1], [1, 1, 1, 1]])
SCORES = torch.tensor([[0.3, -1.2, 2.5, 0.0, -0.7], [4.0, 1.0, -3.0, 2.0, 0.1], [-2.0, 0.5, 1.0, 3.0, -1.0], [0.1] * 5])
Q = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)


@each_policy
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [1.0, 7.0])  # 7: logits beyond 20, where a linear tail would show
@pytest.mark.parametrize("log_z", [0.0, torch.tensor(1.25), torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_value_and_gradient_in_50_digits(
    policy: str, dtype: torch.dtype, tolerance: float, scale: float, log_z: float | Tensor
) -> None:
    scores, log_q = (scale * SCORES).to(dtype).requires_grad_(), Q.log().to(dtype)
    offsets = torch.as_tensor(log_z, dtype=dtype).clone().requires_grad_()
    given_z = log_z if isinstance(log_z, float) else offsets
    loss = loss_of_classes(scores, TARGET, IDS, log_q, policy, given_z)
    gradient = torch.autograd.grad(loss.sum(), [scores] + ([] if isinstance(log_z, float) else [offsets]))
    slopes = []
    for row, log_z_row in enumerate(offsets.expand(4).tolist()):
        arguments = [*scores[row].tolist(), log_z_row], int(TARGET[row]), IDS[row].tolist(), log_q.tolist(), policy
        expected = reference(*arguments)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        slopes.append(reference_gradient(*arguments))
        for entry, slope in zip(gradient[0][row].tolist(), slopes[-1][:-1], strict=True):
            assert abs(entry - slope) <= tolerance
    if len(gradient) == 2:
        by_row = [slope[-1] for slope in slopes]
        expected_rows = by_row if offsets.ndim else [mp.fsum(by_row)]
        for entry, slope in zip(gradient[1].flatten().tolist(), expected_rows, strict=True):
            assert abs(entry - slope) <= 4 * tolerance


@each_policy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_of_ten_thousand(policy: str, dtype: torch.dtype) -> None:
    scores = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], repeat=3)), dtype=dtype, requires_grad=True)
    target, ids = torch.zeros(27, dtype=torch.long), torch.tensor([1, 2, 2, 0]).expand(27, 4)
    loss = loss_of_classes(scores, target, ids, Q.log().to(dtype), policy)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.isfinite().all()
    for row, value in enumerate(loss.tolist()):
        expected = reference([*scores[row].tolist(), 0], 0, ids[row].tolist(), Q.log().tolist(), policy)
        assert abs(value - expected) <= (1e-10 if dtype == torch.float64 else 1e-5) * max(1, abs(expected))


def test_the_printed_sign_has_no_minimum() -> None:
    """With the printed minus before the noise term the same sample gives -150.3, and less for larger scores."""
    positive, negative, log_q = torch.tensor(0.0), torch.tensor([50.0, 100.0]), -math.log(3)
    right = nce_loss(positive, negative, log_q_positive=log_q, log_q_negative=log_q).item()
    data = nn.functional.softplus(-(positive - log_q - math.log(2))).item()
    assert right == pytest.approx(151.3, abs=0.05)
    assert data - (right - data) == pytest.approx(-150.3, abs=0.05)
    assert FACTS.convex.status == "contradicted"


# --- masks ---


@each_policy
def test_nothing_left_but_the_positive(policy: str, seed: int) -> None:
    positive, negative = torch.randn(2, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    scores = negative if policy == "mask" else negative + torch.tensor(-math.inf)
    loss = nce_loss(
        positive,
        scores,
        log_q_positive=-1.0,
        log_q_negative=-2.0,
        hits=torch.ones(2, 3, dtype=torch.bool),
        hit_policy=policy,
        reduction="none",
    )
    torch.testing.assert_close(loss, nn.functional.softplus(-(positive + 1 - math.log(3))))
    assert (torch.autograd.grad(loss.sum(), negative)[0] == 0).all()


def test_a_negative_at_minus_infinity_is_a_masked_hit(seed: int) -> None:
    positive, negative, masked = torch.randn(4), torch.randn(4, 5), torch.rand(4, 5) < 0.4
    options: dict[str, Any] = {"log_q_positive": -1.0, "log_q_negative": -2.0}
    by_score = negative.masked_fill(masked, -math.inf).requires_grad_()
    by_hits = negative.clone().requires_grad_()
    loss = nce_loss(positive, by_score, **options)
    other = nce_loss(positive, by_hits, hits=masked, hit_policy="mask", **options)
    torch.testing.assert_close(loss, other)
    for gradient in torch.autograd.grad(loss, by_score) + torch.autograd.grad(other, by_hits):
        assert (gradient[masked] == 0).all()
        assert gradient.isfinite().all()


def test_hits_are_kept_unless_told_otherwise() -> None:
    sample: dict[str, Any] = {"positive": torch.zeros(1), "negative": torch.zeros(1, 2)}
    sample |= {"log_q_positive": -1.0, "log_q_negative": -1.0, "hits": torch.tensor([[True, False]])}
    assert nce_loss(**sample) == nce_loss(**sample, hit_policy="keep")
    assert nce_loss(**sample) > nce_loss(**sample, hit_policy="mask")


# --- shapes, dtypes, transforms ---


@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    num_negatives=st.integers(1, 4),
    policy=st.sampled_from(["keep", "mask"]),
    shared=st.booleans(),
    scalar_q=st.booleans(),
    log_z=st.sampled_from(["number", "scalar", "rows"]),
)
def test_a_batch_is_its_rows(
    batch: list[int], num_negatives: int, policy: str, shared: bool, scalar_q: bool, log_z: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = [num_negatives] if shared else [*batch, num_negatives]
    positive, negative = torch.randn(batch, generator=generator), torch.randn(shape, generator=generator)
    hits = torch.rand(*batch, num_negatives, generator=generator) < 0.3
    q_positive = -1.5 if scalar_q else torch.rand(batch, generator=generator).log()
    q_negative = -0.5 if scalar_q else torch.rand(shape, generator=generator).log()
    z = {"number": 0.7, "scalar": torch.tensor(0.7), "rows": torch.randn(batch, generator=generator)}[log_z]

    def loss(*rows: Any, reduction: str = "none") -> Tensor:
        names = ("positive", "negative", "log_q_positive", "log_q_negative", "hits", "log_z")
        return nce_loss(**dict(zip(names, rows, strict=True)), hit_policy=policy, reduction=reduction)

    def at(part: Any, index: tuple[int, ...], per_row: bool) -> Any:
        return part[index] if isinstance(part, Tensor) and per_row else part

    everything = positive, negative, q_positive, q_negative, hits, z
    per_row = True, not shared, True, not shared, True, log_z == "rows"
    value = loss(*everything)
    assert value.shape == tuple(batch)
    for index in itertools.product(*map(range, batch)):
        row = [at(part, index, of_row) for part, of_row in zip(everything, per_row, strict=True)]
        torch.testing.assert_close(value[index], loss(*row))
    torch.testing.assert_close(loss(*everything, reduction="sum"), value.sum())
    mean = value.mean() if value.numel() else torch.tensor(0.0)
    torch.testing.assert_close(loss(*everything, reduction="mean"), mean)


def sample() -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Scores and log Z0 that ask for gradients, and the rest of a sample with hits."""
    generator = torch.Generator().manual_seed(3)
    positive = torch.randn(3, generator=generator).double().requires_grad_()
    negative = torch.randn(3, 4, generator=generator).double().requires_grad_()
    log_z = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    hits = torch.rand(3, 4, generator=generator) < 0.3
    hits[0] = True
    log_q = torch.rand(3, 4, generator=generator).double().log()
    return positive, negative, log_z, {"log_q_positive": log_q[:, 0], "log_q_negative": log_q, "hits": hits}


def bound(policy: str, rest: dict[str, Any]) -> Callable[..., Tensor]:
    def loss(positive: Tensor, negative: Tensor, log_z: float | Tensor = 0.0) -> Tensor:
        return nce_loss(positive, negative, **rest, hit_policy=policy, log_z=log_z, reduction="none")

    return loss


@each_policy
def test_derivatives_by_finite_differences(policy: str) -> None:
    positive, negative, log_z, rest = sample()
    for z in (log_z, log_z[0].detach().requires_grad_()):
        assert gradcheck(bound(policy, rest), (positive, negative, z))
        assert gradgradcheck(bound(policy, rest), (positive, negative, z))


@each_policy
def test_function_transforms(policy: str) -> None:
    positive, negative, log_z, rest = sample()
    loss = bound(policy, rest)
    arguments = positive, negative, log_z
    expected = torch.autograd.grad(loss(*arguments).sum(), arguments)
    got = torch.func.grad(lambda *parts: loss(*parts).sum(), argnums=(0, 1, 2))(*arguments)
    torch.testing.assert_close(got, expected)

    def row(p: Tensor, n: Tensor, z: Tensor, q: Tensor, h: Tensor) -> Tensor:
        return bound(policy, {"log_q_positive": q[0], "log_q_negative": q, "hits": h})(p, n, z)

    rows = *arguments, rest["log_q_negative"], rest["hits"]
    torch.testing.assert_close(torch.vmap(row)(*rows), loss(*arguments))
    torch.testing.assert_close(torch.vmap(torch.func.grad(row, argnums=1))(*rows), expected[1])
    torch.testing.assert_close(torch.func.jacrev(loss, argnums=1)(*arguments).sum(0), expected[1])
    curvature = torch.vmap(hessian(row, argnums=1))(*rows)
    torch.testing.assert_close(curvature, torch.diag_embed(curvature.diagonal(dim1=-2, dim2=-1)))


@each_policy
def test_compiles_in_one_graph(policy: str) -> None:
    positive, negative, log_z, rest = sample()
    negative = negative.detach().index_fill(1, torch.tensor([2]), -math.inf).requires_grad_()
    loss = bound(policy, rest)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for arguments in ((positive, negative), (positive, negative, log_z)):
        value, expected = compiled(*arguments), loss(*arguments)
        torch.testing.assert_close(value, expected)
        gradients = (torch.autograd.grad(each.sum(), arguments) for each in (value, expected))
        torch.testing.assert_close(*gradients)


def test_nan_stays_visible_where_values_cannot_be_checked() -> None:
    negative = torch.tensor([0.0, math.nan])
    one = lambda n: nce_loss(torch.tensor(0.0), n, log_q_positive=-1.0, log_q_negative=-1.0)  # noqa: E731
    assert torch.vmap(one)(negative.unsqueeze(0)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_policy
def test_half_precision(policy: str, dtype: torch.dtype) -> None:
    positive, negative, log_z, rest = sample()
    positive, negative, log_z = positive.to(dtype), negative.to(dtype), log_z.to(dtype)
    loss = bound(policy, rest)
    exact = loss(positive.double(), negative.double(), log_z.double())
    assert loss(positive, negative, log_z).dtype == dtype
    torch.testing.assert_close(loss(positive, negative, log_z), exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = loss(positive, negative, log_z)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact.float())


# --- the module ---


@each_policy
def test_module_is_the_function(policy: str) -> None:
    positive, negative, _, rest = sample()
    module = NCELoss(log_z=0.5, hit_policy=policy, reduction="none")
    assert torch.equal(module(positive, negative, **rest), bound(policy, rest)(positive, negative, 0.5))
    assert list(module.parameters()) == []


def test_module_learns_log_z() -> None:
    positive, negative, _, rest = sample()
    module = NCELoss(log_z=0.5, learnable=True)
    module(positive, negative, **rest).backward()
    (log_z,) = module.parameters()
    assert log_z.item() == 0.5
    assert log_z.grad is not None
    assert log_z.grad.item() != 0
    assert list(module.state_dict()) == ["log_z"]


def test_a_float32_parameter_keeps_float64_digits() -> None:
    positive, negative, _, rest = sample()
    shift = 0.5 + math.log(4)  # log Z0 and log k
    noise = torch.logaddexp(negative - rest["log_q_negative"] - shift, torch.zeros(()).double()).sum(-1)
    data = torch.logaddexp(rest["log_q_positive"] + shift - positive, torch.zeros(()).double())
    for learnable in (True, False):
        loss = NCELoss(log_z=0.5, learnable=learnable, reduction="none")(positive, negative, **rest)
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, data + noise, rtol=0, atol=1e-13)


# --- what the population minimises ---


def exactly(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


POPULATIONS = [
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 1),
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 2),
    (exactly(0.4, 0.32, 0.28), exactly(0.1, 0.2, 0.7), 4),
    (exactly(0.45, 0.25, 0.2, 0.1), exactly(0.15, 0.4, 0.05, 0.4), 3),
    (exactly(0.8, 0.2), exactly(0.3, 0.7), 10),
]
each_population = pytest.mark.parametrize(("probs", "q", "num_negatives"), POPULATIONS)


def losses_of_all_samples(
    scores: Tensor, probs: Tensor, q: Tensor, num_negatives: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Losses (C, C^k), for every y and every sequence of draws, and the probabilities (C^k,) of the draws."""
    num_classes = len(q)
    ids = torch.tensor(list(itertools.product(range(num_classes), repeat=num_negatives)))
    targets = torch.arange(num_classes).unsqueeze(-1).expand(num_classes, len(ids))
    every = ids.expand(num_classes, *ids.shape)
    return loss_of_classes(scores, targets, every, q.log(), **options), q[ids].prod(-1)


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """The minimiser of a strictly convex risk, by Newton steps that never go up."""
    scores = torch.zeros(num_classes, dtype=torch.float64)
    for _ in range(100):
        slope = torch.func.grad(risk)(scores)
        if slope.norm() < 1e-12:
            break
        step = torch.linalg.solve(hessian(risk)(scores), slope)
        length = 1.0
        while risk(scores - length * step) > risk(scores) + 1e-15:
            length /= 2
        scores = scores - length * step
    assert slope.norm() < 1e-9
    return scores


def minimises(probs: Tensor, q: Tensor, num_negatives: int, **options: Any) -> Tensor:
    def risk(scores: Tensor) -> Tensor:
        losses, weights = losses_of_all_samples(scores, probs, q, num_negatives, **options)
        return (probs * (losses * weights).sum(-1)).sum()

    return minimiser(risk, len(probs))


@each_population
def test_minimiser_is_log_p(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    torch.testing.assert_close(minimises(probs, q, num_negatives), probs.log(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("log_z", [0.7, torch.tensor(-1.3)])
def test_minimiser_moves_with_log_z(log_z: float | Tensor) -> None:
    probs, q, num_negatives = POPULATIONS[1]
    best = minimises(probs, q, num_negatives, log_z=log_z)
    torch.testing.assert_close(best, probs.log() + float(log_z), rtol=0, atol=1e-6)


def test_masking_hits_moves_the_minimiser() -> None:
    probs, q, num_negatives = POPULATIONS[1]
    best = minimises(probs, q, num_negatives, policy="mask")
    assert (best - probs.log()).abs().max() > 0.05


# --- mean and variance ---


@each_population
def test_exact_mean(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    mean = (probs * (losses * weights).sum(-1)).sum()
    torch.testing.assert_close(expected_loss(probs, q, num_negatives), mean, rtol=1e-13, atol=1e-13)


@each_population
def test_exact_variance_for_every_positive(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    means = (losses * weights).sum(-1, keepdim=True)
    spread = ((losses - means) ** 2 * weights).sum(-1)
    torch.testing.assert_close(variance(probs, q, num_negatives).expand(len(q)), spread, rtol=1e-11, atol=1e-13)


def zipf(power: float, num_classes: int) -> Tensor:
    weights = torch.arange(1, num_classes + 1, dtype=torch.float64) ** -power
    return weights / weights.sum()


@pytest.mark.parametrize("num_classes", [5, 60])
@pytest.mark.parametrize("power", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("num_negatives", [1, 6, 40])
def test_mean_and_variance_agree_with_draws(num_classes: int, power: float, num_negatives: int, seed: int) -> None:
    draws = 20_000
    probs, q = zipf(1.5, num_classes), zipf(power, num_classes)
    target = torch.multinomial(probs, draws, replacement=True)
    ids = torch.multinomial(q, draws * num_negatives, replacement=True).view(draws, num_negatives)
    losses = loss_of_classes(probs.log(), target, ids, q.log())
    mean = expected_loss(probs, q, num_negatives).item()
    assert abs(losses.mean().item() - mean) <= 4 * losses.std().item() / math.sqrt(draws)
    fixed = loss_of_classes(probs.log(), torch.zeros_like(target), ids, q.log())
    squares = (fixed - fixed.mean()) ** 2
    spread = variance(probs, q, num_negatives).item()
    assert abs(squares.mean().item() - spread) <= 4 * squares.std().item() / math.sqrt(draws) + 1e-9


def printed_variance(probs: Tensor, q: Tensor, num_negatives: int) -> float:
    return (num_negatives * chi_square(probs, q) / (1 + num_negatives) ** 2).item()


def test_the_printed_variance_holds_only_near_the_noise() -> None:
    """k chi2 / (1 + k)^2 linearises log(k + t) at t = 1: right for small chi2, many times too large otherwise."""
    q = torch.full((50,), 1 / 50, dtype=torch.float64)
    near, far = q * torch.tensor([1.3, 0.7]).repeat(25), zipf(3.0, 50)
    assert chi_square(near, q) == pytest.approx(0.09)
    for k in (1, 5):
        assert printed_variance(near, q, k) / variance(near, q, k).item() == pytest.approx(1, abs=0.12)
        assert printed_variance(far, q, k) / variance(far, q, k).item() > 8
    assert printed_variance(far, q, 100_000) / variance(far, q, 100_000).item() == pytest.approx(1, abs=0.01)


def test_the_divergence_lowers_the_mean_and_tends_to_kl() -> None:
    probs, q = zipf(1.0, 20), zipf(0.0, 20)
    weighted = [(1 + k) * jensen_shannon(probs, q, 1 / (1 + k)).item() for k in (1, 10, 100, 10_000)]
    assert weighted == sorted(weighted)
    assert weighted[-1] == pytest.approx(kl(probs, q).item(), rel=1e-3)
    assert expected_loss(probs, q, 10) < expected_loss(q, q, 10)


def test_the_gap_to_the_full_loss_grows_like_log_k() -> None:
    probs, q = zipf(1.0, 20), zipf(0.0, 20)
    gaps = [expected_loss(probs, q, k).item() for k in (1000, 10_000)]
    assert gaps[1] - gaps[0] == pytest.approx(math.log(10), rel=1e-2)


def test_the_gradient_tends_to_that_of_unnormalised_scores() -> None:
    """exp(s) - e_y, and not softmax(s) - e_y: they differ unless the scores are normalised."""
    scores, q, k = exactly(0.5, -1.0, 0.2), exactly(0.3, 0.3, 0.4), 200_000
    target = torch.tensor([1])
    ids = torch.repeat_interleave(torch.arange(3), (k * q).round().long()).unsqueeze(0)  # as often as expected
    gradient = torch.func.grad(lambda s: loss_of_classes(s, target, ids, q.log()).sum())(scores)
    expected = scores.exp() - torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-4)
    assert (gradient - (scores.softmax(-1) - torch.tensor([0.0, 1.0, 0.0]))).norm() > 0.5
    assert FACTS.fenchel_young.value is False


# --- facts ---


def class_hessian(scores: Tensor, target: int, ids: list[int], q: Tensor) -> Tensor:
    """The Hessian in the scores of the classes, duplicates and hits added up."""
    drawn = torch.tensor([ids])
    return hessian(lambda s: loss_of_classes(s, torch.tensor([target]), drawn, q.log()).sum())(scores)


def test_fact_convex_and_smoothness(seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    q = exactly(0.1, 0.2, 0.3, 0.4)
    for _ in range(50):
        ids = torch.randint(4, (5,)).tolist()
        eigenvalues = torch.linalg.eigvalsh(class_hessian(3 * torch.randn(4).double(), 0, ids, q))
        multiplicity = max([*ids, 0].count(j) for j in range(4))
        assert (eigenvalues[0].item() >= -1e-12) is FACTS.convex.value
        assert eigenvalues[-1] <= multiplicity / 4 + 1e-12
        assert eigenvalues[-1] <= FACTS.smoothness.fn(num_classes=4, num_negatives=5)
    balanced = (5 * q).log()  # every logit 0
    worst = torch.linalg.eigvalsh(class_hessian(balanced, 0, [0] * 5, q))[-1].item()
    assert worst == pytest.approx(FACTS.smoothness.fn(num_classes=4, num_negatives=5))
    distinct = torch.linalg.eigvalsh(class_hessian((3 * q).log(), 0, [1, 2, 3], q))[-1].item()
    assert distinct == pytest.approx(1 / 4)  # what the paper prints for all samples
    assert FACTS.smoothness.printed == "1/4"


def test_fact_shift_invariant(seed: int) -> None:
    scores = torch.randn(4, 5).double()
    moved, still = (loss_of_classes(s, TARGET, IDS, Q.log()) for s in (scores + 0.1, scores))
    assert torch.allclose(moved, still, rtol=0, atol=1e-12) is FACTS.shift_invariant.value


def test_fact_calibrated() -> None:
    ranked = [torch.equal(minimises(*population).argsort(), population[0].argsort()) for population in POPULATIONS]
    assert all(ranked) is FACTS.calibrated.value
    assert FACTS.calibrated.status == "contradicted"


def test_fact_cost_is_the_number_of_scores() -> None:
    assert FACTS.cost.fn is not None
    positive, negative = torch.randn(8), torch.randn(8, 20)
    for num_classes in (10, 10**6):
        cost = FACTS.cost.fn(batch=8, num_classes=num_classes, num_negatives=20)
        assert cost == positive.numel() + negative.numel()
    assert FACTS.cost.value == "constant"


@each_population
def test_fact_bias_and_variance(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    """The mean loss minus that of the full softmax, H(P), and the variance of either."""
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    losses, weights = losses_of_all_samples(probs.log(), probs, q, num_negatives)
    mean = (losses * weights).sum(-1)
    gap = (probs * (mean + probs.log())).sum().item()
    spread = ((losses[0] - mean[0]) ** 2 * weights).sum().item()
    assert FACTS.bias.fn(probs=probs, q=q, num_negatives=num_negatives) == pytest.approx(gap, abs=1e-12)
    assert FACTS.variance.fn(probs=probs, q=q, num_negatives=num_negatives) == pytest.approx(spread, rel=1e-10)
    printed = (1 + num_negatives) * jensen_shannon(probs, q, 1 / (1 + num_negatives)).item()
    assert gap != pytest.approx(printed, rel=0.1)


def test_facts_at_classes_without_probability() -> None:
    """A class that P never takes adds nothing to its entropy, and one that q never draws nothing to the variance."""
    probs, q = exactly(0.6, 0.4, 0.0), exactly(0.5, 0.5, 0.0)
    assert FACTS.bias is not None
    assert FACTS.variance is not None
    assert FACTS.bias.fn is not None
    assert FACTS.variance.fn is not None
    for fn in (FACTS.bias.fn, FACTS.variance.fn):
        whole = fn(probs=probs, q=q, num_negatives=3)
        assert whole == pytest.approx(fn(probs=probs[:2], q=q[:2], num_negatives=3), abs=1e-14)


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
    ({"negative": torch.zeros(3, 3)}, ArgumentError, "`negative`"),
    ({"negative": None}, ArgumentTypeError, "`negative`"),
    ({"positive": torch.zeros(2, dtype=torch.int32)}, ArgumentTypeError, "`positive`"),
    ({"positive": torch.tensor([0.0, -math.inf])}, ArgumentError, "`positive`.*-inf"),
    ({"positive": torch.tensor([0.0, math.nan])}, ArgumentError, "`positive`.*nan"),
    ({"negative": torch.tensor([0.0, math.nan, 1.0])}, ArgumentError, "`negative`.*nan"),
    ({"negative": torch.tensor([0.0, math.inf, 1.0])}, ArgumentError, "`negative`.*inf"),
    ({"log_q_positive": None}, ArgumentError, "`log_q_positive`"),
    ({"log_q_negative": None}, ArgumentError, "`log_q_negative`"),
    ({"log_q_positive": -math.inf}, ArgumentError, "`log_q_positive`.*q = 0"),
    ({"log_q_negative": torch.tensor([0.0, -math.inf, 0.0])}, ArgumentError, "`log_q_negative`.*q = 0"),
    ({"log_q_negative": torch.zeros(2, 4)}, ArgumentError, "`log_q_negative`"),
    ({"log_q_negative": "uniform"}, ArgumentTypeError, "`log_q_negative`"),
    ({"hits": None, "hit_policy": "mask"}, ArgumentError, "`hits`"),
    ({"hits": torch.zeros(2, 3)}, ArgumentTypeError, "`hits`"),
    ({"hits": torch.zeros(2, 4, dtype=torch.bool)}, ArgumentError, "`hits`"),
    ({"hit_policy": "remove"}, ArgumentError, "`hit_policy`"),
    ({"reduction": "average"}, ArgumentError, "`reduction`"),
    ({"log_z": torch.zeros(3)}, ArgumentError, "`log_z`"),
    ({"log_z": torch.zeros(3, 2)}, ArgumentError, "`log_z`"),
    ({"log_z": "learn"}, ArgumentTypeError, "`log_z`"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nce_loss(**(GOOD | changes))


@pytest.mark.parametrize("name", ["log_q_positive", "log_q_negative"])
def test_noise_must_be_given(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        nce_loss(**{key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(("option", "value"), [("reduction", "average"), ("hit_policy", "remove")])
def test_a_module_refuses_at_once(option: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{option}`"):
        NCELoss(**{option: value})  # type: ignore[arg-type]
