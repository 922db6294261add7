"""`FenchelYoung` with custom pairs of map and regulariser, and Omega and divergences of members against 50 digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from manymax import (
    FAMILY,
    ArgumentError,
    FenchelYoung,
    entmax,
    entmax_loss,
    softmax,
    softmax_loss,
    sparsemax,
    sparsemax_loss,
)
from tests import high_precision
from tests.exact import INF, normal

HOT = torch.tensor([[True, False, True, False], [False, True, False, False], [True, True, True, False]])
IDS = torch.tensor([[0, 2, -100], [1, -100, -100], [0, 1, 2]])


def half_norm(probs: Tensor) -> Tensor:
    """|p|^2 / 2, which is 1/2 at the vertices of the simplex: Omega of sparsemax plus a constant."""
    return probs.square().sum(-1) / 2


def warm_entropy(probs: Tensor) -> Tensor:
    """3 sum p log p, of which the map is softmax at a temperature of 3."""
    return 3 * (probs * torch.where(probs > 0, probs, 1).log()).sum(-1)


def blend(probs: Tensor) -> Tensor:
    """|p|^2 / 2 + sum p log p, a regulariser that no member has."""
    return half_norm(probs) + warm_entropy(probs) / 3


def blend_map(scores: Tensor) -> Tensor:
    """The map of `blend`: p + log p = s - tau, with tau such that sum p = 1.

    tau is found by bisection without derivatives; two Newton steps from there carry them.
    """
    top = scores.amax(-1, keepdim=True).detach()
    low, high = top - 3 - 2 * scores.shape[-1], top + 3
    for _ in range(60):
        middle = (low + high) / 2
        above = _lambert(scores.detach() - middle).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    tau = low
    for _ in range(2):
        probs = _lambert(scores - tau)
        tau = tau + (probs.sum(-1, keepdim=True) - 1) / (probs / (1 + probs)).sum(-1, keepdim=True)
    return _lambert(scores - tau)


def _lambert(x: Tensor) -> Tensor:
    """The solution p of p + log p = x, by Newton steps on log p."""
    log_p = torch.where(x > 1, x.clamp(min=1).log(), x)
    for _ in range(6):
        log_p = log_p - (log_p.exp() + log_p - x) / (log_p.exp() + 1)
    return log_p.exp()


PAIRS = {
    "half norm": FenchelYoung(sparsemax, half_norm),
    "warm entropy": FenchelYoung(lambda s: softmax(s / 3), warm_entropy),
    "blend": FenchelYoung(blend_map, blend),
}


def test_a_constant_added_to_omega_does_not_change_the_loss() -> None:
    scores = normal(3, 4, scale=2)
    custom = PAIRS["half norm"]
    for target in (torch.tensor([0, 1, 3]), IDS, HOT, normal(3, 4, seed=1).softmax(-1)):
        for options in ({}, {"multilabel": "normalized"}, {"reduction": "none", "label_smoothing": 0.2}):
            torch.testing.assert_close(
                custom.loss(scores, target, **options), sparsemax_loss(scores, target, **options)
            )
    torch.testing.assert_close(custom.conjugate(scores), FAMILY["sparsemax"].conjugate(scores) - 0.5)


def test_a_multiple_of_the_entropy_is_softmax_at_a_temperature() -> None:
    scores, target = normal(3, 4, scale=2), torch.tensor([0, 1, 3])
    custom = PAIRS["warm entropy"]
    torch.testing.assert_close(custom.loss(scores, target), 3 * softmax_loss(scores / 3, target))
    torch.testing.assert_close(custom.conjugate(scores), 3 * (scores / 3).logsumexp(-1))


@pytest.mark.parametrize("custom", PAIRS.values(), ids=PAIRS)
def test_a_custom_pair_keeps_the_fenchel_young_definitions(custom: FenchelYoung) -> None:
    scores = normal(3, 4)
    t = HOT / HOT.sum(-1, keepdim=True)
    probs = custom.map(scores)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, dtype=torch.float64))
    leaf = scores.clone().requires_grad_()
    (grad,) = torch.autograd.grad(custom.conjugate(leaf).sum(), leaf)
    torch.testing.assert_close(grad, probs)
    # the Fenchel-Young loss at t, by its definition, and its gradient
    loss = custom.loss(leaf, HOT, multilabel="normalized", reduction="none")
    inner = lambda p: (p * scores).sum(-1)  # noqa: E731
    expected = inner(probs) - custom.omega(probs) + custom.omega(t.double()) - inner(t)
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(grad, custom.gradient(scores, t.double()))
    # the map maximises <p, s> - Omega(p): no other point of the simplex has more
    for seed in range(20):
        other = normal(3, 4, seed=seed, scale=2).softmax(-1)
        assert (inner(other) - custom.omega(other) <= custom.conjugate(scores) + 1e-12).all()
    # the loss is 0 where the target is the map
    at_map = custom.loss(scores, probs, multilabel="normalized", reduction="none")
    torch.testing.assert_close(at_map, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("custom", PAIRS.values(), ids=PAIRS)
def test_targets_of_a_custom_pair(custom: FenchelYoung) -> None:
    scores, weight = normal(3, 4), torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    singles = torch.stack([custom.loss(scores, torch.full((3,), i), reduction="none") for i in range(4)], -1)
    for target in (IDS, HOT):
        torch.testing.assert_close(custom.loss(scores, target, reduction="none"), (HOT * singles).sum(-1))
        weighted = custom.loss(scores, target, weight=weight)
        torch.testing.assert_close(weighted, (HOT * weight * singles).sum() / (HOT * weight).sum())
    rows = normal(3, 4, seed=1).softmax(-1)
    torch.testing.assert_close(custom.loss(scores, rows, reduction="none"), (rows * singles).sum(-1))


@pytest.mark.parametrize("custom", PAIRS.values(), ids=PAIRS)
def test_derivatives_and_transforms_of_a_custom_pair(custom: FenchelYoung) -> None:
    scores = normal(2, 4, seed=3).requires_grad_()

    def loss(s: Tensor) -> Tensor:
        return custom.loss(s, HOT[:2], multilabel="normalized", reduction="none")

    for function in (loss, custom.conjugate):
        assert gradcheck(function, scores)
        assert gradgradcheck(function, scores)
    detached = scores.detach()
    torch.testing.assert_close(torch.vmap(custom.conjugate)(detached), custom.conjugate(detached))
    single = lambda s: custom.loss(s, torch.tensor(1))  # noqa: E731
    torch.testing.assert_close(torch.vmap(single)(detached), torch.stack([single(s) for s in detached]))
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(single))(detached), custom.map(detached) - torch.tensor([0.0, 1, 0, 0])
    )
    hessian = torch.func.jacrev(torch.func.jacrev(single))(detached[0])
    torch.testing.assert_close(hessian, torch.func.jacrev(custom.map)(detached[0]))


def test_masked_classes_of_a_custom_pair() -> None:
    scores = normal(2, 5)
    scores[:, 4] = -INF
    for name in ("half norm", "warm entropy"):
        leaf = scores.clone().requires_grad_()
        loss = PAIRS[name].loss(leaf, torch.tensor([0, 3]), reduction="none")
        torch.testing.assert_close(loss, PAIRS[name].loss(scores[:, :4], torch.tensor([0, 3]), reduction="none"))
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert grad.isfinite().all()
        assert grad[:, 4].tolist() == [0.0, 0.0]
        with pytest.raises(ArgumentError, match="masked"):
            PAIRS[name].loss(scores, torch.tensor([0, 4]))
        with pytest.raises(ArgumentError, match="nan"):
            PAIRS[name].loss(torch.full((1, 3), torch.nan), torch.tensor([0]))


def test_half_precision_of_a_custom_pair() -> None:
    scores, target = normal(3, 4, dtype=torch.bfloat16), torch.tensor([0, 1, 2])
    for custom in PAIRS.values():
        loss = custom.loss(scores, target)
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(loss.double(), custom.loss(scores.double(), target), rtol=2**-8, atol=0)


# The members -------------------------------------------------------------------------------------

MEMBERS: list[tuple[str, dict[str, Any], float]] = [("softmax", {}, 1.0), ("sparsemax", {}, 2.0)] + [
    ("entmax", {"alpha": alpha}, alpha) for alpha in (1.0, 1.0001, 1.3, 1.5, 2.0)
]


@pytest.mark.parametrize(("name", "setting", "alpha"), MEMBERS)
def test_omega_and_conjugate_to_fifty_digits(name: str, setting: dict[str, Any], alpha: float) -> None:
    probs = torch.cat([normal(3, 4, scale=2).softmax(-1), torch.tensor([[0.5, 0.5, 0, 0], [1, 0, 0, 0]]).double()])
    omega = high_precision.as_tensor([high_precision.omega(row, alpha) for row in probs.tolist()])
    torch.testing.assert_close(FAMILY[name].omega(probs, **setting), omega, rtol=1e-12, atol=1e-12)
    scores = torch.cat([normal(3, 4, scale=2), normal(1, 4) + 1e4])
    conjugate = high_precision.as_tensor([high_precision.conjugate(row, alpha) for row in scores.tolist()])
    torch.testing.assert_close(FAMILY[name].conjugate(scores, **setting), conjugate, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "setting", "alpha"), MEMBERS)
def test_bregman_divergence_to_fifty_digits(name: str, setting: dict[str, Any], alpha: float) -> None:
    """Also where the second point has zeros: there the divergence of softmax is infinite, and that of others is not."""
    inside, corner = normal(1, 3).softmax(-1), torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    pairs = [
        (inside, inside.flip(-1)),
        (corner, inside),
        (inside, corner),
        (corner, corner),
        (corner.roll(1, -1), corner),
    ]
    for first, second in pairs:
        expected = high_precision.as_tensor([high_precision.bregman(first[0].tolist(), second[0].tolist(), alpha)])
        torch.testing.assert_close(FAMILY[name].bregman(first, second, **setting), expected, rtol=1e-10, atol=1e-12)


def test_the_divergence_of_softmax_is_the_kullback_leibler_divergence() -> None:
    p, q = normal(4, 5).softmax(-1), normal(4, 5, seed=1).softmax(-1)
    torch.testing.assert_close(FAMILY["softmax"].bregman(p, q), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(FAMILY["sparsemax"].bregman(p, q), (p - q).square().sum(-1) / 2)


def test_the_pair_of_a_member_has_its_loss_and_its_map() -> None:
    scores, target = normal(3, 4), torch.tensor([0, 1, 2])
    torch.testing.assert_close(
        FAMILY["entmax"].fenchel_young(alpha=1.3).loss(scores, target), entmax_loss(scores, target, alpha=1.3)
    )
    torch.testing.assert_close(FAMILY["entmax"].fenchel_young(alpha=1.3).map(scores), entmax(scores, 1.3))
