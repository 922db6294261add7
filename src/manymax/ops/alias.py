"""Walker's alias table: draws from a fixed distribution in O(1), whatever the number of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops.lookup import lookup


def alias_table(probs: Tensor) -> tuple[Tensor, Tensor]:
    """The alias table of a distribution, built without a loop over its classes.

    Every class c owns a column of height 1. It fills keep_c of it, and class alias_c the rest:

        probs_c = (keep_c + sum of (1 - keep_j) over the j with alias_j = c) / C

    Light classes (C p < 1) keep C p and leave a deficit, heavy ones have a surplus. Deficits and surpluses are
    laid end to end in class order, so that two running sums say which heavy class fills a light column, and
    where a heavy class runs out and is itself filled up by the next heavy one. Light classes come out exact; the
    relative error of heavy ones is that of the running sums, about 1e-9 for 1e6 classes and 1e-7 for 1e7.

    Args:
        probs: (C,) float64, non-negative, sum 1. Running sums in float32 would be wrong from about 1e5 classes.

    Returns:
        keep (C,) float64 in [0, 1] and alias (C,) int64. A class of probability 0 has keep 0 and is nobody's alias.

    Example:
        >>> keep, alias = alias_table(torch.tensor([0.5, 0.25, 0.0, 0.25], dtype=torch.float64))
        >>> keep.tolist(), alias.tolist()
        ([1.0, 1.0, 0.0, 1.0], [1, 3, 0, 3])

    References:
        Walker (1977); Huebschle-Schneider and Sanders (2022) for the parallel sweep.
    """
    height = probs * probs.numel()
    # Rounding may leave every height just under 1: the tallest class is always heavy.
    is_heavy = height >= height.max().clamp(max=1.0)
    heavy, light = is_heavy.nonzero().squeeze(1), (~is_heavy).nonzero().squeeze(1)
    surplus, deficit = (height[heavy] - 1).cumsum(0), (1 - height[light]).cumsum(0)

    keep, alias = height.clamp(max=1.0), torch.empty_like(heavy).new_zeros(probs.numel())
    deficit_before = torch.nn.functional.pad(deficit, (1, 0))  # entry i: the deficits of the light classes before i
    filler = torch.searchsorted(surplus, deficit_before[:-1]).clamp_(max=len(heavy) - 1)
    alias[light] = heavy[filler]
    # A heavy class runs out at the first light one whose deficit goes past its surplus; none after the last.
    runs_out = torch.searchsorted(deficit, surplus, right=True)
    never = runs_out == len(light)
    left = 1 + surplus - deficit_before[(runs_out + 1).clamp_(max=len(light))]
    keep[heavy] = torch.where(never, 1.0, left.clamp_(0.0, 1.0))
    alias[heavy] = torch.cat([heavy[1:], heavy[-1:]])
    return keep, alias


def draw_from_alias_table(
    keep: Tensor, alias: Tensor, shape: tuple[int, ...], generator: torch.Generator | None = None
) -> Tensor:
    """Ids drawn from the distribution of an alias table: a column, then the class that fills it at a random height.

    Args:
        keep, alias: (C,), from `alias_table`.
        shape: of the result.
        generator: of the randomness, on the device of the table.

    Returns:
        int64 ids of the given shape.

    Example:
        >>> keep, alias = alias_table(torch.tensor([0.0, 1.0], dtype=torch.float64))
        >>> draw_from_alias_table(keep, alias, (3,)).tolist()
        [1, 1, 1]
    """
    column = torch.randint(keep.numel(), shape, generator=generator, device=keep.device)
    # float64: with the 24 bits of a float32 uniform, classes much rarer than the average are drawn too often.
    height = torch.rand(shape, generator=generator, device=keep.device, dtype=keep.dtype)
    return torch.where(height < lookup(keep, column), column, lookup(alias, column))
