"""SL@K: what its authors claim and what holds, and the gate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from manymax import ArgumentError, linear_sl_at_k_loss, sl_at_k, sl_at_k_loss, softmax_loss
from tests.exact import normal


def dcg(ranks: list[int], k: int) -> float:
    return sum(1 / math.log2(1 + rank) for rank in ranks if rank <= k)


def one_row(scores: list[float], positives: list[int], k: int, gate_temperature: float = 1.0) -> float:
    """The sum of the losses of the positives of a row."""
    target = torch.tensor(positives).unsqueeze(0)
    row = torch.tensor([scores], dtype=torch.float64)
    return float(sl_at_k_loss(row, target, k=k, gate_temperature=gate_temperature, reduction="sum"))


def test_the_value_by_hand() -> None:
    loss = sl_at_k_loss(torch.tensor([[3.0, 1.0, 0.0]]).double(), torch.tensor([2]), k=2, gate_temperature=0.5)
    gate = 1 / (1 + math.exp((1.0 - 0.0) / 0.5))
    assert float(loss) == pytest.approx(gate * math.log(math.exp(3) + math.exp(1) + 1))


def test_gates_change_the_loss_and_no_probability() -> None:
    scores = normal(5, 7)
    torch.testing.assert_close(sl_at_k(scores, k=2), scores.softmax(-1))
    half = sl_at_k_loss(scores, torch.arange(5), k=2, gate_temperature=1e9)
    torch.testing.assert_close(half, softmax_loss(scores, torch.arange(5)) / 2)


def test_the_gate_has_a_gradient_and_the_bound_has_none() -> None:
    """d (w L) = w dL + L w (1 - w) / tau e_y, with nothing at the class whose score is the bound."""
    scores = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(sl_at_k_loss(scores, torch.tensor([2]), k=2, gate_temperature=0.5), scores)
    probs, gate = scores.detach().softmax(1), 1 / (1 + math.exp(2.0))
    expected = gate * (probs - torch.tensor([0.0, 0.0, 1.0]))
    expected[0, 2] += gate * (1 - gate) / 0.5 * -math.log(float(probs[0, 2]))
    torch.testing.assert_close(found, expected)


def test_settings_out_of_range_are_refused() -> None:
    for given in ({"k": 0}, {"k": 1.5}, {"gate_temperature": 0.0}):
        with pytest.raises((ArgumentError, TypeError), match=next(iter(given))):
            sl_at_k_loss(torch.zeros(1, 3), torch.tensor([0]), **given)


# The bound of its authors ------------------------------------------------------------------------


def test_with_a_hard_gate_and_a_hit_the_loss_bounds_dcg() -> None:
    """-log DCG@K <= sum of log sum_j exp(s_j - s_i) over the positives that are among the first K."""
    for scores, k in itertools.product(normal(20, 5, scale=2.0), (1, 2, 3, 5)):
        ranks = scores.argsort(descending=True).argsort() + 1
        each: Tensor = scores.logsumexp(0) - scores
        for own in itertools.product([False, True], repeat=5):
            hits = torch.tensor(own) & (ranks <= k)
            if hits.any():
                assert -math.log(dcg(ranks[hits].tolist(), k)) <= each[hits].sum() + 1e-12


def test_with_one_hit_the_whole_bound_fails() -> None:
    """One positive as the fourth of four nearly tied scores, K = 4: its gate is 1/2."""
    loss = one_row([3e-9, 2e-9, 1e-9, 0.0, -50.0], [3], k=4)
    assert loss == pytest.approx(math.log(4) / 2)
    assert -math.log(dcg([4], 4)) > loss + 0.14
    assert -math.log(dcg([4], 4)) <= 2 * loss


def test_it_is_no_bound_of_ndcg() -> None:
    """Twenty positives, of which two are at the top and the others given up: their gates are closed."""
    scores = [0.0, -1e-9, *[-60.0] * 18, *[-200.0] * 18]
    loss = one_row(scores, [0, 1, *range(20, 38)], k=20)
    found, best = dcg([1, 2], 20), dcg(list(range(1, 21)), 20)
    assert -math.log(found) < loss < -math.log(found / best)


def test_decoupled_it_bounds_nothing() -> None:
    """The published code leaves the positive out of its sum: the loss of a positive at the top is then negative."""
    vectors = torch.tensor([[9.0], [0.0], [-1.0]])
    loss = linear_sl_at_k_loss(torch.ones(1, 1), vectors, torch.tensor([0]), k=1, decoupled=True)
    assert loss < -math.log(dcg([1], 1))
