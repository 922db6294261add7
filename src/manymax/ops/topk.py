"""The largest scores of rows: of a block of a head, in one pass, and the K-th largest of any tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops.simplex import GROUP_SIZE


def topk_block(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and columns of the k largest scores of each row, (rows, k) each; the columns are a multiple of 16.

    If a class of the k best were in none of the k groups with the largest maxima, k other classes, the maxima of those
    groups, would be at least as good. One pass over the scores takes the maxima; topk then sees C/16 numbers and 16 k
    numbers per row instead of C. Measured with k = 20 and C = 41,000: 2.7 times as fast as topk alone, matmul included.
    """
    rows, classes = scores.shape
    width = classes // GROUP_SIZE
    if width < 4 * k:  # too few groups to choose among: the second step would see a large part of the classes again
        return scores.topk(k, dim=1)
    # Strided groups, not neighbours: the maximum runs over 16 long contiguous stretches, which vectorises.
    grouped = scores.view(rows, GROUP_SIZE, width)  # group l: classes l, l + width, ...
    chosen = grouped.amax(1).topk(k, dim=1, sorted=False).indices  # (rows, k)
    inside = grouped.gather(2, chosen[:, None, :].expand(rows, GROUP_SIZE, k)).reshape(rows, GROUP_SIZE * k)
    values, position = inside.topk(k, dim=1)
    # `inside` has the classes as (GROUP_SIZE, k): position = step in the group * k + number of the group.
    group = chosen.gather(1, position % k)
    return values, position // k * width + group


def kth_largest(scores: Tensor, k: int) -> Tensor:
    """The k-th largest score of each row, (..., 1), without a gradient; the lowest where fewer are not masked (-inf).

    Example:
        >>> import torch
        >>> kth_largest(torch.tensor([3.0, 1.0, 2.0]), 2), kth_largest(torch.tensor([3.0, 1.0, -torch.inf]), 3)
        (tensor([2.]), tensor([1.]))
    """
    scores = scores.detach()
    found = scores.topk(min(k, scores.shape[-1]), -1).values.amin(-1, keepdim=True)
    return torch.maximum(found, lowest(scores))


def lowest(scores: Tensor) -> Tensor:
    """The lowest score of each row that is not masked, (..., 1); inf where all are."""
    return torch.where(scores > -torch.inf, scores, torch.inf).amin(-1, keepdim=True)
