"""A logistic loss for each pair of a query and a document, as in SigLIP.

    loss      softplus(-s_y) + sum over j != y of softplus(s_j)  =  -sum_j log sigma(z_j s_j),  z = +1 at y, else -1
    gradient  sigma(s) - e_y

Unlike in softmax no score is compared with another one: each is to be above or below 0. Almost all pairs are negatives,
and a bias far below 0 keeps their sum from being most of the loss at first.

Citation: Zhai et al., Sigmoid loss for language image pre-training, ICCV 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine.member import Fact, Facts, Formulas


def pairwise_logistic_loss(scores: Tensor, target: Tensor) -> Tensor:
    """-sum_j log sigma(z_j s_j) of each row, with z = +1 at the target and -1 elsewhere.

    Args:
        scores: (N, C).
        target: (N,) ids.

    Returns:
        (N,) losses.

    Example:
        >>> pairwise_logistic_loss(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
        tensor([1.3863])
    """
    sign = torch.full_like(scores, -1.0).scatter(1, target.unsqueeze(1), 1.0)
    return -logsigmoid(sign * scores).sum(1)


FORMULAS = Formulas(
    map="sigma(s)",
    loss="softplus(-s_y) + sum_{j != y} softplus(s_j)",
    gradient="sigma(s) - e_y",
)

FACTS = Facts(
    order_preservation=Fact("strict", "sigma is increasing", "derived", "derived"),
    fenchel_young=Fact(
        True, "its Omega is a sum of binary entropies, over [0, 1]^C and not over the simplex", "derived", "derived"
    ),
    convex=Fact(True, "it is a sum of logistic losses", "derived", "derived"),
    calibrated=Fact(True, "the minimiser has sigma(s) = p, which ranks classes like p", "derived", "derived"),
    shift_invariant=Fact(False, "adding a constant to all scores changes the loss", "derived", "derived"),
    smoothness=Fact(
        0.25, "the Hessian is diagonal, sigma (1 - sigma) <= 1/4", "derived", "derived", fn=lambda num_classes: 0.25
    ),
    cost=Fact(
        "linear",
        "batch x C, the number of pairs",
        "derived",
        "derived",
        fn=lambda batch, num_classes: float(batch * num_classes),
    ),
)
