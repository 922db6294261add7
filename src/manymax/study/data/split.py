"""The split of every user's interactions into train, validation and test."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.errors import ArgumentError, check_choice
from manymax.study.data.interactions import PARTS, Interactions, Lists, Split
from manymax.study.seeds import generator

SPLITS = ("ratio", "ratio-time", "leave-one-out", "given")
HELD_OUT_DIVISOR = 10  # a tenth of a user's interactions is for validation, another tenth for the test
TRAIN_PART, VALID_PART, TEST_PART = range(3)  # indices into `PARTS`


def split_interactions(
    interactions: Interactions, split: str | None = None, seed: int = 0
) -> tuple[Split, Interactions]:
    """Split each user's n interactions into train, validation and test.

        ratio           at random: max(1, floor(0.1 n)) each for validation and test, the others for training
        ratio-time      the same numbers in time order: the last for test, those before them for validation
        leave-one-out   in time order: the last for test, the last but one for validation
        given           the split that the data comes with. If it has no validation part, max(1, floor(0.1 n)) of the n
                        training interactions of each user with n >= 2 are taken for it, at random

    Users with fewer than 3 interactions stay in training. Interactions of equal time are taken in the order of the
    file, and so are all if the data has no times.

    Args:
        interactions: with one row per (user, item) pair.
        split: one of `SPLITS`; None means "given" if the data comes with a split, else "ratio".
        seed: for the random splits.

    Returns:
        The lists, each in time order, and the interactions with their parts and one more step on the card.
    """
    split = split or ("ratio" if interactions.parts is None else "given")
    check_choice("split", split, SPLITS)
    by_time = _time_order(interactions)
    parts, figures = _parts(interactions, split, by_time, seed)
    for part, name in enumerate(PARTS):
        figures[name] = int((parts == part).sum())
        if figures[name] == 0:
            raise ArgumentError(f"{interactions.name}: split {split!r} leaves no interaction for {name}. {HINTS[name]}")
    kept = replace(interactions, parts=parts).with_step("split", split=split, **figures)
    return _lists(kept, by_time), kept


HINTS = {  # what to do if a part is empty
    "train": "The split column must mark some rows as 'train'.",
    "valid": "Each user needs 3 interactions for a validation and a test item; take more data, or filter less.",
    "test": "Each user needs 3 interactions for a validation and a test item; take more data, or filter less.",
}


def _parts(interactions: Interactions, split: str, by_time: Tensor, seed: int) -> tuple[Tensor, dict[str, object]]:
    """The part of each interaction, (n,) int8 indices into `PARTS`, and the figures for the card."""
    if split == "given":
        return _given(interactions, seed)
    figures: dict[str, object] = {"seed": seed} if split == "ratio" else {}
    permutation = by_time
    if split == "ratio":
        permutation = torch.randperm(len(interactions), generator=generator(seed, "split"))
    from_end, count = _places_from_end(interactions.users, permutation)
    held_out = _held_out(count) if split != "leave-one-out" else torch.ones_like(count)
    # Counted from the end, the first `held_out` interactions of a user give quotient 0 (test), the next `held_out` give
    # 1 (validation), and all others at least 2 (training).
    parts = (TEST_PART - from_end // held_out).clamp(min=TRAIN_PART)
    parts[count < 3] = TRAIN_PART
    if short := int((interactions.users.bincount(minlength=interactions.num_users) < 3).sum()):
        figures["users_in_train_only"] = short
    if split != "ratio" and interactions.times is None:
        figures["note"] = "no times: the order is that of the file"
    return parts.to(torch.int8), figures


def _given(interactions: Interactions, seed: int) -> tuple[Tensor, dict[str, object]]:
    """The parts that the data comes with; if there is no validation part, it is taken out of training."""
    if interactions.parts is None:
        raise ArgumentError(
            f"`split` 'given' needs a column that says train, valid or test, and {interactions.name} has none. Name "
            f"the column with --columns split=NAME, or choose another split: {', '.join(SPLITS[:-1])}."
        )
    parts = interactions.parts.clone()
    if (parts == VALID_PART).any():
        return parts, {}
    train = (parts == TRAIN_PART).nonzero()[:, 0]
    permutation = torch.randperm(train.numel(), generator=generator(seed, "split"))
    from_end, count = _places_from_end(interactions.users[train], permutation)
    parts[train[(from_end < _held_out(count)) & (count >= 2)]] = VALID_PART
    return parts, {"seed": seed, "note": "validation taken out of training"}


def _held_out(count: Tensor) -> Tensor:
    """max(1, floor(0.1 n)) for users with n interactions; integer division, because 0.1 is not exact in floats."""
    return (count // HELD_OUT_DIVISOR).clamp(min=1)


def _places_from_end(users: Tensor, permutation: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: how many rows of its user come after it in `permutation`, and how many its user has; (n,) each.

    Args:
        users: (n,) the user of each row.
        permutation: (n,) the rows in some order.
    """
    by_user = permutation[users[permutation].argsort(stable=True)]  # by user, then as in `permutation`
    counts = users.bincount()
    from_end = torch.empty_like(users)
    from_end[by_user] = counts.cumsum(0)[users[by_user]] - 1 - torch.arange(users.numel())
    return from_end, counts[users]


def _time_order(interactions: Interactions) -> Tensor:
    """(n,) the rows sorted by time; stable, so that rows of equal time keep the order of the file."""
    times = interactions.times
    return torch.arange(len(interactions)) if times is None else times.argsort(stable=True)


def _lists(interactions: Interactions, by_time: Tensor) -> Split:
    """The lists of the three parts, each in time order."""
    assert interactions.parts is not None
    users, items, parts = (t[by_time] for t in (interactions.users, interactions.items, interactions.parts))
    train, valid, test = (
        Lists.from_pairs(users[parts == part], items[parts == part], interactions.num_users) for part in range(3)
    )
    return Split(train, valid, test, interactions.num_items)
