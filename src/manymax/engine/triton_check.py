"""Which calls go to Triton kernels, and the comparison with plain torch that comes before the first of them.

Nobody has run the kernels on every device and with every version of Triton. So each of them is compared with plain
torch on the very device that it is about to serve, on a small case with small and large supports, ties, masked classes
and several positives: once per process, kernel and dtype. One that differs is not used, and a warning names it.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine.block_loop import run
from manymax.engine.blocks import Kernel
from manymax.engine.keywords import Keywords
from manymax.engine.native_library import VARIABLE
from manymax.engine.options import HeadOptions
from manymax.engine.ranks import Shards
from manymax.engine.row_target import RowTarget
from manymax.engine.triton_backend import BACKEND, refuses
from manymax.errors import ManymaxError

# Of the comparison, relative to the largest number of a tensor. In float32 plain torch may multiply in TF32.
DIFFERENCE = {torch.float32: 2e-3, torch.float64: 1e-9}
CHECKED_CLASSES, CHECKED_ROWS, CHECKED_DIM = 150, 6, 8

_found: dict[tuple[str, torch.device, torch.dtype], str | None] = {}


def settle_back_end(keywords: Keywords, kernel: Kernel, queries: Tensor, num_classes: int) -> Keywords:
    """The keywords of a call, with "triton" as the back end if Triton kernels serve it, and without if they do not.

    Raises:
        ManymaxError: where the caller demands Triton and it cannot serve.
    """
    options = keywords.options
    wanted = os.environ.get(VARIABLE, "auto") if options.backend == "auto" else options.backend
    demanded = options.backend == BACKEND
    on_device = queries.device.type != "cpu"
    if wanted != BACKEND and not (wanted == "auto" and on_device):
        return keywords
    reason = None if kernel.triton else "this member has no Triton kernel."
    reason = reason or refuses(queries, num_classes) or difference(kernel, queries)
    if reason is None:
        return replace(keywords, options=replace(options, backend=BACKEND))
    if demanded:
        raise ManymaxError(f"`options.backend` is {BACKEND!r}, which cannot serve this call: {reason}")
    return keywords


def difference(kernel: Kernel, like: Tensor) -> str | None:
    """How a kernel differs from plain torch on the device of a tensor, as a sentence; None if it agrees there.

    The first comparison on a device takes as long as Triton compiles the kernels; what it found is kept.
    """
    key = kernel.triton, like.device, like.dtype
    if key not in _found:
        _found[key] = _compare(kernel, like)
        if _found[key] is not None:
            warnings.warn(f"{_found[key]} Everything it would have served runs in plain torch.", stacklevel=2)
    return _found[key]


def _compare(kernel: Kernel, like: Tensor) -> str | None:
    """The comparison, of the loss of each row and of all gradients."""
    name = f"the Triton kernel {kernel.triton!r}"
    try:
        with torch.no_grad():
            expected, found = (_results(kernel, like, backend) for backend in ("torch", BACKEND))
    except Exception as error:  # whatever a compiler may raise: a device that is not known to it, or no compiler at all
        return f"{name} does not run on {like.device}: {type(error).__name__}: {str(error).strip()[:500]}"
    for what, ours, theirs in zip(("losses", *_TENSORS), found, expected, strict=True):
        gap = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-3))
        if not gap <= DIFFERENCE[like.dtype]:  # true for nan
            return f"{name} differs from plain torch on {like.device}: its {what} are off by {gap:.0e}."
    return None


_TENSORS = ("gradients of queries", "gradients of class vectors", "gradients of the bias", "gradient of the setting")


def _results(kernel: Kernel, like: Tensor, backend: str) -> list[Tensor]:
    """Losses and gradients of a small case on one back end."""

    # From arithmetic and not from a generator, whose state belongs to the caller.
    def spread(*shape: int, step: float) -> Tensor:
        count = torch.arange(torch.Size(shape).numel(), device=like.device, dtype=torch.float64)
        return (8 * torch.frac(count * step) - 4).round().div(4).reshape(shape).to(like.dtype)

    # Rows whose scores are close together and rows whose scores are not; the second half of the classes repeats the
    # first, so that there are ties.
    scale = (
        torch.tensor([1 / 64, 1.0, 4.0], device=like.device, dtype=like.dtype).repeat(CHECKED_ROWS // 3).unsqueeze(1)
    )
    input = scale * spread(CHECKED_ROWS, CHECKED_DIM, step=0.6180339887)
    vectors = spread(CHECKED_CLASSES // 2, CHECKED_DIM, step=0.7548776662).repeat(2, 1)
    bias = torch.zeros(CHECKED_CLASSES, device=like.device, dtype=like.dtype)
    bias[3::5] = -torch.inf
    ids = torch.arange(2 * CHECKED_ROWS, device=like.device).reshape(CHECKED_ROWS, 2) * 5
    weights = torch.ones_like(ids, dtype=like.dtype)
    weights[1, 1] = 0  # padding
    # Never 1 over the total: then a factor that is forgotten would not show.
    coefficient = 0.3 + 0.1 * torch.arange(CHECKED_ROWS, device=like.device).to(like.dtype)
    target = RowTarget(ids, weights, None, None, weights.sum(1), coefficient)
    keywords = Keywords(options=HeadOptions(backend=backend))
    shards, wants = Shards((CHECKED_CLASSES,)), (True, True, True)
    losses, gradients, setting, _ = run(input, vectors, bias, target, kernel, keywords, shards, wants)
    return [losses, *(part for part in gradients.finish() if part is not None), setting]
