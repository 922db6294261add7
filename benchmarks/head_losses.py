"""The losses that heads.py compares: manymax's heads, in plain torch and compiled, and their peers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import entmax as package
import torch
import torch.nn.functional as F
from head_problems import Loss
from torch import Tensor

import manymax
from manymax.engine import native_library

OURS: dict[str, Loss] = {
    "softmax": manymax.linear_softmax_loss,
    "sparsemax": manymax.linear_sparsemax_loss,
    "entmax-1.5": partial(manymax.linear_entmax_loss, alpha=1.5),
    "entmax-1.3": partial(manymax.linear_entmax_loss, alpha=1.3),
    "rankmax": manymax.linear_rankmax_loss,
    "taylor_softmax": manymax.linear_taylor_softmax_loss,
    "rg": manymax.linear_rg_loss,
}
SPARSE = ("sparsemax", "entmax-1.5", "rankmax")
COMPILED: dict[str, Loss] = {}  # stays empty on a machine without a compiler
if native_library.available():
    COMPILED = {f"{name}, compiled": partial(OURS[name], options={"compiled": True}) for name in SPARSE}

# The losses of the entmax package, which take an (N, C) table of scores.
PACKAGE = {"sparsemax": package.sparsemax_loss, "entmax-1.5": package.entmax15_loss}
BISECTION = package.entmax_bisect_loss


def plain_and_compiled(name: str) -> dict[str, Loss]:
    """One of our heads in plain torch, and compiled where it can be."""
    return {key: loss for key, loss in (OURS | COMPILED).items() if key in (name, f"{name}, compiled")}


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of a full (N, C) table of scores, the usual way in torch."""
    return F.cross_entropy(F.linear(x, w), y)


def torch_chunked(rows: int, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's own linear cross entropy, which scores so many rows at a time."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return F.linear_cross_entropy(x, w, y, options=options)


def packaged(function: Callable[..., Tensor], settings: dict[str, Any], x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """A loss of the entmax package on the full table of scores."""
    return function(F.linear(x, w), y, **settings).mean()
