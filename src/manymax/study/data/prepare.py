"""Preparation of data: read it, filter it, split it, and note on a card what each step left."""

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
from manymax.study.data.card import CARD_SUFFIX
from manymax.study.data.interactions import PARTS, Interactions, Split
from manymax.study.data.load import load
from manymax.study.data.planted import PlantedLaw
from manymax.study.data.split import split_interactions
from manymax.study.files import atomic_write, write_json


@dataclass(frozen=True)
class Prepared:
    """Data that is ready for training.

    Args:
        interactions: the interactions after the filters, in the order of the file.
        split: the same interactions as train, validation and test lists.
        card: the steps of the preparation, each a dict with `step` and its figures.
        truth: p(item | user), which is known for planted data only.
    """

    interactions: Interactions
    split: Split
    card: list[dict[str, Any]]
    truth: PlantedLaw | None = None


def prepare(
    data: str | Path = "planted",
    *,
    columns: Mapping[str, str] | None = None,
    encoding: str | None = None,
    date_format: str | None = None,
    drop_missing: bool = False,
    preset: str | None = None,
    min_rating: float | None = None,
    k_core: int | None = None,
    split: str | None = None,
    seed: int = 0,
    size: str | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
) -> Prepared:
    """Read a data set, filter it and split it.

    The filters are, in this order: rows in which no value is missing, interactions with rating >= `min_rating`, the
    last row of each (user, item) pair, the k-core. Pairs come after ratings so that an item that was bought and given
    back, a row with a negative rating, is still known to have been bought.

    Args:
        data: a name (`manymax data list` shows them) or a path.
        columns: names of the columns of your own file, {"user": ..., "item": ..., "rating": ..., "time": ...,
            "split": ..., "title": ...}; those that are not given are guessed, and "none" leaves out one that is.
        encoding: of the text of your own file, such as "latin-1"; None for UTF-8.
        date_format: how times are written in your own file, such as "%m/%d/%Y %H:%M" (the letters are those of
            `datetime.strptime`); None for numbers and ISO dates.
        drop_missing: leave out rows in which a value is missing, instead of an error; the card counts them.
        preset: "paper-table" or "paper-text": the filters that give the numbers of the paper's table, or those that its
            text describes. `min_rating` and `k_core` take precedence over it.
        min_rating: keep interactions with at least this rating.
        k_core: drop users and items with fewer interactions, again and again until none is left.
        split: one of `SPLITS`; the default is "given" if the data comes with a split, else "ratio".
        seed: of the split, and of planted data.
        size: of planted data: "tiny", "small", "medium", "ml-1m" or USERSxITEMSxMEAN.
        name: name of the data set in the file `data`; a preset is looked up by it.
        folder: where to look for the files of named sets, in place of the cache.

    >>> prepared = prepare("planted-tiny", k_core=5)
    >>> [step["step"] for step in prepared.card]
    ['raw', 'k-core', 'split']
    >>> prepared.split.num_users, prepared.truth.probs(torch.tensor([0, 1])).shape[0]
    (200, 2)
    """
    loaded = load(
        data,
        columns=columns,
        encoding=encoding,
        date_format=date_format,
        drop_missing=drop_missing,
        seed=seed,
        size=size,
        name=name,
        folder=folder,
    )
    filters = loaded.filters(preset)
    min_rating = filters.min_rating if min_rating is None else min_rating
    k_core = filters.k_core if k_core is None else k_core
    kept = loaded.interactions
    if min_rating is not None:
        kept = rated(kept, min_rating)
    kept = last_of_each_pair(kept)
    if k_core is not None:
        kept = core(kept, k_core)
    if not len(kept):
        raise ArgumentError(f"{kept.name}: no interaction is left after the steps {_steps(kept)}. Use weaker filters.")
    lists, kept = split_interactions(kept, split, seed)
    truth = None if loaded.truth is None else loaded.truth.among(kept.user_ids, kept.item_ids)
    return Prepared(kept, lists, list(kept.card), truth)


def save(prepared: Prepared, folder: Path) -> Path:
    """Write the interactions as NAME.parquet, with the original ids and a column `split`, and the card beside it.

    Returns:
        The path of the Parquet file, which `prepare` can read.
    """
    kept = prepared.interactions
    assert kept.parts is not None
    columns = {"user": kept.user_ids[kept.users.numpy()], "item": kept.item_ids[kept.items.numpy()]}
    columns |= {
        name: values.numpy() for name, values in (("rating", kept.ratings), ("time", kept.times)) if values is not None
    }
    if kept.item_titles is not None:
        columns["item_title"] = pa.array(kept.item_titles[kept.items.numpy()], pa.large_string())
    split = pa.DictionaryArray.from_arrays(kept.parts.numpy(), list(PARTS))
    path = folder / f"{kept.name}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            parquet.write_table(pa.table({**columns, "split": split}), partial, compression="zstd")
        write_json(folder / f"{kept.name}{CARD_SUFFIX}", prepared.card)
    except OSError as error:
        raise ManymaxError(f"{folder} cannot be written to: {error.strerror or error}.") from None
    return path


def _steps(interactions: Interactions) -> str:
    return ", ".join(f"{step['step']} ({step['interactions']:,} left)" for step in interactions.card)


def last_of_each_pair(interactions: Interactions) -> Interactions:
    """Keep one row of each (user, item) pair: the latest; of rows without times or of equal time the last in the file.

    If the data comes with a split, the row of the earliest part (training first) is kept: an item that was seen in
    training is masked in evaluation, so a row of the same pair in a later part could never be found.
    """
    pairs = interactions.users * interactions.num_items + interactions.items
    if (pairs.sort().values.diff() != 0).all():  # no pair is repeated: no step on the card
        return interactions
    # Stable sorts by several keys, the least important first: file, time, part (descending), pair. The last row of each
    # pair is then the one of the earliest part and, within it, of the latest time.
    sorted_rows = torch.arange(len(interactions))
    for key, descending in ((interactions.times, False), (interactions.parts, True)):
        if key is not None:
            sorted_rows = sorted_rows[key[sorted_rows].argsort(stable=True, descending=descending)]
    sorted_rows = sorted_rows[pairs[sorted_rows].argsort(stable=True)]
    last = torch.ones_like(sorted_rows, dtype=torch.bool)
    last[:-1] = pairs[sorted_rows].diff() != 0
    keep = torch.zeros_like(last)
    keep[sorted_rows[last]] = True
    return interactions.rows(keep).with_step("repeated pairs", removed=int((~last).sum()))


def rated(interactions: Interactions, min_rating: float) -> Interactions:
    """The interactions with rating >= `min_rating`."""
    if interactions.ratings is None:
        raise ArgumentError(
            f"`min_rating` needs ratings, and {interactions.name} has none. Leave `min_rating` out, or name the column "
            "of the ratings: --columns rating=NAME."
        )
    return interactions.rows(interactions.ratings >= min_rating).with_step("rating", min_rating=min_rating)


def core(interactions: Interactions, k_core: int) -> Interactions:
    """The k-core: the largest subset in which every user and every item has at least `k_core` interactions.

    It is unique, so it does not matter in which order users and items with too few interactions are dropped.
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
    """(n,) whether the user (or item) of each row occurs at least `count` times."""
    return (numbers.bincount() >= count)[numbers]
