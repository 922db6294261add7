"""Binary cross entropy (BCE) on sampled negatives, a pointwise loss that is common in recommenders.

    loss      softplus(-s_y) + mean over k negatives j of softplus(s_j)
    gradient  -sigma(-s_y) on the positive, sigma(s_j) / k on each negative

With labels drawn from p and negatives from q, s = log(p / q) minimises the expected loss, class by class. The loss does
not use log q.

Citation: Kang and McAuley, ICDM 2018, equation 12.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.sampled_scores import DrawnKernel, SampledScores


def bce_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Binary cross entropy -log sigmoid(s_y) - mean_j log sigmoid(-s_j) of each positive.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.

    Returns:
        (M,) losses.

    >>> import torch
    >>> bce_loss(torch.tensor([0.0]), torch.tensor([[0.0, 0.0]]))
    tensor([1.3863])
    """
    return softplus(-positive) + softplus(negative).mean(-1)


def bce_kernel() -> DrawnKernel:
    """Make the kernel of BCE for a head: softplus(-s_y) + mean_j softplus(s_j).

    A masked negative (score -inf) adds 0 to the sum, and still counts in the k that divides it.
    """

    def rows(sample: SampledScores) -> Tensor:
        # Each rank sums over the negatives that it holds; one sum over the ranks per positive completes the mean. The
        # term of the positive is the same on every rank and must stay outside of that sum.
        noise = sample.ranks.total(softplus(sample.negative).sum(-1)) / sample.num_negatives
        return softplus(-sample.positive) + noise

    return DrawnKernel(rows)


FORMULAS = Formulas(
    map=None,
    loss="softplus(-s_y) + mean_j softplus(s_j)",
    gradient="-sigma(-s_y) on the positive, sigma(s_j)/k on each negative",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "it is a sum of logistic losses of single scores", "derived", "derived"),
    convex=Fact(True, "it is a sum of logistic losses", "derived", "derived"),
    calibrated=Fact(
        True,
        "the minimiser is log(p / q), which ranks classes like p if negatives are drawn uniformly",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(False, "adding a constant to all scores changes the loss", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "1/4 from the positive and 1/4 from the negatives, which add up if every negative equals the positive",
        "derived",
        "derived",
        fn=lambda num_classes: 0.5,
    ),
    cost=Fact(
        "constant",
        "batch x (k + 1), whatever the number of classes",
        "derived",
        "derived",
        fn=lambda batch, num_classes, num_negatives=100: float(batch * (num_negatives + 1)),
    ),
)
