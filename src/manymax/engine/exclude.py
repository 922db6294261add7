"""Ids that are left out of the sums of their row: reading them, and what they mean for the positives of the row."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup

MARKS = 1 << 21  # classes that are marked at a time, a byte each
# Classes per id of a row, up to which all classes are marked: to clear so many marks takes as long as to sort an id.
CLASSES_PER_ID = 512


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
    if visible(flat) and flat.numel():
        # Lists may be long: as few passes as possible.
        low, high = (int(end) for end in flat.aminmax())
        if high >= classes or (low < 0 and bool(((flat < 0) & (flat != -100)).any())):
            raise ArgumentError(f"`{name}` ids must be in [0, {classes}) or -100; got {low} to {high}.")
    return flat


def on_lists(ids: Tensor, lists: Tensor, num_classes: int, rows: Tensor | None = None) -> Tensor:
    """Which of the ids (M, K) are on the list of their row, (M, K).

    Args:
        ids: (M, K), negative where there is none.
        lists: (N, E), negative where there is none.
        num_classes: C, of which all ids are smaller.
        rows: (M,) ascending, the list of each row of ids; None if row m has list m.
    """
    if num_classes > CLASSES_PER_ID * (ids.shape[1] + lists.shape[1]) or not visible(lists):
        return _found_by_search(ids, lists, num_classes, rows)
    # A mark for every class, in some rows at a time so that marks stay in cache: that is a step for each id, where a
    # search sorts, and takes as long as the loss if lists are long.
    found = torch.empty_like(ids, dtype=torch.bool)
    step = max(1, MARKS // num_classes)
    starts = torch.arange(0, len(lists) + step, step)
    ends = (starts if rows is None else torch.searchsorted(rows, starts.to(rows.device))).tolist()
    for k, start in enumerate(starts[:-1].tolist()):
        some, mine = lists[start : start + step], ids[ends[k] : ends[k + 1]]
        marks = lists.new_zeros(len(some), num_classes + 1, dtype=torch.bool)  # the last column is for what is none
        marks.scatter_(1, torch.where(some >= 0, some, num_classes), True)
        marks[:, num_classes] = False
        row = torch.arange(len(some), device=lists.device) if rows is None else rows[ends[k] : ends[k + 1]] - start
        place = torch.where(mine >= 0, mine, num_classes) + row.unsqueeze(1) * (num_classes + 1)
        found[ends[k] : ends[k + 1]] = lookup(marks.view(-1), place)
    return found


def _found_by_search(ids: Tensor, lists: Tensor, num_classes: int, rows: Tensor | None) -> Tensor:
    """`on_lists` without marks; no operation waits for a number of another device."""
    if not lists.numel():
        return torch.zeros_like(ids, dtype=torch.bool)
    # One number for each pair of a row and a class. Sorted row by row they are sorted as a whole; what is none is a
    # class above all others.
    row = torch.arange(len(lists), device=lists.device).unsqueeze(1)
    mine = row if rows is None else rows.unsqueeze(1)
    pairs = torch.where(lists >= 0, lists, num_classes).sort(1).values.add_(row * (num_classes + 1)).view(-1)
    wanted = ids + mine * (num_classes + 1)
    place = torch.searchsorted(pairs, wanted).clamp_(max=len(pairs) - 1)
    return (pairs[place] == wanted) & (ids >= 0)


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
    ids = torch.where(positive, target.ids, -100)
    if ids.shape[1] == 1:  # the usual case, for which nothing is searched
        return torch.where(exclude == ids, -100, exclude), torch.zeros_like(positive)
    alone = positive.sum(1, keepdim=True) <= 1
    hit = on_lists(ids, exclude, num_classes) & ~alone
    return torch.where(on_lists(exclude, ids, num_classes), -100, exclude), hit
