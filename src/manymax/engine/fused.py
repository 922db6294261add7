"""The loss of a head whose backward updates the class vectors, so that their gradient never exists as a whole.

Two ways, by what a member's gradient looks like:

    in turn   every class has a gradient (softmax). Forward: blocks of classes one after the other add to the sums of
              each row. Backward: the same blocks again, with the sums of all classes; each block's gradient is (classes
              of the block, d), and is used up by the update of these classes before the next block begins
    entries   few classes of a row have one (sparse members). Forward: blocks of rows, whose entries are kept, 12 bytes
              each. Backward: the entries are sorted by class, and some touched classes at a time are summed and updated

The gradient of the queries is that at the class vectors before the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manymax.engine.autograd import refuse_second_derivatives
from manymax.engine.block_loop import run
from manymax.engine.blocks import Kernel
from manymax.engine.class_blocks import InTurn, block_sizes, classes_of, target_mass
from manymax.engine.gradients import sum_bags
from manymax.engine.half import WIDENED
from manymax.engine.kept_entries import KeptEntries
from manymax.engine.keywords import Keywords
from manymax.engine.linear import HeadCall, omega_rows
from manymax.engine.ranks import Shards
from manymax.engine.row_sparse import row_sparse
from manymax.engine.row_target import RowTarget
from manymax.errors import ManymaxError
from manymax.ops.checks import full_precision, refuse_transforms
from manymax.ops.lookup import lookup
from manymax.ops.reduction import check_losses, mean_divisor, reduce

# Tables of the size of a gradient that an update makes, itself included.
TEMPORARIES = 4
# Touched classes whose gradients are summed and updated at a time.
TOUCHED = 1 << 13
# Numbers that are held at a time, as a share of the class vectors; small tables get more. Much fewer would make a block
# wait for memory: each block of rows reads all class vectors, each block of classes all queries.
DENSE_SHARE, SPARSE_SHARE = 0.05, 0.08
FEW_NUMBERS = 1 << 22

# update(rows, grad of the vectors, grad of the bias or None, part): changes these classes. `rows` as in
# `TableUpdates.update`; `part` numbers the parts of a step.
Update = Callable[[slice | Tensor, Tensor, Tensor | None, int], None]


@dataclass
class FusedStep:
    """One call of a head, from its forward to the update in its backward.

    call: read and checked, without the rows that do not count.
    kernel, keywords: of the member and of the call.
    target: of its rows; the coefficients are 1.
    begin: called once, before the first update of the step.
    update: what the backward does with the gradient of some classes.
    """

    call: HeadCall
    kernel: Kernel
    keywords: Keywords
    target: RowTarget
    begin: Callable[[], None]
    update: Update
    done: bool = False

    def __post_init__(self) -> None:
        self.version = self.call.vectors._version

    def _room(self, share: float) -> int:
        """How many numbers may be held at a time, if that is a share of the class vectors."""
        table = self.call.vectors.numel() * self.call.vectors.element_size() // 4
        return max(FEW_NUMBERS, int(share * table))

    def start(self) -> None:
        """Begin the update, unless this call has had its own or the class vectors have changed since its forward."""
        if self.done:
            raise ManymaxError(
                "this loss has updated the class vectors already: a fused head has one backward per call."
            )
        if self.call.vectors._version != self.version:
            raise ManymaxError(
                "the class vectors have changed since this loss was computed: call `backward` of one loss of a fused"
                " head before the next forward, or add up the queries of both into one call."
            )
        self.done = True
        self.begin()


class InTurnStep(FusedStep):
    """The call of a member all of whose classes have a gradient: blocks of classes in turn."""

    def losses(self) -> Tensor:
        """The losses of the rows (n,), and the sums of each row for the backward."""
        call, moved = self.call, self.kernel.moved
        assert moved is not None
        # A class has a score for each row, and d numbers in its gradient and in each temporary of its update.
        numbers = len(call.queries) + TEMPORARIES * call.vectors.shape[1]
        self.sizes = block_sizes(
            len(call.vectors), max(1, min(self.keywords.options.block_scores, self._room(DENSE_SHARE)) // numbers)
        )
        self.turns = InTurn(len(self.sizes), moved)
        plain = replace(self.target, coefficient=None)
        for block in range(len(self.sizes)):
            self._run(block, call.queries, plain, (False, False, False))
        self.turns.complete = True
        # The last block once more: its kernel makes losses of the complete sums.
        return self._run(len(self.sizes) - 1, call.queries, plain, (False, False, False))[0]

    def backward(self, queries: Tensor, factor: Tensor, wants_queries: bool) -> Tensor | None:
        """Update all class vectors, block by block; returns the gradient of the queries (n, d)."""
        bias = self.call.bias
        target = replace(self.target, coefficient=self.target.factor * factor)
        total = torch.zeros_like(queries) if wants_queries else None
        for block in range(len(self.sizes)):
            _losses, gradients, _, _ = self._run(block, queries, target, (wants_queries, True, bias is not None))
            grad_queries, grad_vectors, grad_bias = gradients.finish()
            assert grad_vectors is not None
            if total is not None and grad_queries is not None:
                total += grad_queries
            self.update(self._span(block), grad_vectors, grad_bias, block)
        return total

    def _span(self, block: int) -> slice:
        start = block * self.sizes[0]  # all but the last have one size
        return slice(start, start + self.sizes[block])

    def _run(self, block: int, queries: Tensor, target: RowTarget, wants: tuple[bool, bool, bool]) -> Any:
        """Run the kernel over the classes of a block."""
        span = self._span(block)
        part = classes_of(target, span)
        self.turns.begin(block, target_mass(part))
        bias = None if self.call.bias is None else self.call.bias[span]
        shards = Shards(self.sizes, self.turns)
        return run(queries, self.call.vectors[span], bias, part, self.kernel, self.keywords, shards, wants)


class EntriesStep(FusedStep):
    """The call of a member that gives few classes of a row a gradient: its entries are kept."""

    def losses(self) -> Tensor:
        """The losses of the rows (n,), with the entries of their gradient for the backward."""
        call = self.call
        keywords, vectors = self.keywords, call.vectors
        if keywords.options.block_rows is None:
            rows = max(1, min(self._room(SPARSE_SHARE) // len(vectors), keywords.options.rows(len(vectors))))
            keywords = replace(keywords, options=replace(keywords.options, block_rows=rows))
        wants = True, True, call.bias is not None
        given = call.queries, vectors, call.bias, self.target, self.kernel, keywords, call.shards, wants
        losses, gradients, _, _ = run(*given, KeptEntries)
        assert isinstance(gradients, KeptEntries)
        self.scoring, self.entries = gradients.scoring, gradients.all_entries()
        return losses

    def backward(self, queries: Tensor, factor: Tensor, wants_queries: bool) -> Tensor | None:
        """Update the touched class vectors, some at a time; returns the gradient of the queries (n, d)."""
        rows, classes, values = self.entries.rows, self.entries.classes, self.entries.values
        del self.entries
        values = values * lookup(factor, rows)
        total = self._of_queries(queries, rows, classes, values) if wants_queries else None
        # Stable, so that the entries of a class are summed in the order of the rows: the same bits in every run.
        order = classes.argsort(stable=True)
        rows, classes, values = rows[order], classes[order], values[order]
        touched, counts = classes.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        for part, first in enumerate(range(0, len(touched), TOUCHED)):
            ids = touched[first : first + TOUCHED].long()
            start = int(ends[first - 1]) if first else 0
            some = slice(start, int(ends[min(first + TOUCHED, len(touched)) - 1]))
            place = torch.repeat_interleave(torch.arange(len(ids)), counts[first : first + TOUCHED])
            self._update(ids, place, rows[some].long(), values[some], queries, part)
        return total

    def _update(self, ids: Tensor, place: Tensor, rows: Tensor, values: Tensor, queries: Tensor, part: int) -> None:
        """Update the classes `ids` by their entries: each belongs to class ids[place] and row `rows`."""
        vectors, scale = self.call.vectors, self.scoring.scale
        grad = sum_bags(place, rows, values, queries, len(ids))
        grad = self.scoring.project(row_sparse(ids, grad, vectors.shape), vectors)._values()
        bias = None
        if self.call.bias is not None:
            bias = values.new_zeros(len(ids)).index_add_(0, place, values)
            bias = bias if scale is None else bias / scale[ids]
        self.update(ids, grad, bias, part)

    def _of_queries(self, queries: Tensor, rows: Tensor, classes: Tensor, values: Tensor) -> Tensor:
        """The gradient of the queries: for each the sum of value x class vector over its entries."""
        order = rows.argsort(stable=True)
        total = torch.zeros_like(queries)
        # Some at a time: the class vectors of all entries could be larger than the table.
        for some in order.split(WIDENED):
            own, place = rows[some].long(), torch.arange(len(some))
            vectors = lookup(self.call.vectors, classes[some].long()).to(queries.dtype)
            first, last = int(own[0]), int(own[-1]) + 1
            total[first:last] += sum_bags(own - first, place, values[some], vectors, last - first)
        return total


class FusedRows(torch.autograd.Function):
    """The losses of all rows (n,), whose backward updates the class vectors.

    `anchor` is a tensor that wants a gradient, so that there is a backward where the queries want none.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, anchor: Tensor, step: InTurnStep | EntriesStep) -> Tensor:
        ctx.save_for_backward(queries)  # autograd refuses a backward after they were changed in place
        ctx.step = step
        return step.losses()

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        refuse_transforms(grad)
        if not grad.isfinite().all():
            raise ManymaxError(
                "the gradient of this loss is not finite: the class vectors have been left as they were."
            )
        (queries,) = ctx.saved_tensors
        ctx.step.start()
        with full_precision(queries):
            grad_queries = ctx.step.backward(queries, grad, ctx.needs_input_grad[0])
        return grad_queries, grad.new_zeros(()), None


def fused_loss(call: HeadCall, kernel: Kernel, begin: Callable[[], None], update: Update) -> Tensor:
    """The loss of a call whose backward updates the class vectors.

    Args:
        call: of one process, read and checked.
        kernel: of the member; with `moved` it goes over blocks of classes, else its entries are kept.
        begin, update: as in `FusedStep`.
    """
    refuse_transforms(call.queries, call.vectors, call.bias)
    call = call.without_empty_rows()
    keywords, rows, factor = call.keywords, call.rows(), call.factor
    scale = torch.ones_like(rows.total) if factor is None else factor
    if keywords.multilabel == "normalized":
        scale = scale * torch.where(rows.total > 0, 1 / torch.where(rows.total > 0, rows.total, 1), 0)
    given = replace(rows, coefficient=torch.ones_like(scale))
    kind = EntriesStep if kernel.moved is None else InTurnStep
    step = kind(call, kernel, keywords, given, begin, update)
    anchor = call.queries.new_zeros((), requires_grad=True)
    losses = FusedRows.apply(call.queries, anchor, step) * scale
    if keywords.multilabel == "normalized" and kernel.omega is not None:
        omega = kernel.omega if kernel.setting is None else partial(kernel.omega, setting=kernel.setting)
        extra = omega_rows(rows, omega, keywords.options.rows(call.shards.size))
        losses = losses + (extra if factor is None else factor * extra)
    if keywords.reduction == "mean":
        value = losses.sum() / mean_divisor(call.divisor)
    else:
        value = reduce(losses, call.divisor, keywords.reduction)
    check_losses(value)
    return call.result(value)
