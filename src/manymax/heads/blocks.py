"""A head in blocks of rows: scores, loss and both gradients, never the (rows, classes) table.

For each block the scores are one matmul into a buffer that is used again. A kernel turns them into
the losses of the rows and into their gradient g, in place and dense, or as the few entries that are
not zero. Then

    grad input = g W         grad W += g' x

where for a sparse g both are sums over its entries: one matmul for the scores is all that is left.
Row coefficients (class weights, 1/N) are put on x and on grad input, never on the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from manymax.errors import ManymaxError
from manymax.heads.options import PAD, HeadOptions
from manymax.heads.target import RowTarget


@dataclass(frozen=True)
class Dense:
    """coefficient_n table_nc for some rows of the block: `rows` (n,) or None for all of them."""

    table: Tensor
    coefficient: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class Sparse:
    """Entries of the gradient, (K,) each, ordered by row: rows of the block, classes and values."""

    rows: Tensor
    classes: Tensor
    values: Tensor


@dataclass
class Result:
    """What a kernel returns for a block: losses (n,), parts of the gradient, gradient in its setting."""

    losses: Tensor
    parts: list[Dense | Sparse] = field(default_factory=list)
    grad_setting: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """What a kernel sees: scores (n, C') that it may overwrite, -inf in the columns past num_classes.

    spread: (n,) sum_c class_weight_c s_c if there is smoothing; rescore recomputes rows of the block.
    """

    scores: Tensor
    target: RowTarget
    num_classes: int
    spread: Tensor | None
    rescore: Callable[[Tensor], Tensor]


Kernel = Callable[[Block], Result]


@dataclass
class Gradients:
    """Accumulates the gradients of a head over its blocks."""

    input: Tensor
    vectors: Tensor
    wants: tuple[bool, bool, bool]
    sparse_grad: bool
    grad_input: Tensor | None = None
    grad_vectors: Tensor | None = None
    grad_bias: Tensor | None = None
    entries: list[Sparse] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.wants[0]:
            self.grad_input = torch.zeros_like(self.input)
        if self.wants[2]:
            self.grad_bias = self.input.new_zeros(self.vectors.shape[0])

    def add(self, start: int, part: Dense | Sparse) -> None:
        """Add a part of the block that begins at row `start`."""
        if isinstance(part, Sparse):
            self.entries.append(replace(part, rows=part.rows + start))
            return
        size = part.table.shape[0]
        rows: slice | Tensor = slice(start, start + size) if part.rows is None else part.rows + start
        matmul_dtype = part.table.dtype
        if self.grad_input is not None:
            product = part.table @ self.vectors.to(matmul_dtype)
            self.grad_input[rows] = product.to(self.input.dtype) * part.coefficient.unsqueeze(1)
        if self.wants[1]:
            if self.grad_vectors is None:
                self.grad_vectors = self.input.new_zeros(self.vectors.shape)
            scaled = self.input[rows] * part.coefficient.unsqueeze(1)
            if matmul_dtype == self.input.dtype:
                self.grad_vectors.addmm_(part.table.T, scaled)
            else:
                self.grad_vectors += part.table.T @ scaled.to(matmul_dtype)
        if self.grad_bias is not None:
            self.grad_bias += part.coefficient @ part.table.to(self.input.dtype)

    def finish(self, num_classes: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, class vectors and bias."""
        if self.entries:
            rows, classes, values = (torch.cat([getattr(e, k) for e in self.entries]) for k in _FIELDS)
            self._add_entries(rows, classes, values, num_classes)
        if self.wants[1] and self.grad_vectors is None:
            self.grad_vectors = self.input.new_zeros(self.vectors.shape)
        vectors, bias = self.grad_vectors, self.grad_bias
        if vectors is not None:
            vectors = vectors if vectors.is_sparse else vectors[:num_classes]
            if self.sparse_grad and not vectors.is_sparse:
                vectors = row_sparse(torch.arange(num_classes, device=vectors.device), vectors, vectors.shape)
        return self.grad_input, vectors, None if bias is None else bias[:num_classes]

    def _add_entries(self, rows: Tensor, classes: Tensor, values: Tensor, num_classes: int) -> None:
        if self.grad_input is not None:
            self.grad_input += bags(rows, classes, values, self.vectors, self.input.shape[0])
        if self.grad_bias is not None:
            self.grad_bias.index_add_(0, classes, values)
        if not self.wants[1]:
            return
        order = classes.int().argsort(stable=True)  # a radix sort: int32 keys are several times faster
        rows, classes, values = rows[order], classes[order], values[order]
        if self.sparse_grad and self.grad_vectors is None:
            touched, position = classes.unique_consecutive(return_inverse=True)
            product = bags(position, rows, values, self.input, len(touched))
            self.grad_vectors = row_sparse(touched, product, (num_classes, self.input.shape[1]))
            return
        product = bags(classes, rows, values, self.input, self.vectors.shape[0])
        self.grad_vectors = product if self.grad_vectors is None else self.grad_vectors.add_(product)


_FIELDS = ("rows", "classes", "values")


def row_sparse(ids: Tensor, rows: Tensor, shape: torch.Size | tuple[int, int]) -> Tensor:
    """The (C, d) gradient that has `rows` (K, d) at the distinct sorted `ids` (K,) and 0 elsewhere."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, shape, is_coalesced=True, check_invariants=False)


def bags(bags: Tensor, ids: Tensor, values: Tensor, table: Tensor, count: int) -> Tensor:
    """sum over the entries of each bag of value x table[id], (count, d); `bags` (K,) is sorted."""
    counts = torch.bincount(bags, minlength=count)
    offsets = counts.cumsum(0) - counts
    return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=values.to(table.dtype))


def run(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: RowTarget,
    kernel: Kernel,
    options: HeadOptions,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor, Gradients, Tensor | None]:
    """Losses (N,), the accumulated gradients, and the gradient in the kernel's setting."""
    num_classes, padded = linear_weight.shape[0], -(-linear_weight.shape[0] // PAD) * PAD
    vectors = linear_weight
    if padded != num_classes:
        vectors = torch.nn.functional.pad(linear_weight, (0, 0, 0, padded - num_classes))
    matmul_vectors = vectors.bfloat16() if options.matmul == "bf16" else vectors
    spread_vector = None if target.class_weight is None else target.class_weight @ linear_weight
    step = options.rows(padded)
    buffer = input.new_empty(min(step, input.shape[0]), padded)

    def score(queries: Tensor, out: Tensor) -> Tensor:
        if options.matmul == "bf16":
            out.copy_(queries.bfloat16() @ matmul_vectors.T)
        else:
            torch.mm(queries, vectors.T, out=out)
        if linear_bias is not None:
            out[:, :num_classes] += linear_bias
        out[:, num_classes:] = -torch.inf
        return out

    gradients = Gradients(input, matmul_vectors if options.matmul == "bf16" else vectors, wants, options.sparse_grad)
    losses, grad_setting = [], None
    for start in range(0, input.shape[0], step):
        queries = input[start : start + step]
        spread = None
        if spread_vector is not None and target.class_weight is not None:
            spread = queries @ spread_vector
            if linear_bias is not None:
                spread = spread + target.class_weight @ torch.where(linear_bias > -torch.inf, linear_bias, 0)
        scores = score(queries, buffer[: len(queries)])
        rescore = partial(_rescore, score, queries, padded)
        result = kernel(Block(scores, target[start : start + step], num_classes, spread, rescore))
        losses.append(result.losses)
        for part in result.parts:
            gradients.add(start, part)
        if result.grad_setting is not None:
            grad_setting = result.grad_setting if grad_setting is None else grad_setting + result.grad_setting
    return torch.cat(losses) if losses else input.new_zeros(0), gradients, grad_setting


def _rescore(score: Callable[[Tensor, Tensor], Tensor], queries: Tensor, padded: int, rows: Tensor) -> Tensor:
    return score(queries[rows], queries.new_empty(len(rows), padded))


class BlockLoss(torch.autograd.Function):
    """sum_n coefficient_n loss_n as one number, with the gradients computed on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        setting: Tensor | None,
        target: RowTarget,
        kernel: Kernel,
        options: HeadOptions,
    ) -> Tensor:
        wants = tuple(ctx.needs_input_grad[:3])
        losses, gradients, grad_setting = run(input, linear_weight, linear_bias, target, kernel, options, wants)
        ctx.grads = (*gradients.finish(linear_weight.shape[0]), grad_setting)
        ctx.retain = options.retain_graph
        return (losses * target.factor).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise ManymaxError(
                "this head computes its gradients in the forward and frees them in the first backward; for a second one"
                " pass `options={'retain_graph': True}`."
            )
        grads = ctx.grads
        if not ctx.retain:
            ctx.grads = None  # nothing else holds them now: autograd may take them over without a copy
        scaled = tuple(None if g is None else _times(g, grad, ctx.retain) for g in grads)
        return (*scaled, None, None, None)


def _times(value: Tensor, factor: Tensor, keep: bool) -> Tensor:
    if keep or value.is_sparse:
        return value * factor
    if factor.device.type == "cpu" and factor == 1:
        return value
    return value.mul_(factor)


class BlockRows(torch.autograd.Function):
    """The losses of all rows, (N,); the backward computes the blocks again, with its own coefficients."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        setting: Tensor | None,
        target: RowTarget,
        kernel: Kernel,
        options: HeadOptions,
    ) -> Tensor:
        ctx.save_for_backward(input, linear_weight, linear_bias)
        ctx.target, ctx.kernel, ctx.options = target, kernel, options
        plain = replace(target, coefficient=None)
        return run(input, linear_weight, linear_bias, plain, kernel, options, (False, False, False))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias = ctx.saved_tensors
        wants = tuple(ctx.needs_input_grad[:3])
        target = replace(ctx.target, coefficient=ctx.target.factor * grad)
        _, gradients, grad_setting = run(input, linear_weight, linear_bias, target, ctx.kernel, ctx.options, wants)
        return (*gradients.finish(linear_weight.shape[0]), grad_setting, None, None, None)
