"""Bayesian personalised ranking (BPR), a pairwise loss that is common in recommenders.

    loss      mean over k negatives j of softplus(s_j - s_y)
    gradient  -mean_j sigma(s_j - s_y) on the positive, sigma(s_j - s_y) / k on each negative

With labels drawn from p and negatives from q, the expected loss of every pair of classes is smallest at s_i - s_j =
log(p_i q_j / (p_j q_i)), so s = log(p / q) minimises it. With one negative BPR is sampled softmax without correction.
The loss does not use log q.

Citation: Rendle, Freudenthaler, Gantner, Schmidt-Thieme, "BPR", UAI 2009.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.sampled_scores import DrawnKernel, SampledScores


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean over the negatives of -log sigmoid(s_y - s_j), for each positive.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.

    Returns:
        (M,) losses.

    >>> import torch
    >>> bpr_loss(torch.tensor([2.0]), torch.tensor([[0.0, 2.0]]))
    tensor([0.4100])
    """
    return softplus(negative - positive.unsqueeze(-1)).mean(-1)


def bpr_kernel() -> DrawnKernel:
    """Make the kernel of BPR for a head: mean_j softplus(s_j - s_y).

    A masked negative (score -inf) adds 0 to the sum, and still counts in the k that divides it.
    """

    def rows(sample: SampledScores) -> Tensor:
        # Every rank knows the scores of the positives and compares them with the negatives that it holds. `spread`:
        # the gradient of a positive comes from the negatives of all ranks and is added up over them.
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
    fenchel_young=Fact(False, "it is a mean of logistic losses of differences of scores", "derived", "derived"),
    convex=Fact(True, "it is a mean of logistic losses of differences of scores", "derived", "derived"),
    calibrated=Fact(
        True,
        "the minimiser is log(p / q), which ranks classes like p if negatives are drawn uniformly",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(True, "only differences of scores enter the loss", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "1/4, the largest curvature of a logistic loss, times |e_j - e_y|^2 = 2",
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
