"""The best classes of the rows of a block apart from the others, over the classes of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from manymax.engine.blocks import Sparse
from manymax.engine.positives import listed_places
from manymax.engine.ranks import Ranks
from manymax.ops.topk import topk_block


@dataclass(frozen=True)
class BestOfRows:
    """The K best classes of each row, after they have been taken out of the table of scores.

    scores: (n, K) float64, the largest first, the same on all ranks; -inf where a row has fewer.
    ids: (n, L) those of this rank, as it numbers them. places: (n, L) their places among the K.
    here: (n, L) which of these places are taken.
    """

    scores: Tensor
    ids: Tensor
    places: Tensor
    here: Tensor

    def holds(self, ids: Tensor | None) -> Tensor:
        """Which of the classes (n, P), as this rank numbers them, have been taken out, (n, P) bool."""
        assert ids is not None
        return ((ids.unsqueeze(2) == self.ids.unsqueeze(1)) & self.here.unsqueeze(1)).any(2)

    def entries(self, values: Tensor, dtype: torch.dtype) -> Sparse:
        """Values (n, K) of the best classes as entries of the gradient, of those that this rank holds."""
        values = torch.where(self.here, values.gather(1, self.places), 0).to(dtype)
        # Like positives: the places without a class are left out, and on a device they are entries of 0.
        row, column = listed_places(self.here)
        return Sparse(row, self.ids[row, column], values[row, column])


def take_best_(scores: Tensor, count: int, ranks: Ranks) -> BestOfRows:
    """Find the best classes of each row; their scores in the table become -inf, as those of masked classes.

    One exchange: every rank gets the best scores of all ranks.

    Args:
        scores: (n, C') of this rank.
        count: K.
        ranks: which hold the other classes.
    """
    n, width = scores.shape
    own, ids = topk_block(scores, min(count, width))
    # Each rank has a place of its own for its best, so that a sum carries them to all; -inf is left out of the sum.
    listed = pad(own.double(), (0, count - own.shape[1]), value=-torch.inf)
    parts = listed.new_zeros(2, n, ranks.size, count)
    parts[0, :, ranks.rank] = torch.where(listed > -torch.inf, listed, 0)
    parts[1, :, ranks.rank] = (listed > -torch.inf).double()
    values, live = ranks.sum(parts).reshape(2, n, ranks.size * count).unbind(0)
    values, order = torch.where(live > 0, values, -torch.inf).sort(dim=1, descending=True, stable=True)
    places = order.argsort(1)[:, ranks.rank * count : ranks.rank * count + own.shape[1]]
    here = (places < count) & (own > -torch.inf)
    # An amin leaves alone what is not among the best: +inf there changes nothing.
    scores.scatter_reduce_(1, ids, torch.where(here, -torch.inf, torch.inf).to(scores.dtype), "amin")
    # A column of padding may be among the best of a row with few classes: it is no class.
    return BestOfRows(values[:, :count], torch.where(here, ids, 0), places.clamp(max=count - 1), here)
