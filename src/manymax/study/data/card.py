"""The data card: the steps that were taken to prepare a data set, in words and as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manymax.errors import ArgumentError
from manymax.study.data.sources.columns import with_article
from manymax.study.files import read_json

CARD_HEADERS = ("step", "users", "items", "interactions", "sparsity")
CARD_SUFFIX = ".card.json"  # the card of NAME.parquet is NAME.card.json in the same folder


def card_rows(card: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The card as the rows of a table with `CARD_HEADERS`, one row per step.

    >>> card_rows([{"step": "k-core", "k_core": 5, "users": 6038, "items": 3307, "interactions": 835789,
    ...             "sparsity": 0.958143}])
    [['5-core', '6,038', '3,307', '835,789', '95.81 %']]
    """
    return [
        [describe(step), *(f"{step[count]:,}" for count in CARD_HEADERS[1:4]), f"{100 * step['sparsity']:.2f} %"]
        for step in card
    ]


def describe(step: Mapping[str, Any]) -> str:
    """A step in a few words, without the counts after it, which have columns of their own.

    >>> describe({"step": "split", "split": "ratio", "seed": 0, "train": 80, "valid": 10, "test": 10})
    'split ratio, seed 0: train 80, valid 10, test 10'
    """
    match step["step"]:
        case "raw":
            size = f" {step['size']}, seed {step['seed']}" if "size" in step else ""
            return f"{step['data']}{size}, all"
        case "missing":
            counts = {key.removeprefix("without_"): step[key] for key in step if key.startswith("without_")}
            return f"complete rows; {', '.join(f'{counts[role]:,} without {with_article(role)}' for role in counts)}"
        case "repeated pairs":
            return f"last of each pair, {step['removed']:,} rows removed"
        case "rating":
            return f"rating >= {step['min_rating']:g}"
        case "k-core":
            return f"{step['k_core']}-core"
        case "split":
            seed = f", seed {step['seed']}" if "seed" in step else ""
            parts = ", ".join(f"{part} {step[part]:,}" for part in ("train", "valid", "test"))
            return f"split {step['split']}{seed}: {parts}"
        case other:
            return str(other)


def card_notes(card: Iterable[Mapping[str, Any]]) -> list[str]:
    """Remarks on the steps, for below the table."""
    notes = [note for step in card if "note" in step for note in str(step["note"]).split("; ")]
    short = [step["users_in_train_only"] for step in card if "users_in_train_only" in step]
    return notes + [f"{count:,} users with fewer than 3 interactions are in training only" for count in short]


def read_card(path: Path) -> list[dict[str, Any]]:
    """Read a data card.

    Args:
        path: of the card itself, of a data file with a card beside it, or of a folder with one card.
    """
    beside = path.with_name(f"{path.stem}{CARD_SUFFIX}")
    found = sorted(path.glob(f"*{CARD_SUFFIX}")) if path.is_dir() else [p for p in (beside, path) if p.is_file()]
    if len(found) != 1 and path.is_dir():
        raise ArgumentError(f"{path} holds {len(found)} data cards (*{CARD_SUFFIX}), expected one. Name a file.")
    if not found or not found[0].name.endswith(".json"):
        raise ArgumentError(f"there is no data card at {path}. `manymax data prepare` writes one.")
    card = read_json(found[0])
    if not isinstance(card, list) or not all(isinstance(step, dict) and {*CARD_HEADERS} <= set(step) for step in card):
        raise ArgumentError(
            f"{found[0]} is not a data card: expected a list of steps, each with {', '.join(CARD_HEADERS)}."
        )
    return card
