"""Talos: softmax cross entropy of log sigma(s - b) / tau, with b the K-th largest score of the row.

    map       p_i = h_i / H,   h_i = sigma(s_i - b)^(1 / tau),   H = sum_j h_j
    loss      l(y, s) = log H - log h_y
    gradient  (p - e_y) sigma(b - s) / tau

b is held constant in the gradient. Scores far above b, which are in the top K anyway, are all the same to the loss: its
gradient is largest for classes that are not there yet.

Citation: Zhang et al., Talos: optimizing top-K accuracy in recommender systems, WWW 2026.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine.list_bound import bound_of
from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, SoftTarget, Target, check_options, read_target, row_losses
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, classes_last, working
from manymax.ops.reduction import reduce

TAKES = Takes(smoothing=False, float_rows=False, why="It is a loss of the positives of a list of K.")

SETTINGS = (
    Setting("k", int, 20, "K, the length of the list that the loss aims at.", least=1),
    Setting("tau", float, 1.0, "1 / tau is the exponent of Talos.", above=0),
)


def logits(scores: Tensor, k: int, tau: float, bound: Tensor | None = None) -> Tensor:
    """log h = log sigma(s - b) / tau, (..., C), with b as in `talos_loss`; -inf at masked classes."""
    live = scores > -math.inf
    values = logsigmoid(torch.where(live, scores, 0) - bound_of(scores, k, bound)) / tau
    return torch.where(live, values, -math.inf)


@checked
def talos(scores: Tensor, k: int = 20, tau: float = 1.0, dim: int = -1) -> Tensor:
    """The probabilities p_i = h_i / sum_j h_j with h_i = sigma(s_i - b)^(1 / tau), b the k-th largest score.

    Args:
        scores: (..., C) scores; -inf masks a class.
        k: the length of the list; b is held constant in derivatives.
        tau: the inverse of the exponent.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.talos(torch.tensor([2.0, 1.0, -1.0]), k=1)
        tensor([0.6125, 0.3294, 0.0581])
    """
    _check(k, tau)
    work, dtype = working(classes_last(scores, dim))
    check_finite(work.amax(-1))
    return torch.softmax(logits(work, k, tau), -1).to(dtype).movedim(-1, dim)


@checked
def talos_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    k: int = 20,
    tau: float = 1.0,
    bound: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The Talos loss log sum_j sigma(s_j - b)^(1 / tau) - (1 / tau) log sigma(s_y - b).

    b is the k-th largest score of the row, or its lowest one where fewer are not masked, and is held constant in the
    gradient.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class. Its authors take cosines, which they do not divide by
            a temperature, with `tau` between 0.05 and 0.3.
        target: ids or bool rows as in `softmax_loss`; float rows and smoothing are refused.
        k: the length of the list that the loss aims at.
        tau: the inverse of the exponent.
        bound: (...) b of each row, if it is not to be the k-th largest of these scores; its authors learn it beside the
            model.
        weight, ignore_index, reduction: as in `softmax_loss`.
        label_smoothing: must be 0.
        multilabel: "sum" over positives; "normalized" divides that by their total weight.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.talos_loss(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([1]), k=1)
        tensor(1.1104)
    """
    _check(k, tau)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("talos", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    check_finite(work.amax(-1))
    values = logits(work, k, tau, bound)
    rows, total = row_losses(values.logsumexp(-1), values, read, weight, 0.0)
    if multilabel == "normalized":
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _check(*values: float) -> None:
    """Raise unless the settings, in their order, can have these values."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.check(value)


class TalosLoss(ExactLoss):
    """Module form of `talos_loss`.

    Args:
        k, tau, weight, ignore_index, reduction, label_smoothing, multilabel: as in `talos_loss`, and `bound` as an
            argument of the call.
    """

    loss_name, takes = "talos", TAKES

    @checked
    def __init__(
        self,
        k: int = 20,
        tau: float = 1.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            multilabel=multilabel,
        )
        _check(k, tau)
        self.k, self.tau = k, tau

    def forward(self, scores: Tensor, target: Tensor, bound: Tensor | None = None) -> Tensor:
        return talos_loss(scores, target, k=self.k, tau=self.tau, bound=bound, **self.options())

    def extra_repr(self) -> str:
        return f"k={self.k}, tau={self.tau}, {super().extra_repr()}"


FORMULAS = Formulas(
    map="p_i = h_i / H, h_i = sigma(s_i - b)^(1 / tau), b the K-th largest score, H = sum_j h_j",
    loss="log H - log h_y",
    gradient="(p - e_y) sigma(b - s) / tau",
)

FACTS = Facts(
    order_preservation=Fact("strict", "sigma is increasing", "derived", "derived"),
    fenchel_young=Fact(False, "the gradient has the factors sigma(b - s) / tau beside p - e_y", "derived", "derived"),
    convex=Fact(False, "with b held constant log H bends downward where scores are far above b", "derived", "derived"),
    calibrated=Fact(
        False,
        "no probability of the map is above 2^(1 / tau) times that of the K-th class. Where p needs more, from K = 3"
        " on, the minimiser has ties among the top K, at infinity or at b; these are the K most probable classes",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(
        True, "b moves along with the scores, so that a common shift changes nothing", "derived", "derived"
    ),
    smoothness=Fact(
        None,
        "no constant is known; with b held constant at most 1 / (2 tau^2) + 1 / (4 tau)",
        "derived",
        "derived",
        fn=lambda num_classes, **_: 0.0 if num_classes == 1 else math.nan,
    ),
    cost=Fact(
        "linear",
        "batch x classes; the K-th largest score is found in one pass",
        "derived",
        "derived",
        fn=lambda batch, num_classes, **_: float(batch * num_classes),
    ),
    bound=Fact(
        "Recall@K",
        "log K minus the mean over the positives of a row is at most Recall@K log(2) / tau. With (log 2) / tau as the"
        " constant the printed bound follows, and so do larger ones; but its right side is never below log K, which is"
        " -log Precision@K of a single hit, so that it does not tell one hit from K of them",
        "Zhang et al. 2026, theorem 3.1",
        "contradicted",
        printed="-log Precision@K is at most the loss plus log(1 + e^2 / 2) / tau, which is a tight bound",
        fn=lambda loss, k, tau=1.0, **_: (math.log(k) - loss) * tau / math.log(2),
    ),
)
