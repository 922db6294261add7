"""The exchanges between ranks (sums, maxima, gathered rows), and the derivatives of those that autograd sees.

A value is either local (each rank has its own part, such as a sum over the classes of its shard) or shared (every rank
has the same numbers). All ranks compute one and the same loss from shared values; `manymax.engine.ranks` explains the
two exchanges with a derivative, `total` (local to shared) and `spread` (shared to local).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from manymax.engine.gather import all_rows, row_counts
from manymax.engine.ranks import Ranks
from manymax.errors import ArgumentError, ManymaxError

T = TypeVar("T")


class ProcessRanks(Ranks):
    """The processes that hold one shard each: those of a process group, or this process alone if none was started.

    Every method is a collective operation: all ranks of the group must call it, in the same order.

    Args:
        group: a process group of torch.distributed; None means the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:  # torch's answer to a process that is not in the group
            raise ArgumentError("`group` must contain this process: build the head on the ranks of the group alone.")

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, a shared value without derivative."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, a shared value without derivative; nan if any rank has nan."""
        if self.size == 1:
            return values.detach()
        # Backends disagree on the maximum of a number and nan. A nan therefore travels as +inf next to a mark (1 where
        # the value was nan): one message of twice the size, and every rank sees the same nan and raises the same error.
        missing = values.isnan()
        sent = torch.stack([torch.where(missing, torch.inf, values), missing.to(values.dtype)])
        top, marked = self._reduced(sent, dist.ReduceOp.MAX)
        return torch.where(marked > 0, torch.nan, top)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a local value: a shared value, with derivative."""
        return values if self.size == 1 else _Total.apply(values, self)

    def spread(self, values: Tensor) -> Tensor:
        """A shared value for use in local formulas; its gradients from all ranks are added up."""
        return values if self.size == 1 else _Spread.apply(values, self)

    def first(self, values: Tensor) -> Tensor:
        """The values of rank 0, on every rank; shape and dtype must be the same everywhere."""
        if self.size == 1:
            return values
        values = values.detach().clone()  # `broadcast` writes into its argument, which belongs to the caller
        dist.broadcast(values, self._global(0), group=self.group)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """The values of every rank, in the order of the ranks; they must have the same shape everywhere."""
        if self.size == 1:
            return [values]
        # `all_gather` fills tensors that are already there, so a rank must know the shapes of the others: one for all.
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return gathered

    def gather_all(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks, each of which may have any number of them.

        Returns:
            All rows in the order of the ranks, and the index at which the rows of this rank begin.
        """
        if self.size == 1:
            return rows, 0
        counts = row_counts(rows, self.group)
        return all_rows(rows, counts, self.group), sum(counts[: self.rank])

    def gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """All rows on rank 0, (sum of sizes, ...), where rank r has `sizes[r]` of them; None on the other ranks."""
        if self.size == 1:
            return rows.clone()
        # Messages from one rank to rank 0 instead of `all_gather`: the whole table of class vectors may fit into the
        # memory of one machine only, so no other rank may have to hold it.
        if self.rank > 0:
            dist.send(rows.contiguous(), self._global(0), group=self.group)
            return None
        whole = rows.new_empty(sum(sizes), *rows.shape[1:])
        for rank, part in enumerate(whole.split(list(sizes))):
            if rank == 0:
                part.copy_(rows)
            else:
                dist.recv(part, self._global(rank), group=self.group)
        return whole

    def agree(self, prepare: Callable[[], T], rows: int, device: torch.device) -> T:
        """The result of `prepare` on this rank, if no rank raised a `ManymaxError` and all have as many rows.

        Otherwise every rank raises. Without this check a rank that refuses its arguments would leave, and the others
        would wait for it in their next exchange until the time-out.

        Args:
            prepare: reads and checks the arguments of this rank; it must make no exchange.
            rows: number of rows of this rank's input.
            device: where the tensor of the exchange lives, as the backend needs it.
        """
        value, error = None, None
        try:
            value = prepare()
        except ManymaxError as refused:
            error = refused
        # One maximum carries three answers: whether any rank failed, the largest number of rows, and minus the
        # smallest. Counts are exact in float64.
        mine = torch.tensor([error is not None, rows, -rows], dtype=torch.float64, device=device)
        failed, most, fewest = self._reduced(mine, dist.ReduceOp.MAX).tolist()
        if error is not None:
            raise error
        if failed:
            raise ManymaxError("another rank refused its arguments: its own error says why.")
        if most != -fewest:
            raise ArgumentError(
                f"`input` must be the same on all ranks; got {-fewest:.0f} rows on one, {most:.0f} on another."
            )
        return cast(T, value)

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        """The values of all ranks combined by `operation`, in a new tensor without derivative."""
        if self.size == 1:
            return values.detach()
        # `all_reduce` overwrites its argument and needs contiguous memory, so it gets a contiguous copy. All ranks
        # must end up with the same bits: they decide by these numbers, for example when a search for a threshold
        # stops, and ranks that decided differently would wait for each other forever.
        values = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, operation, group=self.group)
        return values

    def _global(self, rank: int) -> int:
        """The number that a rank of this group has in the default group, by which torch addresses messages."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Total(torch.autograd.Function):
    """Sum over the ranks, S = sum_r x_r, of a local value; its derivative is `spread`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ProcessRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss L(S), so it has all of dL/dS already, and dL/dx_r = dL/dS: nothing is sent.
        # (`all_reduce` of torch.distributed.nn adds the gradients up here, as is right for a loss that is a sum over
        # the ranks. This loss is not: the gradient would come out R times too large on R ranks.)
        # `spread` leaves the numbers as they are. It is there for the second derivative: the shared `grad` now enters
        # local values, so the gradients of `grad` itself must be added up over the ranks.
        return ctx.ranks.spread(grad), None


class _Spread(torch.autograd.Function):
    """A shared value for use in local formulas; its derivative is `total`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ProcessRanks) -> Tensor:
        ctx.ranks = ranks
        return values.view_as(values)  # no copy, and nothing is sent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The loss depends on the value through its uses on all ranks, and `grad` is only the part that goes through
        # the classes of this rank. The sum over the ranks is the whole gradient, the same everywhere: one exchange of
        # the size of the value. `total` instead of `sum`, so that it can be differentiated once more.
        return ctx.ranks.total(grad), None
