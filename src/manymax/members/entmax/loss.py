"""Alpha-entmax: the family from softmax (alpha = 1) to sparsemax (alpha = 2), and its loss.

    map       p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)),   tau such that sum_i p_i = 1
    omega     Omega(p) = sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))
    loss      l(y, s) = Omega*(s) - s_y,   Omega*(s) = <p, s> - Omega(p)
    gradient  p - e_y

Probabilities below the threshold are exactly 0. Alpha is a number or a tensor, and both the map
and the loss are differentiable in it, alpha = 1 included.

References: Peters, Niculae, Martins, "Sparse sequence-to-sequence models", ACL 2019; gradient in
alpha: Correia, Niculae, Martins, EMNLP 2019, rearranged here so that nothing cancels near alpha = 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Fact, Facts, Formulas, Learned, Setting
from manymax.engine.module import ExactLoss
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops import operators, simplex
from manymax.ops.checks import check_finite, check_scores, visible, working
from manymax.ops.deformed import chi, log_of, power


def _rows(scores: Tensor) -> Tensor:
    return scores.reshape(-1, scores.shape[-1])


def _row_alpha(scores: Tensor, alpha: Tensor) -> Tensor:
    """alpha as () or as one value per row, (rows, 1)."""
    if alpha.ndim == 0:
        return alpha
    return alpha.expand(*scores.shape[:-1], 1).reshape(-1, 1)


def _alpha_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """d p / d alpha, (..., C): with x = log p, beta = alpha - 1, a = p^(1 - beta), A = sum a,
    M = sum a x^2 chi(beta x) and H = -sum p x it is (M p (1 - beta x) - a x^2 chi (1 + beta H)) / A.
    """
    beta, x, a = alpha - 1, log_of(probs), power(probs, 2 - alpha)
    second = a * x.square() * chi(beta * x)
    mean, entropy = second.sum(-1, keepdim=True), -(probs * x).sum(-1, keepdim=True)
    return (mean * probs * (1 - beta * x) - second * (1 + beta * entropy)) / a.sum(-1, keepdim=True)


def omega_slope(probs: Tensor, alpha: Tensor) -> Tensor:
    """d Omega / d alpha at fixed p, (..., 1)."""
    beta, x = alpha - 1, log_of(probs)
    safe = torch.where(beta > 0, beta, 1)
    first = torch.where(beta > 0, (beta * x).expm1() / safe, x)
    return (probs * (x.square() * chi(beta * x) - first / alpha)).sum(-1, keepdim=True) / alpha


def _to_shape(grad: Tensor, alpha: Tensor) -> Tensor:
    """Sum a gradient of shape (..., 1) down to the shape of alpha."""
    return grad.sum_to_size(alpha.shape) if alpha.ndim else grad.sum()


class _Map(torch.autograd.Function):
    """p from (scores, alpha). The backward is written in p itself, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        rows, row_alpha = _rows(scores), _row_alpha(scores, alpha)
        maximum, log_top, _ = operators.solve(rows, row_alpha)
        probs = operators.apply(rows, row_alpha, maximum, log_top, torch.ones_like(maximum))
        return probs.reshape(scores.shape), maximum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0], inputs[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
        probs, alpha = ctx.saved_tensors
        if not torch.is_grad_enabled() and visible(probs, grad, alpha) and alpha.ndim == 0:
            grad_scores = simplex.vjp(_rows(probs), float(alpha), _rows(grad)).reshape(probs.shape)
        else:
            a = power(probs, 2 - alpha)
            grad_scores = a * (grad - (a * grad).sum(-1, keepdim=True) / a.sum(-1, keepdim=True))
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            grad_alpha = _to_shape((grad * _alpha_slope(probs, alpha)).sum(-1, keepdim=True), alpha)
        return grad_scores, grad_alpha


class _Potential(torch.autograd.Function):
    """total (Omega*(s) - max s) - sum_i weights_i (s_i - max s) over listed ids, per row.

    With total = sum_i weights_i this is the loss of a row, with total = 1 and no ids the conjugate.
    One function for both, because the forward then needs no table and the backward exactly one.
    `total` and `weights` are constants here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, alpha: Tensor, total: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        results = operators.solve(_rows(scores), _row_alpha(scores, alpha))
        maximum, log_top, conjugate = (r.reshape(scores.shape[:-1]) for r in results)
        listed = torch.where(weights != 0, scores.gather(-1, ids) - maximum.unsqueeze(-1), 0)
        return total * conjugate - (weights * listed).sum(-1), maximum, log_top

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scores, alpha, total, ids, weights, maximum, log_top = ctx.saved_tensors
        scale, grad_alpha = grad * total, None
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if again or ctx.needs_input_grad[1]:  # may be differentiated once more, or needs p for alpha
            probs = _Map.apply(scores, alpha)[0]
            table = scale.unsqueeze(-1) * probs
            if ctx.needs_input_grad[1]:
                grad_alpha = _to_shape(-scale.unsqueeze(-1) * omega_slope(probs, alpha), alpha)
        else:
            row_alpha, flat = _row_alpha(scores, alpha), (maximum.flatten(), log_top.flatten(), scale.flatten())
            table = operators.apply(_rows(scores), row_alpha, *flat).reshape(scores.shape)
        listed = -grad.unsqueeze(-1) * weights
        # eager first-order use owns the table and may write into it
        in_place = not again and visible(table)
        table = table.scatter_add_(-1, ids, listed) if in_place else table.scatter_add(-1, ids, listed)
        return table, grad_alpha, None, None, None


def potential(
    scores: Tensor, total: Tensor, ids: Tensor | None, weights: Tensor | None, alpha: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`FenchelYoung`'s potential for alpha-entmax; softmax and sparsemax are alpha = 1 and 2."""
    if ids is None or weights is None:
        ids = torch.zeros(*scores.shape[:-1], 0, dtype=torch.long, device=scores.device)
        weights = ids.to(scores.dtype)
    value, maximum, _ = _Potential.apply(scores, read_alpha(alpha, scores), total, ids, weights)
    return value, maximum


def read_alpha(alpha: float | Tensor, scores: Tensor | None = None) -> Tensor:
    """Alpha as a tensor that is () or broadcasts against (..., 1) for scores (..., C); raises outside of [1, 2]."""
    if not isinstance(alpha, Tensor):
        _check_number(alpha)
        return torch.tensor(float(alpha), dtype=torch.float64)
    if not alpha.is_floating_point():
        raise ArgumentTypeError(f"`alpha` must be a number or a float tensor; got dtype {alpha.dtype}.")
    if alpha.ndim and scores is not None:
        batch = scores.shape[:-1]
        if alpha.ndim > scores.ndim or alpha.shape[-1] != 1 or not _broadcasts(alpha.shape[:-1], batch):
            raise ArgumentError(
                f"`alpha` must be a scalar or broadcast to one value per row, {(*batch, 1)}; got shape"
                f" {tuple(alpha.shape)}. For one alpha per row pass `alpha.unsqueeze(-1)`."
            )
        alpha = alpha.to(scores.dtype)
    if visible(alpha) and not ((alpha >= 1) & (alpha <= 2)).all():
        raise ArgumentError(f"`alpha` must be in [1, 2] (1 is softmax, 2 is sparsemax); got {alpha.detach()}.")
    return alpha


def _check_number(alpha: object) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ArgumentTypeError(f"`alpha` must be a number or a float tensor; got {type(alpha).__name__}.")
    if not 1 <= alpha <= 2:
        raise ArgumentError(f"`alpha` must be in [1, 2] (1 is softmax, 2 is sparsemax); got {alpha}.")


def _raw_alpha(alpha: float) -> float:
    """The free number whose `_alpha_of` is alpha: a learned alpha is 1 + sigmoid(raw), so no step leaves (1, 2)."""
    if not 1 < alpha < 2:
        raise ArgumentError(f"a learnable `alpha` must start inside (1, 2); got {alpha}.")
    return float(torch.tensor(alpha - 1.0).logit())


def _alpha_of(raw: Tensor) -> Tensor:
    """1 + sigmoid(raw), inside of the open interval in floating point too: far out the sigmoid rounds to 0 or 1."""
    eps = torch.finfo(raw.dtype).eps
    return 1 + raw.sigmoid().clamp(eps, 1 - eps)


def _broadcasts(shape: torch.Size, batch: torch.Size) -> bool:
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(batch), strict=False))


def entmax(scores: Tensor, alpha: float | Tensor = 1.5, dim: int = -1) -> Tensor:
    """Alpha-entmax probabilities, exactly 0 below a threshold.

    p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)) with tau such that the p_i sum to 1.

    Args:
        scores: (..., C) scores; -inf masks a class.
        alpha: 1 (softmax) to 2 (sparsemax), a number or a tensor that is a scalar or broadcasts to
            one value per row, (..., 1). A tensor gets a gradient. Values are checked in eager CPU use.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.entmax(torch.tensor([2.0, 1.0, -1.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
    """
    check_scores(scores)
    work, dtype = working(scores.movedim(dim, -1))
    probs, maximum = _Map.apply(work, read_alpha(alpha, work))
    check_finite(maximum)
    return probs.to(dtype).movedim(-1, dim)


def omega(probs: Tensor, alpha: float | Tensor = 1.5) -> Tensor:
    """sum_i (p_i^alpha - p_i) / (alpha (alpha - 1)), (...): the negative Tsallis entropy, 0 at vertices.

    At alpha = 1 it is sum_i p_i log p_i.
    """
    alpha = read_alpha(alpha, probs)
    beta, x = alpha - 1, log_of(probs)
    safe = torch.where(beta > 0, beta, 1)
    return (probs * torch.where(beta > 0, (beta * x).expm1() / safe, x) / alpha).sum(-1)


def _slope(probs: Tensor, alpha: float | Tensor) -> Tensor:
    """The gradient of Omega, (p^beta - 1) / beta + 1 / alpha with beta = alpha - 1, at zeros too."""
    alpha = read_alpha(alpha, probs)
    beta, x = alpha - 1, probs.log()
    safe = torch.where(beta > 0, beta, 1)
    return torch.where(beta > 0, (safe * x).expm1() / safe, x) + 1 / alpha


def foundation(alpha: float | Tensor = 1.5) -> FenchelYoung:
    """The Fenchel-Young pair of alpha-entmax."""
    return FenchelYoung(
        partial(entmax, alpha=alpha),
        partial(omega, alpha=alpha),
        slope=partial(_slope, alpha=alpha),
        potential=partial(potential, alpha=alpha),
        separable=True,
    )


def entmax_loss(
    scores: Tensor,
    target: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The entmax loss Omega*(s) - s_y, with gradient entmax(s) - e_y.

    Args:
        scores: (..., C) scores, classes last; -inf masks a class.
        target: as in `softmax_loss`.
        alpha: 1 to 2, a number or a tensor, see `entmax`.
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `softmax_loss`.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> manymax.entmax_loss(torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([0]))
        tensor(0.0617)
    """
    return foundation(alpha).loss(
        scores,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
    )


class EntmaxLoss(ExactLoss):
    """Module form of `entmax_loss`.

    Args:
        alpha: 1 to 2; the start value if it is learned.
        learnable: keep alpha = 1 + sigmoid(raw) with `raw` a parameter, so that no step can leave (1, 2).
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `softmax_loss`.
    """

    def __init__(
        self,
        alpha: float = 1.5,
        weight: Tensor | None = None,
        *,
        learnable: bool = False,
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
        _check_number(alpha)
        self.fixed_alpha = None if learnable else float(alpha)
        if learnable:
            self.raw_alpha = nn.Parameter(torch.tensor(_raw_alpha(alpha)))

    @property
    def alpha(self) -> float | Tensor:
        """The number, or the tensor that is learned."""
        if self.fixed_alpha is not None:
            return self.fixed_alpha
        return _alpha_of(self.raw_alpha)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target, alpha=self.alpha, **self.options())

    def extra_repr(self) -> str:
        alpha = torch.as_tensor(self.alpha).detach()
        return f"alpha={float(alpha):.4g}, learnable={self.fixed_alpha is None}, {super().extra_repr()}"


def smoothness(num_classes: int, alpha: float = 1.5) -> float:
    """Supremum of the spectral norm of the entmax Jacobian.

    max{2^(alpha-2), (1 + 1/n) / (1 + n^(-(alpha-1)/(3-alpha)))^(3-alpha)} with n = C - 1; it tends to 1
    as C grows, for every alpha > 1.
    """
    if num_classes == 1:
        return 0.0
    n = num_classes - 1
    spread = (1 + 1 / n) / (1 + n ** (-(alpha - 1) / (3 - alpha))) ** (3 - alpha)
    return max(2 ** (alpha - 2), spread)


FORMULAS = Formulas(
    map="p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)), tau: sum_i p_i = 1",
    loss="<p, s> - Omega(p) - s_y",
    gradient="p - e_y",
    omega="sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))",
)

FACTS = Facts(
    order_preservation=Fact(
        "weak", "never inverts; classes below the threshold tie at 0", "proposition 3.5", "confirmed"
    ),
    fenchel_young=Fact(True, "Omega is the negative Tsallis alpha-entropy", "section 2.4", "confirmed"),
    convex=Fact(True, "convex in the scores", "appendix A.2", "confirmed"),
    calibrated=Fact(
        True,
        "Top-k calibrated (k >= 1) and DCG-consistent for one label and for the sum over positives",
        "proposition 3.3",
        "confirmed",
    ),
    shift_invariant=Fact(True, "a constant added to all scores changes nothing", "definition", "derived"),
    smoothness=Fact(
        None,
        "max{2^(alpha-2), (1 + 1/n) / (1 + n^(-(alpha-1)/(3-alpha)))^(3-alpha)}, n = C - 1: below 1, and 1 only"
        " as C grows",
        "derived; Table 1 has the bound 1",
        "contradicted",
        printed="1",
        fn=smoothness,
    ),
    cost=Fact(
        "linear",
        "batch x classes: the threshold is found by Newton steps, no row is sorted",
        "derived; Table 4 assumes a sort",
        "contradicted",
        printed="N C log C + N |P|",
        fn=lambda batch, num_classes, alpha=1.5: float(batch * num_classes),
    ),
)

SETTINGS = (
    Setting(
        "alpha",
        float,
        1.5,
        "Of entmax: near 1 is softmax, 2 is sparsemax.",
        least=1,
        most=2,
        reason="1 is softmax, 2 is sparsemax",
        learned=Learned(raw=_raw_alpha, value=_alpha_of, key="order.raw_alpha"),
    ),
)
