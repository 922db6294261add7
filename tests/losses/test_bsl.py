"""BSL against the formula that its authors print, and what is left of it for one positive."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import manymax
from manymax import ManymaxError
from tests.exact import normal

POSITIVES = torch.tensor([[0, 3, 5], [2, -100, -100], [4, 1, -100], [-100, -100, -100]])


def as_printed(scores: Tensor, positives: list[int], tau1: float, tau2: float) -> Tensor:
    """-tau1 log mean over positives of exp(s / tau1) + tau2 log mean over all classes of exp(s / tau2)."""
    return tau2 * (scores / tau2).exp().mean().log() - tau1 * (scores[positives] / tau1).exp().mean().log()


@pytest.mark.parametrize(("tau1", "tau2"), [(0.2, 0.2), (0.5, 0.1), (0.1, 0.4)])
def test_it_is_the_authors_loss_but_for_a_factor_and_a_constant(tau1: float, tau2: float) -> None:
    scores = normal(4, 7)
    ours = manymax.bsl_loss(scores / tau2, POSITIVES, tau=tau1 / tau2, reduction="none")
    for row, ids, loss in zip(scores, POSITIVES.tolist(), ours, strict=True):
        positives = [y for y in ids if y >= 0]
        if not positives:
            assert loss == 0
            continue
        printed = as_printed(row, positives, tau1, tau2) + tau2 * math.log(7)
        torch.testing.assert_close(tau2 * loss, len(positives) * printed)


@pytest.mark.parametrize("tau", [0.01, 1.0, 100.0])
def test_with_one_positive_it_is_softmax_at_its_temperature(tau: float) -> None:
    x, w, target = normal(5, 3), normal(9, 3, seed=1), torch.arange(5)
    ours = manymax.linear_bsl_loss(x, w, target, tau=tau, temperature=0.3)
    torch.testing.assert_close(ours, manymax.linear_softmax_loss(x, w, target, temperature=0.3))


@pytest.mark.parametrize("tau", [1e-6, 1e6])
def test_between_the_best_positive_and_the_mean_of_all(tau: float) -> None:
    scores = normal(2, 6, scale=3)
    target = torch.tensor([[1, 4, 5], [0, 2, 3]])
    each = torch.stack([manymax.softmax_loss(scores, y, reduction="none") for y in target.T])
    expected = each.amin(0) if tau < 1 else each.mean(0)
    ours = manymax.bsl_loss(scores, target, tau=tau, reduction="none", multilabel="normalized")
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_what_it_refuses() -> None:
    scores, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    for bad in ({"tau": 0.0}, {"tau": -1.0}, {"label_smoothing": 0.1}):
        with pytest.raises(ManymaxError, match=f"`{next(iter(bad))}` must be"):
            manymax.bsl_loss(scores, ids, **bad)  # type: ignore[arg-type]
    with pytest.raises(ManymaxError, match="`target` of bsl must be ids or bool rows; got float rows"):
        manymax.bsl_loss(scores, torch.full((2, 3), 1 / 3))
