"""Checks of what callers give to samplers; each error names its argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import visible


def check_positive_integer(argument: str, value: Any) -> int:
    """`value`; raises unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"`{argument}` must be an integer >= 1; got {value!r}.")
    if value < 1:
        raise ArgumentError(f"`{argument}` must be an integer >= 1; got {value}.")
    return value


def check_number(argument: str, value: float, low: float, high: float = math.inf) -> float:
    """`value`; raises unless it is a finite number with low <= value <= high."""
    if not (low <= value <= high and math.isfinite(value)):  # every comparison with nan is false
        raise ArgumentError(f"`{argument}` must be a number from {low} to {high}; got {value!r}.")
    return value


def check_ids(argument: str, ids: Tensor, num_classes: int) -> Tensor:
    """`ids` as int64; raises unless they are a tensor of integers from 0 to num_classes - 1."""
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ArgumentTypeError(
            f"`{argument}` must be a tensor of integer ids; got {getattr(ids, 'dtype', type(ids))}."
        )
    if ids.numel() and visible(ids):
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= num_classes:
            raise ArgumentError(
                f"`{argument}` must hold ids from 0 to {num_classes - 1}; got {low if low < 0 else high}. "
                "Drop ignored rows before drawing."
            )
    return ids.long()


def batch_shape(
    batch: int | Sequence[int] | None, target: Tensor | None, input: Tensor | None
) -> tuple[int, ...] | None:
    """The batch shape that all given arguments agree on; None if none is given. Raises if they disagree."""
    given = {"batch": None if batch is None else (batch,) if isinstance(batch, int) else tuple(batch)}
    if target is not None:
        if not isinstance(target, Tensor) or target.dim() not in (1, 2):
            raise ArgumentError(f"`target` must be a tensor (N,) or (N, P); got {_shape(target)}.")
        given["target"] = tuple(target.shape[:1])
    if input is not None:
        if not isinstance(input, Tensor) or input.dim() != 2 or not input.dtype.is_floating_point:
            raise ArgumentError(f"`input` must be floating-point queries (N, d); got {_shape(input)}.")
        given["input"] = tuple(input.shape[:1])
    shapes = {name: shape for name, shape in given.items() if shape is not None}
    if len(set(shapes.values())) > 1:
        raise ArgumentError(f"`batch`, `target` and `input` must have the same rows; got {shapes}.")
    return next(iter(shapes.values()), None)


def check_row_ids(argument: str, ids: Tensor | None, target: Tensor | None) -> Tensor | None:
    """`ids`; raises unless they are None or one int64 id for each row of the target."""
    if ids is not None and (target is None or ids.shape != target.shape[:1] or ids.dtype != torch.int64):
        rows = "no `target`" if target is None else f"a target of {target.shape[0]} rows"
        raise ArgumentError(f"`{argument}` must be an int64 id for each row of `target`; got {_shape(ids)} for {rows}.")
    return ids


def check_class_vectors(weight: Tensor | None, input: Tensor | None, num_classes: int) -> Tensor | None:
    """`weight`; raises unless it is None or one vector (C, d) per class that fits the queries."""
    dim = None if input is None else input.shape[1]
    if weight is not None and (weight.dim() != 2 or len(weight) != num_classes or dim not in (None, weight.shape[1])):
        expected = f"({num_classes}, {'d' if dim is None else dim})"
        raise ArgumentError(f"`linear_weight` must be {expected}, one vector per class; got {_shape(weight)}.")
    return weight


def check_class_bias(bias: Tensor | None, num_classes: int) -> Tensor | None:
    """`bias`; raises unless it is None or one number per class."""
    if bias is not None and bias.shape != (num_classes,):
        raise ArgumentError(f"`linear_bias` must be ({num_classes},), one number per class; got {_shape(bias)}.")
    return bias


def check_support(log_q_target: Tensor | None) -> None:
    """Raise if a positive has probability 0 under the proposal."""
    if log_q_target is not None and visible(log_q_target) and torch.isneginf(log_q_target).any():
        missing = int(torch.isneginf(log_q_target).sum())
        raise ArgumentError(
            f"`target` must have positive probability under q; got {missing} positives with q = 0 (a zero count?). "
            "Build the sampler with `smoothing` > 0, or drop those rows."
        )


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
