"""PSL: its formulas against 50 digits, its cuts, the range of its exponents, and the bounds that g keeps to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import ArgumentError, psl, psl_loss, rankmax, rankmax_loss, softmax_loss
from manymax.engine import native_library
from manymax.members.psl.loss import ACTIVATIONS, log_activation
from tests import high_precision
from tests.exact import INF, labels, normal

VALUES = st.floats(-4, 4) | st.integers(-4, 4).map(lambda n: n / 2)
BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))


def gradient(scores: Tensor, target: Tensor, **setting: Any) -> Tensor:
    """The gradient of the summed loss in the scores."""
    leaf = scores.clone().requires_grad_()
    return torch.autograd.grad(psl_loss(leaf, target, reduction="sum", **setting), leaf)[0]


@settings(max_examples=60)
@given(
    values=st.lists(VALUES | st.just(-INF), min_size=1, max_size=7),
    target=st.integers(0, 6),
    alive=VALUES,
    activation=st.sampled_from(ACTIVATIONS),
    tau=st.sampled_from([0.05, 0.3, 0.5, 0.9]),
)
def test_values_against_fifty_digits(
    values: list[float], target: int, alive: float, activation: str, tau: float
) -> None:
    label = target % len(values)
    values[label] = alive
    scores, ids = torch.tensor([values], dtype=torch.float64), torch.tensor([label])
    setting: Any = {"activation": activation, "tau": tau}
    loss = high_precision.as_tensor(high_precision.psl_loss(values, label, **setting))
    slope = high_precision.as_tensor(high_precision.psl_gradient(values, label, **setting))
    for goal in (ids, ids[:, None], torch.nn.functional.one_hot(ids, len(values)).bool()):
        torch.testing.assert_close(psl_loss(scores, goal, **setting), loss, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(gradient(scores, goal, **setting)[0], slope, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(psl(scores, ids, **setting)[0, label], (-loss).exp(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_exponents_beyond_the_range_of_a_float(activation: str, backend: str) -> None:
    """With tau = 0.005 a term is 2^200 and more; in float32 as in float64, but for the digits of the scores."""
    scores = normal(6, 40, scale=0.5)
    eye = torch.eye(40)
    target = normal(6, 40, seed=5).argsort(1)[:, :3]
    setting: Any = {"activation": activation, "tau": 0.005}
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        for goal in (target, target[:, 0]):
            leaf = scores.to(dtype, copy=True).requires_grad_()
            head = manymax.linear_psl_loss(leaf, eye.to(dtype), goal, options={"backend": backend}, **setting)
            head.backward()
            expected = psl_loss(scores, goal, **setting)
            torch.testing.assert_close(head.double(), expected, rtol=tolerance, atol=tolerance)
            assert leaf.grad is not None
            slopes = gradient(scores, goal, **setting) / goal.numel()
            torch.testing.assert_close(leaf.grad.double(), slopes, rtol=20 * tolerance, atol=20 * tolerance)


def test_with_relu_and_tau_1_it_is_rankmax() -> None:
    scores, ids = normal(20, 9, scale=1.5), labels(20, 3, num_classes=9)
    found, expected = (
        torch.func.grad_and_value(lambda s, f=f: f(s, ids))(scores)
        for f in (lambda s, y: psl_loss(s, y, activation="relu", tau=1.0), rankmax_loss)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(psl(scores, ids[:, 0], activation="relu", tau=1.0), rankmax(scores, ids[:, 0]))


@pytest.mark.parametrize(("activation", "cut"), [("relu", 1.0), ("atan", math.tan(1.0))])
def test_a_class_below_the_cut_adds_nothing(activation: str, cut: float) -> None:
    scores = torch.tensor([[1.0, 1.0 - cut - 1e-9, -3.0, -INF, 0.5]], dtype=torch.float64)
    without = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    setting: Any = {"activation": activation, "tau": 0.3}
    torch.testing.assert_close(
        psl_loss(scores, torch.tensor([0]), **setting), psl_loss(without, torch.tensor([0]), **setting)
    )
    assert gradient(scores, torch.tensor([0]), **setting)[0, 1:4].tolist() == [0.0] * 3
    assert psl(scores, torch.tensor([0]), **setting)[0, 1:4].tolist() == [0.0] * 3
    assert gradient(scores + torch.tensor([0, 1e-3, 0, 0, 0]), torch.tensor([0]), **setting)[0, 1] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_positive_that_is_compared_with_nothing_is_refused(backend: str) -> None:
    """Decoupled, with every other class below the cut of relu: the log of an empty sum. tanh has no cut."""
    input, vectors = torch.tensor([[1.0], [1.0]]), torch.tensor([[3.0], [1.0], [0.5], [2.5]])
    given: Any = {"decoupled": True, "options": {"backend": backend}}
    assert manymax.linear_psl_loss(input, vectors, torch.tensor([0, 1]), **given).isfinite()
    exclude = torch.tensor([[3], [-100]])
    with pytest.raises(ArgumentError, match=r"no class left.*leave `decoupled` out"):
        manymax.linear_psl_loss(input, vectors, torch.tensor([0, 1]), exclude=exclude, **given)
    loss = manymax.linear_psl_loss(input, vectors, torch.tensor([0, 1]), exclude=exclude, activation="tanh", **given)
    assert loss.isfinite()
    far = torch.tensor([[0.0], [-30.0]])  # 1 + tanh(-30) is 0 in any precision; its logarithm is log 2 - 60
    loss = manymax.linear_psl_loss(input[:1], far, torch.tensor([0]), activation="tanh", **given)
    assert loss.item() == pytest.approx((math.log(2) - 60) / 0.1, rel=1e-6)


def test_settings_out_of_range_are_refused() -> None:
    for wrong, words in (({"tau": 0.0}, "`tau`"), ({"tau": 1.5}, "`tau`.*gradient"), ({"activation": "exp"}, "relu")):
        with pytest.raises(ArgumentError, match=words):
            psl_loss(torch.zeros(1, 3), torch.tensor([0]), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"`target`.*one id per row"):
        psl(torch.zeros(2, 3), torch.tensor([[0, 1], [2, -100]]))
    with pytest.raises(ArgumentError, match=r"`target`.*every row"):
        psl(torch.zeros(2, 3), torch.tensor([0, -100]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_g_is_between_the_step_and_exp(activation: str) -> None:
    """The condition of the authors' lemma 4.1, which they state on [-1, 1]; it holds everywhere."""
    d = torch.cat([torch.linspace(-1, 1, 2001), torch.linspace(-40, 40, 8001), torch.tensor([0.0])]).double()
    g = log_activation(d, activation).exp()
    assert (g >= (d >= 0).double() - 1e-15).all()
    assert (g <= d.exp() * (1 + 1e-12)).all()
    scores, ids = normal(50, 7, scale=2), labels(50, num_classes=7)
    ours = psl_loss(scores, ids, activation=activation, tau=0.3, reduction="none")
    assert (ours <= softmax_loss(scores / 0.3, ids, reduction="none") + 1e-12).all()
