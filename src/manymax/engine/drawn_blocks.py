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
from manymax.engine.row_sparse import row_sparse
from manymax.engine.sampled_scores import DrawnBlock, DrawnGradient, DrawnKernel, check_values
from manymax.engine.selected_scores import class_rows
from manymax.ops.checks import full_precision, refuse_transforms, visible
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
    every: whether the positives are one for every query, in order.
    ids, log_q: (k,) the drawn classes and their log q. log_q_target: (M,) that of the positives.
    shift: (M,) to be added to log q of the positives and of their negatives, or None; see `shift_of`.
    copies: finds the draws that were taken from the positives of an owner, which that owner does not count; or None.
    owner: (M,) to which owner each positive belongs.
    hits: finds the draws that are a given class, if such draws are masked; or None.
    num_classes: C.
    """

    rows: Tensor
    target: Tensor
    every: bool
    ids: Tensor
    log_q: Tensor
    log_q_target: Tensor
    shift: Tensor | None
    copies: Matches | None
    owner: Tensor
    hits: Matches | None
    num_classes: int

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

    queries: (M, d), that of each positive. own: (M, d) class vectors of the positives. vectors: (k, d) of the draws.
    bias: (k,) of the draws, or None.
    positive: (M,) scores of the positives.
    """

    queries: Tensor
    own: Tensor
    vectors: Tensor
    bias: Tensor | None
    positive: Tensor

    @classmethod
    def read(cls, draw: SharedDraw, queries: Tensor, linear_weight: Tensor, bias: Tensor | None) -> SharedTensors:
        each = queries if draw.every else lookup(queries, draw.rows)
        vectors, own = (lookup(linear_weight, ids).to(queries.dtype) for ids in (draw.ids, draw.target))
        # All at once, as everything of size (M, d) here: an operation on a block of it would be too short for the
        # threads that torch wakes for it.
        positive = (each * own).sum(1)
        if bias is None:
            return cls(each, own, vectors, None, positive)
        return cls(each, own, vectors, bias[draw.ids], positive + bias[draw.target])

    def scores(self, draw: SharedDraw, part: slice, out: Tensor) -> Tensor:
        """The scores of the negatives (n, k) of a block, in `out`."""
        torch.mm(self.queries[part], self.vectors.T, out=out)
        if self.bias is not None:
            out += self.bias  # -inf masks a class
        for row, column in draw.masked(part):
            out[row, column] = -torch.inf
        return out


class SharedGradients:
    """The gradients of queries, class vectors, biases and the kernel's setting, summed over the blocks.

    Per positive until `finish`: own (M, d) and own_bias (M,) of its class; queries (M, d) of its query through the
    negatives, without scale (M,).
    """

    def __init__(self, draw: SharedDraw, tensors: SharedTensors, wants: tuple[bool, ...]) -> None:
        self.draw, self.tensors, self.wants = draw, tensors, wants
        self.queries = torch.empty_like(tensors.queries) if wants[0] else None
        self.vectors = torch.zeros_like(tensors.vectors)
        self.bias, self.own_bias = torch.zeros_like(tensors.vectors[:, 0]), torch.empty_like(tensors.positive)
        self.scale = torch.empty_like(tensors.positive)
        self.setting: Tensor | None = None

    def add(self, part: slice, gradient: DrawnGradient) -> None:
        """Add the gradient of a block in its scores."""
        self.own_bias[part], self.scale[part] = gradient.positive, gradient.scale
        if self.queries is not None:
            torch.mm(gradient.table, self.tensors.vectors, out=self.queries[part])
        if self.wants[1]:
            # The scale goes on queries, (n, d), and not on the table, (n, k).
            self.vectors.addmm_(gradient.table.T, self.tensors.queries[part] * gradient.scale.unsqueeze(1))
        if self.wants[2]:
            self.bias += gradient.scale @ gradient.table
        if gradient.setting is not None:
            self.setting = gradient.setting if self.setting is None else self.setting + gradient.setting

    def finish(self, size: int) -> None:
        """Sum what belongs to one query, of which there are `size`, and what belongs to one class."""
        positive, draw = self.own_bias.unsqueeze(1), self.draw
        if self.queries is not None:
            self.queries.mul_(self.scale.unsqueeze(1)).addcmul_(positive, self.tensors.own)
            if not draw.every:  # several positives of one query, or none
                zeros = self.queries.new_zeros(size, self.queries.shape[1])
                self.queries = zeros.index_add_(0, draw.rows, self.queries)
        # A class may have been drawn more than once, and be a positive too.
        self.touched, place = torch.cat([draw.ids, draw.target]).unique(return_inverse=True)

        def summed(drawn: Tensor, own: Tensor) -> Tensor:
            total = drawn.new_zeros(len(self.touched), *drawn.shape[1:])
            return total.index_add_(0, place, torch.cat([drawn, own]))

        if self.wants[1]:
            self.vectors = summed(self.vectors, self.tensors.queries * positive)
        if self.wants[2]:
            self.bias = summed(self.bias, self.own_bias)

    def scaled(self, factor: Tensor, linear_weight: Tensor, sparse_grad: bool) -> tuple[Tensor | None, ...]:
        """The gradients of queries, class vectors, biases and setting times a factor (); None where not wanted.

        They stay as they are, for another backward. That of the class vectors is rounded to their dtype here: once.
        """
        vectors = bias = None
        if self.wants[1]:
            vectors = class_rows(self.touched, self.vectors * factor, linear_weight, sparse_grad)
        if self.wants[2]:
            bias, size = self.bias * factor, len(linear_weight)
            if sparse_grad:
                bias = row_sparse(self.touched, bias, (size,))
            else:
                bias = bias.new_zeros(size).index_copy_(0, self.touched, bias)
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
        negative = tensors.scores(draw, part, buffer[: len(draw.rows[part]), :k])
        block = DrawnBlock(
            tensors.positive[part],
            negative,
            draw.log_q_target[part],
            draw.log_q,
            None if draw.shift is None else draw.shift[part],
            draw.num_classes,
            None if coefficient is None else coefficient[part],
            level,
        )
        result = kernel.gradient(block, wants[3])
        if visible(result.losses) and not result.losses.isfinite().all():
            # The kernel may have overwritten the scores: they are computed again to see what is wrong with them.
            check_values(tensors.positive[part], tensors.scores(draw, part, negative))
        losses[part] = result.losses
        if coefficient is not None:
            gradients.add(part, result)
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
        if any(wants):
            gradients.finish(len(queries))
        ctx.save_for_backward(linear_weight, losses)  # the former for its shape and dtype
        ctx.gradients, ctx.sparse_grad = gradients, sparse_grad
        return (losses * coefficient).sum()

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_transforms(grad)
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
        refuse_transforms(grad)
        queries, linear_weight, bias = ctx.saved_tensors
        # The caller may run the backward under autocast, which the forward was protected from by its head.
        with full_precision(queries):
            tensors = SharedTensors.read(ctx.draw, queries, linear_weight, bias)
            wants = tuple(ctx.needs_input_grad[:4])
            _, gradients = _run(ctx.draw, ctx.kernel, ctx.options, tensors, grad.contiguous(), wants)
            gradients.finish(len(queries))
            return (*gradients.scaled(grad.new_ones(()), linear_weight, ctx.sparse_grad), *[None] * 4)
