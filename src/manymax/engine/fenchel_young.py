"""The Fenchel-Young foundation: from a map and its regulariser to a loss.

For a convex Omega on the simplex,

    conjugate   Omega*(s) = max_p <p, s> - Omega(p)
    map         p(s) = grad Omega*(s) = the maximiser
    loss        L(t, s) = Omega*(s) + Omega(t) - <t, s>  >= 0, and 0 exactly when p(s) = t
    gradient    p(s) - t
    Bregman     D(p, q) = Omega(p) - Omega(q) - <grad Omega(q), p - q>

Softmax, sparsemax and entmax are of this form, with negative Tsallis entropies as Omega; a pair of
your own works the same way. Rankmax and Taylor-softmax are not Fenchel-Young losses.

Citation: Blondel, Martins, Niculae, "Learning with Fenchel-Young losses", JMLR 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manymax.engine.target import (
    Form,
    SoftTarget,
    Target,
    check_options,
    check_positives,
    normalized_weights,
    read_target,
    row_losses,
)
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_finite, check_scores, learned, working
from manymax.ops.forward_mode import differentiable
from manymax.ops.reduction import reduce

Map = Callable[[Tensor], Tensor]
# (scores, total, ids, weights) to (value, maximum); see the argument `potential` of `FenchelYoung`.
Potential = Callable[[Tensor, Tensor, "Tensor | None", "Tensor | None"], tuple[Tensor, Tensor]]


class _Conjugate(torch.autograd.Function):
    """(Omega*(s) - max s, max s) for any (map, omega) pair, with the map as gradient (Danskin's theorem).

    Differentiating <p(s), s> - Omega(p(s)) directly would multiply the Jacobian of the map with
    s - grad Omega(p), which is infinite where an entropy meets a zero probability.

    The gradient belongs to Omega*(s): callers add the maximum back, or subtract scores relative to it,
    and the maximum is a constant for them.
    """

    generate_vmap_rule = True  # so that torch.func.vmap works; everything here is made of torch operations

    @staticmethod
    def forward(scores: Tensor, map: Map, omega: Map) -> tuple[Tensor, Tensor]:
        maximum = scores.amax(-1)  # no gradient: it is taken off here and put back by the caller, see above
        probs = map(scores)
        # <p, s> - max s = <p, s - max s>, because p sums to 1: a common offset of the scores costs no digits. Where p
        # is 0 the score may be -inf, and 0 x -inf is nan.
        inner = torch.where(probs != 0, probs * (scores - maximum.unsqueeze(-1)), 0).sum(-1)
        return inner - omega(probs), maximum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        scores, ctx.map, _ = inputs
        # The scores and not the probabilities: the backward applies the map to them once more, which autograd follows,
        # so that second derivatives exist.
        ctx.save_for_backward(scores)
        ctx.save_for_forward(scores)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * ctx.map(scores), None, None

    @staticmethod
    def tangent(ctx: Any, step: Tensor, *_: None) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return (ctx.map(scores) * step).sum(-1), None


_conjugate = differentiable(_Conjugate)


class FenchelYoung:
    """A regulariser Omega with its map, and the loss that follows from them.

    Args:
        map: from scores (..., C) to probabilities (..., C), the gradient of Omega*; shift invariant.
        omega: from probabilities (..., C) to Omega (...), with the same value at every vertex of the simplex.
        slope: the gradient of Omega, (..., C) to (..., C). If it is left out autograd computes it, which needs an Omega
            that is differentiable at zero probabilities too.
        potential: a faster way to the loss, from (scores, total, ids, weights) to
            (total (Omega*(s) - max s) - sum_i weights_i (s_i - max s), max s), (...) each. The sum runs over
            ids (..., P), or is left out where they are None. If it is left out it is built from `map` and `omega`. With
            one, Omega is taken to be 0 at the vertices.
        separable: whether Omega is a sum over classes in which a zero probability adds nothing, so that it can be
            computed from the listed classes alone.

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

    def __init__(
        self,
        map: Map,
        omega: Map,
        *,
        slope: Map | None = None,
        potential: Potential | None = None,
        separable: bool = False,
    ) -> None:
        for name, value in {"map": map, "omega": omega, "slope": slope, "potential": potential}.items():
            if not callable(value) and (value is not None or name in ("map", "omega")):
                raise ArgumentTypeError(f"`{name}` must be a function; got {type(value).__name__}.")
        if not isinstance(separable, bool):
            raise ArgumentTypeError(f"`separable` must be True or False; got {type(separable).__name__}.")
        # Public, because theory and tests ask a pair for its map and Omega; the rest is how the loss is computed.
        self.map = map
        self.omega = omega
        self._separable = separable
        self._slope = slope
        self._potential = potential

    def relative(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(Omega*(s) - max s, max s), (...) each, of scores (..., C).

        Omega*(s) grows with a common offset of the scores, and the loss is a small difference of two such numbers. With
        the maximum apart, no digit is lost at any offset.
        """
        if self._potential is not None:  # without ids: total 1 and no sum over positives leave the conjugate
            value, maximum = self._potential(scores, torch.ones_like(scores[..., 0]), None, None)
        else:
            value, maximum = _conjugate(scores, self.map, self.omega)
        check_finite(maximum)  # nan, +inf and rows of -inf alone show in the maximum
        return value, maximum

    @checked
    def conjugate(self, scores: Tensor) -> Tensor:
        """Omega*(s) of scores (..., C), (...); its gradient is the map."""
        check_scores(scores)
        work, dtype = working(scores)  # half precision is computed in float32 and comes back as it came
        value, maximum = self.relative(work)
        return (value + maximum).to(dtype)

    @checked
    def gradient(self, scores: Tensor, target: Tensor) -> Tensor:
        """The gradient map(s) - t of the loss in the scores, for rows t on the simplex, (..., C) each."""
        if target.shape != scores.shape:
            raise ArgumentError(
                f"`target` must have the shape {tuple(scores.shape)} of `scores`; got {tuple(target.shape)}."
            )
        return self.map(scores) - target

    @checked
    def slope(self, probs: Tensor) -> Tensor:
        """grad Omega(p), (..., C). For a strictly convex Omega these are scores whose map is p again."""
        return torch.func.grad(lambda p: self.omega(p).sum())(probs) if self._slope is None else self._slope(probs)

    @checked
    def bregman(self, probs: Tensor, other: Tensor) -> Tensor:
        """The Bregman divergence D(probs, other) of Omega, (...), of rows (..., C) on the simplex.

        It is +inf where Omega is infinitely steep at `other` and the two differ there.
        """
        step = probs - other
        # Where they agree the slope does not matter, even if it is infinite: 0 x inf would be nan.
        linear = torch.where(step != 0, self.slope(other) * step, 0).sum(-1)
        return self.omega(probs) - self.omega(other) - linear

    def loss(
        self,
        scores: Tensor,
        target: Tensor | Target | SoftTarget,
        *,
        weight: Tensor | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
    ) -> Tensor:
        """The loss with the arguments of `torch.nn.functional.cross_entropy`; see `softmax_loss`."""
        check_options(reduction, label_smoothing, multilabel)
        check_scores(scores)
        work, dtype = working(scores)
        read = read_target(Form.of(work), target, weight, ignore_index, multilabel)
        rows, total = self._rows(work, read, weight, label_smoothing)
        if multilabel == "normalized":
            # L(t / |t|, s) = rows / |t| + Omega(t / |t|), and 0 without a positive.
            mixed = normalized_weights(work, read, weight, label_smoothing)
            # An Omega that is no sum over classes needs all of them; others are computed from the listed ones.
            if not self._separable and read.ids is not None and mixed.shape != work.shape:
                mixed = torch.zeros_like(work).scatter_add(-1, read.ids, mixed)
            rows = torch.where(total > 0, rows / torch.where(total > 0, total, 1) + self.omega(mixed), 0)
        elif self._potential is None:
            # The sum of single-label losses, each with Omega at a vertex.
            rows = rows + total * self._vertex(work)
        return reduce(rows, read.divisor, reduction).to(dtype)

    def _rows(
        self, scores: Tensor, read: Target, weight: Tensor | None, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """sum_i t_i (Omega*(s) - s_i) and sum_i t_i, (...) each."""
        # The potential takes listed positives with constant weights: it has no gradient in the weights, and smoothing
        # gives every class a weight.
        listed = read.ids is not None and label_smoothing == 0 and not learned(read.weights)
        if self._potential is None or not listed:
            value, maximum = self.relative(scores)
            return row_losses(value, scores, read, weight, label_smoothing, maximum.unsqueeze(-1))
        total = read.weights.sum(-1)
        # Conjugate and positives in one go: a member's own potential sums them before anything is rounded.
        rows, maximum = self._potential(scores, total, read.ids, read.weights)
        check_finite(maximum)
        check_positives(rows)
        return rows, total

    def _vertex(self, scores: Tensor) -> Tensor:
        """Omega at a vertex of the simplex, (); the same at all of them, so that the first one will do."""
        corner = scores.new_zeros(scores.shape[-1])
        return self.omega(torch.cat([corner[:1] + 1, corner[1:]]))
