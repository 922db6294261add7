"""Bayesian personalised ranking, the pairwise loss that recommenders are compared with.

    loss      mean over k negatives j of softplus(s_j - s_y)
    gradient  -mean_j sigma(s_j - s_y) on the positive, sigma(s_j - s_y) / k on each negative

For labels from p and negatives from q every pair of classes is least at s_i - s_j = log(p_i q_j / (p_j q_i)), so that
s = log(p / q) is the minimiser. With one negative it is sampled softmax without correction. No log q enters it.

Reference: Rendle, Freudenthaler, Gantner, Schmidt-Thieme, "BPR", UAI 2009.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.sampled_scores import DrawnKernel, SampledScores


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log sigmoid(s_y - s_j), the mean over negatives.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.

    Returns:
        (M,).

    >>> import torch
    >>> bpr_loss(torch.tensor([2.0]), torch.tensor([[0.0, 2.0]]))
    tensor([0.4100])
    """
    return softplus(negative - positive.unsqueeze(-1)).mean(-1)


def bpr_kernel() -> DrawnKernel:
    """The kernel of BPR; what is masked (-inf) adds nothing to the mean."""

    def rows(sample: SampledScores) -> Tensor:
        ranks = sample.ranks
        positive = ranks.spread(sample.positive).unsqueeze(-1)
        return ranks.total(softplus(sample.negative - positive).sum(-1)) / sample.num_negatives

    return DrawnKernel(rows)


FORMULAS = Formulas(
    map=None,
    loss="mean_j softplus(s_j - s_y)",
    gradient="-mean_j sigma(s_j - s_y) on the positive, sigma(s_j - s_y)/k on each negative",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "a mean of logistic losses of differences", "derived", "derived"),
    convex=Fact(True, "a mean of logistic losses of differences", "derived", "derived"),
    calibrated=Fact(
        True, "the minimiser is log(p / q): the order of p if negatives are drawn uniformly", "derived", "derived"
    ),
    shift_invariant=Fact(True, "only differences of scores enter", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "1/4 times |e_j - e_y|^2 = 2",
        "derived",
        "derived",
        fn=lambda num_classes: 0.5 if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "constant",
        "batch x (k + 1), whatever the number of classes",
        "derived",
        "derived",
        fn=lambda batch, num_classes, num_negatives=100: float(batch * (num_negatives + 1)),
    ),
)
