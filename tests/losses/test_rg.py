"""RG: a squared loss in disguise, from scores and from moments of the class vectors."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from manymax import (
    FAMILY,
    ArgumentError,
    ArgumentTypeError,
    RGLoss,
    class_moments,
    rg,
    rg_log_partition,
    rg_log_partition_from_moments,
    rg_loss,
)

mp = mpmath.mp.clone()
mp.dps = 50
Number = Any  # mpmath has no types

MEMBER = FAMILY["rg"]
FACTS = MEMBER.facts
INF = math.inf
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


def hessian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Reverse over reverse: torch's own takes a forward mode that warns about its insides."""
    return torch.func.jacrev(torch.func.grad(function))


# --- values and gradients, against the definition in 50 digits ---


def reference_partition(scores: list[float]) -> Number:
    """log C + mean + variance / 2 over the live classes."""
    live = [mp.mpf(score) for score in scores if score != -INF]
    mean = mp.fsum(live) / len(live)
    return mp.log(len(live)) + mean + mp.fsum((score - mean) ** 2 for score in live) / (2 * len(live))


def reference_loss(scores: list[float], weights: list[Number]) -> Number:
    """sum_i t_i (Z(s) - s_i) for target weights t."""
    partition = reference_partition(scores)
    return mp.fsum(t * (partition - mp.mpf(score)) for t, score in zip(weights, scores, strict=True) if t)


def reference_gradient(scores: list[float], weights: list[Number]) -> list[Number]:
    """|t| (1 + s - mean) / C - t, and 0 at masked classes."""
    live = [mp.mpf(score) for score in scores if score != -INF]
    mean, total = mp.fsum(live) / len(live), mp.fsum(weights)
    return [
        total * (1 + mp.mpf(score) - mean) / len(live) - t if score != -INF else mp.mpf(0)
        for t, score in zip(weights, scores, strict=True)
    ]


def smoothed(weights: list[float], scores: list[float], class_weight: list[float], smoothing: float) -> list[Number]:
    """The target weights after class weights and smoothing, as in torch's cross entropy."""
    live = sum(score != -INF for score in scores)
    share = mp.mpf(smoothing) * mp.fsum(weights) / live
    kept = 1 - mp.mpf(smoothing)
    return [
        mp.mpf(w) * (kept * t + (share if score != -INF else 0))
        for t, w, score in zip(weights, class_weight, scores, strict=True)
    ]


SCORES = torch.tensor(
    [[0.3, -1.2, 2.5, 0.0, -0.7], [40.0, 1.0, -3.0, 2.0, 0.1], [-2.0, -INF, 1.0, -INF, -1.0], [0.1] * 5]
)
POSITIVES = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0])


def targets(kind: str, dtype: torch.dtype) -> Tensor:
    """POSITIVES as ids (one each), padded ids, bool rows, or float rows."""
    if kind == "ids":
        return torch.tensor([0, 3, 4, 2])
    if kind == "padded":
        return torch.tensor([[0, -100, 0, -100], [4, 2, 3, 4], [-100, 0, 4, -100], [-100] * 4])
    if kind == "bool":
        return POSITIVES
    return (POSITIVES.double() / POSITIVES.sum(-1, keepdim=True).clamp(min=1)).to(dtype)


def weights_of(kind: str, dtype: torch.dtype) -> list[list[float]]:
    if kind == "ids":
        return torch.nn.functional.one_hot(targets("ids", dtype), 5).tolist()
    return (targets("float", dtype) if kind == "float" else POSITIVES).tolist()


@each_dtype
@pytest.mark.parametrize("kind", ["ids", "padded", "bool", "float"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradient_in_50_digits(
    dtype: torch.dtype, tolerance: float, kind: str, smoothing: float, weighted: bool
) -> None:
    scores = SCORES.to(dtype).requires_grad_()
    weight = WEIGHT.to(dtype) if weighted else None
    loss = rg_loss(scores, targets(kind, dtype), weight=weight, label_smoothing=smoothing, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    class_weight = WEIGHT.tolist() if weighted else [1.0] * 5
    for row, plain in enumerate(weights_of(kind, dtype)):
        values = scores[row].tolist()
        weights = smoothed(plain, values, class_weight, smoothing)
        expected = reference_loss(values, weights)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(gradient[row].tolist(), reference_gradient(values, weights), strict=True):
            assert abs(entry - slope) <= tolerance * max(1, abs(slope))


@each_dtype
@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3])
def test_an_offset_costs_no_digits(dtype: torch.dtype, tolerance: float, offset: float, seed: int) -> None:
    scores = ((torch.randn(20, 300) * 64).round() / 64).to(dtype) + offset  # the sum is a float32 number too
    target = torch.randint(300, (20,))
    loss = rg_loss(scores, target, reduction="none").tolist()
    probs = rg(scores)
    for row, values in enumerate(scores.tolist()):
        weights = [float(j == target[row]) for j in range(300)]
        assert abs(loss[row] - reference_loss(values, weights)) <= tolerance
        slopes = reference_gradient(values, weights)
        assert (
            max(abs(p - t - slope) for p, t, slope in zip(probs[row].tolist(), weights, slopes, strict=True))
            <= tolerance
        )


@each_dtype
def test_scores_of_ten_thousand(dtype: torch.dtype, tolerance: float) -> None:
    scores = torch.tensor(list(itertools.product([-1e4, 0.0, 1e4], repeat=3)), dtype=dtype, requires_grad=True)
    loss = rg_loss(scores, torch.zeros(27, dtype=torch.long), reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    for values, value, slopes in zip(scores.tolist(), loss.tolist(), gradient.tolist(), strict=True):
        expected = reference_loss(values, [1.0, 0.0, 0.0])
        assert abs(value - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(slopes, reference_gradient(values, [1.0, 0.0, 0.0]), strict=True):
            assert abs(entry - slope) <= tolerance * max(1, abs(slope))


@each_dtype
def test_map_and_log_partition_in_50_digits(dtype: torch.dtype, tolerance: float) -> None:
    scores = SCORES.to(dtype)
    for row, values in enumerate(scores.tolist()):
        expected = reference_partition(values)
        assert abs(rg_log_partition(scores)[row].item() - expected) <= tolerance * max(1, abs(expected))
        first = [1, 0, 0, 0, 0]
        for prob, t, slope in zip(rg(scores)[row].tolist(), first, reference_gradient(values, first), strict=True):
            assert abs(prob - t - slope) <= tolerance * max(1, abs(slope))
    torch.testing.assert_close(rg(scores).sum(-1), torch.ones(4, dtype=dtype))
    torch.testing.assert_close(rg(scores.mT, dim=0).mT, rg(scores))


@given(
    scores=st.lists(st.floats(-20, 20), min_size=1, max_size=8),
    masked=st.integers(0, 3),
    kind=st.sampled_from(["ids", "bool", "float"]),
    smoothing=st.sampled_from([0.0, 0.2]),
    data=st.data(),
)
def test_normalized_is_a_squared_distance(
    scores: list[float], masked: int, kind: str, smoothing: float, data: st.DataObject
) -> None:
    """(C / 2) ||p - t||^2 over the live classes, whatever form t comes in."""
    size = len(scores)
    positives = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    row = torch.tensor([*scores, *[-INF] * masked], dtype=torch.float64)
    many_hot = torch.zeros(size + masked, dtype=torch.bool).index_fill(0, torch.tensor(positives), True)
    t = many_hot / many_hot.sum().double()
    target = {"ids": torch.tensor(positives), "bool": many_hot, "float": t}[kind]
    live = row > -INF
    mixed = (1 - smoothing) * t + smoothing * live / size
    expected = size / 2 * (rg(row) - mixed).square().sum()
    loss = rg_loss(row, target, multilabel="normalized", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert loss >= -1e-10


def test_it_is_a_squared_loss(seed: int) -> None:
    """||s - mean - (C e_y - 1)||^2 / (2 C) + log C - (C - 1) / 2, so it can be negative."""
    scores, target = 2 * torch.randn(7, 4).double(), torch.randint(4, (7,))
    corner = 4 * torch.nn.functional.one_hot(target, 4) - 1
    distance = (scores - scores.mean(-1, keepdim=True) - corner).square().sum(-1) / 8
    torch.testing.assert_close(rg_loss(scores, target, reduction="none"), distance + math.log(4) - 3 / 2)
    torch.testing.assert_close(rg_loss(corner.double(), target), torch.tensor(math.log(4) - 3 / 2).double())


def test_one_class_and_equal_scores() -> None:
    alone = torch.tensor([[3.0]], requires_grad=True)
    loss = rg_loss(alone, torch.tensor([0]))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, alone)[0].item() == 0
    assert rg(alone).item() == 1
    torch.testing.assert_close(rg(torch.full((4,), -7.0)), torch.full((4,), 0.25))


def test_reductions_and_ignored_rows(seed: int) -> None:
    scores, target, weight = torch.randn(6, 4), torch.tensor([0, 3, -100, 2, 2, 1]), torch.rand(4)
    rows = rg_loss(scores, target, weight=weight, reduction="none")
    assert rows[2] == 0
    torch.testing.assert_close(rg_loss(scores, target, weight=weight, reduction="sum"), rows.sum())
    kept = weight[target.clamp(min=0)] * (target >= 0)
    torch.testing.assert_close(rg_loss(scores, target, weight=weight), rows.sum() / kept.sum())
    other = rg_loss(scores, torch.where(target == -100, 9, target), weight=weight, ignore_index=9)
    torch.testing.assert_close(other, rg_loss(scores, target, weight=weight))


@given(batch=st.lists(st.integers(0, 3), max_size=3), several=st.booleans())
def test_a_batch_is_its_rows(batch: list[int], several: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(*batch, 5, generator=generator)
    target = torch.randint(5, [*batch, 3] if several else batch, generator=generator)
    value = rg_loss(scores, target, reduction="none")
    assert value.shape == tuple(batch)
    for index in itertools.product(*map(range, batch)):
        torch.testing.assert_close(value[index], rg_loss(scores[index], target[index], reduction="none"))


def test_foundation_is_the_loss(seed: int) -> None:
    scores, target = torch.randn(5, 6).double(), torch.randint(6, (5,))
    fy = MEMBER.fenchel_young()
    torch.testing.assert_close(fy.loss(scores, target), rg_loss(scores, target))
    rows = torch.nn.functional.one_hot(target, 6).double()
    normalized = rg_loss(scores, target, multilabel="normalized")
    torch.testing.assert_close(fy.loss(scores, rows, multilabel="normalized"), normalized)
    torch.testing.assert_close(MEMBER.conjugate(scores), rg_log_partition(scores))
    inner = (rg(scores) * scores).sum(-1) - MEMBER.omega(rg(scores))
    torch.testing.assert_close(inner, rg_log_partition(scores))
    other = rg(torch.randn(5, 6).double())
    torch.testing.assert_close(MEMBER.bregman(rg(scores), other), 3 * (rg(scores) - other).square().sum(-1))


def test_module_is_the_function(seed: int) -> None:
    scores, target, weight = torch.randn(4, 5), torch.randint(5, (4,)), torch.rand(5)
    module = RGLoss(weight, label_smoothing=0.1, reduction="sum", multilabel="normalized")
    expected = rg_loss(scores, target, weight=weight, label_smoothing=0.1, reduction="sum", multilabel="normalized")
    assert module(scores, target) == expected


# --- from moments ---


def queries_and_classes(bias: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    sizes = [(6, 3), (9, 3)] + ([(9,)] if bias else [])
    return tuple(torch.randn(size, generator=generator).double().requires_grad_() for size in sizes)


def direct_loss(target: Tensor, input: Tensor, *linear: Tensor) -> Tensor:
    return rg_loss(torch.nn.functional.linear(input, *linear), target, reduction="none")


def loss_from_moments(target: Tensor, input: Tensor, *linear: Tensor) -> Tensor:
    positive = (input * linear[0][target]).sum(-1)
    if len(linear) == 2:
        positive = positive + linear[1][target]
    return rg_log_partition_from_moments(input, class_moments(*linear)) - positive


@pytest.mark.parametrize("bias", [False, True])
def test_moments_give_the_same_loss_and_gradients(bias: bool) -> None:
    arguments, target = queries_and_classes(bias), torch.tensor([0, 8, 3, 3, 5, 1])
    direct, quick = direct_loss(target, *arguments), loss_from_moments(target, *arguments)
    torch.testing.assert_close(quick, direct, rtol=1e-12, atol=1e-12)
    share = torch.arange(1.0, 7.0).double()  # so that the rows count differently
    gradients = [torch.autograd.grad((share * loss).sum(), arguments) for loss in (quick, direct)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_moments_in_50_digits(bias: bool) -> None:
    input, weight, *rest = (part.detach() for part in queries_and_classes(bias))
    values = rg_log_partition_from_moments(input, class_moments(weight, *rest))
    for x, value in zip(input.tolist(), values.tolist(), strict=True):
        offsets = rest[0].tolist() if bias else [0.0] * 9
        scores = [
            mp.fsum(mp.mpf(a) * mp.mpf(b) for a, b in zip(x, w, strict=True)) + mp.mpf(b0)
            for w, b0 in zip(weight.tolist(), offsets, strict=True)
        ]
        assert abs(value - reference_partition(scores)) <= 1e-12


@pytest.mark.parametrize("bias", [False, True])
def test_derivatives_of_the_moments_form(bias: bool) -> None:
    arguments, target = queries_and_classes(bias), torch.tensor([0, 8, 3, 3, 5, 1])
    loss = lambda *parts: loss_from_moments(target, *parts)  # noqa: E731
    assert gradcheck(loss, arguments)
    assert gradgradcheck(loss, arguments)


def test_shape_of_the_queries_is_kept() -> None:
    _, weight = queries_and_classes(False)
    moments = class_moments(weight)
    input = torch.randn(2, 4, 3).double()
    values = rg_log_partition_from_moments(input, moments)
    torch.testing.assert_close(values, rg_log_partition(input @ weight.T))
    torch.testing.assert_close(rg_log_partition_from_moments(input[0, 0], moments), values[0, 0])


class Largest(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.entries = max(self.entries, part.numel())
        return out


def test_no_table_of_scores_is_made() -> None:
    batch, num_classes, dim = 50, 400, 4
    input = torch.randn(batch, dim, requires_grad=True)
    weight, bias = torch.randn(num_classes, dim, requires_grad=True), torch.randn(num_classes, requires_grad=True)
    target = torch.zeros(batch, dtype=torch.long)
    with Largest() as quick:
        loss_from_moments(target, input, weight, bias).sum().backward()
    with Largest() as direct:
        direct_loss(target, input, weight, bias).sum().backward()
    assert quick.entries == num_classes * (dim + 1)
    assert direct.entries >= batch * num_classes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_in_half_precision(dtype: torch.dtype) -> None:
    input, weight, bias = (part.detach().to(dtype) for part in queries_and_classes(True))
    exact = rg_log_partition_from_moments(input.double(), class_moments(weight.double(), bias.double()))
    plain = rg_log_partition_from_moments(input, class_moments(weight, bias))
    torch.testing.assert_close(plain, exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = rg_log_partition_from_moments(input, class_moments(weight, bias))
        single = rg_log_partition_from_moments(input.float(), class_moments(weight.float(), bias.float()))
    for value in (mixed, single):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, exact.float())


# --- dtypes and transforms ---

CASES = [
    pytest.param(SCORES[:1, :], torch.tensor([3]), {}, id="ids"),
    pytest.param(SCORES[[0, 2]], POSITIVES[[0, 2]], {}, id="masked"),
    pytest.param(SCORES[[0, 2]], POSITIVES[[0, 2]], {"label_smoothing": 0.2}, id="smoothed"),
    pytest.param(SCORES[[0, 1]], POSITIVES[[0, 1]], {"multilabel": "normalized"}, id="normalized"),
    pytest.param(SCORES[[0, 1]], torch.tensor([2, 4]), {"weight": WEIGHT}, id="weighted"),
]


@pytest.mark.parametrize(("scores", "target", "options"), CASES)
def test_derivatives_by_finite_differences(scores: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    live = scores > -INF  # finite differences cannot step from -inf
    inputs = scores[live].double().requires_grad_()

    def loss(values: Tensor) -> Tensor:
        row = torch.full(scores.shape, -INF, dtype=torch.float64).masked_scatter(live, values)
        return rg_loss(row, target, reduction="none", **options)

    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs)


@pytest.mark.parametrize(("scores", "target", "options"), CASES)
def test_function_transforms(scores: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    inputs = scores.double().requires_grad_()
    loss = lambda s, t: rg_loss(s, t, reduction="none", **options)  # noqa: E731
    (expected,) = torch.autograd.grad(loss(inputs, target).sum(), inputs)
    total = torch.func.grad(lambda s: loss(s, target).sum())(inputs)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.vmap(loss)(inputs, target), loss(inputs, target))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(inputs, target), expected)
    torch.testing.assert_close(torch.func.jacrev(lambda s: loss(s, target))(inputs).sum(0), expected)


@pytest.mark.parametrize(("scores", "target", "options"), [CASES[1], CASES[3]])
def test_compiles_in_one_graph(scores: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    inputs = scores.double().requires_grad_()
    loss = lambda s: rg_loss(s, target, **options)  # noqa: E731
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(inputs)
    torch.testing.assert_close(value, loss(inputs))
    torch.testing.assert_close(torch.autograd.grad(value, inputs), torch.autograd.grad(loss(inputs), inputs))


def test_moments_compile_in_one_graph() -> None:
    arguments, target = queries_and_classes(True), torch.tensor([0, 8, 3, 3, 5, 1])
    loss = lambda *parts: loss_from_moments(target, *parts).sum()  # noqa: E731
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(value, loss(*arguments))
    expected = torch.autograd.grad(loss(*arguments), arguments)
    torch.testing.assert_close(torch.autograd.grad(value, arguments), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    scores, target = SCORES[[0, 2]].to(dtype), POSITIVES[[0, 2]]
    exact = rg_loss(scores.double(), target)
    assert rg_loss(scores, target).dtype == rg(scores).dtype == rg_log_partition(scores).dtype == dtype
    torch.testing.assert_close(rg_loss(scores, target), exact.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = rg_loss(scores, target)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact.float())


# --- how good the expansion is ---


def test_error_series_for_small_scores(seed: int) -> None:
    """-mu3 / 6 - kappa4 / 24, and what is left is of fifth order."""
    shape = torch.randn(12).double()
    left = []
    for size in (0.2, 0.1):
        scores = size * shape
        d = scores - scores.mean()
        third, second, fourth = (d**3).mean(), (d**2).mean(), (d**4).mean()
        error = rg_log_partition(scores) - scores.logsumexp(-1)
        left.append((error + third / 6 + (fourth - 3 * second**2) / 24).abs().item())
        assert left[-1] < 0.2 * error.abs().item() + 1e-6
    assert left[1] < left[0] / 16


def bound(scores: Tensor) -> float:
    assert FACTS.bias is not None
    assert FACTS.bias.fn is not None
    return FACTS.bias.fn(scores=scores)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=10))
def test_fact_bias_is_a_bound(scores: list[float]) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    assert abs(rg_log_partition(row) - row.logsumexp(-1)) <= bound(row) + 1e-12


def test_fact_bias_is_reached() -> None:
    worst = 0.0
    for ones in range(1, 100):
        row = torch.zeros(100, dtype=torch.float64)
        row[:ones] = 0.01
        worst = max(worst, abs(rg_log_partition(row) - row.logsumexp(-1)).item() / bound(row))
    assert 0.999 < worst <= 1


@pytest.mark.parametrize(("num_classes", "error"), [(10, -0.23), (100, -11), (1000, -112), (40_981, -3380)])
def test_the_error_at_its_own_optimum_is_not_negligible(num_classes: int, error: float) -> None:
    probs = 1 / torch.arange(1, num_classes + 1, dtype=torch.float64)
    scores = num_classes * probs / probs.sum()
    assert (rg_log_partition(scores) - scores.logsumexp(-1)).item() == pytest.approx(error, rel=0.015)
    assert FACTS.bias is not None
    assert FACTS.bias.status == "contradicted"


# --- what the population minimises ---


def minimiser(risk: Callable[[Tensor], Tensor], num_classes: int) -> Tensor:
    """One Newton step, which is all that a quadratic needs, with the scores centred."""
    start = torch.zeros(num_classes, dtype=torch.float64)
    best = start - torch.linalg.pinv(hessian(risk)(start)) @ torch.func.grad(risk)(start)
    assert torch.func.grad(risk)(best).norm() < 1e-12
    return best - best.mean()


def test_minimiser_is_affine_in_p() -> None:
    probs = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
    best = minimiser(lambda s: (probs * rg_loss(s.expand(4, 4), torch.arange(4), reduction="none")).sum(), 4)
    torch.testing.assert_close(best, 4 * probs - 1)
    assert torch.equal(best.argsort(), probs.argsort()) is FACTS.calibrated.value
    torch.testing.assert_close(rg(best), probs)


def test_minimiser_with_several_positives() -> None:
    """C E[y] / E|Y| + const for the sum: P({a}) = .45, P({b, c}) = .55 ranks b and c first; C E[y/|y|] normalized."""
    labels = torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.bool)
    chance = torch.tensor([0.45, 0.55], dtype=torch.float64)

    def risk(scores: Tensor, multilabel: str) -> Tensor:
        return (chance * rg_loss(scores.expand(2, 3), labels, multilabel=multilabel, reduction="none")).sum()

    mean = (chance.unsqueeze(-1) * labels).sum(0)
    torch.testing.assert_close(minimiser(lambda s: risk(s, "sum"), 3), 3 * mean / mean.sum() - 1)
    normalized = minimiser(lambda s: risk(s, "normalized"), 3)
    torch.testing.assert_close(normalized, 3 * torch.tensor([0.45, 0.275, 0.275]).double() - 1, rtol=0, atol=1e-6)


# --- facts ---


def test_fact_order(seed: int) -> None:
    scores = torch.randn(50, 6)
    assert FACTS.order_preservation is not None
    assert FACTS.order_preservation.value == (
        "strict" if torch.equal(rg(scores).argsort(-1), scores.argsort(-1)) else "none"
    )
    assert rg(torch.tensor([5.0, 0.0, 0.0])).min() < 0  # it is not on the simplex


def test_fact_fenchel_young(seed: int) -> None:
    scores, t = torch.randn(5, 4).double().requires_grad_(), torch.rand(5, 4).double()
    t = t / t.sum(-1, keepdim=True)
    loss = rg_loss(scores, t, multilabel="normalized", reduction="sum")
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.allclose(gradient, rg(scores) - t) is FACTS.fenchel_young.value
    at_target = rg_loss(4 * t, t, multilabel="normalized", reduction="none")
    torch.testing.assert_close(at_target, torch.zeros(5).double())


@pytest.mark.parametrize("num_classes", [1, 2, 7])
def test_fact_convex_and_smoothness(num_classes: int, seed: int) -> None:
    assert FACTS.smoothness.fn is not None
    for size in (0.1, 100.0):
        scores = size * torch.randn(num_classes).double()
        eigenvalues = torch.linalg.eigvalsh(hessian(lambda s: rg_loss(s, torch.tensor(0)))(scores))
        assert (eigenvalues[0].item() >= -1e-12) is FACTS.convex.value
        assert eigenvalues[-1].item() == pytest.approx(FACTS.smoothness.fn(num_classes=num_classes), abs=1e-12)


def test_fact_shift_invariant(seed: int) -> None:
    scores, target = torch.randn(5, 4).double(), torch.randint(4, (5,))
    same = torch.allclose(rg_loss(scores + 3.7, target), rg_loss(scores, target), rtol=0, atol=1e-12)
    assert same is FACTS.shift_invariant.value


def test_fact_cost_and_variance() -> None:
    assert FACTS.cost.fn is not None
    assert FACTS.variance is not None
    assert FACTS.cost.fn(batch=3, num_classes=20) == torch.zeros(3, 20).numel()
    assert FACTS.cost.value == "linear"
    repeated = torch.stack([rg_loss(SCORES[:1], torch.tensor([2])) for _ in range(3)])
    assert repeated.var().item() == FACTS.variance.value


# --- bad input ---

ROWS = torch.zeros(2, 3)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: rg_loss(torch.tensor([0.0, math.nan, 1.0]), torch.tensor(0)), ArgumentError, "nan"),
    (lambda: rg_loss(torch.tensor([0.0, INF, 1.0]), torch.tensor(0)), ArgumentError, r"\+inf"),
    (lambda: rg_loss(torch.tensor([0.0, -INF, 1.0]), torch.tensor(1)), ArgumentError, "`target`"),
    (lambda: rg_loss(torch.full((3,), -INF), torch.tensor(1)), ArgumentError, "`scores`.*masked"),
    (lambda: rg(torch.tensor([0.0, math.nan, 1.0])), ArgumentError, "nan"),
    (lambda: rg(torch.full((3,), -INF)), ArgumentError, "masked"),
    (lambda: rg_log_partition(torch.tensor([0.0, math.nan, 1.0])), ArgumentError, "nan"),
    (lambda: rg_log_partition(torch.zeros(2, 0)), ArgumentError, "`scores`"),
    (lambda: rg(torch.zeros(3, dtype=torch.long)), ArgumentTypeError, "`scores`"),
    (lambda: rg_loss(ROWS, torch.zeros(3, dtype=torch.long)), ArgumentError, "`target`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 3])), ArgumentError, "`target`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), weight=torch.ones(2)), ArgumentError, "`weight`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), reduction="average"), ArgumentError, "`reduction`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), multilabel="mean"), ArgumentError, "`multilabel`"),
    (lambda: rg_loss(ROWS, torch.tensor([0, 1]), label_smoothing=1.5), ArgumentError, "`label_smoothing`"),
    (lambda: class_moments(torch.zeros(3)), ArgumentError, "`linear_weight`"),
    (lambda: class_moments(torch.zeros(0, 3)), ArgumentError, "`linear_weight`"),
    (lambda: class_moments(torch.zeros(3, 2, dtype=torch.long)), ArgumentTypeError, "`linear_weight`"),
    (lambda: class_moments([[0.0]]), ArgumentTypeError, "`linear_weight`"),  # type: ignore[arg-type]
    (lambda: class_moments(torch.zeros(3, 2), torch.zeros(2)), ArgumentError, "`linear_bias`"),
    (lambda: class_moments(torch.zeros(3, 2), torch.zeros(3).long()), ArgumentTypeError, "`linear_bias`"),
    (lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 4))), ArgumentError, "`input`"),
    (lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 2))), ArgumentError, "`input`"),
    (
        lambda: rg_log_partition_from_moments(ROWS, class_moments(torch.zeros(5, 2), torch.zeros(5))),
        ArgumentError,
        "`input`",
    ),
    (
        lambda: rg_log_partition_from_moments(torch.tensor(0.0), class_moments(torch.zeros(5, 1))),
        ArgumentError,
        "`input`",
    ),
    (
        lambda: rg_log_partition_from_moments(ROWS.long(), class_moments(torch.zeros(5, 3))),
        ArgumentTypeError,
        "`input`",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_nan_stays_visible_where_values_cannot_be_checked() -> None:
    scores = torch.tensor([[0.0, math.nan, 1.0]])
    assert torch.vmap(rg_log_partition)(scores).isnan().all()


def test_moments_know_no_masks() -> None:
    with pytest.raises(ArgumentError, match="`linear_bias` must be finite"):
        class_moments(torch.ones(3, 2), torch.tensor([0.0, -torch.inf, 0.0]))
