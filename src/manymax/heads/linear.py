"""The exact losses from queries and class vectors: `linear_m_loss`, like torch's linear_cross_entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.heads.blocks import BlockLoss, BlockRows, Kernel, in_dtype
from manymax.heads.kernels import entmax_kernel, rankmax_kernel, softmax_kernel, taylor_kernel
from manymax.heads.options import HeadOptions, read_options
from manymax.heads.target import RowTarget, live_classes, row_target
from manymax.losses import entmax, rankmax, softmax, sparsemax, taylor_softmax
from manymax.losses.base import Target, check_options, read_target
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


def linear_softmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`softmax_loss(input @ linear_weight.T + linear_bias, target)` without the table of scores.

    Arguments and their order are those of `torch.nn.functional.linear_cross_entropy`, with
    `ignore_index` -100 as everywhere. Gradients for `input`, `linear_weight` and `linear_bias` are
    computed in the forward (for "mean" and "sum"), block by block; there are no second derivatives.

    Args:
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        target: as in `softmax_loss`, or what `group_pairs` returns.
        linear_bias: (C,), added to the scores; -inf masks a class.
        weight, reduction, ignore_index, label_smoothing, multilabel: as in `softmax_loss`.
        options: `HeadOptions` or a mapping of its fields.

    Returns:
        A scalar, or (...) for `reduction="none"`, in the dtype of `input` (float32 under autocast).

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.3490)
    """
    return linear_loss(
        softmax_kernel,
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        options=options,
        omega=softmax.omega,
    )


def linear_entmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    alpha: float | Tensor = 1.5,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`entmax_loss` of `input @ linear_weight.T + linear_bias` without the table of scores.

    Where the support is small the gradient touches only its classes, so that of three matmuls one is
    left. `alpha` is a number or a scalar tensor, which gets its gradient; other arguments as in
    `linear_softmax_loss`.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_entmax_loss(input, vectors, torch.tensor([0]), alpha=1.5)
        tensor(0.1844)
    """
    read = entmax.read_alpha(alpha, input)
    if read.ndim:
        raise ArgumentError(f"`alpha` of a head must be a number or a scalar tensor; got shape {tuple(read.shape)}.")
    value = float(read.detach())
    kernel = softmax_kernel if value == 1 else lambda: entmax_kernel(value, read.requires_grad)
    if value == 1 and read.requires_grad:
        raise ArgumentError("a head has no gradient in `alpha` at alpha = 1; use `entmax_loss` or start above 1.")
    return linear_loss(
        kernel,
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        options=options,
        setting=read if read.requires_grad else None,
        omega=lambda probs: entmax.omega(probs, alpha),
    )


def linear_sparsemax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`sparsemax_loss` of `input @ linear_weight.T + linear_bias` without the table of scores.

    Arguments as in `linear_softmax_loss`.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_sparsemax_loss(input, vectors, torch.tensor([1]))
        tensor(0.5625)
    """
    return linear_loss(
        lambda: entmax_kernel(2.0),
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        options=options,
        omega=sparsemax.omega,
    )


def linear_rankmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`rankmax_loss` of `input @ linear_weight.T + linear_bias` without the table of scores.

    Arguments as in `linear_softmax_loss`; smoothing and float rows are refused as by `rankmax_loss`.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_rankmax_loss(input, vectors, torch.tensor([1]))
        tensor(0.9163)
    """
    if isinstance(target, Tensor):
        rankmax.check_target(target, label_smoothing)
    else:
        rankmax.check_target(torch.zeros(0, dtype=torch.long), label_smoothing)
    return linear_loss(
        rankmax_kernel,
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        options=options,
    )


def linear_taylor_softmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    order: int = 2,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """`taylor_softmax_loss` of `input @ linear_weight.T + linear_bias` without the table of scores.

    Arguments as in `linear_softmax_loss`.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_taylor_softmax_loss(input, vectors, torch.tensor([0]))
        tensor(0.6016)
    """
    taylor_softmax.check_order(order)
    return linear_loss(
        lambda: taylor_kernel(order),
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        options=options,
    )
