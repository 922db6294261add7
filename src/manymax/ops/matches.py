"""Finding which of many values equal some wanted ones, as a list of pairs instead of a table of comparisons."""

from __future__ import annotations

import torch
from torch import Tensor


class Matches:
    """Finds the places of wanted numbers among values (k,), which are sorted once.

    Comparing n wanted numbers with k values takes a table (n, k), almost all of which is False. Here the cost is that
    of the pairs that are equal.

    Example:
        >>> rows, places = Matches(torch.tensor([4, 1, 4])).of(torch.tensor([0, 4]))
        >>> rows.tolist(), places.tolist()
        ([1, 1], [0, 2])
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.order = values.sort(stable=True)

    def of(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """All pairs of a place in `wanted` (n,) and a place in the values that hold the same number, (P,) each."""
        first, count = self._runs(wanted)
        rows = torch.repeat_interleave(count)
        # Pair i of a row is the i-th of the run of equal values that the row has found.
        before = count.cumsum(0) - count
        within = torch.arange(len(rows), device=rows.device) - before[rows]
        return rows, self.order[first[rows] + within]

    def count(self, wanted: Tensor) -> Tensor:
        """How many values equal each wanted number, (n,)."""
        return self._runs(wanted)[1]

    def _runs(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Where the run of values that equal each wanted number begins, and its length, (n,) each."""
        wanted = wanted.contiguous()
        first = torch.searchsorted(self.values, wanted)
        return first, torch.searchsorted(self.values, wanted, right=True) - first
