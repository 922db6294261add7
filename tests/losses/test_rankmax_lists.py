"""Rankmax on the (n, k)-simplex: map, loss and head against a bisection for the scale a."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import ManymaxError, rankmax, rankmax_loss
from manymax.engine import native_library
from manymax.theory.jacobian import jacobian
from tests.exact import INF, labels, normal

BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
C, DIM = 83, 5


def by_bisection(row: Tensor, label: int, k: int) -> Tensor:
    """min(1, a u) with the sum k, (C,); 1 for every class inside of the margin where these are fewer than k."""
    u = (row - row[label] + 1).clamp(min=0)
    if int((u > 0).sum()) <= k:
        return (u > 0).double()
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * u).clamp(max=1).sum()) < k else (low, middle)
    return (low * u).clamp(max=1)


@pytest.mark.parametrize("k", [2, 3, 6, 7, 20])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_map_and_loss(k: int, scale: float) -> None:
    scores, target = normal(40, 7, scale=scale), labels(40, num_classes=7)
    scores[:, 2] = torch.where(target == 2, scores[:, 2], -INF)
    expected = torch.stack([by_bisection(row, y, k) for row, y in zip(scores, target.tolist(), strict=True)])
    torch.testing.assert_close(rankmax(scores, target, k=k), expected, rtol=1e-9, atol=1e-9)
    own = expected.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(rankmax_loss(scores, target, k=k, reduction="none"), -own.log(), rtol=1e-9, atol=1e-9)


def test_with_k_1_it_is_rankmax() -> None:
    scores, target = normal(4, 7), labels(4, num_classes=7)
    assert torch.equal(rankmax(scores, target, k=1), rankmax(scores, target))
    assert torch.equal(rankmax_loss(scores, target, k=1), rankmax_loss(scores, target))


def test_a_score_far_above_costs_no_digits() -> None:
    scores = torch.tensor([[1e30, -1e20, 2.0, 1.0]])
    torch.testing.assert_close(rankmax_loss(scores, torch.tensor([3]), k=2), torch.tensor(3.0).log())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, of a derivative in forward mode
@pytest.mark.parametrize("k", [2, 4])
def test_derivatives(k: int) -> None:
    scores, target = normal(4, 6).requires_grad_(), torch.tensor([[0, 2], [5, -100], [3, 1], [4, 4]])
    assert torch.autograd.gradcheck(lambda s: rankmax_loss(s, target, k=k), scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda s: rankmax_loss(s, target, k=k), scores)
    one = torch.tensor([0, 5, 3, 4])
    found = jacobian(manymax.FAMILY["rankmax"], scores.detach(), one, k=k)
    for row, y, ours in zip(scores.detach(), one, found, strict=True):
        torch.testing.assert_close(ours, torch.func.jacrev(lambda s, y=y: rankmax(s, y, k=k))(row))


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scores": {"temperature": 0.5, "softcap": 2.0, "normalize": True},
    "weights": {"weight": torch.linspace(-1, 2, C).double(), "reduction": "sum"},
    "rows": {"row_weight": torch.linspace(0, 1, 30).double(), "num_items": 7},
    "normalized": {"multilabel": "normalized"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [2, 5, 60, 83, 200])
@pytest.mark.parametrize("case", GIVEN)
def test_head(case: str, k: int, backend: str) -> None:
    """Rows of several positives, of which some are among the k - 1 best; few and many classes inside of the margin."""
    given = dict(GIVEN[case])
    x, w, bias = normal(30, DIM), normal(C, DIM, seed=1), normal(C, seed=2)
    x[:10], bias[9] = 5 * x[:10], -INF
    target = torch.where(labels(30, 3, num_classes=C) == 9, 8, labels(30, 3, num_classes=C))
    target[4, 1:], target[7] = -100, -100
    target[:20, 0] = (x @ w.T + bias).argmax(1)[:20]
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    options = {"backend": backend, "block_rows": 4}
    ours = manymax.linear_rankmax_loss(*leaves[:2], target, k=k, linear_bias=bias, options=options, **given)
    if given.pop("normalize", False):
        x, w = torch.nn.functional.normalize(x), torch.nn.functional.normalize(w)
    scores = x @ w.T / given.pop("temperature", 1.0) + bias
    cap = given.pop("softcap", None)
    scores = scores if cap is None else torch.where(scores > -INF, cap * torch.tanh(scores / cap), scores)
    rows, items = given.pop("row_weight", None), given.pop("num_items", None)
    if rows is None:
        expected = rankmax_loss(scores, target, k=k, **given)
    else:
        expected = (rows * rankmax_loss(scores, target, k=k, reduction="none")).sum() / items
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs.nan_to_num(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_in_other_precisions(dtype: torch.dtype) -> None:
    x, w, target = normal(6, DIM).to(dtype), normal(C, DIM, seed=1).to(dtype), labels(6, num_classes=C)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss = manymax.linear_rankmax_loss(*leaves, target, k=4)
    expected = rankmax_loss(x.double() @ w.double().T, target, k=4)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(loss.double(), expected, **tolerance)
    for mine, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_what_it_refuses() -> None:
    for k in (0, -1):
        with pytest.raises(ManymaxError, match=r"`simplex` must be an integer in \[1, 4096\]"):
            rankmax_loss(torch.zeros(2, 3), torch.tensor([0, 1]), k=k)
    with pytest.raises(ManymaxError, match=r"`k` must be an integer; got 2\.5"):
        manymax.RankmaxLoss(k=2.5)  # type: ignore[arg-type]
