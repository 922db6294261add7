"""What the ranks tell each other: sums, maxima and gathered rows, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from manymax.engine.ranks import Ranks
from manymax.errors import ArgumentError, ManymaxError

T = TypeVar("T")


class ProcessRanks(Ranks):
    """The processes that hold one shard each: a process group, or this process alone where none was started.

    Args:
        group: of torch.distributed; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ArgumentError("`group` must contain this process: build the head on the ranks of the group alone.")

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, without derivative."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, without derivative; nan wins."""
        if self.size == 1:
            return values.detach()
        # backends disagree on the maximum of a number and nan: it travels as +inf with a mark
        missing = values.isnan()
        sent = torch.stack([torch.where(missing, torch.inf, values), missing.to(values.dtype)])
        top, marked = self._reduced(sent, dist.ReduceOp.MAX)
        return torch.where(marked > 0, torch.nan, top)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, a shared value."""
        return values if self.size == 1 else _Total.apply(values, self)

    def spread(self, values: Tensor) -> Tensor:
        """A shared value for local use."""
        return values if self.size == 1 else _Spread.apply(values, self)

    def first(self, values: Tensor) -> Tensor:
        """What the first rank has, of the same shape and dtype on every rank."""
        if self.size == 1:
            return values
        values = values.detach().clone()
        dist.broadcast(values, self._global(0), group=self.group)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """What every rank has, in their order, of the same shape everywhere."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return gathered

    def gather_all(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks, in their order, and where those of this rank begin; each has any number of them."""
        counts = torch.cat(self.gather(torch.tensor([len(rows)], device=rows.device))).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [part[:count] for part, count in zip(self.gather(padded), counts, strict=True)]
        return torch.cat(parts), sum(counts[: self.rank])

    def gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """All rows on the first rank, (sum of sizes, ...), where rank r has `sizes[r]` of them; None elsewhere."""
        if self.size == 1:
            return rows.clone()
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
        """What `prepare` returns; raises on all ranks if one refuses its arguments or has another number of rows.

        Otherwise the others would wait for it.
        """
        value, error = None, None
        try:
            value = prepare()
        except ManymaxError as refused:
            error = refused
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
        if self.size == 1:
            return values.detach()
        values = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, operation, group=self.group)
        return values

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ProcessRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.spread(grad), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ProcessRanks) -> Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.total(grad), None
