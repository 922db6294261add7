"""The functions that the derivative in alpha needs, against 50 digits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from manymax.ops.deformed import chi, log_of, power
from tests.high_precision import mp


def chi_in_high_precision(u: float) -> float:
    if abs(u) < 1e-12:  # 50 digits cannot tell the quotient of two such numbers from its limit
        return 0.5 + u / 3
    x = mp.mpf(u)
    return float((x * mp.exp(x) - mp.expm1(x)) / x**2)


@given(st.floats(-700, 1) | st.floats(-1, 1) | st.sampled_from([0.0, -0.5, 0.5, 1e-300, -1e-8]))
def test_chi_keeps_its_digits(u: float) -> None:
    value = chi(torch.tensor(u, dtype=torch.float64)).item()
    expected = chi_in_high_precision(u)
    assert abs(value - expected) <= 4e-15 * abs(expected)


def test_chi_is_differentiable_twice_also_where_its_two_forms_meet() -> None:
    u = torch.tensor([-30.0, -0.6, -0.4, 0.0, 0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(chi, u)
    assert torch.autograd.gradgradcheck(chi, u)


def test_log_and_power_leave_zeros_out() -> None:
    probs = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    assert log_of(probs).tolist() == [0.0, torch.tensor(0.25, dtype=torch.float64).log().item(), 0.0]
    assert power(probs, 0.0).tolist() == [0.0, 1.0, 1.0]
    assert power(probs, 0.5).tolist() == [0.0, 0.5, 1.0]
    (grad,) = torch.autograd.grad((log_of(probs) + power(probs, 0.5)).sum(), probs)
    assert grad.tolist() == [0.0, 5.0, 1.5]
