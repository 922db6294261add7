"""Which tensors can be looked at, and in which dtype the arithmetic runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from manymax.errors import ArgumentError, ArgumentTypeError


def visible(*tensors: Tensor) -> bool:
    """Whether values may be checked: eager use on the CPU.

    Under `torch.compile`, the `torch.func` transforms and in fake tensors there are no values to look at, and on a
    GPU looking would make the host wait.
    """
    if torch.compiler.is_compiling():
        return False
    hidden = (is_functorch_wrapped_tensor(t) or isinstance(t, FakeTensor) for t in tensors)
    return all(t.device.type == "cpu" for t in tensors) and not any(hidden)


def learned(tensor: Tensor) -> bool:
    """Whether a gradient in `tensor` may be asked for; under `torch.func` that does not show."""
    return tensor.requires_grad or (not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(tensor))


def check_scores(scores: Tensor, argument: str = "scores") -> None:
    """Raise unless `scores` is a float tensor with at least one class in its last dimension."""
    if not isinstance(scores, Tensor):
        raise ArgumentTypeError(f"`{argument}` must be a tensor; got {type(scores).__name__}.")
    if not scores.is_floating_point():
        raise ArgumentTypeError(f"`{argument}` must be a float tensor; got dtype {scores.dtype}. Use `.float()`.")
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ArgumentError(
            f"`{argument}` must be (..., classes) with at least 1 class; got shape {tuple(scores.shape)}."
        )


def check_finite(maximum: Tensor) -> None:
    """Raise if a row maximum shows nan or +inf in the scores, or a row without any live class."""
    if not visible(maximum) or maximum.isfinite().all():
        return
    if maximum.isnan().any():
        raise ArgumentError("`scores` must not hold nan; got at least one row with nan.")
    if (maximum == torch.inf).any():
        raise ArgumentError("`scores` must not hold +inf; got at least one row with +inf. Mask a class with -inf.")
    raise ArgumentError("`scores` has a row in which every class is masked (-inf); leave at least one class alive.")


def working(scores: Tensor) -> tuple[Tensor, torch.dtype]:
    """The scores in the dtype of the arithmetic (float32 at least), and the dtype of the result.

    Half precision comes back as it came, except under autocast, which returns float32 as it does
    for `torch.nn.functional.cross_entropy`.
    """
    if scores.dtype not in (torch.float16, torch.bfloat16):
        return scores, scores.dtype
    autocast = torch.is_autocast_enabled(scores.device.type)
    return scores.float(), torch.float32 if autocast else scores.dtype


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast would run products in half precision; in here it is off, where the device has it."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
