"""From a name or a file to a split: read, filter, split, and a card that says what each step left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from manymax.errors import ArgumentError, ManymaxError
from manymax.study.data.card import SUFFIX
from manymax.study.data.interactions import PARTS, Interactions, Split
from manymax.study.data.load import load
from manymax.study.data.planted import PlantedLaw
from manymax.study.data.split import split_interactions
from manymax.study.files import atomic_write, write_json


@dataclass(frozen=True)
class Prepared:
    """Data that is ready for training.

    Args:
        interactions: what the filters left, in the order of the file.
        split: the same rows as train, validation and test lists.
        card: the steps that led here, each a dict with `step` and its figures.
        truth: p(item | user), known for planted data alone.
    """

    interactions: Interactions
    split: Split
    card: list[dict[str, Any]]
    truth: PlantedLaw | None = None


def prepare(
    data: str | Path = "planted",
    *,
    columns: Mapping[str, str] | None = None,
    preset: str | None = None,
    min_rating: float | None = None,
    k_core: int | None = None,
    split: str | None = None,
    seed: int = 0,
    size: str | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
) -> Prepared:
    """Read a data set, keep the last row of each pair, then rating >= `min_rating`, then the k-core; split it.

    Args:
        data: a name (`manymax data list` shows them) or a path.
        columns: of an own file: {"user": ..., "item": ..., "rating": ..., "time": ..., "split": ...}; guessed where
            not given.
        preset: "paper-table" or "paper-text", the filters behind the paper's table and those in its text; values
            given besides it count more.
        min_rating: keep interactions rated so or better.
        k_core: leave out users and items with fewer interactions, until all have as many.
        split: one of `SPLITS`; "given" where the data comes with a split, else "ratio".
        seed: of the split, and of planted data.
        size: of planted data: "tiny", "small", "medium", "ml-1m" or USERSxITEMSxMEAN.
        name: what the data in the file `data` is called; a preset is looked up by it.
        folder: where files of named sets are looked for, in place of the cache.

    >>> prepared = prepare("planted-tiny", k_core=5)
    >>> [step["step"] for step in prepared.card]
    ['raw', 'k-core', 'split']
    >>> prepared.split.num_users, prepared.truth.probs(torch.tensor([0, 1])).shape[0]
    (200, 2)
    """
    loaded = load(data, columns=columns, seed=seed, size=size, name=name, folder=folder)
    filters = loaded.filters(preset)
    min_rating = filters.min_rating if min_rating is None else min_rating
    k_core = filters.k_core if k_core is None else k_core
    kept = last_of_each_pair(loaded.interactions)
    if min_rating is not None:
        kept = rated(kept, min_rating)
    if k_core is not None:
        kept = core(kept, k_core)
    if not len(kept):
        raise ArgumentError(f"{kept.name}: no interaction is left; the steps were {_steps(kept)}. Filter less.")
    lists, kept = split_interactions(kept, split, seed)
    truth = None if loaded.truth is None else loaded.truth.among(kept.user_ids, kept.item_ids)
    return Prepared(kept, lists, list(kept.card), truth)


def save(prepared: Prepared, folder: Path) -> Path:
    """Write NAME.parquet, with the publisher's ids and a column `split`, and its card beside it.

    Returns:
        the path of the table, which `prepare` reads again.
    """
    kept = prepared.interactions
    assert kept.parts is not None
    columns = {"user": kept.user_ids[kept.users.numpy()], "item": kept.item_ids[kept.items.numpy()]}
    columns |= {
        name: values.numpy() for name, values in (("rating", kept.ratings), ("time", kept.times)) if values is not None
    }
    split = pa.DictionaryArray.from_arrays(kept.parts.numpy(), list(PARTS))
    path = folder / f"{kept.name}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            parquet.write_table(pa.table({**columns, "split": split}), partial, compression="zstd")
        write_json(folder / f"{kept.name}{SUFFIX}", prepared.card)
    except OSError as error:
        raise ManymaxError(f"{folder} cannot be written to: {error.strerror or error}.") from None
    return path


def _steps(interactions: Interactions) -> str:
    return ", ".join(f"{step['step']} ({step['interactions']:,} left)" for step in interactions.card)


def last_of_each_pair(interactions: Interactions) -> Interactions:
    """One row for each (user, item): the latest, the later in the file where times are equal or unknown.

    Where the data comes with a split, a pair stays in the earliest part that has it: an item seen in training is
    masked in evaluation and could never be found.
    """
    pairs = interactions.users * interactions.num_items + interactions.items
    if (pairs.sort().values.diff() != 0).all():
        return interactions
    order = torch.arange(len(interactions))
    for key, descending in ((interactions.times, False), (interactions.parts, True)):
        if key is not None:
            order = order[key[order].argsort(stable=True, descending=descending)]
    order = order[pairs[order].argsort(stable=True)]  # by pair, then by part and time: the last of each pair stays
    last = torch.ones_like(order, dtype=torch.bool)
    last[:-1] = pairs[order].diff() != 0
    keep = torch.zeros_like(last)
    keep[order[last]] = True
    return interactions.rows(keep).with_step("repeated pairs", removed=int((~last).sum()))


def rated(interactions: Interactions, min_rating: float) -> Interactions:
    """The interactions with rating >= `min_rating`."""
    if interactions.ratings is None:
        raise ArgumentError(
            f"`min_rating` needs ratings, and {interactions.name} has none. Leave it out, or name the column of the "
            "ratings: --columns rating=NAME."
        )
    return interactions.rows(interactions.ratings >= min_rating).with_step("rating", min_rating=min_rating)


def core(interactions: Interactions, k_core: int) -> Interactions:
    """The k-core: the largest part in which every user and every item has at least `k_core` interactions.

    It is unique, so users and items may go in any order until none is short.
    """
    if k_core < 1:
        raise ArgumentError(f"`k_core` must be at least 1; got {k_core}.")
    users, items, rows, rounds = interactions.users, interactions.items, torch.arange(len(interactions)), 0
    while not (keep := _enough(users, k_core) & _enough(items, k_core)).all():
        users, items, rows, rounds = users[keep], items[keep], rows[keep], rounds + 1
    inside = torch.zeros(len(interactions), dtype=torch.bool)
    inside[rows] = True
    return interactions.rows(inside).with_step("k-core", k_core=k_core, rounds=rounds)


def _enough(numbers: Tensor, count: int) -> Tensor:
    return (numbers.bincount() >= count)[numbers]
