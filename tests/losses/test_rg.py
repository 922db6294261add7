"""RG on scores: values and gradients in 50 digits, targets, dtypes, function transforms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import (
    RGLoss,
    rg,
    rg_log_partition,
    rg_loss,
)
from tests.losses.rg_cases import (
    INF,
    MEMBER,
    POSITIVES,
    SCORES,
    WEIGHT,
    Number,
    each_dtype,
    high_precision_gradient,
    high_precision_loss,
    high_precision_partition,
    mp,
)


def smoothed(weights: list[float], scores: list[float], class_weight: list[float], smoothing: float) -> list[Number]:
    """The target weights after class weights and smoothing, as in torch's cross entropy."""
    live = sum(score != -INF for score in scores)
    share = mp.mpf(smoothing) * mp.fsum(weights) / live
    kept = 1 - mp.mpf(smoothing)
    return [
        mp.mpf(w) * (kept * t + (share if score != -INF else 0))
        for t, w, score in zip(weights, class_weight, scores, strict=True)
    ]


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
        expected = high_precision_loss(values, weights)
        assert abs(loss[row].item() - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(gradient[row].tolist(), high_precision_gradient(values, weights), strict=True):
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
        assert abs(loss[row] - high_precision_loss(values, weights)) <= tolerance
        slopes = high_precision_gradient(values, weights)
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
        expected = high_precision_loss(values, [1.0, 0.0, 0.0])
        assert abs(value - expected) <= tolerance * max(1, abs(expected))
        for entry, slope in zip(slopes, high_precision_gradient(values, [1.0, 0.0, 0.0]), strict=True):
            assert abs(entry - slope) <= tolerance * max(1, abs(slope))


@each_dtype
def test_map_and_log_partition_in_50_digits(dtype: torch.dtype, tolerance: float) -> None:
    scores = SCORES.to(dtype)
    for row, values in enumerate(scores.tolist()):
        expected = high_precision_partition(values)
        assert abs(rg_log_partition(scores)[row].item() - expected) <= tolerance * max(1, abs(expected))
        first = [1, 0, 0, 0, 0]
        for prob, t, slope in zip(rg(scores)[row].tolist(), first, high_precision_gradient(values, first), strict=True):
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
    """It is (C / 2) ||p - t||^2 over the live classes, in whatever form t is given."""
    size = len(scores)
    positives = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    row = torch.tensor([*scores, *[-INF] * masked], dtype=torch.float64)
    many_hot = torch.zeros(size + masked, dtype=torch.bool).index_fill(0, torch.tensor(positives), True)
    t = many_hot / many_hot.sum().double()
    target = {"ids": torch.tensor([*positives, -100]), "bool": many_hot, "float": t}[kind]
    live = row > -INF
    mixed = (1 - smoothing) * t + smoothing * live / size
    expected = size / 2 * (rg(row) - mixed).square().sum()
    loss = rg_loss(row, target, multilabel="normalized", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert loss >= -1e-10


def test_it_is_a_squared_loss(seed: int) -> None:
    """It is ||s - mean - (C e_y - 1)||^2 / (2 C) + log C - (C - 1) / 2, so it can be negative."""
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
