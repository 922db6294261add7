"""SL@K: the softmax loss of each positive, times a gate that opens where the positive is among the top K.

    map       p_i = exp(s_i) / sum_j exp(s_j)
    gate      w_y = sigma((s_y - b) / tau),   b the K-th largest score of the row
    loss      l(y, s) = w_y (log sum_j exp(s_j) - s_y)
    gradient  w_y (p - e_y) + e_y w_y (1 - w_y) / tau (log sum_j exp(s_j) - s_y)

b is held constant in the gradient. A positive far below the top K, which a ranking metric at K does not see, counts
little, and the model may give it up.

Citation: Yang et al., Breaking the top-K barrier: advancing top-K ranking metrics optimization in recommender systems,
KDD 2025.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.engine.list_bound import bound_of
from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, SoftTarget, Target, check_options, check_positives, read_target
from manymax.members.softmax.loss import softmax
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, working
from manymax.ops.reduction import reduce

TAKES = Takes(
    smoothing=False,
    float_rows=False,
    why="Each positive has a gate of its own, which opens by its score.",
)

SETTINGS = (
    Setting("k", int, 20, "K, the length of the list that the loss aims at.", least=1),
    Setting(
        "gate_temperature",
        float,
        10.0,
        "How slowly the gate of SL@K opens, in units of scores; the authors' tau_w / tau_d.",
        above=0,
    ),
)


@checked
def sl_at_k(scores: Tensor, k: int = 20, gate_temperature: float = 10.0, dim: int = -1) -> Tensor:
    """The probabilities of SL@K, which are those of softmax: the gate weighs positives and changes no probability.

    Args:
        scores: (..., C) scores; -inf masks a class.
        k, gate_temperature: settings of the loss, without an effect here; a map takes the settings of its loss.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.sl_at_k(torch.tensor([2.0, 1.0, -1.0]))
        tensor([0.7054, 0.2595, 0.0351])
    """
    _check(k, gate_temperature)
    return softmax(scores, dim)


@checked
def sl_at_k_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    k: int = 20,
    gate_temperature: float = 10.0,
    bound: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """SL@K, the softmax loss of each positive y times its gate w_y = sigma((s_y - b) / gate_temperature).

    b is the k-th largest score of the row, or its lowest one where fewer are not masked, and is held constant in the
    gradient. The gate itself has a gradient.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: ids or bool rows as in `softmax_loss`; float rows are refused, and so is smoothing, because each
            positive has a gate of its own.
        k: the length of the list that the loss aims at.
        gate_temperature: how slowly a gate opens, in units of scores. Its authors divide cosines by tau_d for the loss
            and by tau_w for the gate: with scores that are cosines / tau_d this is tau_w / tau_d. Their best settings
            for the data set Health, tau_d = 0.2 and tau_w = 2.5 with quantiles every 5 epochs, are cosines / 0.2 and a
            `gate_temperature` of 12.5; in a study `scale=cosine`, `temperature=0.2` and `bound_epochs=5`, with
            `exclude=positives` and `decoupled`, because their sums have negatives alone.
        bound: (...) b of each row, if it is not to be the k-th largest of these scores; its authors estimate it once in
            some epochs. In units of scores, as `gate_temperature`.
        weight, ignore_index, reduction: as in `softmax_loss`.
        label_smoothing: must be 0.
        multilabel: "sum" over positives; "normalized" divides that by their total weight.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> scores = torch.tensor([[2.0, 1.5, -1.0]])
        >>> manymax.sl_at_k_loss(scores, torch.tensor([1]), k=1, gate_temperature=0.5)  # 0.2689 of softmax's 1.0049
        tensor(0.2702)
    """
    _check(k, gate_temperature)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("sl_at_k", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    check_finite(work.amax(-1))
    # Differences to the maximum, so that a large offset of the scores costs no digits. A masked class is no positive; 0
    # in its place keeps derivatives finite.
    above = work - work.amax(-1, keepdim=True).detach()
    check_positives(read.pick(above))
    live = torch.where(above > -math.inf, above, 0)
    # The gate looks at differences to the bound, which is not near the maximum where scores are far apart.
    gates = torch.sigmoid((torch.where(above > -math.inf, work, 0) - bound_of(work, k, bound)) / gate_temperature)
    rows = read.pick(gates * (above.logsumexp(-1, keepdim=True) - live))
    if multilabel == "normalized":
        total = read.weights.sum(-1)
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _check(*values: float) -> None:
    """Raise unless the settings, in their order, can have these values."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.check(value)


class SlAtKLoss(ExactLoss):
    """Module form of `sl_at_k_loss`.

    Args:
        k, gate_temperature, weight, ignore_index, reduction, label_smoothing, multilabel: as in `sl_at_k_loss`, and
            `bound` as an argument of the call.
    """

    loss_name, takes = "sl_at_k", TAKES

    @checked
    def __init__(
        self,
        k: int = 20,
        gate_temperature: float = 10.0,
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
        _check(k, gate_temperature)
        self.k, self.gate_temperature = k, gate_temperature

    def forward(self, scores: Tensor, target: Tensor, bound: Tensor | None = None) -> Tensor:
        gate = self.gate_temperature
        return sl_at_k_loss(scores, target, k=self.k, gate_temperature=gate, bound=bound, **self.options())

    def extra_repr(self) -> str:
        return f"k={self.k}, gate_temperature={self.gate_temperature}, {super().extra_repr()}"


FORMULAS = Formulas(
    map="p_i = exp(s_i) / sum_j exp(s_j)",
    loss="w_y (log sum_j exp(s_j) - s_y), w_y = sigma((s_y - b) / tau), b the K-th largest score",
    gradient="w_y (p - e_y) + e_y w_y (1 - w_y) / tau (log sum_j exp(s_j) - s_y)",
)


def _smoothness(num_classes: int, k: int = 20, **_: float) -> float:
    """The supremum of the curvature for K = `k`; nan where none is known."""
    if num_classes == 1:
        return 0.0
    # One class far above, the label near b, and b the score of a third one.
    return math.inf if k > 1 and num_classes > 2 else math.nan


FACTS = Facts(
    order_preservation=Fact("strict", "the map is softmax", "derived", "derived"),
    fenchel_young=Fact(
        False,
        "the gate changes the gradient, and b is held constant in it",
        "derived",
        "derived",
    ),
    convex=Fact(
        False, "the gate closes where the softmax loss grows: the product bends both ways", "derived", "derived"
    ),
    calibrated=Fact(
        False,
        "a class far below the top K costs nothing, however probable it is: at K = 1 the risk is 0 with any class alone"
        " at the top",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(
        True, "b moves along with the scores, so that a common shift changes nothing", "derived", "derived"
    ),
    smoothness=Fact(
        None,
        "infinite: the curvature of the gate is multiplied by the softmax loss, which grows without bound where another"
        " class is far above b. At K = 1 and for two classes there is none, and no constant is known",
        "derived",
        "derived",
        fn=_smoothness,
    ),
    cost=Fact(
        "linear",
        "batch x classes; the K-th largest score is found in one pass",
        "derived",
        "derived",
        fn=lambda batch, num_classes, **_: float(batch * num_classes),
    ),
    bound=Fact(
        "DCG@K",
        "-log DCG@K of a row is at most the sum over its positives, if two or more of them are among the first K. With"
        " one such hit that holds for half of it, or less 0.15. It needs sums over all classes (not `decoupled`), and"
        " is no bound of -log NDCG@K, which is larger by the log of the best DCG@K",
        "Yang et al. 2025, theorem 3.2",
        "contradicted",
        printed="a tight upper bound of -log NDCG@K",
        fn=lambda loss, hits, **_: math.exp(-loss - (0.0 if hits > 1 else 0.15)),
    ),
)
