"""Alpha of entmax as a tensor: derivatives in it against 50 digits, one alpha per row, and a learned one."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import ArgumentError, EntmaxLoss, entmax, entmax_loss, softmax, sparsemax
from tests import high_precision
from tests.exact import INF, normal
from tests.losses.entmax_rows import ALPHAS, TARGET, short_rows

# Derivatives in alpha ----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_slope_of_the_map_in_alpha(alpha: float) -> None:
    scores, upstream = short_rows(), normal(5, 5, seed=6)
    slopes = [
        high_precision.alpha_slope(lambda a, row=row: high_precision.entmax(row, a), alpha) for row in scores.tolist()
    ]
    expected = (upstream * high_precision.as_tensor(slopes)).sum(-1)
    for shape in ((), (5, 1)):
        alpha_tensor = torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((upstream * entmax(scores, alpha_tensor)).sum(), alpha_tensor)
        assert grad.shape == shape
        wanted = expected.sum() if shape == () else expected[:, None]
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_slope_of_the_loss_in_alpha(alpha: float) -> None:
    scores = short_rows()
    pairs = list(zip(scores.tolist(), TARGET.tolist(), strict=True))
    slopes = [
        high_precision.alpha_slope(lambda a, r=r, y=y: [high_precision.entmax_loss(r, y, a)], alpha) for r, y in pairs
    ]
    expected = high_precision.as_tensor(slopes)
    for shape in ((), (5, 1)):
        alpha_tensor = torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(entmax_loss(scores, TARGET, alpha=alpha_tensor, reduction="sum"), alpha_tensor)
        torch.testing.assert_close(grad, expected.sum() if shape == () else expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_second_derivatives_in_alpha(alpha: float) -> None:
    """d2 L / ds dalpha = dp / dalpha; d2 L / dalpha2 against a second difference in 50 digits."""
    scores = short_rows()[1].requires_grad_()
    alpha_tensor = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    slope = high_precision.alpha_slope(lambda a: high_precision.entmax(scores.tolist(), a), alpha)
    loss = entmax_loss(scores, torch.tensor(2), alpha=alpha_tensor)
    (first,) = torch.autograd.grad(loss, alpha_tensor, create_graph=True)
    mixed, second = torch.autograd.grad(first, (scores, alpha_tensor), retain_graph=True)
    torch.testing.assert_close(mixed, high_precision.as_tensor(slope), rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(loss, scores, create_graph=True)
    (other,) = torch.autograd.grad(grad @ torch.arange(5.0, dtype=torch.float64), alpha_tensor)
    torch.testing.assert_close(
        other, high_precision.as_tensor(slope) @ torch.arange(5.0, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )

    def inner(a: Any) -> list[Any]:
        return high_precision.alpha_slope(lambda b: [high_precision.entmax_loss(scores.tolist(), 2, b)], a)

    if alpha in (1.2, 1.5, 1.75):  # a second difference needs alphas on both sides
        step = high_precision.mp.mpf(10) ** -6
        expected = (inner(alpha + step)[0] - inner(alpha - step)[0]) / (2 * step)
        torch.testing.assert_close(second, high_precision.as_tensor(expected), rtol=1e-9, atol=1e-9)
    assert second.isfinite()


@pytest.mark.parametrize("alpha", [1.0001, 1.2, 1.5, 1.8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, 1), (2, 3, 1)])
def test_alpha_of_every_shape_that_broadcasts(alpha: float, shape: tuple[int, ...]) -> None:
    scores = normal(2, 3, 4, seed=2).requires_grad_()
    target = torch.tensor([[0, 1, 2], [3, 0, 1]])
    alpha_tensor = (torch.full(shape, alpha, dtype=torch.float64) + 1e-2 * normal(*shape).abs()).requires_grad_()
    assert gradcheck(entmax, (scores, alpha_tensor), fast_mode=True)
    assert gradgradcheck(entmax, (scores, alpha_tensor), fast_mode=True)

    def loss(s: Tensor, a: Tensor) -> Tensor:
        return entmax_loss(s, target, alpha=a, reduction="none", label_smoothing=0.1)

    def normalized(s: Tensor, a: Tensor) -> Tensor:
        return entmax_loss(s, target[..., None].expand(2, 3, 2), alpha=a, reduction="none", multilabel="normalized")

    for function in (loss, normalized):
        assert gradcheck(function, (scores, alpha_tensor), fast_mode=True)
        assert gradgradcheck(function, (scores, alpha_tensor), fast_mode=True)


def test_alpha_gradient_of_the_normalized_loss_includes_omega() -> None:
    scores, hot = normal(2, 4), torch.tensor([[True, True, False, False], [False, True, True, True]])
    alpha_tensor = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: entmax_loss(scores, hot, alpha=a, multilabel="normalized"), alpha_tensor)


def test_each_row_uses_its_own_alpha() -> None:
    scores, alphas = normal(3, 6), torch.tensor([[1.0], [1.5], [2.0]], dtype=torch.float64)
    expected = torch.cat([softmax(scores[:1]), entmax(scores[1:2], 1.5), sparsemax(scores[2:])])
    torch.testing.assert_close(entmax(scores, alphas), expected, rtol=1e-13, atol=1e-15)
    mapped = torch.vmap(entmax)(scores, alphas[:, 0])
    torch.testing.assert_close(mapped, expected, rtol=1e-13, atol=1e-15)
    one = torch.vmap(lambda a: entmax(scores[0], a))(alphas[:, 0])
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
def test_masked_classes_with_one_alpha_per_row(alpha: float) -> None:
    scores = torch.tensor([[1.0, 0.5, -INF, 0.2], [-INF, 2.0, 1.9, -INF]], dtype=torch.float64, requires_grad=True)
    alphas = torch.tensor([[alpha], [1.5]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1])
    loss = entmax_loss(scores, target, alpha=alphas, reduction="none")
    expected = torch.stack(
        [entmax_loss(scores[0], target[0], alpha=alpha), entmax_loss(scores[1], target[1], alpha=1.5)]
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    for grad in torch.autograd.grad(loss.sum() + entmax(scores, alphas).square().sum(), (scores, alphas)):
        assert grad.isfinite().all()


def test_alpha_of_another_dtype() -> None:
    scores = normal(3, 5)
    for dtype in (torch.float16, torch.float32, torch.float64):
        alpha_tensor = torch.tensor(1.5, dtype=dtype, requires_grad=True)
        probs = entmax(scores, alpha_tensor)
        torch.testing.assert_close(probs, entmax(scores, 1.5), rtol=1e-13, atol=1e-15)
        (grad,) = torch.autograd.grad(probs[0, 0], alpha_tensor)
        assert grad.dtype == dtype
    half = entmax(scores.half(), torch.full((3, 1), 1.5, requires_grad=True))
    assert half.dtype == torch.float16


def test_alpha_gradient_under_torch_compile() -> None:
    torch._dynamo.reset()
    scores, alpha_tensor = normal(3, 5, dtype=torch.float32), torch.tensor(1.5, requires_grad=True)

    def both(s: Tensor, a: Tensor) -> Tensor:
        return entmax(s, a)[:, 0].sum() + entmax_loss(s, torch.tensor([0, 1, 2]), alpha=a)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(scores, alpha_tensor)
        (grad,) = torch.autograd.grad(compiled, alpha_tensor)
    torch.testing.assert_close(compiled, both(scores, alpha_tensor))
    torch.testing.assert_close(grad, torch.autograd.grad(both(scores, alpha_tensor), alpha_tensor)[0])
    torch._dynamo.reset()


# The module with a learnable alpha ---------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.99, 2.01])
def test_module_refuses_an_invalid_alpha(alpha: float) -> None:
    with pytest.raises(ArgumentError, match="`alpha`"):
        EntmaxLoss(alpha)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_a_learnable_alpha_must_start_inside_the_interval(alpha: float) -> None:
    EntmaxLoss(alpha)
    with pytest.raises(ArgumentError, match="learnable"):
        EntmaxLoss(alpha, learnable=True)


def test_a_learnable_alpha_starts_at_the_given_value() -> None:
    for alpha in (1.01, 1.5, 1.9):
        module = EntmaxLoss(alpha, learnable=True)
        assert isinstance(module.alpha, Tensor)
        assert abs(module.alpha.item() - alpha) < 1e-6
        assert [name for name, _ in module.named_parameters()] == ["raw_alpha"]
    assert list(EntmaxLoss(1.3).parameters()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [1e30, -1e30, 1e3, -1e3])
def test_no_optimiser_step_leaves_the_interval(dtype: torch.dtype, rate: float) -> None:
    module = EntmaxLoss(1.5, learnable=True).to(dtype)
    scores, target = normal(3, 5, dtype=dtype), torch.tensor([0, 1, 2])
    module(scores, target).backward()
    assert module.raw_alpha.grad is not None
    assert module.raw_alpha.grad.abs() > 1e-4
    with torch.no_grad():  # a step of gradient descent, downhill or uphill
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


def test_learning_alpha_lowers_the_loss() -> None:
    """Labels are drawn from the softmax of the scores, so that the best alpha is close to 1."""
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


def test_repr_of_the_module_shows_alpha() -> None:
    assert "alpha=1.3" in repr(EntmaxLoss(1.3))
    torch._C._set_warnAlways(
        True
    )  # otherwise torch shows a warning only once per process, in whichever test comes first
    try:
        assert "alpha=1.3, learnable=True" in repr(EntmaxLoss(1.3, learnable=True))
    finally:
        torch._C._set_warnAlways(False)
