"""Generalised binary cross entropy (gBCE) on sampled negatives: the fewer of them, the less the positive weighs.

    loss      b softplus(-s_y) + sum over k negatives j of softplus(s_j)
    weight    b = a (t (1 - 1/a) + 1/a) = 1 - t (1 - a),    a = k / (C - 1), the share of the other classes drawn
    gradient  -b sigma(-s_y) on the positive, sigma(s_j) on each negative

Every positive is in the loss, and only a share a of what is not positive: without a weight, sigma(s) becomes too large
for a probability (overconfident). With labels drawn from p and negatives drawn uniformly from the other C - 1 classes,
the minimiser is sigma(s_i) = b p_i / (b p_i + a (1 - p_i)): p itself at t = 1, where b = a. At t = 0 the positive has
weight 1, as in plain binary cross entropy. The loss does not use log q.

The authors divide the loss by k + 1, a constant factor, and take t = 0.75 by default.

Citation: Petrov and Macdonald, "gSASRec: Reducing Overconfidence in Sequential Recommendation Trained with Negative
Sampling", RecSys 2023.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.sampled_scores import DrawnKernel, SampledScores

CALIBRATION = Setting(
    "t",
    float,
    0.75,
    "How far sigma(s) is calibrated: 0 gives positives the weight 1, 1 makes sigma(s) a probability.",
    least=0,
    most=1,
)


def positive_weight(num_negatives: int, num_classes: int, t: float) -> float:
    """b = 1 - t (1 - a), the weight of the positive, where a = k / (C - 1).

    >>> positive_weight(10, 41, t=0.0), positive_weight(10, 41, t=1.0)
    (1.0, 0.25)
    """
    share = num_negatives / max(1, num_classes - 1)  # one class has no others to draw: its weight does not matter
    return 1 - t * (1 - share)


def gbce_loss(positive: Tensor, negative: Tensor, num_classes: int, *, t: float = CALIBRATION.default) -> Tensor:
    """Binary cross entropy -b log sigmoid(s_y) - sum_j log(1 - sigmoid(s_j)) with a weight b of each positive.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.
        num_classes: C, of which the k negatives were drawn.
        t: from 0, where b = 1, to 1, where b = k / (C - 1).

    Returns:
        (M,) losses.

    Example: two of four other classes are drawn, so that b = 1 - 0.75 / 2.

        >>> import torch
        >>> gbce_loss(torch.tensor([0.0]), torch.tensor([[0.0, 0.0]]), num_classes=5)
        tensor([1.8195])
    """
    CALIBRATION.check(t)
    weight = positive_weight(negative.shape[-1], num_classes, t)
    return weight * softplus(-positive) + softplus(negative).sum(-1)


def gbce_kernel(t: float = CALIBRATION.default) -> DrawnKernel:
    """Make the kernel of gBCE for a head: b softplus(-s_y) + sum_j softplus(s_j).

    A masked negative (score -inf) adds 0 to the sum, and still counts in the k of the weight b.
    """

    def rows(sample: SampledScores) -> Tensor:
        # Each rank sums over the negatives that it holds. The term of the positive is the same on every rank and must
        # stay outside of the sum over the ranks.
        weight = positive_weight(sample.num_negatives, sample.num_classes, t)
        return weight * softplus(-sample.positive) + sample.ranks.total(softplus(sample.negative).sum(-1))

    return DrawnKernel(rows)


FORMULAS = Formulas(
    map=None,
    loss="b softplus(-s_y) + sum_j softplus(s_j), b = 1 - t (1 - k/(C - 1))",
    gradient="-b sigma(-s_y) on the positive, sigma(s_j) on each negative",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "it is a sum of logistic losses of single scores", "derived", "derived"),
    convex=Fact(True, "it is a sum of logistic losses", "derived", "derived"),
    calibrated=Fact(
        True,
        "the minimiser is log(b p / (k q)), which ranks classes like p if negatives are drawn uniformly; at t = 1 and"
        " with negatives drawn uniformly from the other classes sigma(s) = p",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(False, "adding a constant to all scores changes the loss", "derived", "derived"),
    smoothness=Fact(
        None,
        "(b + k)/4: b/4 from the positive and 1/4 from each negative, which add up if all of them are the positive",
        "derived",
        "derived",
        fn=lambda num_classes, num_negatives=100, t=CALIBRATION.default: (
            (positive_weight(num_negatives, num_classes, t) + num_negatives) / 4
        ),
        sizes=("num_negatives",),
    ),
    cost=Fact(
        "constant",
        "batch x (k + 1), whatever the number of classes",
        "derived",
        "derived",
        fn=lambda batch, num_classes, num_negatives=100: float(batch * (num_negatives + 1)),
    ),
)

SETTINGS = (CALIBRATION,)
