"""Taylor-softmax: softmax with a Taylor polynomial of even order in place of the exponential.

    map       p_i = f(s_i) / F,   f(s) = sum_{k <= order} s^k / k!,   F = sum_j f(s_j)
    loss      l(y, s) = log F - log f(s_y)
    gradient  f'(s_j) / F - 1{j = y} f'(s_y) / f(s_y)

f is positive for even orders but not monotone: at order 2 it decreases in s for s < -1. So the map does not
keep the order of the scores, the loss is not convex, and a constant added to all scores changes both. Rank by p.

Citation: de Brebisson and Vincent, "An exploration of softmax alternatives", ICLR 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, SoftTarget, Target, check_options, read_target, row_losses
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, classes_last, visible, working
from manymax.ops.reduction import reduce

# Below 0 the terms of the polynomial cancel: around its least value they are e^(0.56 order) times as large as their
# sum. At order 30 that leaves nine digits of a float64. Higher orders come to the exponential itself.
MOST_ORDER = 30


def check_order(order: int) -> None:
    """Raise unless the order is an even integer in [2, 30]: polynomials of odd order take negative values."""
    if isinstance(order, bool) or not isinstance(order, int) or not 2 <= order <= MOST_ORDER or order % 2:
        raise ArgumentError(
            f"`order` must be an even integer in [2, {MOST_ORDER}] (odd orders turn negative, higher ones lose their"
            f" digits below 0 and are softmax above); got {order!r}."
        )


def polynomial(s: Tensor, order: int) -> Tensor:
    """f(s) = 1 + s + ... + s^order / order!, of the shape of s, by Horner's rule; its slope is that of order - 1."""
    # ((1 + s)^2 + 1) / 2 is a sum of squares, in which nothing cancels for s < 0.
    if order == 2:
        return (1 + s).square().add_(1).div_(2)
    value = 1 + s if order == 1 else s / order + 1
    for k in range(order - 1, 0, -1):
        value = value * s / k + 1
    return value


def taylor_exp(scores: Tensor, order: int = 2) -> Tensor:
    """f(s), the Taylor polynomial of the exponential, of the shape of the scores; 0 for a masked class (-inf)."""
    live = scores > -torch.inf
    value = polynomial(torch.where(live, scores, 0), order)
    # nan is not live either, but must not be taken for a mask: it stays what it is.
    return torch.where(live, value, torch.where(scores == -torch.inf, 0, scores))


def _terms(scores: Tensor, order: int) -> Tensor:
    """f(s), (..., C), in float64 from order 6 on: below 0 the terms of f cancel, and float32 would lose digits."""
    values = taylor_exp(scores.double() if order > 4 else scores, order)
    if visible(values) and not values.sum(-1).isfinite().all():
        check_finite(scores.amax(-1))
        raise ArgumentError(f"`scores` are too large for `order` {order}: the polynomial overflows {values.dtype}.")
    if visible(values) and (values.sum(-1) == 0).any():  # no class of a row is live
        check_finite(scores.amax(-1))
    return values


@checked
def taylor_softmax(scores: Tensor, order: int = 2, dim: int = -1) -> Tensor:
    """Taylor-softmax probabilities, p_i = f(s_i) / sum_j f(s_j) with f = 1 + s + ... + s^order / order!.

    Args:
        scores: (..., C) scores; -inf masks a class. Not shift invariant.
        order: an even order.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.taylor_softmax(torch.tensor([2.0, 1.0, -1.0]))
        tensor([0.6250, 0.3125, 0.0625])
    """
    check_order(order)
    work, dtype = working(classes_last(scores, dim))
    values = _terms(work, order)
    return (values / values.sum(-1, keepdim=True)).to(dtype).movedim(-1, dim)


@checked
def taylor_softmax_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    order: int = 2,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The Taylor-softmax loss log F - log f(s_y) = -log p_y, with F = sum_j f(s_j).

    Args:
        scores: (..., C) scores, classes last; -inf masks a class. Not shift invariant.
        target: as in `softmax_loss`.
        order: an even order.
        weight, ignore_index, reduction, label_smoothing: as in `softmax_loss`.
        multilabel: "sum" over positives; "normalized" divides that by their total weight, and adds no Omega(t),
            because the loss is not Fenchel-Young.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.taylor_softmax_loss(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([0]))
        tensor(0.4700)
    """
    check_order(order)
    check_options(reduction, label_smoothing, multilabel)
    check_scores(scores)
    work, dtype = working(scores)
    read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
    terms = _terms(work, order)
    log_terms = torch.where(terms > 0, torch.where(terms > 0, terms, 1).log(), -torch.inf)
    rows, total = row_losses(terms.sum(-1).log(), log_terms, read, weight, label_smoothing)
    if multilabel == "normalized":
        rows = rows / torch.where(total > 0, total, 1)
    return reduce(rows, read.divisor, reduction).to(dtype)


class TaylorSoftmaxLoss(ExactLoss):
    """Module form of `taylor_softmax_loss`.

    Args:
        order: an even order.
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `taylor_softmax_loss`.
    """

    @checked
    def __init__(
        self,
        order: int = 2,
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
        check_order(order)
        self.order = order

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return taylor_softmax_loss(scores, target, order=self.order, **self.options())

    def extra_repr(self) -> str:
        return f"order={self.order}, {super().extra_repr()}"


def _smoothness(num_classes: int, order: int = 2) -> float:
    """An upper bound of the spectral norm of the Hessian of the loss; nan where none is known.

    At order 2 the negative part of the Hessian is at most 2, from -log f(s_y), plus 1/C, from log F; its positive part
    is at most 1/4 plus 2/C.
    """
    if num_classes == 1:
        return 0.0
    return 2 + 1 / num_classes if order == 2 else math.nan


FORMULAS = Formulas(
    map="p_i = f(s_i) / F, f(s) = 1 + s + s^2/2 (+ ... up to an even order), F = sum_j f(s_j)",
    loss="log F - log f(s_y)",
    gradient="f'(s_j)/F - 1{j = y} f'(s_y)/f(s_y)",
)

FACTS = Facts(
    order_preservation=Fact(
        "none",
        "at order 2 f decreases for s < -1, so that f(-3) = 2.5 is more than f(-1) = 0.5: rank by p, not by the scores",
        "derived",
        "derived",
    ),
    fenchel_young=Fact(False, "the gradient of the loss is not p - e_y", "derived", "derived"),
    convex=Fact(False, "the Hessian of the loss has eigenvalues down to -2", "derived", "derived"),
    calibrated=Fact(
        False,
        "at the minimum of the risk the map equals p, but each score may be on the rising or the falling branch of f",
        "derived",
        "derived",
    ),
    shift_invariant=Fact(
        False, "f(s + c) is not proportional to f(s), so that a common shift changes the map", "derived", "derived"
    ),
    smoothness=Fact(
        None,
        "at most 2 + 1/C at order 2; no constant is known for higher orders",
        "derived",
        "derived",
        fn=_smoothness,
    ),
    cost=Fact(
        "linear",
        "batch x classes",
        "derived",
        "derived",
        fn=lambda batch, num_classes, order=2: float(batch * num_classes),
    ),
)

SETTINGS = (
    Setting(
        "order",
        int,
        2,
        "Order of the Taylor polynomial of Taylor-softmax; even.",
        least=2,
        most=MOST_ORDER,
        multiple_of=2,
        reason="odd orders turn negative, higher ones lose their digits",
    ),
)


def ranking_key(order: int = 2) -> Callable[[Tensor], Tensor]:
    """A function from scores to log f(s), by which classes are ranked: f is not monotone, so the scores will not do."""
    return lambda scores: taylor_exp(scores, order).log()
