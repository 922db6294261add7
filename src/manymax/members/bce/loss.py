"""Binary cross entropy, the pointwise loss that recommenders are compared with.

    loss      softplus(-s_y) + mean over k negatives j of softplus(s_j)
    gradient  -sigma(-s_y) on the positive, sigma(s_j) / k on each negative

For labels from p and negatives from q every class is least at s = log(p / q). No log q enters it.

Reference: Kang and McAuley, ICDM 2018, equation 12.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.sampled_scores import DrawnKernel, SampledScores


def bce_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log sigmoid(s_y) - log sigmoid(-s_j), the latter as mean over negatives.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.

    Returns:
        (M,).

    >>> import torch
    >>> bce_loss(torch.tensor([0.0]), torch.tensor([[0.0, 0.0]]))
    tensor([1.3863])
    """
    return softplus(-positive) + softplus(negative).mean(-1)


def bce_kernel() -> DrawnKernel:
    """The kernel of BCE; what is masked (-inf) adds nothing to the mean."""

    def rows(sample: SampledScores) -> Tensor:
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
    fenchel_young=Fact(False, "logistic losses of single scores", "derived", "derived"),
    convex=Fact(True, "a sum of logistic losses", "derived", "derived"),
    calibrated=Fact(
        True, "the minimiser is log(p / q): the order of p if negatives are drawn uniformly", "derived", "derived"
    ),
    shift_invariant=Fact(False, "a constant added to all scores is paid for", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "1/4 for the positive and 1/4 for the negatives, together where all of them hit it",
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
