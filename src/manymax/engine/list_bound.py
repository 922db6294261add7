"""The bound that some losses compare scores with: the K-th largest score of a row, or what the caller gives for it.

It follows from the scores, but gradients hold it constant. Over the classes of several ranks it takes one exchange, and
none where it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.cost import FLOAT, Shape, Traffic, TrafficOf, exact_traffic
from manymax.engine.ranks import Ranks
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_finite, visible
from manymax.ops.topk import kth_largest, lowest, topk_block


def read_bound(bound: Tensor | None, batch: torch.Size, dtype: torch.dtype, hint: str = "") -> Tensor | None:
    """The bounds of the rows of a batch in the dtype of their scores, checked; None where none are given."""
    if bound is None:
        return None
    if not isinstance(bound, Tensor) or not bound.is_floating_point():
        kind = bound.dtype if isinstance(bound, Tensor) else type(bound).__name__
        raise ArgumentTypeError(f"`bound` must be a float tensor; got {kind}.")
    if bound.shape != batch:
        raise ArgumentError(
            f"`bound` must have a number for each row, {tuple(batch)}; got shape {tuple(bound.shape)}.{hint}"
        )
    if bound.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("`bound` requires a gradient, and is held constant: pass `bound.detach()`.")
    if visible(bound) and not bound.isfinite().all():
        raise ArgumentError("`bound` must hold finite numbers; got nan or inf.")
    return bound.to(dtype)


def bound_of(scores: Tensor, k: int, bound: Tensor | None) -> Tensor:
    """(..., 1), for scores (..., C) of all classes: what is given as `bound` (...), else the k-th largest of each row.

    Example:
        >>> import torch
        >>> bound_of(torch.tensor([3.0, 1.0, 2.0]), 2, None), bound_of(torch.tensor([3.0, 1.0]), 2, torch.tensor(0.5))
        (tensor([2.]), tensor([0.5000]))
    """
    given = read_bound(bound, scores.shape[:-1], scores.dtype)
    return kth_largest(scores, k) if given is None else given.unsqueeze(-1)


def block_bound(scores: Tensor, k: int, ranks: Ranks) -> Tensor:
    """The k-th largest score of each row over the classes of all ranks, (n, 1); the lowest where fewer are not masked.

    Args:
        scores: (n, C') the scores of this rank, padded with -inf.
        k: at least 1.
        ranks: which hold the other classes.
    """
    n, width = scores.shape
    best = topk_block(scores, min(k, width))[0]
    if not ranks.alone:
        # The k best of each rank, in a place of its own: a sum carries them to all ranks.
        places = scores.new_zeros(n, ranks.size, k)
        places[:, ranks.rank] = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-torch.inf)
        best = ranks.sum(places).reshape(n, ranks.size * k).topk(k, 1).values
    check_finite(best[:, :1])  # nan counts as the largest
    found = best[:, -1:] if best.shape[1] == k else torch.full_like(best[:, :1], -torch.inf)
    if visible(found) and (found > -torch.inf).all():  # the same on all ranks
        return found
    return torch.maximum(found, -ranks.maximum(-lowest(scores)))


def list_traffic(sums: float, row: float, k: int) -> TrafficOf:
    """What the ranks of a member with a bound exchange: as in `exact_traffic`, and the k best scores of every rank.

    The exchange of the latter is one of the `sums`, and its bytes are not in `row`.
    """

    def traffic(shape: Shape, ranks: int) -> Traffic:
        return exact_traffic(sums, row + FLOAT * k * ranks)(shape, ranks)

    return traffic
