"""A small study on MovieLens-1M in run folders, and how to read the page that is made of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.study.report.generated import write_run

ML1M: dict[str, Any] = {"data": "/somewhere/else/ml-1m.parquet", "preset": "paper-table"}


def originals(folder: Path) -> Path:
    """A small study: two learning rates, several numbers of negatives, one run that failed, one that diverged."""
    for lr, quality in ((1e-3, 0.26), (1e-4, 0.24)):
        write_run(folder, loss="softmax", lr=lr, quality=quality, **ML1M)
    write_run(folder, loss="softmax", lr=1e-3, quality=0.27, seed=1, **ML1M)
    write_run(folder, loss="rankmax", quality=0.30, **ML1M)
    write_run(folder, loss="sparsemax", quality=0.20, **ML1M)
    for k, quality in ((5, 0.22), (10, 0.24), (100, 0.265)):
        write_run(folder, loss="sampled_softmax", num_negatives=k, quality=quality, **ML1M)
    for ridge, quality in ((0.1, 0.25), (1.0, 0.28)):
        write_run(folder, loss="rg", solver="als", ridge=ridge, quality=quality, **ML1M)
    write_run(folder, loss="entmax", status="failed", reason="no memory at /somewhere", **ML1M)
    write_run(folder, loss="entmax", lr=0.5, status="diverged", reason="the loss is nan", **ML1M)
    return folder


def section(text: str, heading: str) -> str:
    """From a heading to the next one of its level or above."""
    level = heading.partition(" ")[0]
    rest = text.partition(f"{heading}\n")[2]
    assert rest, f"there is no {heading!r}"
    return re.split(rf"^#{{2,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


def row(text: str, *starts: str) -> list[str]:
    """The cells of the one row of a table that begins so."""
    (found,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(starts) + " |")]
    return [cell.strip() for cell in found.strip("| ").split(" | ")]
