"""Three parts of every user's interactions: train, validation, test."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from manymax.errors import ArgumentError, check_choice
from manymax.study.data.interactions import PARTS, Interactions, Lists, Split
from manymax.study.seeds import generator

SPLITS = ("ratio", "ratio-time", "leave-one-out", "given")
HELD_OUT = 10  # one in ten of a user's interactions for validation, another for test
TRAIN, VALID, TEST = range(3)


def split_interactions(
    interactions: Interactions, split: str | None = None, seed: int = 0
) -> tuple[Split, Interactions]:
    """Split each user's interactions; say so on the card.

        ratio           shuffled; max(1, floor(0.1 n)) each for validation and test, the rest for training
        ratio-time      the same in time order: the last for test, those before for validation
        leave-one-out   in time order: the last for test, the last but one for validation
        given           as the data comes; where it has no validation part, max(1, floor(0.1 n)) of the n training
                        interactions of each user with n >= 2, at random

    Users with fewer than 3 interactions stay in training. Equal times keep the order of the file, which is all the
    order there is where times are unknown.

    Args:
        interactions: with one row a pair.
        split: one of `SPLITS`; None is "given" where the data comes with a split, else "ratio".
        seed: of what is random.

    Returns:
        the lists, each in time order, and the interactions with their new part and one more step on the card.
    """
    split = split or ("ratio" if interactions.parts is None else "given")
    check_choice("split", split, SPLITS)
    order = _time_order(interactions)
    parts, figures = _parts(interactions, split, order, seed)
    for part, name in enumerate(PARTS):
        figures[name] = int((parts == part).sum())
        if figures[name] == 0:
            raise ArgumentError(f"{interactions.name}: split {split!r} leaves no interaction for {name}. {HINTS[name]}")
    kept = replace(interactions, parts=parts).with_step("split", split=split, **figures)
    return _lists(kept, order), kept


HINTS = {
    "train": "The split column must mark some rows as 'train'.",
    "valid": "Each user needs 3 interactions for a validation and a test item; take more data, or filter less.",
    "test": "Each user needs 3 interactions for a validation and a test item; take more data, or filter less.",
}


def _parts(interactions: Interactions, split: str, order: Tensor, seed: int) -> tuple[Tensor, dict[str, object]]:
    """(n,) int8 parts, and what the card says of them."""
    if split == "given":
        return _given(interactions, seed)
    figures: dict[str, object] = {"seed": seed} if split == "ratio" else {}
    if split == "ratio":
        order = torch.randperm(len(interactions), generator=generator(seed, "split"))
    from_end, count = _places_from_end(interactions.users, order)
    held_out = _held_out(count) if split != "leave-one-out" else torch.ones_like(count)
    parts = (TEST - from_end // held_out).clamp(min=TRAIN)
    parts[count < 3] = TRAIN
    if short := int((interactions.users.bincount(minlength=interactions.num_users) < 3).sum()):
        figures["users_in_train_only"] = short
    if split != "ratio" and interactions.times is None:
        figures["note"] = "no times: the order is that of the file"
    return parts.to(torch.int8), figures


def _given(interactions: Interactions, seed: int) -> tuple[Tensor, dict[str, object]]:
    """The parts that the data comes with, validation taken out of training where there is none."""
    if interactions.parts is None:
        raise ArgumentError(
            f"`split` 'given' needs a column that says train, valid or test, and {interactions.name} has none. Name it "
            f"with --columns split=NAME, or choose another split: {', '.join(SPLITS[:-1])}."
        )
    parts = interactions.parts.clone()
    if (parts == VALID).any():
        return parts, {}
    train = (parts == TRAIN).nonzero()[:, 0]
    order = torch.randperm(train.numel(), generator=generator(seed, "split"))
    from_end, count = _places_from_end(interactions.users[train], order)
    parts[train[(from_end < _held_out(count)) & (count >= 2)]] = VALID
    return parts, {"seed": seed, "note": "validation taken out of training"}


def _held_out(count: Tensor) -> Tensor:
    return (count // HELD_OUT).clamp(min=1)


def _places_from_end(users: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: how many rows of its user come after it in `order`, and how many rows its user has. Both (n,)."""
    order = order[users[order].argsort(stable=True)]  # by user, then as in `order`
    counts = users.bincount()
    from_end = torch.empty_like(users)
    from_end[order] = counts.cumsum(0)[users[order]] - 1 - torch.arange(users.numel())
    return from_end, counts[users]


def _time_order(interactions: Interactions) -> Tensor:
    times = interactions.times
    return torch.arange(len(interactions)) if times is None else times.argsort(stable=True)


def _lists(interactions: Interactions, order: Tensor) -> Split:
    assert interactions.parts is not None
    users, items, parts = (t[order] for t in (interactions.users, interactions.items, interactions.parts))
    train, valid, test = (
        Lists.from_pairs(users[parts == part], items[parts == part], interactions.num_users) for part in range(3)
    )
    return Split(train, valid, test, interactions.num_items)
