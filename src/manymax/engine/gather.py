"""Rows of all processes of a group, with gradients that go back to the process each row came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from manymax.engine.autograd import refuse_second_derivatives
from manymax.errors import ArgumentError, ManymaxError

T = TypeVar("T")


def world(group: dist.ProcessGroup | None) -> int:
    """The number of processes of a group, of the default group if None; 1 where none was started."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    if dist.get_rank(group) < 0:  # torch's answer to a process that is not in the group
        raise ArgumentError("the process group must contain this process: call with it on its own ranks alone.")
    return dist.get_world_size(group)


def row_counts(rows: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """How many rows each process has, in the order of the ranks."""
    return [int(count) for count in _all(torch.tensor(len(rows), device=rows.device), group)]


def all_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all processes in the order of the ranks, as many of each as `row_counts` says; without gradients."""
    # `all_gather` takes one shape only: every process pads to the largest number, and the padding is cut off again.
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows.detach()
    return torch.cat([part[:count] for part, count in zip(_all(padded, group), counts, strict=True)])


def _all(values: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The values of every process, in the order of the ranks; they have the same shape everywhere."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return gathered


class GatheredRows(torch.autograd.Function):
    """`all_rows` with gradients: each process has a loss of its own, and the sum of all losses is differentiated.

    A row gets the sum of its gradients from all processes. Data parallel training then divides by the number of
    processes, which makes it the gradient of the mean of their losses.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        start = sum(counts[: dist.get_rank(group)])
        ctx.own, ctx.group = slice(start, start + len(rows)), group
        return all_rows(rows, counts, group)

    @staticmethod
    @refuse_second_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A sum of all gradients on every process, of which each keeps its rows: gloo has no `reduce_scatter` of parts
        # of different sizes. Every process comes here, so that none may leave out the backward of its loss.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None


def all_rows_with_gradients(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all processes, with gradients if they require one, which must be so on all processes or on none."""
    return GatheredRows.apply(rows, counts, group) if rows.requires_grad else all_rows(rows, counts, group)


def agreed(
    prepare: Callable[[], T],
    form: Callable[[T], Sequence[int]],
    size: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> T:
    """The result of `prepare` on this process, if none raised a `ManymaxError` and all have results of one form.

    Otherwise every process raises. Without this a process that refuses its arguments would leave, and the others would
    wait for it in their next exchange until the time-out.

    Args:
        prepare: reads and checks the arguments of this process; it must make no exchange.
        form: from its result to integers that must be the same everywhere: lengths, and which arguments are given.
        size: how many integers those are.
        device: where the tensor of the exchange lives, as the backend needs it.
        group: the processes.
    """
    value, error = None, None
    try:
        value = prepare()
    except ManymaxError as refused:
        error = refused
    mine = [1] + [0] * size if error is not None else [0, *form(cast(T, value))]
    answers = [answer.tolist() for answer in _all(torch.tensor(mine, device=device), group)]
    if error is not None:
        raise error
    if any(failed for failed, *_ in answers):
        raise ManymaxError("another rank refused its arguments: its own error says why.")
    if any(answer != answers[0] for answer in answers):
        raise ArgumentError(
            "all ranks must give vectors of one length and dtype, the same arguments, and ask for the same gradients;"
            " another rank does not."
        )
    return cast(T, value)
