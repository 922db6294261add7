"""Half precision and autocast, for every exact member: float32 inside, one rounding at the end."""

from __future__ import annotations

import pytest
import torch

from tests.exact import HALVES, Case, cases, labels, normal


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_classes", [5, 700])
def test_half_precision_is_float32_inside(case: Case, dtype: torch.dtype, num_classes: int) -> None:
    scores, target = normal(6, num_classes, scale=2, dtype=dtype).requires_grad_(), labels(6, num_classes=num_classes)
    wide = scores.detach().double().requires_grad_()
    eps = torch.finfo(dtype).eps
    probs, loss = case.probs(scores, target), case.loss(scores, target)
    (grad,) = torch.autograd.grad(loss, scores)
    assert probs.dtype == loss.dtype == grad.dtype == dtype
    # One rounding at the end, none before.
    torch.testing.assert_close(probs.double(), case.probs(wide, target).detach(), rtol=eps, atol=1e-7)
    torch.testing.assert_close(loss.double(), case.loss(wide, target).detach(), rtol=eps, atol=0)
    (expected,) = torch.autograd.grad(case.loss(wide, target), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=eps, atol=1e-7)
    # C rounded numbers, each wrong by at most eps / 2 times itself (or by half of the smallest number).
    slack = eps / 2 + num_classes * torch.finfo(dtype).smallest_normal * eps
    assert ((probs.detach().double().sum(-1) - 1).abs() <= slack + 1e-6).all()


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_gives_float32(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(1003, 7, dtype=dtype).requires_grad_(), labels(1003, num_classes=7)
    hot = torch.nn.functional.one_hot(target, 7).bool() | (normal(1003, 7, seed=3) > 1)
    weight = torch.rand(7, generator=torch.Generator().manual_seed(0))
    for goal in (target, hot):
        for options in ({}, {"weight": weight}, {"multilabel": "normalized"}):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, probs = case.loss(scores, goal, **options), case.probs(scores, target)
            assert loss.dtype == probs.dtype == torch.float32
            torch.testing.assert_close(loss.double(), case.loss(scores.double(), goal, **options), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(probs.double(), case.probs(scores.double(), target), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(probs.sum(-1), torch.ones(1003), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(loss, scores)
    assert grad.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert case.loss(scores.float(), target).dtype == torch.float32


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_mean_counts_all_rows(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(1, 3, dtype=dtype).expand(70001, 3), torch.full((70001,), 2)
    one = case.loss(scores[0], target[0])
    assert one > 1
    torch.testing.assert_close(case.loss(scores, target), one, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("case", cases(distributions=True))
@pytest.mark.parametrize("dtype", HALVES)
def test_float_rows_keep_their_digits_beside_half_scores(case: Case, dtype: torch.dtype) -> None:
    scores, target = normal(3, 5, dtype=dtype), normal(3, 5, seed=1, dtype=torch.float32).softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.loss(scores, target, reduction="none")
    torch.testing.assert_close(
        loss.double(), case.loss(scores.double(), target.double(), reduction="none"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("case", cases(foundation=True))
@pytest.mark.parametrize("dtype", HALVES)
def test_conjugate_of_half_precision(case: Case, dtype: torch.dtype) -> None:
    scores = normal(3, 6, dtype=dtype)
    conjugate = case.member.conjugate(scores, **case.setting)
    assert conjugate.dtype == dtype
    expected = case.member.conjugate(scores.double(), **case.setting)
    torch.testing.assert_close(conjugate.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
