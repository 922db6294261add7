"""Checks of the arguments of `RGFactorization`: sizes, numbers, ids, values and priors."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError


def count_new(argument: str, count: int | None, ids: Any, axis: int) -> int:
    """The number of new users or items: the given one, else that of the matrix, else the largest id + 1."""
    if count is not None:
        return check_size(argument, count)
    if isinstance(ids, Tensor) and ids.dim() == 1:
        return int(ids.max()) + 1 if len(ids) else 1
    return int(ids.shape[axis])


def check_size(argument: str, value: int) -> int:
    """The value, if it is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"`{argument}` must be an int; got {type(value).__name__}.")
    if value < 1:
        raise ArgumentError(f"`{argument}` must be at least 1; got {value}.")
    return value


def check_number(argument: str, value: float, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """The value as a float, if it is a finite number above `above` and at least `least`."""
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise ArgumentTypeError(f"`{argument}` must be a number; got {type(value).__name__}.")
    if not (math.isfinite(value) and value > above and value >= least):
        wanted = f"above {above}" if above > -math.inf else f"at least {least}" if least > -math.inf else ""
        raise ArgumentError(f"`{argument}` must be a finite number {wanted}; got {value}.")
    return float(value)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype, if it is one that the systems can be solved in."""
    if dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(f"`dtype` must be torch.float32 or torch.float64; got {dtype}.")
    return dtype


def check_prior(prior: Tensor, size: int) -> Tensor:
    """The prior in float64, if it has one positive weight for each of `size` items."""
    check_tensor("prior", prior)
    if prior.shape != (size,):
        raise ArgumentError(f"`prior` must have one weight per item, shape ({size},); got {tuple(prior.shape)}.")
    if not bool((prior.isfinite() & (prior > 0)).all()):
        raise ArgumentError("`prior` must be positive and finite; for counts with zeros pass counts + 1.")
    return prior.detach().double()


def check_tensor(argument: str, value: Tensor) -> None:
    """Raise unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"`{argument}` must be a tensor; got {type(value).__name__}.")


def check_values(values: Tensor, shape: torch.Size) -> Tensor:
    """The values without gradient, if they have the shape of the ids, are finite and not negative."""
    check_tensor("values", values)
    if values.shape != shape:
        raise ArgumentError(f"`values` must have the shape of `users`, {tuple(shape)}; got {tuple(values.shape)}.")
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ArgumentError("`values` must be finite and at least 0.")
    return values.detach()


def check_ids(argument: str, ids: Tensor, size: int) -> Tensor:
    """The ids, if they are integers in [0, size), in one dimension."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{argument}` must be an integer tensor; got {got}.")
    if ids.dim() != 1:
        raise ArgumentError(f"`{argument}` must have one dimension; got shape {tuple(ids.shape)}.")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ArgumentError(f"`{argument}` must lie in [0, {size}); got {int(ids.min())} to {int(ids.max())}.")
    return ids
