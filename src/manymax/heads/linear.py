"""The exact losses from queries and class vectors: `linear_m_loss`, like torch's linear_cross_entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.linear import Options, linear_loss
from manymax.engine.target import Target
from manymax.errors import ArgumentError
from manymax.members.entmax import loss as entmax
from manymax.members.entmax.kernel import entmax_kernel
from manymax.members.rankmax import loss as rankmax
from manymax.members.rankmax.kernel import rankmax_kernel
from manymax.members.softmax import loss as softmax
from manymax.members.softmax.kernel import softmax_kernel
from manymax.members.sparsemax import loss as sparsemax
from manymax.members.taylor_softmax import loss as taylor_softmax
from manymax.members.taylor_softmax.kernel import taylor_kernel


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
