"""Rankmax: probabilities for the classes that come within 1 of the label, and its likelihood loss.

    map       p_i(s; y) = u_i / S,   u_i = max(0, s_i - s_y + 1),   S = sum_j u_j
    loss      l(y, s) = -log p_y = log S = log(1 + sum_{j != y} u_j)
    gradient  (1_P - m e_y) / S,   P = {j: u_j > 0},   m = |P|

The map needs the label, so at inference rank by the scores. The gradient of the loss is not p - e_y, no loss has
the gradient p - e_y, and the loss is not convex: rankmax is not a Fenchel-Young loss, although the paper on the softmax
family that the facts cite calls it one. At a kink s_j = s_y - 1 the class j counts as outside of the support.

On the (n, k)-simplex {p in [0, 1]^n, sum p = k}, for lists of k items, with k = 1 as above:

    map       p_i(s; y) = min(1, a u_i), a such that the sum is k; 1 for all with u_i > 0 where these are fewer than k
    loss      l(y, s) = -log p_y = max(0, -log a)
    gradient  (1_P' - m' e_y) / S' where p_y < 1, with S' and m' over P', the classes of P with p < 1

A class at the bound 1 has no more to gain, and only its place counts. The authors state it and ran k = 1 alone.

Citation: Kong, Krichene, Mayoraz, Rendle, Zhang, "Rankmax", NeurIPS 2020.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Fact, Facts, Formulas, Setting, Takes
from manymax.engine.module import ExactLoss
from manymax.engine.row_target import listed
from manymax.engine.target import Form, SoftTarget, Target, check_options, check_positives, read_target
from manymax.errors import ArgumentError
from manymax.members.rankmax.saturation import log_scale, saturation
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, classes_last, learned, visible, working
from manymax.ops.forward_mode import differentiable
from manymax.ops.reduction import reduce

SETTINGS = (
    Setting(
        "k",
        int,
        1,
        "The sum of rankmax's probabilities, the length of the list.",
        least=1,
        most=4096,
        option="simplex",
        reason="the k best scores of every row are kept apart",
    ),
)


@checked
def rankmax(scores: Tensor, target: Tensor, dim: int = -1, *, k: int = 1) -> Tensor:
    """Rankmax probabilities given the label, p_i = max(0, s_i - s_y + 1) / S.

    Args:
        scores: (..., C) scores; -inf masks a class.
        target: (...) integer ids, the label y of each row.
        dim: the dimension of the classes.
        k: the sum of the probabilities, each of which is at most 1: p_i = min(1, a max(0, s_i - s_y + 1)).

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.rankmax(torch.tensor([2.0, 1.5, -1.0]), torch.tensor(1))
        tensor([0.6000, 0.4000, 0.0000])
        >>> manymax.rankmax(torch.tensor([2.0, 1.5, 1.0]), torch.tensor(1), k=2)
        tensor([1.0000, 0.6667, 0.3333])
    """
    _check(k)
    work, dtype = working(classes_last(scores, dim))
    TAKES.check("rankmax", target)
    read = read_target(Form.of(work), target, None, -100)
    if read.ids is None or target.ndim != work.ndim - 1:
        raise ArgumentError("`target` of the rankmax map must hold one id per row: the map is defined given one label.")
    if visible(read.weights) and not read.weights.all():
        raise ArgumentError("`target` of the rankmax map must name a class in every row; got `ignore_index` (-100).")
    label = work.gather(-1, read.ids)
    check_finite(work.amax(-1))
    check_positives(label)
    violation = torch.relu(work - label + 1)
    if k == 1:
        return (violation / violation.sum(-1, keepdim=True)).to(dtype).movedim(-1, dim)
    best, others = _best_and_others(work, k)
    rest = torch.relu(others - label + 1).sum(-1, keepdim=True)
    found = saturation(best, label, rest, torch.zeros_like(rest))
    inside = found.sums > 0
    scale = found.places / torch.where(inside, found.sums, 1)
    probs = torch.where(inside, (scale * violation).clamp(max=1), (violation > 0).to(work.dtype))
    return probs.to(dtype).movedim(-1, dim)


def _best_and_others(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k - 1 largest scores of each row, (..., K), and the scores (..., C) with -inf in their places."""
    best = scores.topk(min(k - 1, scores.shape[-1]), -1)
    others = scores.scatter(-1, best.indices, -torch.inf)
    padding = max(0, k - 1 - scores.shape[-1])
    return torch.nn.functional.pad(best.values, (0, padding), value=-torch.inf), others


class _Violations(torch.autograd.Function):
    """S_p = sum_j max(0, s_j - s_{y_p} + 1) for the listed positives, (..., P), without keeping a table.

    The backward is written in terms of the mask of the support, which is constant between kinks, so that second
    derivatives are right there too.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, ids: Tensor) -> Tensor:
        labels = scores.gather(-1, ids)  # (..., P)
        # The difference comes first: s_y - 1 would be rounded to s_y where scores are large.
        sums = [torch.relu(scores - label.unsqueeze(-1) + 1).sum(-1) for label in labels.unbind(-1)]
        return torch.stack(sums, -1) if sums else torch.ones_like(labels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def tangent(ctx: Any, step: Tensor, _: None) -> Tensor:
        scores, ids = ctx.saved_tensors
        sums = []
        for label, moved in zip(scores.gather(-1, ids).unbind(-1), step.gather(-1, ids).unbind(-1), strict=True):
            support = scores - label.unsqueeze(-1) > -1
            sums.append(torch.where(support, step - moved.unsqueeze(-1), 0).sum(-1))
        return torch.stack(sums, -1) if sums else torch.zeros(ids.shape, dtype=step.dtype, device=step.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, ids = ctx.saved_tensors
        labels = scores.gather(-1, ids)
        total = torch.zeros_like(scores)
        sizes = []
        # A pass for each positive: (..., P, C) in one go would be P tables of scores.
        for label, g in zip(labels.unbind(-1), grad.unbind(-1), strict=True):
            support = (scores - label.unsqueeze(-1) > -1).to(scores.dtype)
            total = total + support * g.unsqueeze(-1)
            sizes.append(support.sum(-1))
        return total.scatter_add(-1, ids, -torch.stack(sizes, -1) * grad) if sizes else total, None


_violations = differentiable(_Violations)


def _all_violations(scores: Tensor) -> Tensor:
    """S_y for every class y as the label, (..., C), by prefix sums over the sorted row in O(C log C).

    For bool rows, where any number of classes may be positives.
    """
    # In float64 and relative to the row maximum: S_y is at least s_max - s_y + 1, so that the difference of the two
    # sums at the end keeps its digits.
    maximum = scores.amax(-1, keepdim=True).detach()
    live = scores > -torch.inf
    d = torch.where(live, scores - maximum, 0).double()
    ranked = torch.where(live, d.detach(), -torch.inf)
    permutation = ranked.argsort(-1, descending=True)
    prefix = d.gather(-1, permutation).cumsum(-1)
    # How many scores are strictly above s_y - 1; `searchsorted` needs ascending values, hence the signs.
    size = torch.searchsorted(-ranked.gather(-1, permutation), (1 - d.detach()).contiguous())
    return (prefix.gather(-1, size - 1) - size * (d - 1)).to(scores.dtype)


TAKES = Takes(
    smoothing=False,
    float_rows=False,
    why="Each class with weight needs a sum over all classes of its own, so that filled rows would cost C^2.",
)


@checked
def rankmax_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    k: int = 1,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The rankmax loss log(1 + sum_{j != y} max(0, s_j - s_y + 1)).

    The loss and its gradient are exactly 0 where s_y exceeds every other score by at least 1; with k > 1 where all but
    k - 1 do not come near it.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: ids or bool rows as in `softmax_loss`; float rows are refused, and so is smoothing,
            because every class with a weight needs a sum over all classes of its own.
        k: the sum of the probabilities of a row, each at most 1. With k > 1 the loss is -log p_y of that map: classes
            that have the probability 1 are left out of the sum.
        weight, ignore_index, reduction: as in `softmax_loss`.
        label_smoothing: must be 0.
        multilabel: "sum" over positives, each with its own support; "normalized" divides that by their total weight.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.rankmax_loss(torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([1]))
        tensor(0.9163)
        >>> manymax.rankmax_loss(torch.tensor([[2.0, 1.5, 1.0]]), torch.tensor([1]), k=2)
        tensor(0.4055)
    """
    _check(k)
    check_options(reduction, label_smoothing, multilabel)
    TAKES.check("rankmax", target, label_smoothing)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    check_finite(work.amax(-1))
    check_positives(read.pick(work))
    if k == 1:
        sums = _all_violations(work) if read.ids is None else _violations(work, read.ids)
        weights = read.weights.to(sums.dtype)
        counts = weights != 0
        if learned(weights):  # a learned weight of 0 has a gradient too, unless its class is masked
            counts = counts | sums.isfinite()
        losses = torch.where(counts, sums, 1).log()
    else:
        read = listed(read)
        weights, losses = read.weights, _list_losses(work, read, k)
    rows = (weights * losses).sum(-1)
    if multilabel == "normalized":
        total = weights.sum(-1)
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


def _list_losses(scores: Tensor, read: Target, k: int) -> Tensor:
    """-log p_y of each listed positive with k > 1, (..., P); 0 for one that is masked, which only padding may be."""
    assert read.ids is not None
    best, others = _best_and_others(scores, k)
    labels = scores.gather(-1, read.ids)
    live = labels > -torch.inf
    labels = torch.where(live, labels, 0)
    rest = [torch.relu(others - label.unsqueeze(-1) + 1).sum(-1) for label in labels.unbind(-1)]
    sums = torch.stack(rest, -1) if rest else torch.ones_like(labels)
    return torch.where(live, log_scale(saturation(best, labels, sums, torch.zeros_like(sums))), 0)


def _check(k: int) -> None:
    """Raise unless the setting can have this value."""
    SETTINGS[0].check(k)


class RankmaxLoss(ExactLoss):
    """Module form of `rankmax_loss`.

    Args:
        weight, k, ignore_index, reduction, label_smoothing, multilabel: as in `rankmax_loss`.
    """

    loss_name, takes = "rankmax", TAKES

    @checked
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        k: int = 1,
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
        _check(k)
        self.k = k

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return rankmax_loss(scores, target, k=self.k, **self.options())

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"


FORMULAS = Formulas(
    map="p_i = max(0, s_i - s_y + 1) / S, S = sum_j max(0, s_j - s_y + 1); with k > 1 min(1, a max(0, ...)), sum k",
    loss="log S",
    gradient="(1_P - m e_y) / S, P = {j: s_j > s_y - 1}, m = |P|",
)

FACTS = Facts(
    order_preservation=Fact(
        "weak", "given the label: never inverts; classes at or below s_y - 1 tie at 0", "section B.3", "confirmed"
    ),
    fenchel_young=Fact(
        False,
        "the gradient is (1_P - m e_y)/S, and no loss has the gradient p - e_y: its Jacobian is not symmetric",
        "derived",
        "contradicted",
        printed="a sparse Fenchel-Young loss",
    ),
    convex=Fact(
        False,
        "the loss is concave between its kinks: the Hessian there is -(1_P - m e_y)(1_P - m e_y)'/S^2",
        "derived",
        "contradicted",
        printed="convex by construction",
    ),
    calibrated=Fact(
        False,
        "never inverts an order, but the risk minimiser ties distinct classes: p = (.6, .22, .18) gives (1, 0, 0)",
        "derived",
        "contradicted",
        printed="consistent",
    ),
    shift_invariant=Fact(
        True, "a constant added to all scores changes neither the map nor the loss", "definition", "derived"
    ),
    smoothness=Fact(
        math.inf,
        "not smooth: kinks at s_j = s_y - 1; between them the Hessian has norm m (m - 1)/S^2",
        "derived",
        "contradicted",
        printed="m/S",
        fn=lambda num_classes, k=1: math.inf if num_classes > k else 0.0,
    ),
    cost=Fact(
        "linear",
        "batch x classes per positive",
        "Table 4",
        "confirmed",
        fn=lambda batch, num_classes, **_: float(batch * num_classes),
    ),
)
