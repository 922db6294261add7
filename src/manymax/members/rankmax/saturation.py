"""Which classes rankmax on the (n, k)-simplex gives the probability 1.

With u_i = max(0, s_i - s_y + 1) and k > 1 the probabilities are min(1, a u_i), where a is such that they sum to k. The
m classes that get 1 are those with the largest scores, and fewer than k. So the k - 1 best classes of a row are looked
at one by one, and all others enter by the sum of their u alone:

    a = (k - m) / (S - u_1 - ... - u_m),   m the smallest number with a u_(m+1) <= 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Saturation(NamedTuple):
    """What is left of the rows where the saturated classes are taken out, for each positive.

    sums, sizes: (..., P) the sum of u over the classes without these, and how many of them have u > 0.
    places: (..., P) k - m, what is left for them of the sum of all probabilities.
    counted: (..., P, K) which of the best classes are among them, with u > 0.
    """

    sums: Tensor
    sizes: Tensor
    places: Tensor
    counted: Tensor


def saturation(best: Tensor, labels: Tensor, sums: Tensor, sizes: Tensor) -> Saturation:
    """Find the saturated classes of rows for each of their positives.

    Args:
        best: (..., K) the K = k - 1 largest scores of each row, the largest first.
        labels: (..., P) the scores of the positives.
        sums: (..., P) the sum of u over all other classes, and `sizes` how many of these have u > 0.

    Example: of the violations 3, 1 and .5 the first would get more than 1, and leaves a sum of 1 to the others.
        >>> best, one = torch.tensor([[2.0]]), torch.tensor([[0.0]])
        >>> saturation(best, one, torch.tensor([[1.5]]), torch.tensor([[2.0]])).places
        tensor([[1]])
    """
    # The difference comes first: s_y - 1 would be rounded to s_y where scores are large.
    u = torch.relu(best.unsqueeze(-2) - labels.unsqueeze(-1) + 1)
    count = best.shape[-1]
    # Sums from the right: each is over what is left if all before it are saturated, and no difference is taken.
    left = u.flip(-1).cumsum(-1).flip(-1) + sums.unsqueeze(-1)
    places = torch.arange(count + 1, 1, -1, device=best.device)  # k, k - 1, ..., 2
    saturated = (places * u > left).to(torch.int64).cumprod(-1)
    kept = saturated == 0
    counted = kept & (u > 0)
    rest = sums + torch.where(kept, u, 0).sum(-1)
    return Saturation(rest, sizes + counted.sum(-1), count + 1 - saturated.sum(-1), counted)


def log_scale(found: Saturation) -> Tensor:
    """-log p_y = max(0, -log a), (..., P); 0 also where fewer than k classes come within 1 of the positive."""
    above = found.sums > found.places
    return torch.where(above, found.sums / found.places, 1).log()
