"""Ids that are left out of the sums of their row: reading them, and what they mean for the positives of the row."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible


def read_listed_ids(name: str, ids: Tensor | None, batch: torch.Size, classes: int) -> Tensor | None:
    """Some ids for each row of a batch, padded with -100, checked and flattened to (N, E); None if there are none."""
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{name}` must be a tensor of integer ids, padded with -100; got {kind}.")
    if ids.ndim != len(batch) + 1 or ids.shape[:-1] != batch:
        raise ArgumentError(f"`{name}` must have shape {(*batch, 'E')} to fit `input`; got {tuple(ids.shape)}.")
    flat = ids.reshape(batch.numel(), ids.shape[-1]).long()
    wrong = visible(flat) and flat.numel() and (int(flat.max()) >= classes or bool(((flat < 0) & (flat != -100)).any()))
    if wrong:
        raise ArgumentError(
            f"`{name}` ids must be in [0, {classes}) or -100; got {int(flat.min())} to {int(flat.max())}."
        )
    return flat


def spare_positives(exclude: Tensor, target: Target, num_classes: int) -> tuple[Tensor, Tensor]:
    """What is left out of the sums of each row, and which positives are left out of the sums of others.

    The own positive of a row is in the sum of its loss even if it is listed: positives are taken off the list. A row
    with several has one sum for each, and a listed positive is in its own and in no other.

    Args:
        exclude: (N, E) ids, -100 where there is none.
        target: with listed ids (N, P).
        num_classes: C.

    Returns:
        The list (N, E) without positives, and (N, P) the listed positives of rows that have several.
    """
    assert target.ids is not None
    positive = target.weights != 0
    if positive.shape[1] == 1:  # the usual case, for which nothing is sorted
        return torch.where((exclude == target.ids) & positive, -100, exclude), torch.zeros_like(positive)
    # Each listed id is looked up among the sorted positives of its row. Those are few, where the list of a user who has
    # seen much is long: sorting the lists of all rows, as `isin` does, takes as long as the loss.
    ranked, order = torch.where(positive, target.ids, num_classes).sort(1)
    place = torch.searchsorted(ranked, exclude).clamp(max=ranked.shape[1] - 1)
    own = (ranked.gather(1, place) == exclude) & (exclude >= 0)
    if visible(own):
        row, column = own.nonzero(as_tuple=True)
        found = torch.zeros_like(positive)
        found[row, place[row, column]] = True
    else:  # nobody waits for their number
        none = torch.zeros_like(positive, dtype=torch.uint8)
        found = none.scatter_reduce(1, place, own.to(torch.uint8), "amax") > 0
    # The search finds the first of equal positives; the others share what became of it.
    found = found.gather(1, torch.searchsorted(ranked, ranked))
    hit = torch.zeros_like(positive).scatter(1, order, found) & positive
    alone = positive.sum(1, keepdim=True) <= 1
    return torch.where(own, -100, exclude), hit & ~alone
