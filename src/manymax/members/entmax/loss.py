"""Alpha-entmax: the family from softmax (alpha = 1) to sparsemax (alpha = 2), and its loss.

    map       p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)),   tau such that sum_i p_i = 1
    omega     Omega(p) = sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))
    loss      l(y, s) = Omega*(s) - s_y,   Omega*(s) = <p, s> - Omega(p)
    gradient  p - e_y

Classes with scores below the threshold tau have the probability 0 exactly. Alpha is a number or a tensor, and both the
map and the loss are differentiable in it, alpha = 1 included; autograd.py has the derivatives.

Citations: Peters, Niculae, Martins, "Sparse sequence-to-sequence models", ACL 2019; gradient in
alpha: Correia, Niculae, Martins, EMNLP 2019, rearranged here so that nothing cancels near alpha = 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.member import Fact, Facts, Formulas, Learned, Setting
from manymax.engine.module import ExactLoss
from manymax.engine.target import SoftTarget, Target
from manymax.members.entmax.alpha import alpha_from_raw, check_number, raw_from_alpha, read_alpha
from manymax.members.entmax.autograd import entmax_map, potential
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, classes_last, working
from manymax.ops.deformed import log_of


@checked
def entmax(scores: Tensor, alpha: float | Tensor = 1.5, dim: int = -1) -> Tensor:
    """Alpha-entmax probabilities, exactly 0 for scores below a threshold.

    p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)), with the threshold tau such that the p_i sum to 1 and [x]_+
    short for max(0, x).

    Args:
        scores: (..., C) scores; -inf masks a class.
        alpha: 1 (softmax) to 2 (sparsemax), a number or a tensor that is a scalar or broadcasts to
            one value per row, (..., 1). A tensor gets a gradient. Its range is checked in eager use on a CPU.
        dim: the dimension of the classes.

    Returns:
        Probabilities with the shape and dtype of `scores` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> manymax.entmax(torch.tensor([2.0, 1.0, -1.0]), alpha=1.5)
        tensor([0.8307, 0.1693, 0.0000])
    """
    work, dtype = working(classes_last(scores, dim))
    probs, maximum = entmax_map(work, read_alpha(alpha, work))
    check_finite(maximum)
    return probs.to(dtype).movedim(-1, dim)


def omega(probs: Tensor, alpha: float | Tensor = 1.5) -> Tensor:
    """The negative Tsallis entropy sum_i (p_i^alpha - p_i) / (alpha (alpha - 1)), (...) for probabilities (..., C).

    It is 0 at the vertices of the simplex, and sum_i p_i log p_i at alpha = 1.
    """
    # As p (p^beta - 1) / beta / alpha with expm1, which cancels nothing near alpha = 1.
    alpha = read_alpha(alpha, probs)
    beta, x = alpha - 1, log_of(probs)
    safe = torch.where(beta > 0, beta, 1)
    return (probs * torch.where(beta > 0, (beta * x).expm1() / safe, x) / alpha).sum(-1)


def _slope(probs: Tensor, alpha: float | Tensor) -> Tensor:
    """The gradient of Omega, (p^beta - 1) / beta + 1 / alpha with beta = alpha - 1, (..., C); also where p = 0."""
    alpha = read_alpha(alpha, probs)
    beta, x = alpha - 1, probs.log()
    safe = torch.where(beta > 0, beta, 1)
    return torch.where(beta > 0, (safe * x).expm1() / safe, x) + 1 / alpha


def foundation(alpha: float | Tensor = 1.5) -> FenchelYoung:
    """Map and regulariser of alpha-entmax, from which its Fenchel-Young loss follows."""
    return FenchelYoung(
        partial(entmax, alpha=alpha),
        partial(omega, alpha=alpha),
        slope=partial(_slope, alpha=alpha),
        potential=partial(potential, alpha=alpha),
        separable=True,
    )


@checked
def entmax_loss(
    scores: Tensor,
    target: Tensor | Target | SoftTarget,
    *,
    alpha: float | Tensor = 1.5,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The entmax loss Omega*(s) - s_y with Omega*(s) = <p, s> - Omega(p) at p = entmax(s); its gradient is p - e_y.

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
        learnable: whether alpha is learned, as 1 + sigmoid(raw_alpha) with a parameter `raw_alpha`, so that no step of
            an optimiser can leave the interval (1, 2).
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `softmax_loss`.
    """

    @checked
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
        check_number(alpha)
        self.fixed_alpha = None if learnable else float(alpha)
        if learnable:
            self.raw_alpha = nn.Parameter(torch.tensor(raw_from_alpha(alpha)))

    @property
    def alpha(self) -> float | Tensor:
        """Alpha: a number, or a scalar tensor that depends on `raw_alpha` if it is learned."""
        if self.fixed_alpha is not None:
            return self.fixed_alpha
        return alpha_from_raw(self.raw_alpha)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target, alpha=self.alpha, **self.options())

    def extra_repr(self) -> str:
        alpha = torch.as_tensor(self.alpha).detach()
        return f"alpha={float(alpha):.4g}, learnable={self.fixed_alpha is None}, {super().extra_repr()}"


def smoothness(num_classes: int, alpha: float = 1.5) -> float:
    """The largest spectral norm that the Jacobian of entmax has or approaches, over all scores of C classes.

    max{2^(alpha-2), (1 + 1/n) / (1 + n^(-(alpha-1)/(3-alpha)))^(3-alpha)} with n = C - 1; it tends to 1
    as C grows, for every alpha > 1.
    """
    if num_classes == 1:
        return 0.0
    n = num_classes - 1
    spread = (1 + 1 / n) / (1 + n ** (-(alpha - 1) / (3 - alpha))) ** (3 - alpha)
    return max(2 ** (alpha - 2), spread)


FORMULAS = Formulas(
    map="p_i = [(alpha - 1)(s_i - tau)]_+^(1/(alpha - 1)), with tau such that sum_i p_i = 1",
    loss="<p, s> - Omega(p) - s_y",
    gradient="p - e_y",
    omega="sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))",
)

FACTS = Facts(
    order_preservation=Fact(
        "weak", "never inverts; classes below the threshold tie at 0", "proposition 3.5", "confirmed"
    ),
    fenchel_young=Fact(True, "the regulariser Omega is the negative Tsallis alpha-entropy", "section 2.4", "confirmed"),
    convex=Fact(True, "the loss is convex in the scores", "appendix A.2", "confirmed"),
    calibrated=Fact(
        True,
        "Top-k calibrated (k >= 1) and DCG-consistent for one label and for the sum over positives",
        "proposition 3.3",
        "confirmed",
    ),
    shift_invariant=Fact(
        True, "a constant added to all scores changes neither the map nor the loss", "definition", "derived"
    ),
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
        "Alpha of entmax: 1 is softmax, 2 is sparsemax.",
        least=1,
        most=2,
        reason="1 is softmax, 2 is sparsemax",
        learned=Learned(raw=raw_from_alpha, value=alpha_from_raw, key="order.raw_alpha"),
    ),
)
