"""Sums over the classes above the cuts s_p - 1 of the positives of rows, in plain torch, with the gradient in place."""

from __future__ import annotations

import torch
from torch import Tensor


def sums_by_passes_(scores: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """S_p and -a_p m_p, (n, P) each, with a pass over the scores for each positive; the gradient overwrites them.

    `factors` (n, P) are coefficient weight_p; without them no gradient is wanted, and the scores may be lost.
    """
    # A single positive, the usual case, needs no second table: its violations overwrite the scores.
    single = labels.shape[1] == 1
    scratch, table = (scores, scores) if single else (torch.empty_like(scores), torch.zeros_like(scores))
    sums, sizes = [], []
    for p, label in enumerate(labels.split(1, 1)):
        # The difference comes first: s_p - 1 would be rounded to s_p where scores are large. A masked class (-inf) and
        # every class of a missing positive (+inf) have the violation 0.
        violation = torch.sub(scores, label, out=scratch).add_(1).clamp_(min=0)
        # The positive itself adds exactly 1. A missing one has the sum 0: with 1 in its place its loss is log 1 = 0.
        sums.append(violation.sum(1, keepdim=True).clamp_(min=1))
        if factors is not None:
            share = factors[:, p : p + 1] / sums[-1]
            # The violators are counted by a sum of signs, because counting a bool table takes four times as long.
            sizes.append(violation.sign_().sum(1, keepdim=True))
            violation.mul_(share) if single else table.addcmul_(violation, share)
    total = torch.cat(sums, 1)
    if factors is None:
        return total, None
    if not single:
        scores.copy_(table)
    return total, -factors / total * torch.cat(sizes, 1)


def sums_by_buckets_(scores: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What `sums_by_passes_` returns, in one pass for all positives.

    The sorted cuts s_p - 1 divide the scores into buckets, and a sum over what is above a cut is a sum over buckets.
    """
    maximum = scores.amax(1, keepdim=True).double()
    # In float64, because S_p is the difference of two large numbers: the sum of all d above the cut, and the cut times
    # their number.
    d, (cuts, permutation) = scores.double() - maximum, (labels.double() - maximum - 1).sort(1)
    # How many cuts are strictly below: a class that sits on a cut is outside. A masked class falls into bucket 0, which
    # is above no cut and in no sum.
    bucket = torch.searchsorted(cuts, d)
    empty = d.new_zeros(len(d), cuts.shape[1] + 1)
    sizes = sums_above(empty.scatter_add(1, bucket, d.new_ones(()).expand_as(d)))
    # Cuts are at most -1, but for that of a missing positive, +inf, and 0 times inf would be nan.
    sums = sums_above(empty.scatter_add(1, bucket, d)) - sizes * cuts.clamp(max=0)
    sums.clamp_(min=1)
    inverse = permutation.argsort(1)
    if factors is None:
        return sums.gather(1, inverse).to(scores.dtype), None
    shares = factors.double().gather(1, permutation) / sums
    # A class in bucket b violates the first b positives: its gradient is the sum of their shares.
    running = torch.nn.functional.pad(shares.cumsum(1), (1, 0)).to(scores.dtype)
    torch.gather(running, 1, bucket, out=scores)
    own = -shares * sizes
    return sums.gather(1, inverse).to(scores.dtype), own.gather(1, inverse).to(scores.dtype)


def sums_above(buckets: Tensor) -> Tensor:
    """(n, P): for each cut the sum over the buckets above it, from (n, P + 1)."""
    return buckets[:, 1:].flip(1).cumsum(1).flip(1)
