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
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from manymax.engine.options import PAD, Keywords
from manymax.engine.ranks import Ranks, Shards
from manymax.engine.row_target import RowTarget
from manymax.errors import ManymaxError
from manymax.ops.checks import full_precision

SPREAD = 1 << 16  # class vectors at a time that are read in float64
PIECE = 1 << 17  # scores at a time where a block is gone over several times: they and two tables more stay in cache


@dataclass(frozen=True)
class Dense:
    """coefficient_n table_nc for some rows of the block: `rows` (n,) or None for all of them."""

    table: Tensor
    coefficient: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class Sparse:
    """Entries of the gradient in any order, (K,) each: rows of the block, classes and values."""

    rows: Tensor
    classes: Tensor
    values: Tensor


def merged(*columns: Tensor) -> Sparse:
    """Two lists of entries as one."""
    return Sparse(*(torch.cat([columns[i], columns[i + 3]]) for i in range(3)))


@dataclass
class BlockResult:
    """What a kernel returns for a block: losses (n,), parts of the gradient, gradient in its setting."""

    losses: Tensor
    parts: list[Dense | Sparse] = field(default_factory=list)
    grad_setting: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """What a kernel sees: scores (n, C') that it may overwrite, -inf in the columns past num_classes.

    On several ranks all of this is what the rank has: its classes, the positives among them, its part of sums.

    spread: (n,) sum_c class_weight_c s_c in float64 if there is smoothing; rescore recomputes rows of the block.
    ranks: complete the sums over the classes of a row.
    keywords: those of the call, its options among them.
    """

    scores: Tensor
    target: RowTarget
    num_classes: int
    spread: Tensor | None
    rescore: Callable[[Tensor], Tensor]
    ranks: Ranks
    keywords: Keywords


@dataclass(frozen=True)
class Kernel:
    """What an exact member does in its head, made for one call.

    run: from a block of scores to its losses and gradient.
    setting: a scalar tensor that the loss is also differentiated in, or None.
    omega: the regulariser of the normalised form, from rows on the simplex (n, P or C), of which zeros may be left
        out, to (n,); it is given the setting too where there is one. None where the form is just divided by |t|.
    """

    run: Callable[[Block], BlockResult]
    setting: Tensor | None = None
    omega: Callable[..., Tensor] | None = None


@dataclass
class Gradients:
    """Accumulates the gradients of a head over its blocks."""

    input: Tensor
    vectors: Tensor
    matmul_vectors: Tensor  # the same, in the dtype of the matmuls
    wants: tuple[bool, bool, bool]
    sparse_grad: bool
    budget: int  # entries to hold at a time
    grad_input: Tensor | None = None
    grad_vectors: Tensor | None = None
    grad_rows: Tensor | None = None  # of the vectors, row-sparse
    grad_bias: Tensor | None = None
    entries: list[Sparse] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.wants[0]:
            self.grad_input = torch.zeros_like(self.input)
        if self.wants[2]:
            self.grad_bias = self.input.new_zeros(self.vectors.shape[0])

    @property
    def num_classes(self) -> int:
        """Columns of a part beyond these are padding."""
        return self.vectors.shape[0]

    def add(self, start: int, part: Dense | Sparse) -> None:
        """Add a part of the block that begins at row `start`."""
        if isinstance(part, Sparse):
            if sum(len(entry.rows) for entry in (*self.entries, part)) > self.budget:
                self._add_entries()
            self.entries.append(replace(part, rows=part.rows + start))
            return
        size = part.table.shape[0]
        rows: slice | Tensor = slice(start, start + size) if part.rows is None else part.rows + start
        table = part.table[:, : self.num_classes].to(self.matmul_vectors.dtype)
        if self.grad_input is not None:
            self.grad_input[rows] = (table @ self.matmul_vectors).to(self.input.dtype) * part.coefficient.unsqueeze(1)
        if self.wants[1]:
            if self.grad_vectors is None:
                self.grad_vectors = self.input.new_zeros(self.vectors.shape)
            scaled = self.input[rows] * part.coefficient.unsqueeze(1)
            if table.dtype == self.input.dtype:
                self.grad_vectors.addmm_(table.T, scaled)
            else:
                self.grad_vectors += table.T @ scaled.to(table.dtype)
        if self.grad_bias is not None:
            self.grad_bias += part.coefficient @ part.table[:, : self.num_classes]

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, class vectors and bias."""
        self._add_entries()
        return self.grad_input, self._finish_vectors() if self.wants[1] else None, self.grad_bias

    def _finish_vectors(self) -> Tensor:
        if self.grad_vectors is None and self.grad_rows is not None:
            return self.grad_rows
        vectors = self.input.new_zeros(self.vectors.shape) if self.grad_vectors is None else self.grad_vectors
        if self.grad_rows is not None:
            vectors += self.grad_rows
        if not self.sparse_grad:
            return vectors
        return row_sparse(torch.arange(self.num_classes, device=vectors.device), vectors, vectors.shape)

    def _add_entries(self) -> None:
        """Add the entries collected so far, and let them go."""
        if not self.entries:
            return
        rows, classes, values = (torch.cat([getattr(e, k) for e in self.entries]) for k in _FIELDS)
        self.entries.clear()
        if self.grad_input is not None:
            by_row = rows, classes, values
            if bool((rows[1:] < rows[:-1]).any()):
                order = rows.int().argsort(stable=True)  # a radix sort: int32 keys are several times faster
                by_row = rows[order], classes[order], values[order]
            self.grad_input += bags(*by_row, self.vectors, self.input.shape[0])
        if self.grad_bias is not None:
            self.grad_bias.index_add_(0, classes, values)
        if not self.wants[1]:
            return
        order = classes.int().argsort(stable=True)
        rows, classes, values = rows[order], classes[order], values[order]
        if self.sparse_grad:
            touched, position = classes.unique_consecutive(return_inverse=True)
            product = bags(position, rows, values, self.input, len(touched))
            added = row_sparse(touched, product, (self.num_classes, self.input.shape[1]))
            self.grad_rows = added if self.grad_rows is None else (self.grad_rows + added).coalesce()
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
    kernel: Callable[[Block], BlockResult],
    keywords: Keywords,
    shards: Shards,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor, Gradients, Tensor]:
    """Losses (N,), the accumulated gradients, and the gradient in the kernel's setting."""
    options = keywords.options
    num_classes, padded = linear_weight.shape[0], padded_length(linear_weight.shape[0])
    matmul_vectors = linear_weight.bfloat16() if options.matmul == "bf16" else linear_weight
    spread_of = None if target.class_weight is None else _spread(target.class_weight, linear_weight, linear_bias)
    step = options.rows(padded_length(max(shards.sizes)))  # all ranks must cut the rows alike
    buffer = input.new_empty(min(step, input.shape[0]), padded)

    def score(queries: Tensor, ids: Tensor | None, out: Tensor) -> Tensor:
        scores = out[:, :num_classes]
        if options.matmul == "bf16":
            scores.copy_(queries.bfloat16() @ matmul_vectors.T)
            if ids is not None:  # the few scores that the loss hangs on are not rounded
                scores.scatter_(1, ids, (linear_weight[ids] @ queries.unsqueeze(2)).squeeze(2))
        else:
            torch.mm(queries, linear_weight.T, out=scores)
        if linear_bias is not None:
            scores += linear_bias
        out[:, num_classes:] = -torch.inf
        return out

    gradients = Gradients(input, linear_weight, matmul_vectors, wants, options.sparse_grad, buffer.numel())
    losses, grad_setting = [], input.new_zeros((), dtype=torch.float64)
    for start in range(0, input.shape[0], step):
        queries = input[start : start + step]
        spread = None if spread_of is None else spread_of(queries)
        part = target[start : start + step]
        scores = score(queries, part.ids, buffer[: len(queries)])
        rescore = partial(_rescore, score, queries, part.ids, padded)
        result = kernel(Block(scores, part, num_classes, spread, rescore, shards.ranks, keywords))
        losses.append(result.losses)
        for gradient in result.parts:
            gradients.add(start, gradient)
        if result.grad_setting is not None:
            grad_setting = grad_setting + result.grad_setting
    return torch.cat(losses) if losses else input.new_zeros(0), gradients, grad_setting


def padded_length(num_classes: int) -> int:
    """The length of a row of scores with its padding."""
    return -(-num_classes // PAD) * PAD


def _spread(class_weight: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """From queries (n, d) to sum_c class_weight_c s_c, (n,), in float64: an offset of the scores is in it C times."""
    vector = linear_weight.new_zeros(linear_weight.shape[1], dtype=torch.float64)
    for weights, vectors in zip(class_weight.split(SPREAD), linear_weight.split(SPREAD), strict=True):
        vector += weights.double() @ vectors.double()
    shift = vector.new_zeros(())
    if linear_bias is not None:
        shift = (class_weight.double() * torch.where(linear_bias > -torch.inf, linear_bias, 0)).sum()
    return lambda queries: queries.double() @ vector + shift


def _rescore(
    score: Callable[[Tensor, Tensor | None, Tensor], Tensor],
    queries: Tensor,
    ids: Tensor | None,
    padded: int,
    rows: Tensor,
) -> Tensor:
    return score(queries[rows], None if ids is None else ids[rows], queries.new_empty(len(rows), padded))


def refuse_second_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses `create_graph=True`, where its result would pass for a constant."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ManymaxError(
                "a head has no second derivatives: `create_graph=True` needs the plain loss on the table of scores."
            )
        return backward(ctx, *grads)

    return checked


class InDtype(torch.autograd.Function):
    """value.to(dtype) with a backward that row-sparse gradients pass too; torch's own refuses them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = value.dtype
        return value.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in the dtype of the arithmetic."""
    return value if value.dtype == dtype else InDtype.apply(value, dtype)


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
        kernel: Callable[[Block], BlockResult],
        keywords: Keywords,
        shards: Shards,
    ) -> Tensor:
        wants = tuple(ctx.needs_input_grad[:3])
        losses, gradients, grad_setting = run(
            input, linear_weight, linear_bias, target, kernel, keywords, shards, wants
        )
        ctx.grads = (*gradients.finish(), grad_setting if ctx.needs_input_grad[3] else None)
        ctx.retain = keywords.options.retain_graph
        return (losses * target.factor).sum()

    @staticmethod
    @refuse_second_derivatives
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
        return (*scaled, None, None, None, None)


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
        kernel: Callable[[Block], BlockResult],
        keywords: Keywords,
        shards: Shards,
    ) -> Tensor:
        ctx.save_for_backward(input, linear_weight, linear_bias)
        ctx.target, ctx.kernel, ctx.keywords, ctx.shards = target, kernel, keywords, shards
        plain = replace(target, coefficient=None)
        return run(input, linear_weight, linear_bias, plain, kernel, keywords, shards, (False, False, False))[0]

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias = ctx.saved_tensors
        wants = tuple(ctx.needs_input_grad[:3])
        target = replace(ctx.target, coefficient=ctx.target.factor * grad)
        with full_precision(input):
            _, gradients, grad_setting = run(
                input, linear_weight, linear_bias, target, ctx.kernel, ctx.keywords, ctx.shards, wants
            )
            grads = gradients.finish()
        return (*grads, grad_setting if ctx.needs_input_grad[3] else None, None, None, None, None)
