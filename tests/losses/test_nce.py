"""Noise contrastive estimation: values and gradients in 50 digits, masks, shapes, dtypes, module, wrong arguments."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import manymax
from manymax import ArgumentError, ArgumentTypeError, NCELoss, nce_loss
from manymax.samplers import UniformSampler
from tests.losses.nce_cases import FACTS, IDS, TARGET, Q, each_policy, hessian, loss_of_classes, loss_on_draws, sample

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types


# --- values and gradients, against the definition in 50 digits ---


def high_precision_loss(scores: list[Number], target: int, ids: list[int], log_q: list[float], policy: str) -> Number:
    """-log P(data | y) - sum_j log P(noise | j), with odds exp(s) / Z0 to k q; log Z0 is the last of `scores`."""
    *scores, log_z = scores

    def odds(j: int) -> Number:
        return mp.exp(mp.mpf(scores[j]) - log_z) / (len(ids) * mp.exp(log_q[j]))

    kept = [j for j in ids if policy == "keep" or j != target]
    data, noise = odds(target), [odds(j) for j in kept]
    return -mp.log(data / (1 + data)) - mp.fsum(mp.log(1 / (1 + each)) for each in noise)


def high_precision_gradient(scores: list[Number], *draws: Any) -> list[Number]:
    """The gradient of `high_precision_loss` in the scores and log Z0, by numerical differentiation."""

    def along(i: int) -> Number:
        return mp.diff(lambda x: high_precision_loss([*scores[:i], x, *scores[i + 1 :]], *draws), scores[i])

    return [along(i) for i in range(len(scores))]


SCORES = torch.tensor([[0.3, -1.2, 2.5, 0.0, -0.7], [4.0, 1.0, -3.0, 2.0, 0.1], [-2.0, 0.5, 1.0, 3.0, -1.0], [0.1] * 5])


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
        expected = high_precision_loss(*arguments)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        slopes.append(high_precision_gradient(*arguments))
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
        expected = high_precision_loss([*scores[row].tolist(), 0], 0, ids[row].tolist(), Q.log().tolist(), policy)
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


@each_policy
def test_derivatives_by_finite_differences(policy: str) -> None:
    positive, negative, log_z, draws = sample()
    for z in (log_z, log_z[0].detach().requires_grad_()):
        assert gradcheck(loss_on_draws(policy, draws), (positive, negative, z))
        assert gradgradcheck(loss_on_draws(policy, draws), (positive, negative, z))


@each_policy
def test_function_transforms(policy: str) -> None:
    positive, negative, log_z, draws = sample()
    loss = loss_on_draws(policy, draws)
    arguments = positive, negative, log_z
    expected = torch.autograd.grad(loss(*arguments).sum(), arguments)
    got = torch.func.grad(lambda *parts: loss(*parts).sum(), argnums=(0, 1, 2))(*arguments)
    torch.testing.assert_close(got, expected)

    def row(p: Tensor, n: Tensor, z: Tensor, q: Tensor, h: Tensor) -> Tensor:
        return loss_on_draws(policy, {"log_q_positive": q[0], "log_q_negative": q, "hits": h})(p, n, z)

    rows = *arguments, draws["log_q_negative"], draws["hits"]
    torch.testing.assert_close(torch.vmap(row)(*rows), loss(*arguments))
    torch.testing.assert_close(torch.vmap(torch.func.grad(row, argnums=1))(*rows), expected[1])
    torch.testing.assert_close(torch.func.jacrev(loss, argnums=1)(*arguments).sum(0), expected[1])
    curvature = torch.vmap(hessian(row, argnums=1))(*rows)
    torch.testing.assert_close(curvature, torch.diag_embed(curvature.diagonal(dim1=-2, dim2=-1)))


@each_policy
def test_compiles_in_one_graph(policy: str) -> None:
    positive, negative, log_z, draws = sample()
    negative = negative.detach().index_fill(1, torch.tensor([2]), -math.inf).requires_grad_()
    loss = loss_on_draws(policy, draws)
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
    positive, negative, log_z, draws = sample()
    positive, negative, log_z = positive.to(dtype), negative.to(dtype), log_z.to(dtype)
    loss = loss_on_draws(policy, draws)
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
    positive, negative, _, draws = sample()
    module = NCELoss(log_z=0.5, hit_policy=policy, reduction="none")
    assert torch.equal(module(positive, negative, **draws), loss_on_draws(policy, draws)(positive, negative, 0.5))
    assert list(module.parameters()) == []


def test_module_learns_log_z() -> None:
    positive, negative, _, draws = sample()
    module = NCELoss(log_z=0.5, learnable=True)
    module(positive, negative, **draws).backward()
    (log_z,) = module.parameters()
    assert log_z.item() == 0.5
    assert log_z.grad is not None
    assert log_z.grad.item() != 0
    assert list(module.state_dict()) == ["log_z"]


def test_a_float32_parameter_keeps_float64_digits() -> None:
    positive, negative, _, draws = sample()
    shift = 0.5 + math.log(4)  # log Z0 and log k
    noise = torch.logaddexp(negative - draws["log_q_negative"] - shift, torch.zeros(()).double()).sum(-1)
    data = torch.logaddexp(draws["log_q_positive"] + shift - positive, torch.zeros(()).double())
    for learnable in (True, False):
        loss = NCELoss(log_z=0.5, learnable=learnable, reduction="none")(positive, negative, **draws)
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, data + noise, rtol=0, atol=1e-13)


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
    ({"log_q_positive": None}, ArgumentTypeError, "`log_q_positive`"),
    ({"log_q_negative": None}, ArgumentTypeError, "`log_q_negative`"),
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_z_that_is_no_number_is_refused(bad: float) -> None:
    scores, q = (torch.zeros(2), torch.zeros(2, 3)), {"log_q_positive": -1.0, "log_q_negative": -1.0}
    for log_z in (bad, torch.tensor(bad), torch.tensor([0.0, bad])):
        with pytest.raises(ArgumentError, match=r"`log_z` must be (finite|a number)"):
            nce_loss(*scores, log_z=log_z, **q)
    vectors, sampler = (torch.zeros(2, 2), torch.zeros(5, 2), torch.tensor([0, 1])), UniformSampler(5)
    with pytest.raises(ArgumentError, match=r"`log_z` must be (finite|a number)"):
        manymax.linear_nce_loss(*vectors, sampler, 3, log_z=torch.tensor(bad))
    for module in (lambda: NCELoss(log_z=bad), lambda: manymax.LinearNCELoss(2, 5, log_z=bad)):
        with pytest.raises(ArgumentError, match="`log_z` must be a"):
            module()
