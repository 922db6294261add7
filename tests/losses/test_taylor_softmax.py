"""Taylor-softmax for several even orders: values against 50 digits, and the properties of softmax that it lacks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manymax
from manymax import ArgumentError, ManymaxError, TaylorSoftmaxLoss, softmax, taylor_softmax, taylor_softmax_loss
from manymax.members.taylor_softmax.loss import MOST_ORDER, taylor_exp
from tests import high_precision
from tests.exact import INF, normal

ORDERS = [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@settings(max_examples=25)
@given(
    values=st.lists(st.floats(-10, 10, width=32) | st.just(-INF), min_size=1, max_size=6),
    target=st.integers(0, 5),
    alive=st.floats(-10, 10, width=32),
)
def test_values_against_fifty_digits(
    order: int, dtype: torch.dtype, tolerance: float, values: list[float], target: int, alive: float
) -> None:
    label = target % len(values)
    values[label] = alive
    scores = torch.tensor([values], dtype=dtype, requires_grad=True)
    loss = taylor_softmax_loss(scores, torch.tensor([label]), order=order)
    (grad,) = torch.autograd.grad(loss, scores)
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    probs = high_precision.as_tensor(high_precision.taylor_softmax(values, order))
    torch.testing.assert_close(taylor_softmax(scores, order)[0].double(), probs, **close)
    value = high_precision.as_tensor(high_precision.taylor_loss(values, label, order))
    torch.testing.assert_close(loss.double(), value, **close)
    slope = high_precision.as_tensor(high_precision.taylor_gradient(values, label, order))
    torch.testing.assert_close(grad[0].double(), slope, **close)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_terms_that_cancel_below_zero(order: int, dtype: torch.dtype, tolerance: float) -> None:
    """Between -8 and 0 the terms of f are far larger than f, and the loss of such a label shows every lost digit."""
    values = torch.linspace(-8, 0, 33, dtype=dtype)
    scores = values.expand(33, 33).clone().requires_grad_()
    loss = taylor_softmax_loss(scores, torch.arange(33), order=order, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    row = values.tolist()
    expected = high_precision.as_tensor([high_precision.taylor_loss(row, y, order) for y in range(33)])
    slopes = high_precision.as_tensor([high_precision.taylor_gradient(row, y, order)[y] for y in range(33)])
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad.diagonal().double(), slopes, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_classes", [3, 600])
def test_large_scores_against_fifty_digits(order: int, dtype: torch.dtype, tolerance: float, num_classes: int) -> None:
    rows = torch.stack([normal(num_classes, scale=s) for s in (1e-3, 30.0, 1.0, 1.0)]).to(dtype)
    rows[2] += 1e4
    rows[3] -= 1e4
    target = torch.tensor([0, 1, 2, 0])
    pairs = list(zip(rows.tolist(), target.tolist(), strict=True))
    probs = high_precision.as_tensor([high_precision.taylor_softmax(row, order) for row, _ in pairs])
    values = high_precision.as_tensor([high_precision.taylor_loss(row, y, order) for row, y in pairs])
    loss = taylor_softmax_loss(rows, target, order=order, reduction="none")
    torch.testing.assert_close(taylor_softmax(rows, order).double(), probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss.double(), values, rtol=tolerance, atol=tolerance)


def test_map_tends_to_softmax_as_the_order_grows() -> None:
    scores = normal(5, 4)
    gaps = [(taylor_softmax(scores, order) - softmax(scores)).abs().max().item() for order in ORDERS]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-5


def test_map_inverts_the_order_of_scores_below_minus_one() -> None:
    probs = taylor_softmax(torch.tensor([-3.0, -1.0], dtype=torch.float64))
    torch.testing.assert_close(probs, torch.tensor([2.5, 0.5], dtype=torch.float64) / 3)


def test_the_loss_is_not_convex() -> None:
    """The Hessian has an eigenvalue close to -2 where the label has the score -1 and another class a large one."""
    scores = torch.tensor([-1.0, 30.0], dtype=torch.float64)
    hessian = torch.func.jacrev(torch.func.grad(lambda s: taylor_softmax_loss(s, torch.tensor(0))))(scores)
    assert -2.05 < torch.linalg.eigvalsh(hessian)[0] < -1.95


@pytest.mark.parametrize("order", [0, 1, 3, -2, 2.0, "2", True, None])
def test_an_invalid_order_is_refused(order: Any) -> None:
    for call in (
        lambda: taylor_softmax(normal(2, 3), order),
        lambda: taylor_softmax_loss(normal(2, 3), torch.tensor([0, 1]), order=order),
        lambda: TaylorSoftmaxLoss(order),
    ):
        with pytest.raises(ManymaxError, match=r"`order` must be an (even )?integer.*got"):
            call()


def test_an_overflow_is_an_error_and_not_an_infinity() -> None:
    scores = torch.tensor([[1e30, 0.0]])
    with pytest.raises(ArgumentError, match="`scores` are too large for `order` 2"):
        taylor_softmax(scores)
    with pytest.raises(ArgumentError, match="`scores` are too large for `order` 2"):
        taylor_softmax_loss(scores, torch.tensor([0]))
    assert taylor_softmax(scores.double()).isfinite().all()


def test_repr_of_the_module_shows_the_order() -> None:
    assert "order=4" in repr(TaylorSoftmaxLoss(4))


def test_orders_that_lose_their_digits_are_refused() -> None:
    """An order of a billion would also take hours, for what is softmax."""
    for call in (
        lambda: TaylorSoftmaxLoss(order=10**9),
        lambda: taylor_softmax(torch.zeros(3), order=32),
        lambda: manymax.LinearTaylorSoftmaxLoss(2, 3, order=10**9),
        lambda: manymax.linear_taylor_softmax_loss(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), order=32),
    ):
        with pytest.raises(ArgumentError, match=r"`order` must be an even integer in \[2, 30\]"):
            call()
    # At the last order that is taken a float64 keeps nine digits at the least value of the polynomial.
    scores = torch.linspace(-12, 0, 500, dtype=torch.float64)
    for number, found in zip(scores.tolist(), taylor_exp(scores, MOST_ORDER).tolist(), strict=True):
        terms = [Fraction(number) ** k / math.factorial(k) for k in range(MOST_ORDER + 1)]
        assert abs(found / float(sum(terms)) - 1) < 1e-8
