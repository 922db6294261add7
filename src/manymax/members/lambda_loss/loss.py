"""LambdaRank, LambdaLoss and LambdaLoss@K: pairs of a positive and a negative, weighted by their ranks, as in NDCG.

    loss      l(Y, s) = 1 / IDCG sum over y in Y, j not in Y of delta_yj log2(1 + exp(sigma (s_j - s_y)))
    gradient  1 / IDCG sum_y delta_yj sigma / log(2) logistic(sigma (s_j - s_y)) at j, and minus the sum over j at y

Y are the positives of a row, r ranks from 1 on over all classes of the row, D(r) = log2(1 + r), and IDCG that of |Y|
positives. The weights of a pair are

    LambdaRank    delta_yj = |1 / D(r_y) - 1 / D(r_j)|
    LambdaLoss    delta_yj = 1 / D(d) - 1 / D(d + 1), d = |r_y - r_j|, the second metric-driven loss of NDCG
    distance      delta_yj = 1 / D(d), which code for recommenders calls LambdaLoss, and published tables with it
    LambdaLoss@K  either times 1 / (1 - 1 / D(m)) where the lower of the two ranks, m = max(r_y, r_j), is beyond K

With K, LambdaRank has 0 in place of 1 / D(r) beyond K, and IDCG is that of the first K places. The weights of
LambdaLoss are nearly all of the next few ranks, those of `distance` fall slowly. Ranks are those of the scores as they
are, and constants in the gradient. Equal scores rank by the class number, positives behind the others:
as far down the list as evaluation may find them.

The loss of several positives is one loss, not a sum of one for each: positives are not compared with one another, and
share IDCG. With a single positive IDCG is 1; where a user's positives are rows of their own, with the user's other ones
excluded, each is ranked among the negatives alone.

Citations: Burges, Ragno, Le, NIPS 2006 (LambdaRank); Wang et al., The LambdaLoss framework, CIKM 2018; Jagerman et al.,
On optimizing top-k metrics for neural ranking models, SIGIR 2022 (LambdaLoss@K).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.row_target import listed
from manymax.engine.target import Form, SoftTarget, Target, check_options, check_positives, read_target
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, working
from manymax.ops.reduction import reduce

LOSS, DISTANCE, RANK = "lambdaloss", "distance", "lambdarank"

TAKES = Takes(
    smoothing=False,
    float_rows=False,
    why="It compares positives with classes that are none, and a class with a share of the target is both.",
)

SETTINGS = (
    Setting(
        "variant",
        str,
        DISTANCE,
        "How pairs are weighted: by the distance of their ranks, or as in lambdaloss or lambdarank.",
        choices=(DISTANCE, LOSS, RANK),
    ),
    Setting("k", int, 20, "K, the length of the list that the loss aims at.", least=0),
    Setting("sigma", float, 1.0, "The factor of differences of scores in the logistic losses of pairs.", above=0),
)


# Weights of pairs --------------------------------------------------------------------------------


def gain(rank: Tensor, k: int) -> Tensor:
    """1 / D(r), what a positive at rank r adds to DCG@k; 0 beyond k, unless k is 0."""
    found = 1 / (1 + rank).log2()
    return torch.where(rank <= k, found, 0) if k else found


def near(distance: Tensor, variant: str) -> Tensor:
    """1 / D(d) - 1 / D(d + 1) for the distance d >= 1 of two ranks, or 1 / D(d) alone."""
    return gain(distance, 0) - (0 if variant == DISTANCE else gain(distance + 1, 0))


def beyond(rank: Tensor, k: int) -> Tensor:
    """The factor 1 / (1 - 1 / D(r)) with K for pairs whose lower rank r is beyond k; 1 for others."""
    if not k:
        return torch.ones_like(rank)
    # A positive at rank r > k is worth nothing to NDCG@k, and loses 1 where it would else lose 1 - 1 / D(r).
    return torch.where(rank > k, 1 / (1 - gain(rank.clamp(min=2), 0)), 1)


def pair_weights(own: Tensor, other: Tensor, variant: str, k: int) -> Tensor:
    """delta of pairs of a positive of rank `own` and a negative of rank `other`, float64 tensors."""
    if variant == RANK:
        return (gain(own, k) - gain(other, k)).abs()
    return near((own - other).abs().clamp(min=1), variant) * beyond(torch.maximum(own, other), k)


def ideal_dcg(count: Tensor, most: int, k: int) -> Tensor:
    """IDCG@k of rows with so many positives, `most` at most; 1 for rows without any, whose loss is 0 anyway."""
    places = torch.arange(1, most + 1, dtype=torch.float64, device=count.device)
    found = pad(gain(places, k).cumsum(0), (1, 0), value=1.0)
    # Not `found[count]`: vmap looks nothing up at a single number.
    return found.expand(*count.shape, most + 1).gather(-1, count.long().unsqueeze(-1)).squeeze(-1)


def best_first(scores: Tensor, positive: Tensor) -> Tensor:
    """The classes of each row by rank, (..., C): of equal scores the positives last, and lower numbers first.

    Args:
        scores: (..., C).
        positive: (..., C) bool.
    """
    late = positive.to(torch.uint8).sort(dim=-1, stable=True).indices
    return late.gather(-1, scores.gather(-1, late).sort(dim=-1, descending=True, stable=True).indices)


# The loss ----------------------------------------------------------------------------------------


@checked
def lambda_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    variant: str = DISTANCE,
    k: int = 20,
    sigma: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """LambdaRank, LambdaLoss (k=0) or LambdaLoss@K: sums over pairs of a positive y and a negative j, by their ranks r.

        loss = 1 / IDCG sum over y and j of delta_yj log2(1 + exp(sigma (s_j - s_y))),   D(r) = log2(1 + r)

        "distance"     delta_yj = 1 / D(|r_y - r_j|)
        "lambdaloss"   delta_yj = 1 / D(|r_y - r_j|) - 1 / D(|r_y - r_j| + 1)
        "lambdarank"   delta_yj = |1 / D(r_y) - 1 / D(r_j)|

    The first two are multiplied by 1 / (1 - 1 / D(m)) where m = max(r_y, r_j) is beyond k. Ranks are constants in the
    gradient. 1 - NDCG@k is at most the loss of a row; with "lambdaloss" and a k that needs a single positive.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: ids or bool rows as in `softmax_loss`; float rows and smoothing are refused. A positive whose class
            weight is 0 is none.
        variant: "distance", whose weights published tables of recommenders call LambdaLoss, "lambdaloss" or
            "lambdarank".
        k: the length of the list that the loss aims at; 0 for the whole list.
        sigma: the factor of score differences; a head's `temperature` is its inverse.
        weight: (C,) class weights, factors of the pairs of a positive.
        ignore_index, reduction: as in `softmax_loss`; a mean is over positives.
        label_smoothing: must be 0.
        multilabel: "sum" over positives; "normalized" divides that by their total weight.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.lambda_loss(torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([1]), variant="lambdaloss", k=0)
        tensor(0.5607)
        >>> manymax.lambda_loss(torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([[1, 2]]), variant="lambdarank", k=0)
        tensor(0.8332)
    """
    _check(variant, k, sigma)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("lambda_loss", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    check_finite(work.amax(-1))
    check_positives(read.pick(work))
    read = listed(read)
    assert read.ids is not None
    counts = read.weights != 0  # padding has the weight 0
    positive = torch.zeros_like(work).scatter_add(-1, read.ids, counts.to(work.dtype)) > 0
    order = best_first(work.detach(), positive)
    places = torch.arange(1, work.shape[-1] + 1, device=work.device).expand(order.shape)
    rank = torch.zeros_like(order).scatter(-1, order, places).double()
    # A row for each positive, (..., P, C). Heads never hold that.
    delta = pair_weights(rank.gather(-1, read.ids).unsqueeze(-1), rank.unsqueeze(-2), variant, k).to(work.dtype)
    pairs = counts.unsqueeze(-1) & (positive.logical_not() & (work > -math.inf)).unsqueeze(-2)
    above = torch.where(pairs, work.unsqueeze(-2) - work.gather(-1, read.ids).unsqueeze(-1), 0)
    terms = torch.where(pairs, delta * -logsigmoid(-sigma * above), 0).sum(-1) / math.log(2)
    ideal = ideal_dcg(counts.sum(-1), counts.shape[-1], k).to(work.dtype)
    rows = (read.weights * terms).sum(-1) / ideal
    if multilabel == "normalized":
        total = read.weights.sum(-1)
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _check(*values: str | float) -> None:
    """Raise unless the settings, in their order, can have these values."""
    for setting, value in zip(SETTINGS, values, strict=True):
        setting.check(value)


class LambdaLoss(ExactLoss):
    """Module form of `lambda_loss`.

    Args:
        variant, k, sigma, weight, ignore_index, reduction, label_smoothing, multilabel: as in `lambda_loss`.
    """

    loss_name, takes = "lambda_loss", TAKES

    @checked
    def __init__(
        self,
        variant: str = DISTANCE,
        k: int = 20,
        sigma: float = 1.0,
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
        _check(variant, k, sigma)
        self.variant, self.k, self.sigma = variant, k, sigma

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        own = {"variant": self.variant, "k": self.k, "sigma": self.sigma}
        return lambda_loss(scores, target, **own, **self.options())  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"variant={self.variant!r}, k={self.k}, sigma={self.sigma}, {super().extra_repr()}"


# Facts -------------------------------------------------------------------------------------------


def smoothness(num_classes: int, variant: str = DISTANCE, k: int = 20, sigma: float = 1.0) -> float:
    """The largest curvature: with two classes no rank changes a weight; with more the gradient jumps between ranks."""
    if num_classes == 1:
        return 0.0
    if num_classes > 2:
        return math.inf
    first, second = torch.tensor([1.0, 2.0], dtype=torch.float64)
    return float(pair_weights(second, first, variant, k)) * sigma**2 / (2 * math.log(2))


def least_ndcg(loss: float, positives: int, variant: str = DISTANCE, k: int = 20, **_: float) -> float:
    """What NDCG@k of a row with so many positives is at least, if its loss is this; 0 where nothing follows."""
    sure = positives == 1 or variant != LOSS or not k
    return 1 - loss if sure else 0.0


FORMULAS = Formulas(
    map=None,
    loss="sum_{y in Y, j not in Y} delta_yj log2(1 + exp(sigma (s_j - s_y))) / IDCG",
    gradient="sum_y delta_yj sigma / (log(2) IDCG) logistic(sigma (s_j - s_y)) at j, minus the sum over j at y",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "it is a weighted sum of logistic losses of pairs", "derived", "derived"),
    convex=Fact(
        False,
        "for fixed ranks it is a sum of convex losses, but it jumps where two classes swap ranks",
        "derived",
        "derived",
    ),
    calibrated=Fact(
        False,
        "for fixed ranks the risk is smallest at sigma s = log p, but ties change the weights: with p = (.6, .22, .18)"
        " the risk is lower where the last two classes tie",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(True, "only ranks and differences of scores enter the loss", "derived", "derived"),
    smoothness=Fact(
        None,
        "with more than two classes the gradient jumps where two classes swap ranks; with two it is delta sigma^2 /"
        " (2 log 2)",
        "derived",
        "derived",
        fn=smoothness,
    ),
    cost=Fact(
        "linearithmic",
        "a sort of each row, and a pass over the classes for each positive",
        "derived",
        "derived",
        fn=lambda batch, num_classes, **_: batch * num_classes * (1 + math.log2(num_classes) / 40),
    ),
    bound=Fact(
        "NDCG@K",
        "1 - NDCG@K of a row is at most its loss; with K and the weights of LambdaLoss that needs a single positive. Of"
        " several the pairs of two positives count as well, which are left out: of K = 6 and positives at the ranks 6"
        " to 11 the loss may be 0.35 less",
        "derived",
        "derived",
        fn=least_ndcg,
    ),
)
