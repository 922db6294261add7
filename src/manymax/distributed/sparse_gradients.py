"""Row-sparse gradients of a model that several processes train, each on its own rows: only the touched rows travel.

torch's `DistributedDataParallel` copies every gradient into a dense buffer before any hook of its users sees it, and
fails on a sparse one. `RowSparseGradients` takes the parameters with row-sparse gradients out of its hands and averages
them in three messages: how many rows each rank has, which rows, and the rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manymax.distributed.collectives import ProcessRanks
from manymax.engine.gradients import sum_bags
from manymax.engine.head import LinearHead
from manymax.engine.row_sparse import ROWS_AT_A_TIME, compact, distinct_rows, row_sparse
from manymax.errors import ArgumentError, ManymaxError

# What a rank has for a parameter: no gradient, a row-sparse one, a dense one, or one that cannot be averaged. The
# largest of all ranks decides.
NO_GRAD, SPARSE_GRAD, DENSE_GRAD, OTHER_GRAD = range(4)


class RowSparseGradients:
    """Averages the row-sparse gradients of a model over the ranks that train it, beside `DistributedDataParallel`.

    Make it before the model is wrapped, and call `average` after the backward and before the optimiser's step:

        rows = RowSparseGradients(model)
        parallel = DistributedDataParallel(model)
        for queries, target in batches:
            optimizer.zero_grad()
            parallel(queries, target).backward()
            rows.average()
            optimizer.step()

    Where the call has no place, `optimizer.register_step_pre_hook(lambda *_: rows.average())` makes it. Afterwards each
    rank has the same gradient, the sum over the ranks divided by their number, as torch gives it for the other
    parameters. It has the rows that some rank has touched, and no others. Gradients may be accumulated over several
    backwards, also under `no_sync()`: they are averaged when `average` is called.

    All ranks must call `average` equally often. A rank without a gradient takes part with no rows.

    Args:
        model: the module that is given to `DistributedDataParallel`, or a part of the model that is in none, such as
            its head. All ranks get the values of the first rank for the parameters named below.
        names: names of parameters of `model`; None for those of its heads with `sparse_grad`. A parameter with a
            dense gradient may be named too, and is averaged like others.
        group: the process group of the ranks; None is the default group, or this process alone if there is none.

    Example:
        >>> import torch, manymax
        >>> from manymax.distributed import RowSparseGradients
        >>> head = manymax.LinearSampledSoftmaxLoss(2, 1000, num_negatives=5, sparse_grad=True)
        >>> rows = RowSparseGradients(head)
        >>> rows.names
        ['linear.weight']
        >>> head(torch.ones(1, 2), torch.tensor([7])).backward()
        >>> rows.average()
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str] | None = None, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self.ranks = ProcessRanks(group)
        # A parameter that two modules share has two names, and DistributedDataParallel must ignore both.
        every = dict(model.named_parameters(remove_duplicate=False))
        error: ArgumentError | None = None
        chosen: dict[str, nn.Parameter] = {}
        try:
            chosen = _chosen(model, every, names)
        except ArgumentError as refused:
            error = refused
        self.names, self.parameters = list(chosen), list(chosen.values())
        self._agree(error, next((p.device for p in every.values()), torch.device("cpu")))
        same = {id(parameter) for parameter in self.parameters}
        _leave_out(model, [name for name, parameter in every.items() if id(parameter) in same])
        with torch.no_grad():
            for parameter in self.parameters:
                # Some rows at a time: no rank needs room for a second table.
                for part in torch.atleast_1d(parameter).split(ROWS_AT_A_TIME):
                    part.copy_(self.ranks.first(part))

    def _agree(self, error: ArgumentError | None, device: torch.device) -> None:
        """Raise on every rank unless all ranks have the same parameters and none has met an error."""
        text = repr([(n, tuple(p.shape), p.dtype) for n, p in zip(self.names, self.parameters, strict=True)])
        mine = torch.tensor([-1 if error else zlib.crc32(text.encode())], device=device)
        every = torch.cat(self.ranks.gather(mine)).tolist()
        if error is not None:
            raise error
        if -1 in every:
            raise ManymaxError("another rank refused its arguments: its own error says why.")
        if len(set(every)) > 1:
            raise ArgumentError(
                "`model` must have the same row-sparse parameters on all ranks: names, shapes and dtypes differ."
            )

    @torch.no_grad()
    def average(self) -> None:
        """Replace the gradients by their means over the ranks; all ranks must call it."""
        if self.ranks.size == 1 or not self.parameters:
            return
        own = [_read(parameter) for parameter in self.parameters]
        # First what each rank has, for all parameters at once: a rank with a gradient that it cannot average says so
        # here, and all of them raise, instead of one that leaves and others that wait for it.
        mine = torch.tensor([[kind, len(ids)] for kind, ids, _ in own], device=self.parameters[0].device)
        every = torch.stack(self.ranks.gather(mine))  # (ranks, parameters, 2)
        kinds, counts = every[:, :, 0].amax(0).tolist(), every[:, :, 1]
        for name, kind in zip(self.names, kinds, strict=True):
            if kind == OTHER_GRAD:
                raise ManymaxError(
                    f"the gradient of `{name}` is neither dense nor row-sparse on some rank, and cannot be averaged."
                )
        totals = counts.sum(0).tolist()
        sparse = [i for i, kind in enumerate(kinds) if kind == SPARSE_GRAD]
        # Where as many rows as the table has would travel, and be held, a sum of tables costs less.
        few = [i for i in sparse if totals[i] <= len(self.parameters[i])]
        if any(totals[i] for i in few):
            self._gather_rows(few, own, counts[:, few])
        for i, (kind, parameter) in enumerate(zip(kinds, self.parameters, strict=True)):
            if kind == DENSE_GRAD:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                parameter.grad = self.ranks.sum(grad).div_(self.ranks.size)
            elif kind == SPARSE_GRAD and i not in few:
                parameter.grad = self._sum_tables(parameter, *own[i][1:])

    def _gather_rows(self, which: list[int], own: Sequence[_Own], counts: Tensor) -> None:
        """Average the gradients of the parameters `which` by gathering the touched rows of all ranks, (ranks, P)."""
        ids = self._gathered(torch.cat([own[i][1] for i in which]), counts.sum(1).tolist())
        parts: dict[int, list[Tensor]] = {i: [] for i in which}
        # The rows of parameters of one dtype travel together; a row of a bias is one number.
        for dtype in dict.fromkeys(self.parameters[i].dtype for i in which):
            alike = [place for place, i in enumerate(which) if self.parameters[i].dtype == dtype]
            widths = torch.tensor([self.parameters[which[place]][0].numel() for place in alike])
            sizes = counts[:, alike].cpu() * widths  # (ranks, parameters of this dtype), numbers
            flat = torch.cat([own[which[place]][2].flatten() for place in alike])
            for rank, part in enumerate(self._gathered(flat, sizes.sum(1).tolist())):
                for place, rows in zip(alike, part.split(sizes[rank].tolist()), strict=True):
                    parts[which[place]].append(rows.view(-1, *self.parameters[which[place]].shape[1:]))
        by_parameter = zip(*(part.split(counts[rank].tolist()) for rank, part in enumerate(ids)), strict=True)
        for i, found in zip(which, by_parameter, strict=True):
            parameter = self.parameters[i]
            parameter.grad = _mean_rows(torch.cat(found), torch.cat(parts[i]), parameter, self.ranks.size)

    def _gathered(self, values: Tensor, sizes: list[int]) -> list[Tensor]:
        """The values of every rank, of which rank r has `sizes[r]`."""
        # One message takes one size: shorter ones are filled up, and cut again.
        padded = values.new_zeros(max(sizes))
        padded[: len(values)] = values
        return [part[:size] for part, size in zip(self.ranks.gather(padded), sizes, strict=True)]

    def _sum_tables(self, parameter: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """The mean as a row-sparse tensor, through a dense table and a mark for every touched row."""
        table, touched = torch.zeros_like(parameter), torch.zeros(len(parameter), device=ids.device, dtype=torch.uint8)
        table.index_copy_(0, ids, rows)
        touched[ids] = 1
        dist.all_reduce(table, group=self.ranks.group)
        dist.all_reduce(touched, dist.ReduceOp.MAX, group=self.ranks.group)
        return row_sparse(*compact(table.div_(self.ranks.size), touched > 0), parameter.shape)


_Own = tuple[int, Tensor, Tensor]  # what a rank has for a parameter, the ids of its rows (K,), the rows (K, ...)


def _chosen(model: nn.Module, every: dict[str, nn.Parameter], names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to average, each under one name."""
    if isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            "`model` must be given before it is wrapped: DistributedDataParallel reads then what to leave out."
        )
    if names is None:
        heads = [module for module in model.modules() if isinstance(module, LinearHead)]
        wanted = {id(parameter) for head in heads for parameter in head.sparse_parameters()}
        if not wanted:
            raise ArgumentError(
                "`model` has no head with row-sparse gradients: give the head `sparse_grad`, or `names` of parameters."
            )
        return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}
    found, seen = {}, set()
    for name in names:
        if name not in every:
            raise ArgumentError(f"`names` must be parameters of `model`; it has no {name!r}.")
        if id(every[name]) not in seen:
            found[name] = every[name]
            seen.add(id(every[name]))
    return found


def _leave_out(model: nn.Module, names: list[str]) -> None:
    """Tell a `DistributedDataParallel` that is made of `model` later to leave these parameters alone."""
    # The one way that torch has; its name is private, and torch's own documentation of it calls it a workaround.
    ignore: Any = getattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", None)
    if ignore is None:
        raise ManymaxError(
            "this version of torch cannot leave parameters out of DistributedDataParallel: keep the head out of the"
            " module that you wrap, and give the head alone to RowSparseGradients."
        )
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    # DistributedDataParallel looks for a parameter of the model itself under a name that begins with a dot, too.
    ignore(model, [*before, *names, *(f".{name}" for name in names if "." not in name)])


def _read(parameter: Tensor) -> _Own:
    """What this rank has as the gradient of a parameter."""
    grad = parameter.grad
    nothing = torch.empty(0, dtype=torch.long, device=parameter.device), parameter[:0] if parameter.ndim else parameter
    if grad is None:
        return NO_GRAD, *nothing
    if grad.layout == torch.strided:
        return DENSE_GRAD, *nothing
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        return OTHER_GRAD, *nothing
    ids, rows = distinct_rows(grad)
    return SPARSE_GRAD, ids[0], rows


def _mean_rows(ids: Tensor, rows: Tensor, parameter: Tensor, ranks: int) -> Tensor:
    """The row-sparse sum of rows (K, ...) at `ids` (K,), in which an id may be more than once, divided by `ranks`."""
    permutation = ids.argsort(stable=True)  # the ranks in order: all of them add in the same order, to the same bits
    touched, position = ids[permutation].unique_consecutive(return_inverse=True)
    # Half precision is added up in float32 and rounded once.
    wide = torch.promote_types(rows.dtype, torch.float32)
    table = rows.reshape(len(rows), -1).to(wide)
    share = torch.full((len(ids),), 1 / ranks, dtype=wide, device=ids.device)
    sums = sum_bags(position, permutation, share, table, len(touched)).to(rows.dtype)
    return row_sparse(touched, sums.view(-1, *parameter.shape[1:]), parameter.shape)
