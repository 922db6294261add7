"""From queries, class vectors and a target to a loss in blocks: what every exact head shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine.blocks import BlockLoss, BlockRows, Kernel, in_dtype
from manymax.engine.options import HeadOptions, read_options
from manymax.engine.row_target import RowTarget, live_classes, row_target
from manymax.engine.target import Target, check_options, read_target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import full_precision, working
from manymax.ops.reduction import reduce

Options = HeadOptions | Mapping[str, Any] | None


def check_linear(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """Raise unless the queries, class vectors and bias fit each other."""
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    for name, value in tensors.items():
        if value is not None and (not isinstance(value, Tensor) or not value.is_floating_point()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentTypeError(f"`{name}` must be a float tensor; got {kind}.")
    if linear_weight.ndim != 2 or linear_weight.shape[0] == 0:
        raise ArgumentError(f"`linear_weight` must be (classes, features); got shape {tuple(linear_weight.shape)}.")
    if input.ndim == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ArgumentError(
            f"`input` must be (..., {linear_weight.shape[1]}) to fit `linear_weight`; got {tuple(input.shape)}."
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ArgumentError(
            f"`linear_bias` must have shape ({linear_weight.shape[0]},); got {tuple(linear_bias.shape)}."
        )


def _check_constant(target: Tensor | Target, weight: Tensor | None) -> None:
    """Refuse targets and class weights that want a gradient: blocks give one to input, vectors and bias alone."""
    constants = {"target": target.weights if isinstance(target, Target) else target, "weight": weight}
    for name, value in constants.items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"`{name}` requires a gradient, which this head has not: pass `{name}.detach()`, or take the plain loss"
                " of `input @ linear_weight.T`, which has it."
            )


def read_head_target(
    input: Tensor, target: Tensor | Target, weight: Tensor | None, ignore_index: int, multilabel: str, classes: int
) -> Target:
    """The target of queries (..., d), flattened to rows."""
    # only the shape and the dtype of the scores matter for reading a target
    shape = (*input.shape[:-1], classes)
    read = read_target(input.new_empty(()).expand(shape), target, weight, ignore_index, multilabel)
    ids = None if read.ids is None else read.ids.reshape(-1, read.ids.shape[-1])
    weights = read.weights.reshape(-1, read.weights.shape[-1])
    return Target(ids, weights, read.count.reshape(-1), read.divisor.reshape(-1))


def linear_loss(
    make_kernel: Callable[[], Kernel],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    multilabel: str,
    options: Options,
    setting: Tensor | None = None,
    omega: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A loss of `input @ linear_weight.T + linear_bias` in blocks; see `linear_softmax_loss`."""
    check_linear(input, linear_weight, linear_bias)
    check_options(reduction, label_smoothing, multilabel)
    _check_constant(target, weight)
    if input.is_meta:
        raise ArgumentError("`input` is on the meta device, where blocks have no values to look at: take a plain loss.")
    chosen = read_options(options)
    queries, dtype = working(input)
    vectors, bias = (
        in_dtype(linear_weight, queries.dtype),
        None if linear_bias is None else linear_bias.to(queries.dtype),
    )
    classes = linear_weight.shape[0]
    read = read_head_target(queries, target, weight, ignore_index, multilabel, classes)
    rows = row_target(read, weight, live_classes(bias), classes, label_smoothing)
    flat = queries.reshape(-1, queries.shape[-1])
    with full_precision(input):
        value = apply_kernel(make_kernel(), flat, vectors, bias, setting, rows, read, reduction, multilabel, chosen)
        if multilabel == "normalized" and omega is not None:
            extra = omega_rows(rows, omega, chosen.rows(classes))
            value = value + (extra if reduction == "none" else reduce(extra, read.divisor, reduction))
    return (value.reshape(input.shape[:-1]) if reduction == "none" else value).to(dtype)


def apply_kernel(
    kernel: Kernel,
    input: Tensor,
    vectors: Tensor,
    bias: Tensor | None,
    setting: Tensor | None,
    rows: RowTarget,
    read: Target,
    reduction: str,
    multilabel: str,
    options: HeadOptions,
) -> Tensor:
    """The reduced losses of the rows, (n,) or a number, by a kernel that works block by block."""
    scale = torch.ones_like(rows.total)
    if multilabel == "normalized":
        scale = torch.where(rows.total > 0, 1 / torch.where(rows.total > 0, rows.total, 1), 0)
    if reduction == "none":
        ones = replace(rows, coefficient=torch.ones_like(scale))
        return BlockRows.apply(input, vectors, bias, setting, ones, kernel, options) * scale
    if reduction == "mean":
        divisor = read.divisor.sum()
        scale = scale * torch.where(divisor > 0, 1 / torch.where(divisor > 0, divisor, 1), 0)
    return BlockLoss.apply(input, vectors, bias, setting, replace(rows, coefficient=scale), kernel, options)


def omega_rows(rows: RowTarget, omega: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Omega(t / |t|) of each row, 0 where there is no positive; `step` rows at a time where smoothing fills them."""
    scale = torch.where(rows.total > 0, 1 / torch.where(rows.total > 0, rows.total, 1), 0).unsqueeze(1)
    weights = rows.weights * scale
    if rows.share is None or rows.class_weight is None:
        return torch.where(rows.total > 0, omega(weights), 0)
    values = []
    for start in range(0, weights.shape[0], step):
        part = slice(start, start + step)
        dense = (rows.share[part].unsqueeze(1) * scale[part]) * rows.class_weight
        if rows.ids is None:
            dense = dense + weights[part]
        else:
            dense = dense.scatter_add(1, rows.ids[part], weights[part])
        values.append(omega(dense))
    return torch.where(rows.total > 0, torch.cat(values) if values else rows.total, 0)
