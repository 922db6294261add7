"""Walker's alias table: draws from a fixed distribution, each in constant time for any number of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops.lookup import lookup


def alias_table(probs: Tensor) -> tuple[Tensor, Tensor]:
    """The alias table of a distribution, built without a loop over its classes.

    Every class c has a column of height 1. Class c itself fills the part keep_c of it, class alias_c the rest:

        probs_c = (keep_c + sum of (1 - keep_j) over the j with alias_j = c) / C

    A light class (C p < 1) keeps C p and leaves a deficit 1 - C p in its column; a heavy one has a surplus C p - 1.
    Deficits and surpluses are laid end to end in class order, each as a line of intervals. Two running sums then say
    which heavy class fills a light column, and at which light class a heavy one has given away more than its surplus;
    what its own column then lacks is filled by the next heavy class. Light classes come out exact; the relative error
    of heavy ones is that of the running sums, about 1e-9 for 1e6 classes and 1e-7 for 1e7.

    Args:
        probs: (C,) float64, non-negative, sum 1. Running sums in float32 would be wrong from about 1e5 classes.

    Returns:
        keep (C,) float64 in [0, 1] and alias (C,) int64. A class of probability 0 has keep 0 and is no class's alias.

    Example:
        >>> keep, alias = alias_table(torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64))
        >>> keep.tolist(), alias.tolist()
        ([1.0, 1.0, 0.0, 1.0], [1, 3, 0, 3])

    References:
        Walker (1977); Huebschle-Schneider and Sanders (2022) for the parallel sweep.
    """
    height = probs * probs.numel()  # (C,), mean 1
    # Rounding may leave every height just under 1, and the columns need at least one class to fill them: the tallest
    # class always counts as heavy.
    is_heavy = height >= height.max().clamp(max=1.0)
    heavy, light = is_heavy.nonzero().squeeze(1), (~is_heavy).nonzero().squeeze(1)
    surplus, deficit = (height[heavy] - 1).cumsum(0), (1 - height[light]).cumsum(0)

    keep, alias = height.clamp(max=1.0), torch.empty_like(heavy).new_zeros(probs.numel())
    deficit_before = torch.nn.functional.pad(deficit, (1, 0))  # entry i: the sum over the light classes before i
    # The heavy class in whose interval of surplus the deficit of a light class begins fills the whole column, even
    # where the deficit is longer than what is left of the interval. At the end of the line the two sums differ by
    # rounding, so that the position may lie one past the last heavy class.
    filler = torch.searchsorted(surplus, deficit_before[:-1]).clamp_(max=len(heavy) - 1)
    alias[light] = heavy[filler]
    # The light class at which a heavy one has given away more than its surplus; past the last light class it never has.
    runs_out = torch.searchsorted(deficit, surplus, right=True)
    never = runs_out == len(light)
    # 1 + (all surplus up to this class) - (all deficit filled up to there): what the class keeps of its own column. The
    # next heavy class takes over exactly there, so that its own running sum needs no correction.
    left = 1 + surplus - deficit_before[(runs_out + 1).clamp_(max=len(light))]
    keep[heavy] = torch.where(never, 1.0, left.clamp_(0.0, 1.0))
    alias[heavy] = torch.cat([heavy[1:], heavy[-1:]])
    return keep, alias


def draw_from_alias_table(
    keep: Tensor, alias: Tensor, shape: tuple[int, ...], generator: torch.Generator | None = None
) -> Tensor:
    """Draw ids from the distribution of an alias table.

    A draw takes a column c at random and a random height in it: below keep_c the id is c, above it is alias_c.

    Args:
        keep, alias: (C,), from `alias_table`.
        shape: the shape of the result.
        generator: the source of randomness, on the device of the table; by default torch's global one.

    Returns:
        int64 ids of the given shape.

    Example:
        >>> keep, alias = alias_table(torch.tensor([0.0, 1.0], dtype=torch.float64))
        >>> draw_from_alias_table(keep, alias, (3,)).tolist()
        [1, 1, 1]
    """
    column = torch.randint(keep.numel(), shape, generator=generator, device=keep.device)
    # float64: a float32 uniform has 24 bits and is 0 once in 2^24 times. Classes with a keep of 1e-7 or less, which are
    # much rarer than the average, would be drawn too often.
    height = torch.rand(shape, generator=generator, device=keep.device, dtype=keep.dtype)
    return torch.where(height < lookup(keep, column), column, lookup(alias, column))
