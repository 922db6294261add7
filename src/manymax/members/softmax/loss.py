"""Softmax and its cross entropy, the baseline of the family.

    map       p_i = exp(s_i) / sum_j exp(s_j)
    omega     Omega(p) = sum_i p_i log p_i
    loss      l(y, s) = log sum_j exp(s_j) - s_y
    gradient  p - e_y

Softmax is entmax at alpha = 1, and its loss is computed by the functions of entmax. With every kind of target, weight,
reduction and smoothing the loss equals `torch.nn.functional.cross_entropy`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.module import ExactLoss
from manymax.engine.target import SoftTarget, Target
from manymax.members.entmax.autograd import potential
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, classes_last, visible, working
from manymax.ops.deformed import log_of


@checked
def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """Softmax probabilities, p_i = exp(s_i) / sum_j exp(s_j).

    Args:
        scores: (..., C) scores; -inf masks a class.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.softmax(torch.tensor([2.0, 1.0, -1.0]))
        tensor([0.7054, 0.2595, 0.0351])
    """
    work, dtype = working(classes_last(scores, dim))
    probs = torch.softmax(work, -1)
    # A nan or +inf score, or a row without a live class, turns every probability of the row into nan. So the first
    # probability tells whether something is wrong, and valid scores need no pass over the table.
    if visible(probs) and probs[..., 0].isnan().any():
        check_finite(work.amax(-1))
    return probs.to(dtype).movedim(-1, dim)


def omega(probs: Tensor) -> Tensor:
    """The negative Shannon entropy Omega(p) = sum_i p_i log p_i, (...) for probabilities (..., C)."""
    return (probs * log_of(probs)).sum(-1)


def foundation() -> FenchelYoung:
    """Map and regulariser of softmax, from which its Fenchel-Young loss follows."""
    return FenchelYoung(
        softmax, omega, slope=lambda probs: probs.log() + 1, potential=partial(potential, alpha=1.0), separable=True
    )


@checked
def softmax_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """Softmax cross entropy, log sum_j exp(s_j) - s_y, with gradient softmax(s) - e_y.

    The arguments are those of `torch.nn.functional.cross_entropy`, with the classes last: torch puts
    them in dimension 1 for inputs of more than two dimensions, so pass `scores.movedim(1, -1)`.

    Args:
        scores: (..., C) float scores, classes last; -inf masks a class (its gradient is 0).
        target: one positive per row as integer ids (...); several positives as integer ids (..., P) padded with
            `ignore_index` (a set: repeated ids count once) or as bool rows (..., C); or float rows
            (..., C) that sum to 1. A target gives class i the weight t_i (1 for a positive), and the loss of a
            row is sum_i t_i l(i, s).
        weight: (C,) class weights, which multiply the t_i.
        ignore_index: the id that marks an entry of `target` as no positive. A row without a positive has loss 0.
        reduction: "none", "mean" or "sum". The mean divides by the sum of the positives' class weights,
            so that a row of several positives counts like as many rows; for float rows and
            `multilabel="normalized"` it divides by the number of rows that have a positive. The mean is 0
            where no row has a positive.
        label_smoothing: the share of each positive's weight that is spread evenly over the live classes, those
            that are not masked.
        multilabel: "sum", the sum over positives; or "normalized", the Fenchel-Young loss at t / |t| with
            |t| = sum_i t_i, which includes Omega(t / |t|) and is 0 exactly when the map equals the target.

    Returns:
        A scalar, or (...) for `reduction="none"`, in the dtype of `scores` (float32 under autocast).

    Raises:
        ArgumentError: for wrong shapes; in eager use on a CPU also for nan or +inf scores, ids out of range and a
            masked positive. Under torch.compile, torch.func and on GPUs values are not inspected.

    Example:
        >>> import torch, manymax
        >>> scores = torch.tensor([[2.0, 1.0, -1.0]])
        >>> manymax.softmax_loss(scores, torch.tensor([0]))
        tensor(0.3490)
        >>> manymax.softmax_loss(scores, torch.tensor([[0, 1, -100]]), reduction="sum")
        tensor(1.6980)
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


class SoftmaxLoss(ExactLoss):
    """Module form of `softmax_loss`."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return softmax_loss(scores, target, **self.options())


FORMULAS = Formulas(
    map="p_i = exp(s_i) / sum_j exp(s_j)",
    loss="log sum_j exp(s_j) - s_y",
    gradient="p - e_y",
    omega="sum_i p_i log p_i",
)

FACTS = Facts(
    order_preservation=Fact("strict", "s_i > s_j exactly when p_i > p_j", "Table 1, section 3.1.3", "confirmed"),
    fenchel_young=Fact(True, "the regulariser Omega is the negative Shannon entropy", "section 2.4", "confirmed"),
    convex=Fact(
        True,
        "the loss is convex in the scores, strictly so in every direction but that of a common shift",
        "appendix A.2",
        "confirmed",
    ),
    calibrated=Fact(
        True,
        "Top-k calibrated and DCG-consistent for one label and for the sum over positives; the normalized form"
        " follows E[y/|y|] instead, which is right for R@k",
        "Table 1, proposition 3.2",
        "confirmed",
    ),
    shift_invariant=Fact(
        True, "a constant added to all scores changes neither the map nor the loss", "section 3.1.3", "confirmed"
    ),
    smoothness=Fact(
        0.5,
        "1/2, reached at (1/2, 1/2) for two classes and approached for more",
        "lemma B.5, Table 1",
        "confirmed",
        fn=lambda num_classes: 0.5 if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "linear",
        "batch x classes",
        "Table 4",
        "confirmed",
        fn=lambda batch, num_classes: float(batch * num_classes),
    ),
)
