"""`manymax recommend`: the best items for a user, by the model of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from manymax.cli.console import open_console, put, put_json, say, table
from manymax.study.records import read_record
from manymax.study.report.answer import winner_folder
from manymax.study.serve import Served


def recommend(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, or of a study: its winner.")],
    user: Annotated[list[str], typer.Option(help="Id of a user as in the data; may be given several times.")],
    top: Annotated[int, typer.Option(help="How many items to list.")] = 20,
    seen: Annotated[bool, typer.Option(help="Also list items that the user already has.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the lists as JSON.")] = False,
) -> None:
    """List the best items for a user by a trained model.

    Users and items are named by the ids of the data. Use it to look at what a model has learned, or to get
    recommendations for a few users. For all users, or for a service, `manymax export` writes the vectors.

    \b
    Examples:
      manymax recommend runs/first --user 42
      manymax recommend studies/choose-ratings --user 42        the loss that was chosen
      manymax recommend runs/first --user anna --user bert --top 5 --json
    """
    served = load_served(run)
    scores, items = served.recommend(torch.tensor([served.number(name) for name in user]), top, seen=seen)
    lists = [_with_ids(served, *row) for row in zip(scores.tolist(), items.tolist(), strict=True)]
    if json:
        put_json([{"user": name, "items": found} for name, found in zip(user, lists, strict=True)])
        return
    titled = served.item_titles is not None
    rows = [
        [name, str(rank), str(found["item"]), *([found["title"] or "-"] if titled else []), f"{found['score']:.4f}"]
        for name, ranked in zip(user, lists, strict=True)
        for rank, found in enumerate(ranked, 1)
    ]
    put(open_console(), table(["user", "rank", "item", *(["title"] if titled else []), "score"], rows))


def load_served(folder: Path) -> Served:
    """The model of a run, or of the winner of a study.

    On stderr it says which run of a study that is.
    """
    run = winner_folder(folder)
    served = Served.load(run)
    if run != folder:
        say(f"{served.config.loss.name}, the winner of {folder}: {run}", err=True)
    note_unchecked(run)
    return served


def note_unchecked(run: Path) -> None:
    """Say on stderr that the files of a run could not be checked, where its record has no checksums of them."""
    if not read_record(run).files:
        say(f"{run}: its record has no checksums (version 0.1.0), and its files were read unchecked", err=True)


def _with_ids(served: Served, scores: list[float], items: list[int]) -> list[dict[str, Any]]:
    """The ranked items by their ids in the data; a place that no item is left for holds -100 and is dropped."""
    titles = served.item_titles
    return [
        {"item": served.item_ids[item], **({} if titles is None else {"title": titles[item]}), "score": score}
        for score, item in zip(scores, items, strict=True)
        if item >= 0
    ]
