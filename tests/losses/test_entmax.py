"""Entmax for every alpha from 1 to 2, the ends included, and its derivative in alpha, against 50 digits."""

from __future__ import annotations

import itertools
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import ArgumentError, ArgumentTypeError, EntmaxLoss, entmax, entmax_loss, softmax, softmax_loss, sparsemax
from manymax.members.entmax.loss import omega, smoothness
from tests import high_precision
from tests.exact import INF, normal

ALPHAS = [1.0, 1.0001, 1.01, 1.05, 1.2, 1.25, 1.5, 1.75, 1.9999, 2.0]
TARGET = torch.tensor([0, 2, 1, 3, 1])


def small() -> Tensor:
    """Rows of 5 classes: nearly equal, ordinary, spread out, with an offset, with a mask."""
    rows = torch.stack([normal(5, scale=s) for s in (1e-3, 1.0, 20.0)] + [normal(5, seed=1) + 1e4, normal(5, seed=2)])
    rows[4, 3] = -INF
    return rows


def long() -> Tensor:
    """Rows of 530 classes: one with every class in the support, one with few."""
    return torch.stack([normal(530, scale=1e-3), normal(530, scale=4.0)])


@cache
def expected_probs(alpha: float, kind: str, dtype: torch.dtype) -> Tensor:
    rows = {"small": small, "long": long}[kind]().to(dtype)
    return high_precision.as_tensor([high_precision.entmax(row, alpha) for row in rows.tolist()])


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_short_rows(alpha: float, dtype: torch.dtype, tolerance: float) -> None:
    scores = small().to(dtype).requires_grad_()
    probs = expected_probs(alpha, "small", dtype)
    pairs = zip(scores.tolist(), TARGET.tolist(), strict=True)
    values = high_precision.as_tensor([high_precision.entmax_loss(row, y, alpha) for row, y in pairs])
    for order in (alpha, torch.tensor(alpha, dtype=torch.float64), torch.full((5, 1), alpha, dtype=torch.float64)):
        if isinstance(order, Tensor) and order.ndim and order[0].to(dtype).item() != alpha:
            continue  # one alpha per row is rounded to the dtype of the scores
        loss = entmax_loss(scores, TARGET, alpha=order, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), scores)
        torch.testing.assert_close(entmax(scores, order).double(), probs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(loss.double(), values, rtol=tolerance, atol=tolerance)
        expected = probs - torch.nn.functional.one_hot(TARGET, 5)
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("alpha", [1.0001, 1.05, 1.2, 1.5, 1.75])
def test_long_rows(alpha: float, dtype: torch.dtype, tolerance: float) -> None:
    scores, target = long().to(dtype).requires_grad_(), torch.tensor([5, 7])
    probs = expected_probs(alpha, "long", dtype)
    peaked = high_precision.entmax_loss(scores[1].tolist(), 7, alpha)
    loss = entmax_loss(scores, target, alpha=alpha, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(entmax(scores, alpha).double(), probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss[1].double(), high_precision.as_tensor(peaked), rtol=tolerance, atol=tolerance)
    expected = probs - torch.nn.functional.one_hot(target, 530)
    torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)
    # the flat row by its definition in float64: <p, s> - Omega(p) - s_y
    flat = (probs[0] * scores[0].double()).sum() - omega(probs[0], alpha) - scores[0, 5].double()
    torch.testing.assert_close(loss[0].double(), flat.detach(), rtol=tolerance, atol=tolerance)


def test_alpha_one_is_softmax_and_alpha_two_is_sparsemax() -> None:
    for scores in (small(), long()):
        target = torch.ones(len(scores), dtype=torch.long)
        one = torch.ones(len(scores), 1, dtype=torch.float64)
        torch.testing.assert_close(entmax(scores, 1), softmax(scores), rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(entmax(scores[:2], one[:2]), softmax(scores[:2]), rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(
            entmax_loss(scores, target, alpha=1), softmax_loss(scores, target), rtol=1e-13, atol=0
        )
        torch.testing.assert_close(entmax(scores, 2 * one), sparsemax(scores), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("alpha", [1 + 2.0**-52, 1 + 1e-12, 1 + 1e-7, 1 + 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_classes", [4, 700])
def test_alpha_next_to_one(alpha: float, dtype: torch.dtype, num_classes: int) -> None:
    for scale in (1e-3, 1.0, 50.0):
        scores = normal(2, num_classes, scale=scale, dtype=dtype).requires_grad_()
        order = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        loss = entmax_loss(scores, torch.tensor([0, 1]), alpha=order, reduction="none")
        grads = torch.autograd.grad(loss.sum(), (scores, order), create_graph=True)
        seconds = torch.autograd.grad(grads[0].square().sum() + grads[1], (scores, order))
        assert all(t.isfinite().all() for t in (loss, *grads, *seconds))
        # p moves by about (alpha - 1) (log p)^2 / 2
        near = (alpha - 1) * 1e4 + (1e-12 if dtype == torch.float64 else 1e-6)
        torch.testing.assert_close(entmax(scores, order), softmax(scores), rtol=0, atol=near)
        torch.testing.assert_close(
            loss, softmax_loss(scores, torch.tensor([0, 1]), reduction="none"), rtol=near, atol=near
        )


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-8, 8) | st.integers(-4, 4).map(lambda n: n / 2), min_size=2, max_size=6),
    alpha=st.floats(1.0001, 2.0) | st.sampled_from([1.25, 1.5, 2.0]),
)
def test_the_support_is_what_is_above_the_threshold(values: list[float], alpha: float) -> None:
    probs = entmax(torch.tensor(values, dtype=torch.float64), alpha)
    # tau from the top class: p_top = [(alpha - 1)(s_top - tau)]^(1/(alpha - 1))
    tau = max(values) - probs.max().item() ** (alpha - 1) / (alpha - 1)
    for score, prob in zip(values, probs.tolist(), strict=True):
        assert abs(prob - max(0.0, (alpha - 1) * (score - tau)) ** (1 / (alpha - 1))) < 1e-9
        if abs(score - tau) > 1e-9 and (alpha - 1) * (score - tau) > 1e-300 ** (alpha - 1):
            assert (prob > 0) == (score > tau)


def test_a_tie_at_the_threshold_is_smooth_below_two() -> None:
    # alpha = 1.5: u = (s - tau) / 2; with s = (2, 0) tau = 0, so class 1 sits exactly at the threshold
    scores = torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert entmax(scores, 1.5).tolist() == [1.0, 0.0]
    for step in (1e-3, -1e-3):
        moved = torch.func.jacrev(lambda s: entmax(s, 1.5))(scores + torch.tensor([0.0, step], dtype=torch.float64))
        assert moved.abs().max() < 1e-3


# Derivatives in alpha ----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_slope_of_the_map_in_alpha(alpha: float) -> None:
    scores, upstream = small(), normal(5, 5, seed=6)
    slopes = [
        high_precision.alpha_slope(lambda a, row=row: high_precision.entmax(row, a), alpha) for row in scores.tolist()
    ]
    expected = (upstream * high_precision.as_tensor(slopes)).sum(-1)
    for shape in ((), (5, 1)):
        order = torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((upstream * entmax(scores, order)).sum(), order)
        assert grad.shape == shape
        wanted = expected.sum() if shape == () else expected[:, None]
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_slope_of_the_loss_in_alpha(alpha: float) -> None:
    scores = small()
    pairs = list(zip(scores.tolist(), TARGET.tolist(), strict=True))
    slopes = [
        high_precision.alpha_slope(lambda a, r=r, y=y: [high_precision.entmax_loss(r, y, a)], alpha) for r, y in pairs
    ]
    expected = high_precision.as_tensor(slopes)
    for shape in ((), (5, 1)):
        order = torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(entmax_loss(scores, TARGET, alpha=order, reduction="sum"), order)
        torch.testing.assert_close(grad, expected.sum() if shape == () else expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_second_derivatives_in_alpha(alpha: float) -> None:
    """d2 L / ds dalpha = dp / dalpha, and d2 L / dalpha2 from a second difference in 50 digits."""
    scores = small()[1].requires_grad_()
    order = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    slope = high_precision.alpha_slope(lambda a: high_precision.entmax(scores.tolist(), a), alpha)
    loss = entmax_loss(scores, torch.tensor(2), alpha=order)
    (first,) = torch.autograd.grad(loss, order, create_graph=True)
    mixed, second = torch.autograd.grad(first, (scores, order), retain_graph=True)
    torch.testing.assert_close(mixed, high_precision.as_tensor(slope), rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    (other,) = torch.autograd.grad(grad @ torch.arange(5.0, dtype=torch.float64), order)
    torch.testing.assert_close(
        other, high_precision.as_tensor(slope) @ torch.arange(5.0, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )

    def inner(a: Any) -> list[Any]:
        return high_precision.alpha_slope(lambda b: [high_precision.entmax_loss(scores.tolist(), 2, b)], a)

    if alpha in (1.2, 1.5, 1.75):  # differences of differences need room on both sides
        step = high_precision.mp.mpf(10) ** -6
        expected = (inner(alpha + step)[0] - inner(alpha - step)[0]) / (2 * step)
        torch.testing.assert_close(second, high_precision.as_tensor(expected), rtol=1e-9, atol=1e-9)
    assert second.isfinite()


@pytest.mark.parametrize("alpha", [1.0001, 1.2, 1.5, 1.8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, 1), (2, 3, 1)])
def test_alpha_of_any_shape_that_fits(alpha: float, shape: tuple[int, ...]) -> None:
    scores = normal(2, 3, 4, seed=2).requires_grad_()
    target = torch.tensor([[0, 1, 2], [3, 0, 1]])
    order = (torch.full(shape, alpha, dtype=torch.float64) + 1e-2 * normal(*shape).abs()).requires_grad_()
    assert gradcheck(entmax, (scores, order), fast_mode=True)
    assert gradgradcheck(entmax, (scores, order), fast_mode=True)

    def loss(s: Tensor, a: Tensor) -> Tensor:
        return entmax_loss(s, target, alpha=a, reduction="none", label_smoothing=0.1)

    def normalized(s: Tensor, a: Tensor) -> Tensor:
        return entmax_loss(s, target[..., None].expand(2, 3, 2), alpha=a, reduction="none", multilabel="normalized")

    for function in (loss, normalized):
        assert gradcheck(function, (scores, order), fast_mode=True)
        assert gradgradcheck(function, (scores, order), fast_mode=True)


def test_normalized_loss_moves_with_alpha_also_through_omega() -> None:
    scores, hot = normal(2, 4), torch.tensor([[True, True, False, False], [False, True, True, True]])
    order = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: entmax_loss(scores, hot, alpha=a, multilabel="normalized"), order)


def test_alpha_of_each_row_is_its_own() -> None:
    scores, orders = normal(3, 6), torch.tensor([[1.0], [1.5], [2.0]], dtype=torch.float64)
    expected = torch.cat([softmax(scores[:1]), entmax(scores[1:2], 1.5), sparsemax(scores[2:])])
    torch.testing.assert_close(entmax(scores, orders), expected, rtol=1e-13, atol=1e-15)
    mapped = torch.vmap(entmax)(scores, orders[:, 0])
    torch.testing.assert_close(mapped, expected, rtol=1e-13, atol=1e-15)
    one = torch.vmap(lambda a: entmax(scores[0], a))(orders[:, 0])
    torch.testing.assert_close(
        one, torch.stack([entmax(scores[0], a) for a in (1.0, 1.5, 2.0)]), rtol=1e-13, atol=1e-15
    )
    slopes = torch.vmap(torch.func.grad(lambda a, s: entmax(s, a)[0]))(
        torch.full((3,), 1.5, dtype=torch.float64), scores
    )
    for slope, row in zip(slopes, scores, strict=True):
        torch.testing.assert_close(
            slope, torch.func.grad(lambda a, r=row: entmax(r, a)[0])(torch.tensor(1.5, dtype=torch.float64))
        )


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_masks_and_alpha_of_each_row(alpha: float) -> None:
    scores = torch.tensor([[1.0, 0.5, -INF, 0.2], [-INF, 2.0, 1.9, -INF]], dtype=torch.float64, requires_grad=True)
    orders = torch.tensor([[alpha], [1.5]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1])
    loss = entmax_loss(scores, target, alpha=orders, reduction="none")
    expected = torch.stack(
        [entmax_loss(scores[0], target[0], alpha=alpha), entmax_loss(scores[1], target[1], alpha=1.5)]
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for grad in torch.autograd.grad(loss.sum() + entmax(scores, orders).square().sum(), (scores, orders)):
        assert grad.isfinite().all()


def test_alpha_of_another_dtype() -> None:
    scores = normal(3, 5)
    for dtype in (torch.float16, torch.float32, torch.float64):
        order = torch.tensor(1.5, dtype=dtype, requires_grad=True)
        probs = entmax(scores, order)
        torch.testing.assert_close(probs, entmax(scores, 1.5), rtol=1e-13, atol=1e-15)
        (grad,) = torch.autograd.grad(probs[0, 0], order)
        assert grad.dtype == dtype
    half = entmax(scores.half(), torch.full((3, 1), 1.5, requires_grad=True))
    assert half.dtype == torch.float16


def test_alpha_compiles() -> None:
    torch._dynamo.reset()
    scores, order = normal(3, 5, dtype=torch.float32), torch.tensor(1.5, requires_grad=True)

    def both(s: Tensor, a: Tensor) -> Tensor:
        return entmax(s, a)[:, 0].sum() + entmax_loss(s, torch.tensor([0, 1, 2]), alpha=a)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(scores, order)
        (grad,) = torch.autograd.grad(compiled, order)
    torch.testing.assert_close(compiled, both(scores, order))
    torch.testing.assert_close(grad, torch.autograd.grad(both(scores, order), order)[0])
    torch._dynamo.reset()


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "error", "words"),
    [
        (0.9, ArgumentError, r"`alpha` must be in \[1, 2\].*0\.9"),
        (2.1, ArgumentError, r"`alpha` must be in \[1, 2\].*2\.1"),
        (float("nan"), ArgumentError, r"`alpha` must be in \[1, 2\].*nan"),
        (torch.tensor(0.5), ArgumentError, r"`alpha` must be in \[1, 2\].*0\.5"),
        (torch.tensor([[1.5], [3.0]]), ArgumentError, r"(?s)`alpha` must be in \[1, 2\].*3\."),
        (torch.tensor(float("nan")), ArgumentError, r"`alpha` must be in \[1, 2\].*nan"),
        ("1.5", ArgumentTypeError, "`alpha`.*str"),
        (True, ArgumentTypeError, "`alpha`.*bool"),
        (torch.tensor(1), ArgumentTypeError, "`alpha`.*int64"),
        (torch.full((2,), 1.5), ArgumentError, r"`alpha`.*\(2, 1\).*\(2,\).*unsqueeze"),
        (torch.full((2, 4), 1.5), ArgumentError, r"`alpha`.*\(2, 1\).*\(2, 4\)"),
        (torch.full((3, 1), 1.5), ArgumentError, r"`alpha`.*\(2, 1\).*\(3, 1\)"),
        (torch.full((1, 2, 1), 1.5), ArgumentError, r"`alpha`.*\(2, 1\).*\(1, 2, 1\)"),
    ],
)
def test_alpha_that_cannot_be_used(alpha: Any, error: type[Exception], words: str) -> None:
    scores = normal(2, 4)
    with pytest.raises(error, match=words):
        entmax(scores, alpha)
    with pytest.raises(error, match=words):
        entmax_loss(scores, torch.tensor([0, 1]), alpha=alpha)


# The module with a learnable alpha ---------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.99, 2.01])
def test_module_refuses_alpha_at_once(alpha: float) -> None:
    with pytest.raises(ArgumentError, match="`alpha`"):
        EntmaxLoss(alpha)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_a_learnable_alpha_starts_inside(alpha: float) -> None:
    EntmaxLoss(alpha)
    with pytest.raises(ArgumentError, match="learnable"):
        EntmaxLoss(alpha, learnable=True)


def test_a_learnable_alpha_starts_where_it_is_told() -> None:
    for alpha in (1.01, 1.5, 1.9):
        module = EntmaxLoss(alpha, learnable=True)
        assert isinstance(module.alpha, Tensor)
        assert abs(module.alpha.item() - alpha) < 1e-6
        assert [name for name, _ in module.named_parameters()] == ["raw_alpha"]
    assert list(EntmaxLoss(1.3).parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [1e30, -1e30, 1e3, -1e3])
def test_no_step_leaves_the_interval(dtype: torch.dtype, rate: float) -> None:
    module = EntmaxLoss(1.5, learnable=True).to(dtype)
    scores, target = normal(3, 5, dtype=dtype), torch.tensor([0, 1, 2])
    module(scores, target).backward()
    assert module.raw_alpha.grad is not None
    assert module.raw_alpha.grad.abs() > 1e-4
    with torch.no_grad():  # plain gradient descent, and the same step uphill
        module.raw_alpha -= rate * module.raw_alpha.grad
    assert 1 < module.alpha < 2
    for num_classes in (5, 700):
        wide = normal(3, num_classes, dtype=dtype).requires_grad_()
        module.zero_grad()
        loss = module(wide, target)
        loss.backward()
        assert loss.isfinite()
        assert wide.grad is not None
        assert wide.grad.isfinite().all()
        assert module.raw_alpha.grad.isfinite()


def test_alpha_is_learned() -> None:
    """Scores that are log-odds of a true softmax: the best alpha is close to 1."""
    scores = normal(400, 4, scale=2, dtype=torch.float32)
    target = torch.distributions.Categorical(logits=scores)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = target.sample()
    module = EntmaxLoss(1.5, learnable=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = module(scores, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(losses))


def test_the_module_tells_its_alpha() -> None:
    assert "alpha=1.3" in repr(EntmaxLoss(1.3))
    torch._C._set_warnAlways(True)  # otherwise torch warns once in a process, whoever comes first
    try:
        assert "alpha=1.3, learnable=True" in repr(EntmaxLoss(1.3, learnable=True))
    finally:
        torch._C._set_warnAlways(False)


# The smoothness constant -------------------------------------------------------------------------


def test_smoothness_has_the_printed_digits_of_its_derivation() -> None:
    known = {47: 0.7071, 100: 0.753, 1000: 0.868, 3307: 0.907, 40981: 0.958, 63001: 0.964}
    for num_classes, value in known.items():
        assert abs(smoothness(num_classes, 1.5) - value) < 6e-4
    for alpha, first in ((1.25, 1674), (1.5, 48), (1.75, 14)):
        assert smoothness(first - 1, alpha) == 2 ** (alpha - 2) < smoothness(first, alpha)


def test_smoothness_is_attained_at_its_own_point() -> None:
    """p = (1, n^-r, ..., n^-r) / norm with r = 2 / (3 - alpha), reached at finite scores."""
    num_classes, alpha = 400, 1.5
    n, r = num_classes - 1, 2 / (3 - alpha)
    probs = torch.full((num_classes,), float(n) ** -r, dtype=torch.float64)
    probs[0] = 1
    probs /= probs.sum()
    scores = probs ** (alpha - 1) / (alpha - 1)
    torch.testing.assert_close(entmax(scores, alpha), probs, rtol=1e-9, atol=1e-12)
    jacobian = torch.func.jacrev(lambda s: entmax(s, alpha))(scores)
    norm = torch.linalg.matrix_norm(jacobian, 2).item()
    assert abs(norm - smoothness(num_classes, alpha)) < 1e-9
    assert norm > 2 ** (alpha - 2) + 0.1
