"""`manymax export`: write the user and item vectors of a finished run, for a nearest-neighbour index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from torch import Tensor

from manymax.cli.console import say
from manymax.cli.recommend import load_served
from manymax.errors import ManymaxError, check_choice
from manymax.study.files import atomic_write
from manymax.study.records import write_table

VECTOR_FORMATS = ("parquet", "npy")


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, or of a study: its winner.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; the given one if left out.")] = None,
    format: Annotated[
        str,
        typer.Option(help="parquet: one file with ids and vectors; npy: an array, and its ids in a parquet file."),
    ] = "parquet",
) -> None:
    """Write the user and item vectors of a trained model.

    The inner product of a user vector and an item vector is the model's score. Use it to serve a model with a
    nearest-neighbour index or from another program.

    \b
    Examples:
      manymax export runs/first                      user_vectors.parquet, item_vectors.parquet
      manymax export runs/first --out index --format npy
    """
    check_choice("format", format, VECTOR_FORMATS)
    served = load_served(run)
    users, items = served.vectors()
    folder = out or run
    try:
        folder.mkdir(parents=True, exist_ok=True)
        titles = {} if served.item_titles is None else {"title": pa.array(served.item_titles, pa.large_string())}
        sides = (("user", {"user": served.user_ids}, users), ("item", {"item": served.item_ids, **titles}, items))
        for side, names, vectors in sides:
            for path in _write(folder, side, names, vectors, format):
                say(f"{path}  {len(vectors):,} x {vectors.shape[1]}")
    except OSError as error:
        raise ManymaxError(f"{folder} cannot be written to: {error.strerror}. Choose another folder.") from None


def _write(folder: Path, side: str, names: Mapping[str, Any], vectors: Tensor, format: str) -> list[Path]:
    """Write the vectors of one side, "user" or "item", and return the paths; a file appears whole or not at all.

    Args:
        names: columns that say what the vectors belong to: ids and, where the data has them, titles.
    """
    table_path, array = folder / f"{side}_vectors.parquet", vectors.float().contiguous().numpy()
    if format == "parquet":
        rows = pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
        write_table(table_path, {**names, "vector": rows})
        return [table_path]
    array_path, ids_path = folder / f"{side}_vectors.npy", folder / f"{side}_ids.parquet"
    with atomic_write(array_path) as partial, partial.open("wb") as file:
        np.save(file, array)
    write_table(ids_path, names)
    return [array_path, ids_path]
