"""The data card: what was done to a data set, step by step, in words and as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manymax.errors import ArgumentError
from manymax.study.files import read_json

HEADINGS = ("step", "users", "items", "interactions", "sparsity")
SUFFIX = ".card.json"  # a card stands beside the file it speaks of


def card_rows(card: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The card as a table under `HEADINGS`, one row a step.

    >>> card_rows([{"step": "k-core", "k_core": 5, "users": 6038, "items": 3307, "interactions": 835789,
    ...             "sparsity": 0.958143}])
    [['5-core', '6,038', '3,307', '835,789', '95.81 %']]
    """
    return [
        [describe(step), *(f"{step[count]:,}" for count in HEADINGS[1:4]), f"{100 * step['sparsity']:.2f} %"]
        for step in card
    ]


def describe(step: Mapping[str, Any]) -> str:
    """A step in a few words; what it left is said elsewhere.

    >>> describe({"step": "split", "split": "ratio", "seed": 0, "train": 80, "valid": 10, "test": 10})
    'split ratio, seed 0: train 80, valid 10, test 10'
    """
    match step["step"]:
        case "raw":
            size = f" {step['size']}, seed {step['seed']}" if "size" in step else ""
            return f"{step['data']}{size}, all"
        case "repeated pairs":
            return f"last of each pair, {step['removed']:,} rows less"
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
    """What the numbers do not say."""
    notes = [str(step["note"]) for step in card if "note" in step]
    short = [step["users_in_train_only"] for step in card if "users_in_train_only" in step]
    return notes + [f"{count:,} users with fewer than 3 interactions are in training only" for count in short]


def read_card(path: Path) -> list[dict[str, Any]]:
    """The card at `path`, or beside the file at `path`, or the one in the folder `path`."""
    beside = path.with_name(f"{path.stem}{SUFFIX}")
    places = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [p for p in (beside, path) if p.is_file()]
    if len(places) != 1 and path.is_dir():
        raise ArgumentError(f"{path} holds {len(places)} data cards (*{SUFFIX}), expected one. Name a file.")
    if not places or not places[0].name.endswith(".json"):
        raise ArgumentError(f"there is no data card at {path}. `manymax data prepare` writes one.")
    card = read_json(places[0])
    if not isinstance(card, list) or not all(
        isinstance(step, dict) and {"step", *HEADINGS} <= set(step) for step in card
    ):
        raise ArgumentError(f"{places[0]} is no data card: expected a list of steps, each with {', '.join(HEADINGS)}.")
    return card
