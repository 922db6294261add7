"""A batch: what a backbone needs to make queries, and the target of each query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of a step.

    Args:
        users: (B,) int64.
        history: (B, T) item ids in time order, padded at the end with -100; None for backbones that know users by id.
        target: what the head gets: (B,) one positive a row, (B, P) several, padded with -100, (B, T) one for each
            position of the history; None in evaluation.
    """

    users: Tensor
    history: Tensor | None = None
    target: Tensor | None = None
