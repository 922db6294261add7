"""Entmax for every alpha from 1 to 2, the ends included: values against 50 digits, errors, the smoothness constant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax import ArgumentError, ArgumentTypeError, entmax, entmax_loss, softmax, softmax_loss, sparsemax
from manymax.members.entmax.loss import omega, smoothness
from tests import high_precision
from tests.exact import normal
from tests.losses.entmax_rows import ALPHAS, TARGET, expected_probs, long_rows, short_rows

# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_short_rows_against_fifty_digits(alpha: float, dtype: torch.dtype, tolerance: float) -> None:
    scores = short_rows().to(dtype).requires_grad_()
    probs = expected_probs(alpha, "short", dtype)
    pairs = zip(scores.tolist(), TARGET.tolist(), strict=True)
    values = high_precision.as_tensor([high_precision.entmax_loss(row, y, alpha) for row, y in pairs])
    forms = (alpha, torch.tensor(alpha, dtype=torch.float64), torch.full((5, 1), alpha, dtype=torch.float64))
    for form in forms:
        if isinstance(form, Tensor) and form.ndim and form[0].to(dtype).item() != alpha:
            continue  # one alpha per row is rounded to the dtype of the scores
        loss = entmax_loss(scores, TARGET, alpha=form, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), scores)
        torch.testing.assert_close(entmax(scores, form).double(), probs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(loss.double(), values, rtol=tolerance, atol=tolerance)
        expected = probs - torch.nn.functional.one_hot(TARGET, 5)
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("alpha", [1.0001, 1.05, 1.2, 1.5, 1.75])
def test_long_rows_against_fifty_digits(alpha: float, dtype: torch.dtype, tolerance: float) -> None:
    scores, target = long_rows().to(dtype).requires_grad_(), torch.tensor([5, 7])
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
    for scores in (short_rows(), long_rows()):
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
        alpha_tensor = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        loss = entmax_loss(scores, torch.tensor([0, 1]), alpha=alpha_tensor, reduction="none")
        grads = torch.autograd.grad(loss.sum(), (scores, alpha_tensor), create_graph=True)
        seconds = torch.autograd.grad(grads[0].square().sum() + grads[1], (scores, alpha_tensor))
        assert all(t.isfinite().all() for t in (loss, *grads, *seconds))
        # p moves by about (alpha - 1) (log p)^2 / 2
        near = (alpha - 1) * 1e4 + (1e-12 if dtype == torch.float64 else 1e-6)
        torch.testing.assert_close(entmax(scores, alpha_tensor), softmax(scores), rtol=0, atol=near)
        torch.testing.assert_close(
            loss, softmax_loss(scores, torch.tensor([0, 1]), reduction="none"), rtol=near, atol=near
        )


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-8, 8) | st.integers(-4, 4).map(lambda n: n / 2), min_size=2, max_size=6),
    alpha=st.floats(1.0001, 2.0) | st.sampled_from([1.25, 1.5, 2.0]),
)
def test_support_is_the_classes_above_the_threshold(values: list[float], alpha: float) -> None:
    probs = entmax(torch.tensor(values, dtype=torch.float64), alpha)
    # tau from the top class: p_top = [(alpha - 1)(s_top - tau)]^(1/(alpha - 1))
    tau = max(values) - probs.max().item() ** (alpha - 1) / (alpha - 1)
    for score, prob in zip(values, probs.tolist(), strict=True):
        assert abs(prob - max(0.0, (alpha - 1) * (score - tau)) ** (1 / (alpha - 1))) < 1e-9
        if abs(score - tau) > 1e-9 and (alpha - 1) * (score - tau) > 1e-300 ** (alpha - 1):
            assert (prob > 0) == (score > tau)


def test_map_is_smooth_at_the_threshold_for_alpha_below_two() -> None:
    # alpha = 1.5: u = (s - tau) / 2; with s = (2, 0) tau = 0, so class 1 sits exactly at the threshold
    scores = torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert entmax(scores, 1.5).tolist() == [1.0, 0.0]
    for step in (1e-3, -1e-3):
        moved = torch.func.jacrev(lambda s: entmax(s, 1.5))(scores + torch.tensor([0.0, step], dtype=torch.float64))
        assert moved.abs().max() < 1e-3


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "error", "words"),
    [
        (0.9, ArgumentError, r"`alpha` must be in \[1, 2\].*0\.9"),
        (2.1, ArgumentError, r"`alpha` must be in \[1, 2\].*2\.1"),
        (float("nan"), ArgumentError, "`alpha` must be a number; got nan"),
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
def test_an_invalid_alpha_is_refused(alpha: Any, error: type[Exception], words: str) -> None:
    scores = normal(2, 4)
    with pytest.raises(error, match=words):
        entmax(scores, alpha)
    with pytest.raises(error, match=words):
        entmax_loss(scores, torch.tensor([0, 1]), alpha=alpha)


# The smoothness constant -------------------------------------------------------------------------


def test_smoothness_at_known_numbers_of_classes() -> None:
    known = {47: 0.7071, 100: 0.753, 1000: 0.868, 3307: 0.907, 40981: 0.958, 63001: 0.964}
    for num_classes, value in known.items():
        assert abs(smoothness(num_classes, 1.5) - value) < 6e-4
    for alpha, first in ((1.25, 1674), (1.5, 48), (1.75, 14)):
        assert smoothness(first - 1, alpha) == 2 ** (alpha - 2) < smoothness(first, alpha)


def test_smoothness_is_reached_at_finite_scores() -> None:
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
