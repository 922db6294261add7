"""Taylor-softmax: softmax with the exponential cut off after an even order.

    map       p_i = f(s_i) / F,   f(s) = sum_{k <= order} s^k / k!,   F = sum_j f(s_j)
    loss      l(y, s) = log F - log f(s_y)
    gradient  f'(s_j) / F - 1{j = y} f'(s_y) / f(s_y)

f is positive for even orders but not monotone: at order 2 it falls below s = -1. So the map does not
keep the order of the scores, the loss is not convex, and shifting the scores changes it: rank by p.

Reference: de Brebisson and Vincent, "An exploration of softmax alternatives", ICLR 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, check_options, read_target, row_losses
from manymax.errors import ArgumentError
from manymax.ops.checks import check_finite, check_scores, visible, working
from manymax.ops.reduction import reduce


def check_order(order: int) -> None:
    """Raise unless the order is even: odd polynomials turn negative."""
    if isinstance(order, bool) or not isinstance(order, int) or order < 2 or order % 2:
        raise ArgumentError(f"`order` must be an even integer of at least 2 (odd orders turn negative); got {order!r}.")


def polynomial(s: Tensor, order: int) -> Tensor:
    """1 + s + ... + s^order / order!, by Horner's rule; order 2 as a sum of squares: no cancellation below 0."""
    if order == 2:
        return (1 + s).square().add_(1).div_(2)
    value = 1 + s if order == 1 else s / order + 1
    for k in range(order - 1, 0, -1):
        value = value * s / k + 1
    return value


def taylor_exp(scores: Tensor, order: int = 2) -> Tensor:
    """f(s), the exponential's Taylor polynomial of an even order; 0 for a masked class (-inf)."""
    live = scores > -torch.inf
    value = polynomial(torch.where(live, scores, 0), order)
    # a nan or +inf score is not live or stays what it is: it must not be taken for a mask
    return torch.where(live, value, torch.where(scores == -torch.inf, 0, scores))


def _terms(scores: Tensor, order: int) -> Tensor:
    """f(s), (..., C); from order 6 on its terms cancel below 0, so float32 is not enough for them."""
    values = taylor_exp(scores.double() if order > 4 else scores, order)
    if visible(values) and not values.sum(-1).isfinite().all():
        check_finite(scores.amax(-1))
        raise ArgumentError(f"`scores` are too large for `order` {order}: the polynomial overflows {values.dtype}.")
    if visible(values) and (values.sum(-1) == 0).any():
        check_finite(scores.amax(-1))
    return values


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
    check_scores(scores)
    work, dtype = working(scores.movedim(dim, -1))
    values = _terms(work, order)
    return (values / values.sum(-1, keepdim=True)).to(dtype).movedim(-1, dim)


def taylor_softmax_loss(
    scores: Tensor,
    target: Tensor,
    *,
    order: int = 2,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The likelihood loss of Taylor-softmax, log F - log f(s_y).

    Args:
        scores: (..., C) scores, classes last; -inf masks a class. Not shift invariant.
        target: as in `softmax_loss`.
        order: an even order.
        weight, ignore_index, reduction, label_smoothing: as in `softmax_loss`.
        multilabel: "sum" over positives; "normalized" divides that by |t| (the loss is not Fenchel-Young).

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
    """Module form of `taylor_softmax_loss`."""

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
    """A bound of the Hessian norm; nan where none is known.

    Below zero 2 from -log f(s_y) and 1/C from log F, above it no more than 1/4 and 2/C.
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
    order_preservation=Fact("none", "f falls for s < -1: f(-3) = 2.5 > f(-1) = 0.5; rank by p", "derived", "derived"),
    fenchel_young=Fact(False, "the gradient is not p - e_y", "derived", "derived"),
    convex=Fact(False, "the Hessian has eigenvalues down to -2", "derived", "derived"),
    calibrated=Fact(
        False, "the minimiser has p-hat = p, but its scores may be on either branch of f", "derived", "derived"
    ),
    shift_invariant=Fact(False, "f(s + c) is not proportional to f(s)", "derived", "derived"),
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
    Setting("order", int, 2, "Of Taylor-softmax; even.", least=2, multiple_of=2, reason="odd orders turn negative"),
)


def ranking_key(order: int = 2) -> Callable[[Tensor], Tensor]:
    """log f(s), which falls and rises with the scores: what classes are ranked by."""
    return lambda scores: taylor_exp(scores, order).log()
