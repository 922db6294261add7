"""Sparsemax: the Euclidean projection onto the simplex, and its loss.

    map       p_i = max(0, s_i - tau),   tau such that sum_i p_i = 1
    omega     Omega(p) = (sum_i p_i^2 - 1) / 2
    loss      l(y, s) = 1/2 sum_{j: p_j > 0} (s_j^2 - tau^2) + 1/2 - s_y
    gradient  p - e_y

Sparsemax is entmax at alpha = 2. Some papers write Omega without the constant -1/2; the losses are the same.

Citation: Martins and Astudillo, "From softmax to sparsemax", ICML 2016.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.module import ExactLoss
from manymax.engine.target import SoftTarget, Target
from manymax.members.entmax.autograd import potential
from manymax.members.entmax.loss import entmax
from manymax.ops.arguments import checked


@checked
def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """Sparsemax probabilities, p_i = max(0, s_i - tau): the point of the simplex nearest to s.

    Args:
        scores: (..., C) scores; -inf masks a class.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.sparsemax(torch.tensor([2.0, 1.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    return entmax(scores, 2.0, dim)


def omega(probs: Tensor) -> Tensor:
    """The negative Gini entropy Omega(p) = (sum_i p_i^2 - 1) / 2, (...) for probabilities (..., C).

    Written as (sum_i p_i^2 - p_i) / 2, which is the same on the simplex and exactly 0 at its vertices.
    """
    return (probs.square() - probs).sum(-1) / 2


def foundation() -> FenchelYoung:
    """Map and regulariser of sparsemax, from which its Fenchel-Young loss follows."""
    return FenchelYoung(
        sparsemax, omega, slope=lambda probs: probs - 0.5, potential=partial(potential, alpha=2.0), separable=True
    )


@checked
def sparsemax_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The sparsemax loss 1/2 sum_{j: p_j > 0} (s_j^2 - tau^2) + 1/2 - s_y, with gradient sparsemax(s) - e_y.

    The loss and its gradient are exactly 0 where s_y exceeds every other score by at least 1.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: as in `softmax_loss`.
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `softmax_loss`.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.sparsemax_loss(torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([0]))
        tensor(0.0625)
    """
    return foundation().loss(
        scores,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
    )


class SparsemaxLoss(ExactLoss):
    """Module form of `sparsemax_loss`."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(scores, target, **self.options())


FORMULAS = Formulas(
    map="p_i = max(0, s_i - tau), with tau such that sum_i p_i = 1",
    loss="1/2 sum_{p_j > 0} (s_j^2 - tau^2) + 1/2 - s_y",
    gradient="p - e_y",
    omega="(sum_i p_i^2 - 1) / 2",
)

FACTS = Facts(
    order_preservation=Fact(
        "weak", "never inverts; classes below the threshold tie at 0", "proposition 3.5", "confirmed"
    ),
    fenchel_young=Fact(True, "the regulariser Omega is the negative Gini entropy", "section 2.4", "confirmed"),
    convex=Fact(True, "the loss is convex in the scores", "appendix A.2", "confirmed"),
    calibrated=Fact(
        True,
        "Top-k calibrated (k >= 1) and DCG-consistent for one label and for the sum over positives",
        "proposition 3.3",
        "confirmed",
    ),
    shift_invariant=Fact(
        True, "a constant added to all scores changes neither the map nor the loss", "definition", "derived"
    ),
    smoothness=Fact(
        1.0,
        "1 wherever the support has at least two classes, else 0",
        "lemma B.6, Table 1",
        "confirmed",
        fn=lambda num_classes: 1.0 if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "linear",
        "batch x classes: the threshold is found by Newton steps, no row is sorted",
        "derived; Table 4 assumes a sort",
        "contradicted",
        printed="N C log C",
        fn=lambda batch, num_classes: float(batch * num_classes),
    ),
)
