"""`manymax recommend`: what a finished run would show to a user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from manymax.cli.console import open_console, put, put_json, table
from manymax.study.serve import Served


def recommend(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    user: Annotated[list[str], typer.Option(help="Id of a user, as in the data; may be given several times.")],
    top: Annotated[int, typer.Option(help="How many items.")] = 20,
    seen: Annotated[bool, typer.Option(help="Items that the user has already count too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The best items for a user, by the ids of the data.

    \b
    Examples:
      manymax recommend runs/first --user 42
      manymax recommend runs/first --user anna --user bert --top 5 --json
    """
    served = Served.load(run)
    scores, items = served.recommend(torch.tensor([served.number(name) for name in user]), top, seen=seen)
    lists = [_named(served, *row) for row in zip(scores.tolist(), items.tolist(), strict=True)]
    if json:
        put_json([{"user": name, "items": found} for name, found in zip(user, lists, strict=True)])
        return
    rows = [
        [name, str(rank), str(found["item"]), f"{found['score']:.4f}"]
        for name, ranked in zip(user, lists, strict=True)
        for rank, found in enumerate(ranked, 1)
    ]
    put(open_console(), table(["user", "rank", "item", "score"], rows))


def _named(served: Served, scores: list[float], items: list[int]) -> list[dict[str, Any]]:
    """Items by their ids; places that no item is left for are left out."""
    pairs = zip(scores, items, strict=True)
    return [{"item": served.item_ids[item], "score": score} for score, item in pairs if item >= 0]
