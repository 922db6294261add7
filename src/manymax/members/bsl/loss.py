"""BSL, the bilateral softmax loss: of several positives in a row, a soft minimum of their softmax losses.

    loss      l(Y, s) = -tau log mean over y in Y of exp(-l_y / tau),   l_y = log sum_j exp(s_j) - s_y
                      = log sum_j exp(s_j) - tau log mean over y in Y of exp(s_y / tau)
    gradient  p - q,   p = softmax(s),   q_y = exp(s_y / tau) / sum over y' in Y of exp(s_y' / tau)

The more probable a positive is, the more of the gradient it gets; one that the model thinks impossible, which may be
in the data by mistake, gets next to none. With tau = 1 the loss is -log of the mean probability of the positives; as
tau grows it becomes the mean of their softmax losses, and as tau falls the loss of the best of them.

Its authors write tau2 log mean_j exp(s_j / tau2) - tau1 log mean over Y of exp(s_y / tau1): that is tau2 times this
loss at the scores s / tau2 with tau = tau1 / tau2, minus the constant tau2 log C. So tau2 is the `temperature` of a
head. For a single positive tau does nothing, and BSL is tau2 times softmax at the temperature tau2: an optimiser that
does not see constant factors, such as Adam, trains the same model with both.

Citation: Wu, Chen, Wu, Shi, Zhou, Wang, He, "BSL: Understanding and improving softmax loss for recommendation", ICDE
2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.row_target import listed
from manymax.engine.target import Form, SoftTarget, Target, check_options, check_positives, read_target
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, working
from manymax.ops.reduction import reduce

TAKES = Takes(
    smoothing=False,
    float_rows=False,
    why="It weights the positives of a row by itself, so that a distribution over them has no place in it.",
)

SETTINGS = (Setting("tau", float, 1.0, "The softness of BSL over positives.", above=0),)


def soft_minimum(losses: Tensor, counts: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """-tau log mean exp(-l / tau) of each row, (...), and its derivative q in the losses, (..., P).

    Args:
        losses: (..., P).
        counts: (..., P) bool, which of them count; a row in which none does has the minimum 0.
        tau: the temperature.
    """
    number = counts.sum(-1, keepdim=True).clamp(min=1)
    # The result does not depend on the number that is taken off here, so that it needs no gradient.
    least = torch.where(counts, losses, math.inf).amin(-1, keepdim=True).detach()
    least = torch.where(least < math.inf, least, 0)
    steps = torch.where(counts, (least - losses) / tau, 0)
    # With expm1 and log1p a large tau, whose exponentials are all near 1, costs no digits.
    mean = torch.where(counts, steps.expm1(), 0).sum(-1, keepdim=True) / number
    value = least - tau * mean.log1p()
    return value.squeeze(-1), torch.where(counts, steps.exp(), 0) / (number * (1 + mean))


@checked
def bsl_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    tau: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """BSL over the positives Y of a row, log sum_j exp(s_j) - tau log mean over y in Y of exp(s_y / tau).

    With a single positive it is `softmax_loss`.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: ids or bool rows as in `softmax_loss`; float rows and smoothing are refused. A positive whose class
            weight is 0 is none.
        tau: the temperature of the mean over positives, a multiple of that of the scores: small for the best of them
            alone, large for the mean of their losses.
        weight: (C,) class weights; the loss of a row is multiplied by the sum of those of its positives.
        ignore_index, reduction: as in `softmax_loss`; a mean is over positives.
        label_smoothing: must be 0.
        multilabel: "sum", which counts a row as often as it has positives; "normalized" counts each row once.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.bsl_loss(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([0]))
        tensor(0.3490)
        >>> manymax.bsl_loss(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([[0, 2]]), tau=0.1)
        tensor(0.4183)
    """
    _check(tau)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("bsl", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    check_finite(work.amax(-1))
    check_positives(read.pick(work))
    read = listed(read)
    assert read.ids is not None
    counts = read.weights != 0  # padding has the weight 0
    # Relative to the best positive: a common offset of the scores costs no digits, nor does a class far above.
    labels = work.gather(-1, read.ids)
    best = torch.where(counts, labels, -math.inf).amax(-1, keepdim=True).detach()
    best = torch.where(best > -math.inf, best, 0)
    least, _ = soft_minimum(best - torch.where(counts, labels, best), counts, tau)
    total = read.weights.sum(-1)
    rows = total * ((work - best).logsumexp(-1) + least)
    if multilabel == "normalized":
        rows = torch.where(total != 0, rows / torch.where(total != 0, total, 1), 0)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _check(tau: float) -> None:
    """Raise unless the setting can have this value."""
    SETTINGS[0].check(tau)


class BslLoss(ExactLoss):
    """Module form of `bsl_loss`.

    Args:
        tau, weight, ignore_index, reduction, label_smoothing, multilabel: as in `bsl_loss`.
    """

    loss_name, takes = "bsl", TAKES

    @checked
    def __init__(
        self,
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
        _check(tau)
        self.tau = tau

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return bsl_loss(scores, target, tau=self.tau, **self.options())

    def extra_repr(self) -> str:
        return f"tau={self.tau}, {super().extra_repr()}"


# Facts -------------------------------------------------------------------------------------------

FORMULAS = Formulas(
    map=None,
    loss="log sum_j exp(s_j) - tau log mean_{y in Y} exp(s_y / tau)",
    gradient="p - q,  p = softmax(s),  q_y = exp(s_y / tau) / sum_{y' in Y} exp(s_y' / tau)",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(
        False,
        "for a single positive it is softmax's; for several the gradient is p - q, and q follows from the scores",
        "derived",
        "derived",
    ),
    convex=Fact(
        False,
        "for a single positive it is softmax's, and convex; for several a convex function is subtracted, that of the"
        " positives, which decides where the other classes have little probability",
        "derived",
        "derived",
    ),
    calibrated=Fact(True, "for a single positive it is softmax's", "derived", "derived"),
    shift_invariant=Fact(True, "both logarithms grow by what is added to all scores", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "for a single positive that of softmax; for several max(1, 1 / tau) / 2 is not exceeded",
        "derived",
        "derived",
        fn=lambda num_classes, **_: 0.5 if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "linear",
        "every score enters a sum, as in softmax; the terms of the positives are few",
        "derived",
        "derived",
        fn=lambda batch, num_classes, **_: float(batch * num_classes),
    ),
)
