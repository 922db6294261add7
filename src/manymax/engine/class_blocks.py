"""Blocks of classes that one process takes in turn, as if they were the shards of several ranks.

A kernel completes its sums over the classes of a row through `ranks`. Here the ranks are blocks of classes, and there
is no other process to wait for. Two rounds over the blocks take the place of an exchange:

    first    each block adds its part to the sums so far; what the kernel is told are the sums up to its block
    second   the same calls get the complete sums

The sums of the first round are relative to the maximum of each row so far. When a later block raises it, the sums are
moved to the new maximum, by the formula that the kernel gives (`Kernel.moved`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manymax.engine.ranks import Ranks
from manymax.engine.row_target import RowTarget

# moved(sums (n, k), mass (n,), change (n,)) -> (n, k): sums of rows whose maximum has risen by `change`. `mass` is the
# target weight of the classes that they are about.
Moved = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class RowSums:
    """What is known of a block of rows: its maximum and its sums, over the classes so far or over all of them."""

    maximum: Tensor  # (n, 1)
    sums: Tensor | None = None  # (n, k) float64
    mass: Tensor | None = None  # (n,) float64, the target weight of the classes so far


@dataclass
class InTurn(Ranks):
    """The exchanges of a kernel that meets blocks of classes one after the other.

    blocks: how many there are; `begin` says which one is next.
    moved: of the kernel.
    """

    blocks: int
    moved: Moved
    known: list[RowSums] = field(default_factory=list)  # of each block of rows
    complete: bool = False  # whether `known` is of all classes: the second round

    def __post_init__(self) -> None:
        self.rank, self.size, self._rows, self._rise = 0, self.blocks, -1, torch.empty(0)

    @property
    def alone(self) -> bool:
        """False even for one block: the kernel must tell its sums."""
        return False

    def begin(self, block: int, masses: Tensor) -> None:
        """The next calls are about this block of classes, whose target weights are `masses` (N,)."""
        self.rank, self._rows, self._masses = block, -1, masses
        self._start = 0

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum (n, 1) of the classes so far, or of all; the first exchange about a block of rows."""
        self._rows += 1
        if self.complete:
            return self.known[self._rows].maximum
        if self._rows == len(self.known):
            self.known.append(RowSums(torch.full_like(values, -torch.inf)))
        row = self.known[self._rows]
        before = row.maximum
        row.maximum = torch.maximum(before, values.detach())  # nan stays, and the kernel refuses it
        self._rise = _reference(row.maximum).double() - _reference(before).double()
        return _reference(row.maximum)

    def sum(self, values: Tensor) -> Tensor:
        """The sums (n, k) of the classes so far, or of all; the second exchange about a block of rows."""
        row = self.known[self._rows]
        if self.complete:
            assert row.sums is not None
            return row.sums
        values = values.detach().double()
        mass = self._masses[self._start : self._start + len(values)].double()
        self._start += len(values)
        if row.sums is None or row.mass is None:
            row.sums, row.mass = torch.zeros_like(values), torch.zeros_like(mass)
        row.sums = self.moved(row.sums, row.mass, self._rise.squeeze(1)) + values
        row.mass = row.mass + mass
        return row.sums


def _reference(maximum: Tensor) -> Tensor:
    """The maximum, and 0 where every class so far is masked: there is nothing yet that it could be the maximum of."""
    return torch.where(maximum == -torch.inf, 0, maximum)


def block_sizes(num_classes: int, most: int) -> tuple[int, ...]:
    """The sizes of blocks of at most `most` classes; the last one has what is left."""
    whole, rest = divmod(num_classes, most)
    return (most,) * whole + ((rest,) if rest else ())


def classes_of(target: RowTarget, span: slice) -> RowTarget:
    """The target weights of the classes of a block, numbered within it; totals stay those of all classes."""
    ids, weights, excluded = target.ids, target.weights, target.excluded
    if ids is None:
        weights = (weights if target.chosen is None else weights[target.chosen])[:, span]
    else:
        inside = (ids >= span.start) & (ids < span.stop)
        ids, weights = torch.where(inside, ids - span.start, 0), torch.where(inside, weights, 0)
    if excluded is not None:
        inside = (excluded >= span.start) & (excluded < span.stop)
        excluded = torch.where(inside, excluded - span.start, -1)
    classes = None if target.class_weight is None else target.class_weight[span]
    return RowTarget(ids, weights, target.share, classes, target.total, target.coefficient, None, excluded)


def target_mass(target: RowTarget) -> Tensor:
    """(n,) the target weight of the classes that a target is about, smoothing included."""
    mass = target.weights.sum(1)
    if target.share is None or target.class_weight is None:
        return mass
    return mass + target.share * target.class_weight.sum()
