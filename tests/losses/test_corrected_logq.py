"""The correction "corrected_logq" of sampled softmax: its gradient, over all samples and in heads, and its value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import ArgumentError, sampled_softmax_loss
from manymax.theory.risk import minimisers
from tests.losses.sampled_softmax_cases import P3, P4, Q3, Q4, bias, loss_of_classes

LAWS = [(P3, Q3), (P4, Q4), (P3, torch.full_like(P3, 1 / 3))]
VARIANTS = {
    name: (name, "keep" if name == "logq" else "mask", None) for name in ("logq", "partition", "corrected_logq")
}


def mean_gradients(probs: Tensor, q: Tensor, num_negatives: int, correction: str) -> Tensor:
    """The mean gradient for each label, (C, C), over all samples, at scores log(probs)."""
    ids, weights = bias.all_samples(q, num_negatives)

    def mean(scores: Tensor, target: int) -> Tensor:
        targets = torch.full((len(ids),), target)
        return (weights * loss_of_classes(scores, targets, ids, q.log(), VARIANTS[correction])).sum()

    return torch.stack([torch.func.grad(mean)(probs.log(), y) for y in range(len(probs))])


def gradient_bias(probs: Tensor, q: Tensor, num_negatives: int, correction: str) -> float:
    """The root of the mean, over labels from probs, of the squared distance of the mean gradient to the exact one."""
    exact = probs - torch.eye(len(probs)).double()
    distance = (mean_gradients(probs, q, num_negatives, correction) - exact).square().sum(1)
    return math.sqrt(probs @ distance)


@pytest.mark.parametrize(("probs", "q"), LAWS, ids=["C=3", "C=4", "uniform q"])
@pytest.mark.parametrize("num_negatives", [1, 2, 5, 10])
def test_the_gradient_has_less_bias_than_that_of_the_default(probs: Tensor, q: Tensor, num_negatives: int) -> None:
    ours, default = (gradient_bias(probs, q, num_negatives, name) for name in ("corrected_logq", "logq"))
    assert ours < (0.8 if num_negatives > 1 else 0.9) * default


@pytest.mark.parametrize("num_negatives", [1, 2, 5])
def test_the_gradient_of_the_model_s_own_proposal_is_exact_if_anything_is_drawn(num_negatives: int) -> None:
    exact = P4 - torch.eye(4).double()
    missed = 1 - P4**num_negatives  # the probability that not all draws are the label
    ours = mean_gradients(P4, P4, num_negatives, "corrected_logq")
    torch.testing.assert_close(ours, missed.unsqueeze(1) * exact, rtol=0, atol=1e-14)
    partition = mean_gradients(P4, P4, num_negatives, "partition")
    assert (partition - exact).norm() > 0.02


def test_the_value_is_no_estimate_of_the_softmax_loss() -> None:
    """It tends to (1 - P_y) log((1 - P_y) / P_y), where "partition" tends to -log P_y."""
    ids, weights = bias.all_samples(Q3, 60)
    for y, prob in enumerate(P3.tolist()):
        means = {
            name: float((weights * loss_of_classes(P3.log(), torch.full((len(ids),), y), ids, Q3.log(), variant)).sum())
            for name, variant in VARIANTS.items()
        }
        assert means["partition"] == pytest.approx(-math.log(prob), abs=0.02)
        assert means["corrected_logq"] == pytest.approx((1 - prob) * math.log((1 - prob) / prob), abs=0.03)


def test_a_positive_without_a_doubt_has_a_negative_loss() -> None:
    positive, negative = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [3.0]])
    options: dict[str, Any] = {"log_q_positive": math.log(0.25), "log_q_negative": math.log(0.25)}
    loss = sampled_softmax_loss(
        positive, negative, **options, hits=torch.zeros(2, 1) > 0, correction="corrected_logq", reduction="none"
    )
    difference = math.log(3) + torch.tensor([-3.0, 3.0])  # log Z' - s_y, where three other classes score alike
    torch.testing.assert_close(loss, difference.sigmoid() * difference)
    assert loss[0] < 0 < loss[1]


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("num_negatives", [3, 8])
def test_in_batch_draws_of_a_query_with_several_positives(shared: bool, num_negatives: int, seed: int) -> None:
    """The columns that are neither of the own query nor hits count; classes repeat, so that there are hits."""
    classes, rows = 7, 6
    queries, vectors = torch.randn(rows, 4).double(), torch.randn(classes, 4).double().requires_grad_()
    target = torch.tensor([[0, 1], [1, -100], [0, 2], [1, 3], [0, 3], [2, 6]])  # a head sorts them
    counts = torch.arange(1.0, classes + 1)
    sampler = manymax.samplers.InBatchSampler(classes, counts=counts)
    options: dict[str, Any] = {"shared": shared, "correction": "corrected_logq", "reduction": "sum"}

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    ours = manymax.linear_sampled_softmax_loss(
        queries, vectors, target, sampler, num_negatives, generator=generator(), **options
    )
    owner, column = (target >= 0).nonzero(as_tuple=True)
    positives, q = target[owner, column], (counts / counts.sum()).double()
    draw = sampler(num_negatives, target=positives, owner=owner, shared=shared, generator=generator())
    theirs = torch.zeros(()).double()
    for m, (n, y) in enumerate(zip(owner.tolist(), positives.tolist(), strict=True)):
        ids, source = (each if shared else each[m] for each in (draw.ids, draw.source_row))
        missed = ids[(source != n) & (ids != y)]
        scores = queries[n] @ vectors.T
        if len(missed):
            others = ((scores[missed].exp() / q[missed]).mean() * (1 - q[y])).log()
            theirs = theirs + (others - scores[y]).detach().sigmoid() * (others - scores[y])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, vectors), torch.autograd.grad(theirs, vectors))


def test_what_it_cannot_do_is_refused() -> None:
    arguments = torch.randn(4, 3), torch.randn(9, 3), torch.arange(4)
    uniform, unknown = manymax.samplers.UniformSampler(9), manymax.samplers.DNSSampler(9, num_candidates=4)
    with pytest.raises(ArgumentError, match="`hit_policy='keep'` and `correction='corrected_logq'` contradict"):
        manymax.linear_sampled_softmax_loss(*arguments, uniform, 3, correction="corrected_logq", hit_policy="keep")
    with pytest.raises(ArgumentError, match="`correction='corrected_logq'` needs log q"):
        manymax.linear_sampled_softmax_loss(*arguments, unknown, 3, correction="corrected_logq")
    with pytest.raises(ArgumentError, match="`correction='corrected_logq'` has no risk to minimise"):
        minimisers(manymax.FAMILY["ssm"], P3, correction="corrected_logq")
