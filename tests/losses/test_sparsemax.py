"""Sparsemax against its closed forms (projection onto the simplex, loss as a sum over the support) and 50 digits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax import entmax, entmax_loss, sparsemax, sparsemax_loss
from tests import high_precision
from tests.exact import INF, normal


def threshold(scores: Tensor) -> Tensor:
    """tau (rows, 1) by sorting: the support has the largest size k with 1 + k s_(k) > s_(1) + ... + s_(k)."""
    ranked = scores.sort(-1, descending=True).values
    running, k = ranked.cumsum(-1), torch.arange(1, scores.shape[-1] + 1)
    size = (1 + k * ranked > running).sum(-1, keepdim=True)
    return (running.gather(-1, size - 1) - 1) / size


def closed_form(scores: Tensor, target: Tensor) -> Tensor:
    """The loss 1/2 sum over the support of (s_j^2 - tau^2) + 1/2 - s_y, (rows,)."""
    tau = threshold(scores)
    support = (scores > tau).double()
    value = (support * (scores.square() - tau.square())).sum(-1) / 2 + 0.5
    return value - scores.gather(-1, target[:, None]).squeeze(-1)


SCORES = st.floats(-5, 5) | st.integers(-4, 4).map(lambda n: n / 2)


@settings(max_examples=60)
@given(values=st.lists(SCORES, min_size=1, max_size=9), target=st.integers(0, 8))
def test_closed_forms(values: list[float], target: int) -> None:
    scores, label = torch.tensor([values], dtype=torch.float64), torch.tensor([target % len(values)])
    torch.testing.assert_close(sparsemax(scores), (scores - threshold(scores)).clamp(min=0), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        sparsemax_loss(scores, label, reduction="none"), closed_form(scores, label), rtol=1e-12, atol=1e-12
    )


def test_map_is_the_nearest_point_of_the_simplex() -> None:
    scores = normal(30, 6, scale=2)
    nearest = (sparsemax(scores) - scores).norm(dim=-1)
    for seed in range(50):
        other = normal(30, 6, seed=seed, scale=3).softmax(-1)
        assert ((other - scores).norm(dim=-1) >= nearest).all()


def test_a_class_at_the_threshold_is_outside_of_the_support() -> None:
    # tau is exactly 0 in both rows: a class with score 0 has p = 0, and no entry in the Jacobian or in the gradient
    scores = torch.tensor([[1.0, 0.0, -3.0], [0.5, 0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    assert sparsemax(scores).tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    jacobian = torch.func.vmap(torch.func.jacrev(sparsemax))(scores.detach())
    assert jacobian[0].abs().max() == 0
    assert jacobian[1].tolist() == [[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    (grad,) = torch.autograd.grad(sparsemax_loss(scores, torch.tensor([0, 0]), reduction="sum"), scores)
    assert grad.tolist() == [[0.0, 0.0, 0.0], [-0.5, 0.5, 0.0]]


def test_the_loss_is_zero_at_a_lead_of_one() -> None:
    for lead in (1.0, 1.5, 1e4):
        scores = torch.tensor([[3.0 + lead, 3.0, 2.9]], dtype=torch.float64, requires_grad=True)
        loss = sparsemax_loss(scores, torch.tensor([0]))
        (grad,) = torch.autograd.grad(loss, scores)
        assert loss.item() == 0
        assert grad.tolist() == [[0.0, 0.0, 0.0]]
    assert sparsemax_loss(torch.tensor([[3.9, 3.0, 2.9]]), torch.tensor([0])) > 0


def test_a_positive_outside_of_the_support_has_gradient_minus_one() -> None:
    scores = torch.tensor([[5.0, 0.0, 4.8, -1.0]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(sparsemax_loss(scores, torch.tensor([1])), scores)
    torch.testing.assert_close(grad, torch.tensor([[0.6, -1.0, 0.4, 0.0]], dtype=torch.float64))


def test_sparsemax_is_entmax_at_alpha_two() -> None:
    scores, target = normal(4, 7, scale=2), torch.tensor([0, 3, 5, 6])
    assert torch.equal(sparsemax(scores), entmax(scores, 2.0))
    assert torch.equal(sparsemax_loss(scores, target), entmax_loss(scores, target, alpha=2.0))


def test_the_normalized_loss_at_uniform_positives() -> None:
    # with |Y| positives of equal weight Omega(t / |t|) = (1/|Y| - 1) / 2
    scores = normal(1, 5)
    hot = torch.tensor([[True, True, False, True, False]])
    total = sparsemax_loss(scores, hot, reduction="sum")
    torch.testing.assert_close(sparsemax_loss(scores, hot, multilabel="normalized"), total / 3 + (1 / 3 - 1) / 2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("num_classes", [4, 600])
def test_values_against_fifty_digits(dtype: torch.dtype, tolerance: float, num_classes: int) -> None:
    rows = torch.stack([normal(num_classes, scale=s, dtype=dtype) for s in (1e-3, 1, 30)])
    rows = torch.cat([rows, rows + 1e4, rows - 1e4])
    rows[1, 3] = -INF
    scores, target = rows.requires_grad_(), torch.tensor([0, 2, 0, 1, 2, 3])
    probs = high_precision.as_tensor([high_precision.entmax(row, 2) for row in scores.tolist()])
    pairs = zip(scores.tolist(), target.tolist(), strict=False)
    values = high_precision.as_tensor([high_precision.entmax_loss(row, y, 2) for row, y in pairs])
    loss = sparsemax_loss(scores[:6], target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(sparsemax(scores).double(), probs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss.double(), values, rtol=tolerance, atol=tolerance)
    expected = probs[:6] - torch.nn.functional.one_hot(target, num_classes)
    torch.testing.assert_close(grad[:6].double(), expected, rtol=tolerance, atol=tolerance)
