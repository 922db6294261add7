"""Losses over negatives that all rows share, block by block: nothing of size (positives, negatives) is ever held.

In-batch negatives make a table of N x N scores, and shared draws one of N x k. As in an exact head
(engine/block_loop.py), the scores of one block of rows at a time are computed by one matmul into a buffer that is used
again, turned into losses and a gradient, and multiplied into the gradients of queries and class vectors. The class
vectors of the draw are read once, before the blocks, and their gradients are summed by class once, after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.autograd import refuse_second_derivatives
from manymax.engine.native_library import SUFFIXES, resolve
from manymax.engine.options import PAD, HeadOptions
from manymax.engine.sampled_scores import DrawnBlock, DrawnGradient, DrawnKernel, check_values
from manymax.engine.selected_scores import class_rows
from manymax.ops.checks import full_precision, visible
from manymax.ops.lookup import lookup
from manymax.ops.matches import Matches

# Scores of a block. Matmuls are fastest with many rows at a time, and a kernel with a closed form needs no other table:
# 32 MB of float32. A graph of autograd has about eight tables of the size of a block: 4 MB, which stay in the outer
# caches.
CLOSED_FORM_SCORES, GRAPH_SCORES = 1 << 23, 1 << 20


@dataclass(frozen=True)
class SharedDraw:
    """One draw that all rows share, as blocks of rows need it.

    rows, target: (M,) query and class of each positive; queries in order.
    distinct: whether every positive has a query of its own.
    ids, log_q: (k,) the drawn classes and their log q. log_q_target: (M,) that of the positives.
    shift: (M,) to be added to log q of the positives and of their negatives, or None; see `shift_of`.
    copies: finds the draws that were taken from the positives of an owner, which that owner does not count; or None.
    owner: (M,) to which owner each positive belongs.
    hits: finds the draws that are a given class, if such draws are masked; or None.
    """

    rows: Tensor
    target: Tensor
    distinct: bool
    ids: Tensor
    log_q: Tensor
    log_q_target: Tensor
    shift: Tensor | None
    copies: Matches | None
    owner: Tensor
    hits: Matches | None

    def block_rows(self, kernel: DrawnKernel) -> int:
        """The number of rows of a block; from the sizes alone, so that results are the same on every machine."""
        scores = GRAPH_SCORES if kernel.block is None else CLOSED_FORM_SCORES
        return min(len(self.rows), max(64, scores // len(self.ids)))

    def masked(self, part: slice) -> list[tuple[Tensor, Tensor]]:
        """Rows of a block and columns of the draw that do not count there."""
        found = [] if self.copies is None else [self.copies.of(self.owner[part])]
        return found if self.hits is None else [*found, self.hits.of(self.target[part])]


@dataclass
class SharedTensors:
    """What the scores of all blocks are computed from, in the dtype of the arithmetic.

    queries: (N, d). vectors: (k, d) of the draws. own: (M, d) of the positives.
    bias: (k,), own_bias: (M,): their biases, or None.
    """

    queries: Tensor
    vectors: Tensor
    own: Tensor
    bias: Tensor | None
    own_bias: Tensor | None

    @classmethod
    def read(cls, draw: SharedDraw, queries: Tensor, linear_weight: Tensor, bias: Tensor | None) -> SharedTensors:
        vectors, own = (lookup(linear_weight, ids).to(queries.dtype) for ids in (draw.ids, draw.target))
        biases = (None, None) if bias is None else (bias[draw.ids], bias[draw.target])
        return cls(queries, vectors, own, *biases)

    def scores(self, draw: SharedDraw, part: slice, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (n, d), scores of the positives (n,) and of the negatives (n, k) of a block, the latter in `out`."""
        queries = self.queries[draw.rows[part]]
        torch.mm(queries, self.vectors.T, out=out)
        positive = (queries * self.own[part]).sum(1)
        if self.bias is not None and self.own_bias is not None:
            out += self.bias  # -inf masks a class
            positive += self.own_bias[part]
        for row, column in draw.masked(part):
            out[row, column] = -torch.inf
        return queries, positive, out


class SharedGradients:
    """The gradients of queries, class vectors, biases and the kernel's setting, summed over the blocks."""

    def __init__(self, draw: SharedDraw, tensors: SharedTensors, wants: tuple[bool, ...]) -> None:
        self.draw, self.tensors, self.wants = draw, tensors, wants
        self.queries = torch.zeros_like(tensors.queries) if wants[0] else None
        self.vectors = torch.zeros_like(tensors.vectors)
        self.own = torch.empty_like(tensors.own)
        self.bias, self.own_bias = tensors.vectors.new_zeros(len(draw.ids)), tensors.own.new_empty(len(draw.rows))
        self.setting: Tensor | None = None

    def add(self, part: slice, queries: Tensor, gradient: DrawnGradient) -> None:
        """Add the gradient of a block in its scores."""
        table, scale, positive = gradient.table, gradient.scale.unsqueeze(1), gradient.positive.unsqueeze(1)
        if self.queries is not None:
            added = (table @ self.tensors.vectors).mul_(scale).addcmul_(positive, self.tensors.own[part])
            rows = self.draw.rows[part]
            if self.draw.distinct:
                self.queries[rows] = added
            else:  # several positives of one query
                self.queries.index_add_(0, rows, added)
        if self.wants[1]:
            # The scale goes on queries, (n, d), and not on the table, (n, k).
            self.vectors.addmm_(table.T, queries * scale)
            torch.mul(queries, positive, out=self.own[part])
        if self.wants[2]:
            self.bias += gradient.scale @ table
            self.own_bias[part] = gradient.positive
        if gradient.setting is not None:
            self.setting = gradient.setting if self.setting is None else self.setting + gradient.setting

    def sum_by_class(self) -> None:
        """Sum what belongs to one class, which may have been drawn more than once and be a positive too."""
        self.touched, place = torch.cat([self.draw.ids, self.draw.target]).unique(return_inverse=True)

        def summed(drawn: Tensor, own: Tensor) -> Tensor:
            total = drawn.new_zeros(len(self.touched), *drawn.shape[1:])
            return total.index_add_(0, place, torch.cat([drawn, own]))

        if self.wants[1]:
            self.vectors, self.own = summed(self.vectors, self.own), self.own[:0]
        if self.wants[2]:
            self.bias, self.own_bias = summed(self.bias, self.own_bias), self.own_bias[:0]

    def scaled(self, factor: Tensor, linear_weight: Tensor, sparse_grad: bool) -> tuple[Tensor | None, ...]:
        """The gradients of queries, class vectors, biases and setting times a factor (); None where not wanted.

        They stay as they are, for another backward. That of the class vectors is rounded to their dtype here: once.
        """
        vectors = bias = None
        if self.wants[1]:
            vectors = class_rows(self.touched, self.vectors * factor, linear_weight, sparse_grad)
        if self.wants[2]:
            bias = self.bias.new_zeros(len(linear_weight)).index_copy_(0, self.touched, self.bias * factor)
        queries, setting = (None if value is None else value * factor for value in (self.queries, self.setting))
        return queries, vectors, bias, setting


def _run(
    draw: SharedDraw,
    kernel: DrawnKernel,
    options: HeadOptions,
    tensors: SharedTensors,
    coefficient: Tensor | None,
    wants: tuple[bool, ...],
) -> tuple[Tensor, SharedGradients]:
    """The losses of all positives (M,), and the gradients of sum_m coefficient_m loss_m; none for no coefficient."""
    gradients = SharedGradients(draw, tensors, wants)
    k = len(draw.ids)
    # Made before the blocks: a small piece of memory that each block left behind would keep the allocator from using
    # that of the block's tables again.
    losses = tensors.queries.new_empty(len(draw.rows))
    level = resolve(options.backend) if visible(tensors.queries) and tensors.queries.dtype in SUFFIXES else None
    # One buffer for all blocks, with rows of a length that matmuls like.
    step = draw.block_rows(kernel)
    buffer = tensors.queries.new_empty(step, -(-k // PAD) * PAD)
    for part in (slice(start, start + step) for start in range(0, len(draw.rows), step)):
        queries, positive, negative = tensors.scores(draw, part, buffer[: len(draw.rows[part]), :k])
        block = DrawnBlock(
            positive,
            negative,
            draw.log_q_target[part],
            draw.log_q,
            None if draw.shift is None else draw.shift[part],
            None if coefficient is None else coefficient[part],
            level,
        )
        result = kernel.gradient(block, wants[3])
        if visible(result.losses) and not result.losses.isfinite().all():
            # The kernel may have overwritten the scores: they are computed again to see what is wrong with them.
            check_values(*tensors.scores(draw, part, negative)[1:])
        losses[part] = result.losses
        if coefficient is not None:
            gradients.add(part, queries, result)
    if coefficient is not None:
        gradients.sum_by_class()
    return losses, gradients


class SharedTotal(torch.autograd.Function):
    """sum_m coefficient_m loss_m over all positives, (), with the gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        linear_weight: Tensor,
        bias: Tensor | None,
        setting: Tensor | None,
        coefficient: Tensor,
        draw: SharedDraw,
        kernel: DrawnKernel,
        options: HeadOptions,
        sparse_grad: bool,
        enabled: bool,
    ) -> Tensor:
        wants = tuple(enabled and needed for needed in ctx.needs_input_grad[:4])
        tensors = SharedTensors.read(draw, queries, linear_weight, bias)
        losses, gradients = _run(draw, kernel, options, tensors, coefficient if any(wants) else None, wants)
        ctx.save_for_backward(linear_weight, losses)  # the former for its shape and dtype
        ctx.gradients, ctx.sparse_grad = gradients, sparse_grad
        return (losses * coefficient).sum()

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        linear_weight, losses = ctx.saved_tensors
        grad_coefficient = losses * grad if ctx.needs_input_grad[4] else None  # class weights may be learned
        return (*ctx.gradients.scaled(grad, linear_weight, ctx.sparse_grad), grad_coefficient, *[None] * 5)


class SharedLosses(torch.autograd.Function):
    """The losses of all positives, (M,), whose factors come with the backward: it computes the blocks again."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        linear_weight: Tensor,
        bias: Tensor | None,
        setting: Tensor | None,
        draw: SharedDraw,
        kernel: DrawnKernel,
        options: HeadOptions,
        sparse_grad: bool,
    ) -> Tensor:
        ctx.save_for_backward(queries, linear_weight, bias)
        ctx.draw, ctx.kernel, ctx.options, ctx.sparse_grad = draw, kernel, options, sparse_grad
        tensors = SharedTensors.read(draw, queries, linear_weight, bias)
        return _run(draw, kernel, options, tensors, None, (False,) * 4)[0]

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, linear_weight, bias = ctx.saved_tensors
        # The caller may run the backward under autocast, which the forward was protected from by its head.
        with full_precision(queries):
            tensors = SharedTensors.read(ctx.draw, queries, linear_weight, bias)
            wants = tuple(ctx.needs_input_grad[:4])
            _, gradients = _run(ctx.draw, ctx.kernel, ctx.options, tensors, grad.contiguous(), wants)
            return (*gradients.scaled(grad.new_ones(()), linear_weight, ctx.sparse_grad), *[None] * 4)
