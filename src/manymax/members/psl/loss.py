"""PSL, the pairwise softmax loss: softmax with the exponential of a score difference replaced by a flatter function g.

    map       p_i(s; y) = h_i / H,   h_i = g(s_i - s_y)^(1 / tau),   H = sum_j h_j
    g(d)      max(0, 1 + d),   1 + tanh(d)   or   max(0, 1 + arctan(d))
    loss      l(y, s) = -log p_y = log H,   because g(0) = 1
    gradient  (p_i r_i - [i = y] sum_j p_j r_j) / tau,   r_j = g'(s_j - s_y) / g(s_j - s_y)

With g = exp it would be softmax of s / tau. Each g lies between the step 1[d >= 0], whose sum is the rank of y, and
exp, so that H bounds the rank more tightly; and a class far above the positive, which may be a positive that nobody has
seen yet, weighs less. Its authors divide cosines by 2, so that differences stay in [-1, 1].

1 + d is negative below d = -1 and 1 + arctan(d) below d = -tan(1) = -1.557: there g is 0, and a class adds nothing to
loss or gradient, as one at the cut itself. With g = max(0, 1 + d) and tau = 1 the loss is that of rankmax.

Citation: Yang, Chen, Xin, Zhou, Hu, Feng, Chen, Wang, "PSL: Rethinking and improving softmax loss from pairwise
perspective for recommendation", NeurIPS 2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.row_target import listed
from manymax.engine.target import Form, SoftTarget, Target, check_options, check_positives, read_target
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, classes_last, learned, readable, visible, working
from manymax.ops.reduction import reduce

# In the order of the numbers in kernel.cpp. The first is the best in nearly all columns of the authors' tables.
ACTIVATIONS = ("relu", "tanh", "atan")

SETTINGS = (
    Setting("activation", str, "relu", "PSL's g(d): relu is max(0, 1 + d), tanh 1 + tanh(d).", choices=ACTIVATIONS),
    Setting(
        "tau",
        float,
        0.1,
        "1 / tau is PSL's exponent.",
        above=0,
        most=1,
        reason="above 1 the gradient is infinite where g begins",
    ),
)

TAKES = Takes(
    smoothing=False,
    float_rows=False,
    why="Each class with weight needs a sum over all classes of its own, so that filled rows would cost C^2.",
)


def log_activation(differences: Tensor, activation: str) -> Tensor:
    """log g(d) of score differences d, of any shape; -inf where g is 0, as at masked classes."""
    live = differences > -math.inf
    d = torch.where(live, differences, 0)  # derivatives at -inf would be nan
    if activation == "tanh":
        # 1 + tanh(d) = 2 sigma(2 d): far below 0 the sum has no digits, and its logarithm has all of them.
        values = math.log(2) + logsigmoid(2 * d)
    else:
        g = 1 + (d if activation == "relu" else d.atan())
        live = live & (g > 0)
        values = torch.where(live, g, 1).log()
    return torch.where(live, values, -math.inf)


def _log_terms(scores: Tensor, labels: Tensor, activation: str, tau: float) -> Tensor:
    """log h = log g(s - s_y) / tau, (..., P, C), of scores (..., C) and scores of positives (..., P)."""
    return log_activation(scores.unsqueeze(-2) - labels.unsqueeze(-1), activation) / tau


@checked
def psl(scores: Tensor, target: Tensor, activation: str = "relu", tau: float = 0.1, dim: int = -1) -> Tensor:
    """PSL's probabilities given the label, p_i = h_i / sum_j h_j with h_i = g(s_i - s_y)^(1 / tau).

    Args:
        scores: (..., C) scores; -inf masks a class.
        target: (...) integer ids, the label y of each row.
        activation: g, "relu", "tanh" or "atan".
        tau: the inverse of the exponent.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.psl(torch.tensor([0.5, 0.25, -0.75]), torch.tensor(1), tau=0.5)
        tensor([0.6098, 0.3902, 0.0000])
    """
    _check(activation, tau)
    work, dtype = working(classes_last(scores, dim))
    TAKES.check("psl", target)
    read = read_target(Form.of(work), target, None, -100)
    if read.ids is None or target.ndim != work.ndim - 1:
        raise ArgumentError("`target` of the psl map must hold one id per row: the map is defined given one label.")
    if visible(read.weights) and not read.weights.all():
        raise ArgumentError("`target` of the psl map must name a class in every row; got `ignore_index` (-100).")
    label = work.gather(-1, read.ids)
    check_finite(work.amax(-1))
    check_positives(label)
    probs = torch.softmax(_log_terms(work, label, activation, tau).squeeze(-2), -1)
    return probs.to(dtype).movedim(-1, dim)


@checked
def psl_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    activation: str = "relu",
    tau: float = 0.1,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The PSL loss log sum_j g(s_j - s_y)^(1 / tau).

    Args:
        scores: (..., C) scores, classes last; -inf masks a class. Its authors take cosines / 2.
        target: ids or bool rows as in `softmax_loss`; float rows are refused, and so is smoothing, because every class
            with a weight needs a sum over all classes of its own.
        activation: g(d), "relu" for max(0, 1 + d), "tanh" for 1 + tanh(d), "atan" for max(0, 1 + arctan(d)).
        tau: the inverse of the exponent, in (0, 1]; tau* of the authors' code, who found 0.025 to 0.1 best.
        weight, ignore_index, reduction: as in `softmax_loss`.
        label_smoothing: must be 0.
        multilabel: "sum" over positives, each with its own sum; "normalized" divides that by their total weight.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.psl_loss(torch.tensor([[0.5, 0.25, -0.75]]), torch.tensor([1]), tau=0.5)
        tensor(0.9410)
    """
    _check(activation, tau)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("psl", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    top = work.amax(-1, keepdim=True)
    check_finite(top)
    check_positives(read.pick(work))
    ids, weights = _positives(read, work)
    labels = work.gather(-1, ids)
    # A class of weight 0, which pads, may be masked; any finite score will do in place of its own.
    live = labels > -torch.inf
    losses = _log_terms(work, torch.where(live, labels, top.detach()), activation, tau).logsumexp(-1)
    rows = (weights * torch.where(live, losses, 0)).sum(-1)
    if multilabel == "normalized":
        total = weights.sum(-1)
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _positives(read: Target, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights (..., P) of the positives, from bool rows too."""
    if read.ids is None and readable(read.weights) and not learned(read.weights):
        read = listed(read)
    if read.ids is not None:
        return read.ids, read.weights.to(scores.dtype)
    # Values that nobody may look at: every class may be a positive, and has a sum of its own.
    return torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape), read.weights.to(scores.dtype)


def _check(*values: str | float) -> None:
    """Raise unless the settings, in their order, can have these values."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.check(value)


class PslLoss(ExactLoss):
    """Module form of `psl_loss`.

    Args:
        activation, tau, weight, ignore_index, reduction, label_smoothing, multilabel: as in `psl_loss`.
    """

    loss_name, takes = "psl", TAKES

    @checked
    def __init__(
        self,
        activation: str = "relu",
        tau: float = 0.1,
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
        _check(activation, tau)
        self.activation, self.tau = activation, tau

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return psl_loss(scores, target, activation=self.activation, tau=self.tau, **self.options())

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, tau={self.tau}, {super().extra_repr()}"


FORMULAS = Formulas(
    map="p_i = h_i / H, h_i = g(s_i - s_y)^(1 / tau), H = sum_j h_j",
    loss="log H",
    gradient="(p_i r_i - [i = y] sum_j p_j r_j) / tau, r_j = g'(s_j - s_y) / g(s_j - s_y)",
)


def _smoothness(num_classes: int, activation: str = "relu", tau: float = 0.1) -> float:
    """Infinite where the slope of h jumps, or is infinite, where g begins; otherwise not known."""
    if num_classes == 1:
        return 0.0
    return math.inf if activation != "tanh" and tau > 0.5 else math.nan


FACTS = Facts(
    order_preservation=Fact(
        "weak",
        "given the label: never inverts. Classes below the cut of relu and atan tie at 0; 1 + tanh(d) is increasing,"
        " but 2 to the last digit for large d",
        "derived",
        "derived",
    ),
    fenchel_young=Fact(False, "the gradient has the factors r_j / tau beside p - e_y", "derived", "derived"),
    convex=Fact(False, "log g is concave: log H bends downward where a class is far above y", "derived", "derived"),
    calibrated=Fact(
        True,
        "a minimum swaps no two classes, and ties none where the slope of h is continuous: for tanh, and for tau below"
        " 1. At tau = 1 relu and atan have a kink, on which classes may tie. Those of tanh and atan, which are bounded,"
        " may be approached only as scores grow apart",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(True, "differences of scores are all it sees", "definition", "derived"),
    smoothness=Fact(
        None,
        "no constant is known; infinite for relu and atan with tau above 1/2, where the slope of h jumps at the cut",
        "derived",
        "derived",
        fn=_smoothness,
    ),
    cost=Fact(
        "linear",
        "batch x classes per positive",
        "derived",
        "derived",
        fn=lambda batch, num_classes, **_: float(batch * num_classes),
    ),
    bound=Fact(
        "DCG@K",
        "the sum over the positives of a row, L, and the number n of those in the list: DCG@K is at least n e^(-L / n)."
        " For the whole list it is the printed bound, which needs g(d) >= 1 for d >= 0 alone, and every class in the"
        " sum: not `decoupled`, and no positive left out",
        "Yang et al. 2024, lemma 4.1",
        "confirmed",
        fn=lambda loss, hits, **_: hits * math.exp(-loss / hits),
    ),
)
