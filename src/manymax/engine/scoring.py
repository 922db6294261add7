"""From products of queries and class vectors to scores, and back from gradients of scores to those of the products.

    z = q . w          one matmul; the caller has divided q by its norm and by the temperature, as the keywords say
    s = z / |w| + b    with `normalize`
    s = c tanh(s / c)  with `softcap`

A block holds s. The kernel of a member gives the gradient of s, and `Scoring.chain` turns it into that of z, from which
those of q and w follow as ever. A normalised copy of the class vectors is never made: with G = sum_n g_n q_n / |w|, the
gradient of a class vector is G without its part along w, which is known when all blocks are done (`project`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Dense, Mixed, Sparse, piece_size
from manymax.engine.half import widened
from manymax.ops.checks import visible
from manymax.ops.forward_mode import differentiable

# Class vectors whose gradients are worked on at a time, so that they and their gradients stay in cache.
IN_CACHE = 1 << 11


class ScaledQueries(torch.autograd.Function):
    """Queries divided by a temperature, and by their norms if asked to: y = q / (|q| tau).

    A function of its own, because autograd would keep the quotients of both steps until the backward: two more copies
    of the queries, which for two towers is as much as their gradients. Here the queries themselves are kept.
    """

    generate_vmap_rule = True  # for heads of moments, which run under vmap; others refuse it in words

    @staticmethod
    def forward(queries: Tensor, temperature: Tensor, normalize: bool) -> Tensor:
        return queries / _divisor(queries, temperature, normalize)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        queries, temperature, ctx.normalize = inputs
        ctx.save_for_backward(queries, temperature)
        ctx.save_for_forward(queries, temperature)

    # Of operations that autograd can follow: sampled losses have second derivatives.
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With y = q / D, D = |q| tau: dL/dq = (g - y (y . g) tau^2) / D, and dL/dtau = -sum(y . g) / tau."""
        queries, temperature = ctx.saved_tensors
        divisor = _divisor(queries, temperature, ctx.normalize)
        along = torch.linalg.vecdot(queries, grad).unsqueeze(-1) / divisor  # y . g; no table of products
        of_temperature = -along.sum() / temperature if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_temperature, None
        if not ctx.normalize:
            return grad / divisor, of_temperature, None
        across = torch.addcmul(grad, queries, along / divisor * temperature.square(), value=-1)
        # A zero vector stays zero, with a gradient of 0: it has no direction.
        return across.mul_(queries.any(-1, keepdim=True) / divisor), of_temperature, None

    @staticmethod
    def tangent(ctx: Any, step: Tensor | None, temperature_step: Tensor | None, _: None) -> Tensor:
        """dy = (dq - y (y . dq) tau^2) / D - y dtau / tau."""
        queries, temperature = ctx.saved_tensors
        divisor = _divisor(queries, temperature, ctx.normalize)
        scaled, moved = queries / divisor, torch.zeros_like(queries)
        if step is not None:
            moved = moved + step / divisor
            if ctx.normalize:
                along = torch.linalg.vecdot(scaled, step).unsqueeze(-1) / divisor
                moved = (moved - scaled * along * temperature.square()) * queries.any(-1, keepdim=True)
        return moved if temperature_step is None else moved - scaled * temperature_step / temperature


scaled_by = differentiable(ScaledQueries)


def _divisor(queries: Tensor, temperature: Tensor, normalize: bool) -> Tensor:
    """|q| tau for each query (..., d), (..., 1), with |q| = 1 for a zero vector; without norms tau, ()."""
    if not normalize:
        return temperature
    # The square is taken of 1 where a vector is zero: the derivative of a norm at zero is nan, chosen or not.
    square = torch.linalg.vecdot(queries, queries).unsqueeze(-1)
    return torch.where(square > 0, square, 1).sqrt() * temperature


@dataclass(frozen=True)
class Scoring:
    """How the scores of one call follow from products.

    num_classes: C.
    scale: (C,) 1 / |w| of the class vectors; None without `normalize`.
    bias: (C,) or None.
    softcap: c, or None.
    level: the dispatch level of the native library that serves the call; None for plain torch.
    has_zero: whether some class vector may be zero, with `normalize`.
    """

    num_classes: int
    scale: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    level: str | None = None
    has_zero: bool = False

    @classmethod
    def of(
        cls, vectors: Tensor, bias: Tensor | None, normalize: bool, softcap: float | None, level: str | None
    ) -> Scoring:
        """The scoring of class vectors (C, d) with a bias (C,)."""
        wide = torch.promote_types(vectors.dtype, torch.float32)
        if not normalize:
            return cls(vectors.shape[0], None, bias, softcap, level)
        norms = torch.cat([torch.linalg.vector_norm(part, dim=1) for _, part in widened(vectors, wide)])
        # 1 for a zero vector, whose products are 0 whatever the factor is.
        scale = 1 / torch.where(norms > 0, norms, 1)
        # On a device nobody waits for the answer, and there may be one.
        has_zero = not (visible(norms) and bool(norms.all()))
        return cls(vectors.shape[0], scale, bias, softcap, level, has_zero)

    @property
    def plain(self) -> bool:
        """Whether a score is the product and the bias, and nothing else."""
        return self.scale is None and self.softcap is None

    def transform(self, capped: Tensor | None = None) -> native.Transform:
        """The same for native code, which does it where it computes products and their gradients."""
        return native.Transform(self.scale, self.softcap, capped)

    def finish(self, scores: Tensor) -> Tensor | None:
        """Turn products into scores, in place; returns the maxima of groups of classes where native code does it.

        Args:
            scores: (n, C'), products; columns beyond the classes are padding and hold -inf.
        """
        if self.level is not None:
            how = self.scale, self.bias, self.softcap, self.num_classes
            return native.finish_scores(self.level, scores, *how)
        table = scores[:, : self.num_classes]
        if self.scale is not None:
            table *= self.scale
        if self.bias is not None:
            table += self.bias  # -inf masks a class
        if self.softcap is not None:
            masked = table == -torch.inf
            table.div_(self.softcap).tanh_().mul_(self.softcap).masked_fill_(masked, -torch.inf)
        return None

    def chain_packed(self, part: Mixed, capped: Tensor | None) -> None:
        """`chain` of the packed rows of a part alone."""
        how = self.scale, capped, self.softcap, self.num_classes, True
        native.chain_gradient(part.level, part.table, part.count, None, *how)

    def chain(self, part: Dense | Sparse | Mixed, capped: Tensor | None) -> Dense | Sparse | Mixed:
        """The gradient of the products from a part of that of the scores; a table is changed in place.

        Args:
            part: of the gradient of a block.
            capped: (n, C') the capped scores of the block; None without a soft cap, or where the kernel has taken the
                gradient through it.
        """
        if isinstance(part, Sparse):
            values = part.values
            if self.scale is not None:
                values = values * self.scale[part.classes]
            if capped is not None:
                values = values * self._slope(capped[part.rows, part.classes])
            return replace(part, values=values)
        table = part.table
        if self.level is not None:
            count, rows = (part.count, None) if isinstance(part, Mixed) else (None, part.rows)
            how = self.scale, capped, self.softcap, self.num_classes
            native.chain_gradient(self.level, table, count, rows, *how)
            return part
        assert isinstance(part, Dense)  # native kernels alone leave packed rows
        step = max(1, piece_size(table) // table.shape[1])
        for start in range(0, len(table), step):  # in pieces, so that temporary tables stay in cache
            piece = table[start : start + step]
            if capped is not None:
                chosen = slice(start, start + step) if part.rows is None else part.rows[start : start + step]
                # A masked class has the gradient 0, and the slope of a score of -inf must not be multiplied with it.
                piece.mul_(torch.where(piece != 0, self._slope(capped[chosen]), 0))
            if self.scale is not None:
                piece[:, : len(self.scale)] *= self.scale
        return part

    def _slope(self, capped: Tensor) -> Tensor:
        """d s' / d s = 1 - (s' / c)^2 of capped scores s' = c tanh(s / c)."""
        assert self.softcap is not None
        return 1 - (capped / self.softcap).square()

    def project(self, grad: Tensor, linear_weight: Tensor) -> Tensor:
        """The gradient of class vectors from G = sum_n g_n q_n / |w|: its part across w. In place, or row-sparse.

        Args:
            grad: (C, d), dense or row-sparse.
            linear_weight: (C, d).
        """
        if self.scale is None:
            return grad
        ids, rows = (grad.indices()[0], grad.values()) if grad.is_sparse else (None, grad)
        for start in range(0, len(rows), IN_CACHE):
            part = slice(start, start + IN_CACHE)
            chosen = part if ids is None else ids[part]
            vectors, scale = linear_weight[chosen].to(rows.dtype), self.scale[chosen].unsqueeze(1)
            along = (vectors * rows[part]).sum(1, keepdim=True) * scale.square()
            rows[part].addcmul_(vectors, along, value=-1)
            if self.has_zero:  # a zero vector stays zero
                rows[part] *= vectors.any(1, keepdim=True)
        return grad

    def bias_gradient(self, grad: Tensor | None) -> Tensor | None:
        """The gradient of the bias (C,) from the sum of the gradients of products, which have the factor 1 / |w|."""
        return grad if grad is None or self.scale is None else grad / self.scale
