"""The target of a head, cut into blocks of rows; and pairs grouped by their query."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manymax.engine.ranks import Shards
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.ops.checks import visible


@dataclass(frozen=True)
class RowTarget:
    """Target weights t of some rows, over listed or all classes, smoothing and class weights included.

    ids: (n, P) or None; weights: (n, P) or (n, C), already times (1 - smoothing).
    share: (n,) what smoothing gives to each live class, times `class_weight` (C,); None without smoothing.
    total: (n,) sum_i t_i.
    coefficient: (n,) factor of each row's gradient, or None if no gradient is wanted.
    """

    ids: Tensor | None
    weights: Tensor
    share: Tensor | None
    class_weight: Tensor | None
    total: Tensor
    coefficient: Tensor | None

    def __getitem__(self, rows: slice | Tensor) -> RowTarget:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return RowTarget(
            cut(self.ids),
            self.weights[rows],
            cut(self.share),
            self.class_weight,
            self.total[rows],
            cut(self.coefficient),
        )

    @property
    def factor(self) -> Tensor:
        """The coefficient, where gradients are wanted."""
        if self.coefficient is None:
            raise ManymaxError("a gradient was asked for where none is wanted")
        return self.coefficient

    @property
    def row_coefficient(self) -> Tensor:
        """coefficient x total, (n,): the factor of map - t / total."""
        return self.factor * self.total

    def pick(self, table: Tensor) -> Tensor:
        """The listed entries of a table (n, C'), (n, P), or its columns of real classes, (n, C)."""
        return table.gather(1, self.ids) if self.ids is not None else table[:, : self.weights.shape[1]]

    def inner(self, picked: Tensor, offset: Tensor, spread: Tensor | None) -> Tensor:
        """sum_i t_i (v_i - offset), (n,), from the picked values and sum_c class_weight_c v_c (n,)."""
        value = (self.weights * torch.where(self.weights != 0, picked - offset, 0)).sum(1)
        if self.share is None or self.class_weight is None or spread is None:
            return value
        rest = spread.double() - self.class_weight.sum(dtype=torch.float64) * offset.squeeze(1).double()
        return value + self.share * rest.to(value.dtype)

    def subtract_(self, table: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> None:
        """table -= t / total, times `factor` (n, C') and over `divisor` (n, C') if given, in place."""
        scale = 1 / torch.where(self.total != 0, self.total, 1).unsqueeze(1)
        weights = -self.weights * scale
        if factor is not None:
            weights = weights * self.pick(factor)
        if divisor is not None:
            weights = (weights / self.pick(divisor)).to(table.dtype)
        if self.ids is not None:
            table.scatter_add_(1, self.ids, weights)
        else:
            table[:, : weights.shape[1]] += weights
        if self.share is not None and self.class_weight is not None:
            spread = (self.share.unsqueeze(1) * scale) * self.class_weight
            columns = table[:, : spread.shape[1]]
            if factor is not None:
                spread = spread * factor[:, : spread.shape[1]]
            columns -= spread if divisor is None else spread / divisor[:, : spread.shape[1]]


def row_target(
    read: Target, weight: Tensor | None, live: Tensor | None, shards: Shards, label_smoothing: float
) -> RowTarget:
    """The weights t of the classes that this rank holds, with the totals of all of them.

    Args:
        read: the target over all classes, (N, ...).
        weight: (C,) class weights.
        live: (classes of this rank,) which are not masked, or None where all are known to be alive.
        shards: which classes this rank holds.
        label_smoothing: as in the head.
    """
    weights = (1 - label_smoothing) * read.weights if label_smoothing > 0 else read.weights
    total = weights.sum(1)
    ids, share, class_weight = read.ids, None, None
    if ids is not None:
        ids, weights = shards.local(ids, weights)
    elif not shards.ranks.alone:
        weights = weights[:, shards.span]
    if label_smoothing > 0:
        class_weight = weights.new_ones(shards.size) if weight is None else weight[shards.span].to(weights.dtype)
        # in float64: a count of many classes is not exact in float32
        count = weights.new_full((), shards.size, dtype=torch.float64)
        if live is not None:
            class_weight, count = class_weight * live, live.sum().double()
        count, mass = shards.ranks.sum(torch.stack([count, class_weight.sum().double()])).to(weights.dtype)
        share = label_smoothing * read.count / count
        total = total + share * mass
    return RowTarget(ids, weights, share, class_weight, total, None)


def live_classes(linear_bias: Tensor | None) -> Tensor | None:
    """(C,) which classes are not masked by a bias of -inf; None where all are known to be alive."""
    if linear_bias is None:
        return None
    live = linear_bias > -torch.inf
    return None if visible(live) and bool(live.all()) else live


def check_live(read: Target, live: Tensor | None, shards: Shards) -> None:
    """Raise if a positive that this rank holds is masked."""
    if live is None or not visible(live):
        return
    if read.ids is None:
        masked = (read.weights[:, shards.span] != 0) & ~live
    else:
        ids, weights = shards.local(read.ids, read.weights)
        masked = (weights != 0) & ~live[ids]
    if masked.any():
        raise ArgumentError("`target` names a class whose bias is -inf: a masked class cannot be a positive.")


def listed(read: Target) -> Target:
    """Bool rows as padded ids, for a member that must know which positive it is about."""
    if read.ids is not None:
        return read
    present = read.weights != 0
    width = max(1, int(present.sum(1).max())) if len(present) else 1
    ids = present.to(torch.uint8).topk(width, dim=1).indices
    return replace(read, ids=ids, weights=read.weights.gather(1, ids))


def group_pairs(rows: Tensor, target: Tensor) -> tuple[Tensor, Target]:
    """Group (row, class) pairs by row, so that each row of scores is computed once.

    The loss of the groups equals the loss of the pairs, repeated pairs counted as often as they occur.

    Args:
        rows: (M,) ids of the queries, for example users.
        target: (M,) class ids, one positive per pair.

    Returns:
        The distinct rows (G,), and a target for a head called with one query for each of them.

    Example:
        >>> import torch, manymax
        >>> users, target = manymax.group_pairs(torch.tensor([7, 3, 7]), torch.tensor([0, 2, 1]))
        >>> users, target.ids
        (tensor([3, 7]), tensor([[2, 0],
                [0, 1]]))
        >>> target.weights
        tensor([[1., 0.],
                [1., 1.]])
    """
    for name, ids in (("rows", rows), ("target", target)):
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentTypeError(f"`{name}` must be a tensor of integer ids; got {kind}.")
    if rows.ndim != 1 or rows.shape != target.shape:
        raise ArgumentError(
            f"`rows` and `target` must be 1-D and equally long; got {tuple(rows.shape)} and {tuple(target.shape)}."
        )
    # one number a pair: sorting numbers is many times faster than sorting columns
    groups, row = rows.long().unique(return_inverse=True)
    low, high = torch.aminmax(target.long()) if len(target) else (0, 0)
    pairs, times = (row * (high - low + 1) + (target.long() - low)).unique(return_counts=True)
    row, classes = pairs // (high - low + 1), pairs % (high - low + 1) + low
    sizes = row.bincount(minlength=len(groups))
    width = int(sizes.max()) if len(sizes) else 1
    column = torch.arange(len(row), device=rows.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    ids = torch.zeros(len(groups), width, dtype=torch.long, device=rows.device)
    weights = torch.zeros(len(groups), width, device=rows.device)
    ids[row, column], weights[row, column] = classes, times.to(weights.dtype)
    count = weights.sum(1)
    return groups, Target(ids, weights, count, count)
