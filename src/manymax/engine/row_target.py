"""The target of a head as its blocks of rows and its shards of classes need it; and pairs grouped by their query."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import overload

import torch
from torch import Tensor

from manymax.engine.ranks import Shards
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.ops.arguments import checked
from manymax.ops.checks import readable, visible


@dataclass(frozen=True)
class RowTarget:
    """The target weights t of some rows, with label smoothing and class weights.

    t is kept in two parts, because smoothing gives every class a weight and would fill an (n, C) table:

        t_c = sum of the weights listed for c + share class_weight_c

    ids: (n, P) listed classes, or None where `weights` covers all classes in order.
    weights: (n, P) or (n, C), already times (1 - smoothing); (N, C) where `chosen` is given.
    share: (n,) what smoothing gives to each live class, before its class weight; None without smoothing.
    class_weight: (C,) class weights, 0 of masked classes; None without smoothing.
    total: (n,) sum_i t_i over the classes of all ranks.
    coefficient: (n,) factor of each row's loss in the result, and so of its gradient; None if no gradient is wanted.
    chosen: (n,) the rows of a table of weights that this is about; None if those are all of them.
    excluded: (n, E) classes of this rank that are left out of the sums of a row, negative where there is none; or None.
    hit: (n, P) the positives, on any rank, that are left out of the sums of the others; None where there is none.
    bound: (n,) what the scores of a row are compared with, where the caller gives that; or None.
    """

    ids: Tensor | None
    weights: Tensor
    share: Tensor | None
    class_weight: Tensor | None
    total: Tensor
    coefficient: Tensor | None
    chosen: Tensor | None = None
    excluded: Tensor | None = None
    hit: Tensor | None = None
    bound: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """All fields in their order, from which `RowTarget(*tensors)` makes the target again."""
        return [getattr(self, f.name) for f in fields(self)]

    def only(self, rows: Tensor) -> RowTarget:
        """The target of some rows (n,), without a copy of the table if the weights are one: blocks copy their part."""
        if self.ids is not None:
            return self[rows]
        return replace(
            self,
            share=None if self.share is None else self.share[rows],
            total=self.total[rows],
            coefficient=None if self.coefficient is None else self.coefficient[rows],
            chosen=rows if self.chosen is None else self.chosen[rows],
            bound=None if self.bound is None else self.bound[rows],
        )

    def __getitem__(self, rows: slice | Tensor) -> RowTarget:
        """The target of some of the rows."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows]

        return RowTarget(
            cut(self.ids),
            self.weights[rows if self.chosen is None else self.chosen[rows]],
            cut(self.share),
            self.class_weight,  # of the classes, the same for all rows
            self.total[rows],
            cut(self.coefficient),
            None,
            cut(self.excluded),
            cut(self.hit),
            cut(self.bound),
        )

    @property
    def factor(self) -> Tensor:
        """The coefficient, in code that only runs where gradients are wanted."""
        if self.coefficient is None:
            raise ManymaxError("a gradient was asked for where none is wanted")
        return self.coefficient

    @property
    def row_coefficient(self) -> Tensor:
        """coefficient x total, (n,): the factor of map - t / total."""
        # The gradient total p - t is kept as p - t / total, so that a kernel writes probabilities as they are, and the
        # factor joins the row coefficient, which never goes on the table.
        return self.factor * self.total

    def pick(self, table: Tensor) -> Tensor:
        """The entries of a table (n, C') at the listed classes, (n, P); without ids its columns of classes, (n, C)."""
        return table.gather(1, self.ids) if self.ids is not None else table[:, : self.weights.shape[1]]

    def inner(self, picked: Tensor, offset: Tensor, spread: Tensor | None) -> Tensor:
        """sum_i t_i (v_i - offset) over the classes of this rank, (n,), without a table of the values v.

        Args:
            picked: (n, P) or (n, C), the values of the listed classes, as `pick` gives them.
            offset: (n, 1), the row maximum for example.
            spread: (n,) float64, sum_c class_weight_c v_c, for the part of smoothing.
        """
        # The difference before the product, so that a common offset of the scores costs no digits; where there is no
        # weight the value may be -inf.
        value = (self.weights * torch.where(self.weights != 0, picked - offset, 0)).sum(1)
        return value if self.share is None else value + self.spread_part(offset, spread)

    def spread_part(self, offset: Tensor, spread: Tensor | None) -> Tensor | float:
        """The part of smoothing in `inner`, (n,); 0 without smoothing."""
        if self.share is None or self.class_weight is None or spread is None:
            return 0.0
        # sum_c class_weight_c (v_c - offset) as a difference of two sums, each of them up to C times the offset: it
        # cancels, and needs float64.
        smoothing_part = spread.double() - self.class_weight.sum(dtype=torch.float64) * offset.squeeze(1).double()
        return self.share * smoothing_part.to(self.share.dtype)

    def amounts(self, weights: Tensor, picked: Tensor | None, softcap: float | None) -> Tensor:
        """What a gradient taken through a soft cap loses at the listed classes, (n, P): weight x slope of the cap.

        Args:
            weights: (n, P) of the listed classes.
            picked: (n, P) their scores; None where there is nothing to multiply with.
            softcap: the cap of the scores, or None.
        """
        if self.ids is None or picked is None or softcap is None:
            return weights
        return (weights * torch.where(weights != 0, 1 - (picked / softcap).square(), 0)).contiguous()

    def subtract_(self, table: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> None:
        """table -= t / total x factor / divisor, in place.

        Args:
            table: (n, C'), probabilities that become the gradient.
            factor, divisor: (n, C') each, or None for 1; for maps whose gradient is not p - t.
        """
        scale = 1 / torch.where(self.total != 0, self.total, 1).unsqueeze(1)  # a row without a positive subtracts 0
        weights = -self.weights * scale  # (n, P): few numbers, to which factor and divisor are applied
        if factor is not None:
            weights = weights * self.pick(factor)
        if divisor is not None:
            weights = (weights / self.pick(divisor)).to(table.dtype)
        if self.ids is not None:
            table.scatter_add_(1, self.ids, weights)  # padding adds 0 to class 0
        else:
            table[:, : weights.shape[1]] += weights
        if self.share is not None and self.class_weight is not None:
            # Every class gets a part; no column of padding does, which has no class weight.
            spread = (self.share.unsqueeze(1) * scale) * self.class_weight
            columns = table[:, : spread.shape[1]]
            if factor is not None:
                spread = spread * factor[:, : spread.shape[1]]
            columns -= spread if divisor is None else spread / divisor[:, : spread.shape[1]]


def row_target(
    read: Target, weight: Tensor | None, live: Tensor | None, shards: Shards, label_smoothing: float
) -> RowTarget:
    """The weights t of the classes that this rank holds, with totals over the classes of all ranks.

    With smoothing the ranks exchange two numbers: how many classes are alive, and the sum of their class weights.

    Args:
        read: the target over all classes, (N, ...).
        weight: (C,) class weights of all classes.
        live: (classes of this rank,) which are not masked, or None where all are known to be alive.
        shards: which classes this rank holds.
        label_smoothing: as in the head.
    """
    # Label smoothing e: t = (1 - e) t + e count / (live classes), the second part times the class weights.
    weights = (1 - label_smoothing) * read.weights if label_smoothing > 0 else read.weights
    total = weights.sum(1)  # before the cut into shards: every rank has the whole target
    ids, share, class_weight = read.ids, None, None
    if ids is not None:
        ids, weights = shards.local(ids, weights)
    elif not shards.ranks.alone:
        weights = weights[:, shards.span]
    if label_smoothing > 0:
        class_weight = weights.new_ones(shards.size) if weight is None else weight[shards.span].to(weights.dtype)
        # In float64: a sum in float32 is not an exact count beyond 2^24 classes.
        count = weights.new_full((), shards.size, dtype=torch.float64)
        if live is not None:
            class_weight, count = class_weight * live, live.sum().double()  # a masked class gets no share
        count, mass = shards.ranks.sum(torch.stack([count, class_weight.sum().double()])).to(weights.dtype)
        share = label_smoothing * read.count / count
        total = total + share * mass
    return RowTarget(ids, weights, share, class_weight, total, None)


def counted_rows(read: Target, label_smoothing: float, row_weight: Tensor | None = None) -> Tensor | None:
    """(n,) the rows that have any target weight, in order; None where all of them do.

    Without are ignored rows, those whose positives have class weight 0, and those of row weight 0. Every rank has the
    whole target and finds the same rows. Under torch.compile and `torch.func` there are no values to look at, and every
    row counts.
    """
    if not readable(read.count, read.weights):
        return None
    # The lists of positives are short. Rows over all classes are a large table, whose sums are at hand.
    weights = read.divisor if read.ids is None else read.weights
    counts = weights if row_weight is None else row_weight
    if visible(weights) and bool(weights.all()) and (row_weight is None or bool(counts.all())):
        return None  # the usual case: every row has positives, and they all have a weight
    # Smoothing gives every class a part of each positive, so that only a row without any is empty.
    empty = read.count == 0
    if label_smoothing == 0:
        empty |= (weights if read.ids is None else weights.sum(1)) == 0
    # Class weights may be negative, if anybody wants that, and then cancel: the weights themselves decide.
    rows = empty.nonzero().squeeze(1)
    empty[rows] = ~read.weights[rows].any(1)
    if row_weight is not None:
        empty |= row_weight == 0
    # On a GPU the host waits here and above: twice for each call, outside of the loop over blocks.
    kept = (~empty).nonzero().squeeze(1)
    return None if len(kept) == len(empty) else kept


def live_classes(linear_bias: Tensor | None) -> Tensor | None:
    """(C,) which classes are not masked by a bias of -inf; None where all are known to be alive."""
    if linear_bias is None:
        return None
    live = linear_bias > -torch.inf
    # None is the usual case and spares work later. On a GPU `all` would make the host wait: the mask is kept there.
    return None if visible(live) and bool(live.all()) else live


def check_live(read: Target, live: Tensor | None, shards: Shards) -> None:
    """Raise if a positive that this rank holds is masked, where its loss would be infinite; or if every class is."""
    if live is None or not visible(live):
        return
    # Kernels find this in the rows that they compute. Here it is found for a call in which no row counts, too.
    if shards.ranks.alone and not live.any():
        raise ArgumentError("`scores` has a row in which every class is masked (-inf); leave at least one class alive.")
    if read.ids is None:
        masked = (read.weights[:, shards.span] != 0) & ~live
    else:
        ids, weights = shards.local(read.ids, read.weights)
        masked = (weights != 0) & ~live[ids]
    if masked.any():
        raise ArgumentError("`target` names a class whose bias is -inf: a masked class cannot be a positive.")


def listed(read: Target) -> Target:
    """The target with rows over all classes as padded ids (..., P), P the largest number of positives of a row.

    Under torch.compile and `torch.func`, where that number is not known, P is the number of classes.
    """
    if read.ids is not None:
        return read
    present = read.weights != 0
    width = present.shape[-1]
    if readable(present):  # at least one column: tensors without any have no maximum
        width = max(1, int(present.sum(-1).max())) if present.numel() else 1
    # The topk of a 0/1 row lists its positives first. Rows with fewer are filled up with classes of weight 0.
    ids = present.to(torch.uint8).topk(width, dim=-1).indices
    return replace(read, ids=ids, weights=read.weights.gather(-1, ids))


@overload
def group_pairs(rows: Tensor, target: Tensor) -> tuple[Tensor, Target]: ...
@overload
def group_pairs(rows: Tensor, target: Tensor, pair_ids: Tensor) -> tuple[Tensor, Target, Tensor]: ...
@checked
def group_pairs(
    rows: Tensor, target: Tensor, pair_ids: Tensor | None = None
) -> tuple[Tensor, Target] | tuple[Tensor, Target, Tensor]:
    """Group (row, class) pairs by row, so that the scores of each row are computed once for all of its classes.

    The loss of the groups equals the loss of the pairs, but for members whose positives have one loss together
    (`Member.joint`); a pair that occurs several times counts as often. Measured on
    30,000 users with 27 pairs each and C = 40,981: an epoch of softmax over users is 22 times as fast as one over
    pairs.

    Args:
        rows: (M,) ids of the queries, for example users.
        target: (M,) class ids, one positive per pair.
        pair_ids: (M,) the numbers of the pairs, for losses that keep averages of them; None if they have none.

    Returns:
        The distinct rows (G,), sorted, and a target for a head that is called with one query for each of them. With
        `pair_ids` those of the target as well, (G, P); a pair that occurs several times has its smallest number.

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
    for name, ids in (("rows", rows), ("target", target), ("pair_ids", rows if pair_ids is None else pair_ids)):
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentTypeError(f"`{name}` must be a tensor of integer ids; got {kind}.")
    if rows.ndim != 1 or rows.shape != target.shape:
        raise ArgumentError(
            f"`rows` and `target` must be 1-D and equally long; got {tuple(rows.shape)} and {tuple(target.shape)}."
        )
    if pair_ids is not None and pair_ids.shape != rows.shape:
        raise ArgumentError(f"`pair_ids` must be as long as `rows`, {tuple(rows.shape)}; got {tuple(pair_ids.shape)}.")
    # Each pair becomes one number, group x span + class, because sorting numbers is many times faster than sorting
    # pairs. Groups and not rows, and classes from the smallest on, so that the numbers stay far from overflow.
    groups, row = rows.long().unique(return_inverse=True)
    low, high = torch.aminmax(target.long()) if len(target) else (0, 0)
    keys = row * (high - low + 1) + (target.long() - low)
    pairs, times = keys.unique(return_counts=True)
    row, classes = pairs // (high - low + 1), pairs % (high - low + 1) + low
    sizes = row.bincount(minlength=len(groups))  # of the groups; `unique` left the pairs sorted by group
    width = int(sizes.max()) if len(sizes) else 1  # the largest group decides: one large group pads all others
    column = torch.arange(len(row), device=rows.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    # Padding is class 0 with weight 0, which adds nothing; a class that occurs n times has weight n.
    ids = torch.zeros(len(groups), width, dtype=torch.long, device=rows.device)
    weights = torch.zeros(len(groups), width, device=rows.device)
    ids[row, column], weights[row, column] = classes, times.to(weights.dtype)
    count = weights.sum(1)
    grouped = Target(ids, weights, count, count)
    if pair_ids is None:
        return groups, grouped
    numbers = torch.zeros_like(ids)
    smallest = torch.full_like(pairs, torch.iinfo(torch.long).max)
    numbers[row, column] = smallest.scatter_reduce_(0, torch.searchsorted(pairs, keys), pair_ids.long(), "amin")
    return groups, grouped, numbers
