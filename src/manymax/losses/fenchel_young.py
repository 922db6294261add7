"""The Fenchel-Young foundation: from a map and its regulariser to a loss.

For a convex Omega on the simplex,

    conjugate   Omega*(s) = max_p <p, s> - Omega(p)
    map         p(s) = grad Omega*(s) = the maximiser
    loss        L(t, s) = Omega*(s) + Omega(t) - <t, s>  >= 0, and 0 exactly when p(s) = t
    gradient    p(s) - t
    Bregman     D(p, q) = Omega(p) - Omega(q) - <grad Omega(q), p - q>

Softmax, sparsemax and entmax are rows of this table (Omega = negative Tsallis entropies); a user's
own pair works the same way. Rankmax and Taylor-softmax are not Fenchel-Young and do not pass here.

Reference: Blondel, Martins, Niculae, "Learning with Fenchel-Young losses", JMLR 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manymax.losses.base import check_options, normalized_weights, read_target, row_losses
from manymax.ops.checks import check_finite, check_scores, working
from manymax.ops.reduction import reduce

Map = Callable[[Tensor], Tensor]
Relative = Callable[[Tensor], tuple[Tensor, Tensor]]


class _Conjugate(torch.autograd.Function):
    """Omega*(s) - max s for any (map, omega) pair; its gradient in s is the map (Danskin).

    Differentiating <p(s), s> - Omega(p(s)) directly would multiply the Jacobian of the map with
    s - grad Omega(p), which is infinite where an entropy meets a zero probability.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, map: Map, omega: Map) -> tuple[Tensor, Tensor]:
        maximum = scores.amax(-1)
        probs = map(scores)
        inner = torch.where(probs != 0, probs * (scores - maximum.unsqueeze(-1)), 0).sum(-1)
        return inner - omega(probs), maximum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, ctx.map, _ = inputs
        ctx.save_for_backward(scores)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (scores,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * ctx.map(scores), None, None


class FenchelYoung:
    """A regulariser Omega with its map, and the loss that follows from them.

    Args:
        map: scores (..., C) to probabilities (..., C), the gradient of Omega*; shift invariant.
        omega: probabilities (..., C) to Omega (...). It must take the same value at every vertex of
            the simplex and leave zero probabilities out of its sum.
        relative: optional, scores (..., C) to (Omega*(s) - max s, max s), (...) each, with a
            gradient only through the first; built from `map` and `omega` if not given.

    Example: Gini's entropy with half the temperature of sparsemax.

        >>> import torch, manymax
        >>> fy = manymax.FenchelYoung(lambda s: manymax.sparsemax(2 * s), lambda p: (p.square().sum(-1) - 1) / 4)
        >>> scores = torch.tensor([[1.0, 0.8, -1.0]])
        >>> fy.map(scores)
        tensor([[0.7000, 0.3000, 0.0000]])
        >>> fy.loss(scores, torch.tensor([0]))
        tensor(0.0450)
        >>> fy.gradient(scores, torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([[-0.3000,  0.3000,  0.0000]])
    """

    def __init__(self, map: Map, omega: Map, *, relative: Relative | None = None) -> None:
        self.map = map
        self.omega = omega
        self._relative = relative

    def relative(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(Omega*(s) - max s, max s), (...) each: a conjugate that keeps its digits at any offset."""
        value, maximum = (
            self._relative(scores) if self._relative is not None else _Conjugate.apply(scores, self.map, self.omega)
        )
        check_finite(maximum)
        return value, maximum

    def conjugate(self, scores: Tensor) -> Tensor:
        """Omega*(s), (...); its gradient is the map."""
        check_scores(scores)
        work, dtype = working(scores)
        value, maximum = self.relative(work)
        return (value + maximum).to(dtype)

    def gradient(self, scores: Tensor, target: Tensor) -> Tensor:
        """map(s) - t for rows t on the simplex, (..., C)."""
        return self.map(scores) - target

    def bregman(self, probs: Tensor, other: Tensor) -> Tensor:
        """D(probs, other) of Omega, (...); +inf where Omega is infinitely steep and they differ."""
        slope = torch.func.grad(lambda q: self.omega(q).sum())(other)
        step = probs - other
        linear = torch.where(step != 0, slope * step, 0).sum(-1)
        return self.omega(probs) - self.omega(other) - linear

    def loss(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
    ) -> Tensor:
        """The loss with the arguments of `torch.nn.functional.cross_entropy`; see `softmax_loss`."""
        check_options(reduction, label_smoothing, multilabel)
        read = read_target(scores, target, weight, ignore_index, multilabel)
        work, dtype = working(scores)
        value, maximum = self.relative(work)
        rows, total = row_losses(value, work, read, weight, label_smoothing, maximum.unsqueeze(-1))
        if multilabel == "normalized":
            mixed = normalized_weights(work, read, weight, label_smoothing)
            rows = torch.where(total > 0, rows / torch.where(total > 0, total, 1) + self.omega(mixed), 0)
        else:
            rows = rows + total * self._vertex(work)
        return reduce(rows, read.divisor, reduction).to(dtype)

    def _vertex(self, scores: Tensor) -> Tensor | float:
        """Omega at a vertex: 0 for the members, whatever a user's Omega says otherwise."""
        if self._relative is not None:
            return 0.0
        corner = torch.zeros_like(scores[(0,) * (scores.ndim - 1)]) if scores.numel() else scores.new_zeros(1)
        corner = torch.cat([torch.ones_like(corner[:1]), corner[1:]])
        return self.omega(corner)
