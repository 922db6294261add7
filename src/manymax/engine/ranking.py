"""Scores and exact top-k of a linear head, in blocks: full ranking without the table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.linear import check_linear
from manymax.engine.options import PAD, Options, read_options
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import working
from manymax.ops.simplex import GROUP


@torch.no_grad()
def linear_scores(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None, block_rows: int = 1024
) -> Tensor:
    """input @ linear_weight.T + linear_bias, (..., C), written block by block into one table.

    In the dtype of `input`, float32 at least.
    """
    check_linear(input, linear_weight, linear_bias)
    flat, vectors = _operands(input, linear_weight)
    out = flat.new_empty(flat.shape[0], linear_weight.shape[0])
    for start in range(0, flat.shape[0], block_rows):
        block = torch.mm(flat[start : start + block_rows], vectors.T, out=out[start : start + block_rows])
        if linear_bias is not None:
            block += linear_bias
    return out.reshape(*input.shape[:-1], linear_weight.shape[0])


def _operands(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The queries as rows and the class vectors, in one dtype, float32 at least: rounded scores would tie."""
    flat, _ = working(input.reshape(-1, input.shape[-1]))
    return flat, linear_weight.to(flat.dtype)


@torch.no_grad()
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    exclude: Tensor | None = None,
    options: Options = None,
    key: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best classes of each query, exactly, best first.

    The maxima of groups of 16 classes are ranked first: the k best classes are in the k best groups.

    Args:
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        k: at most C.
        linear_bias: (C,).
        exclude: (..., E) integer ids to leave out, padded with -100.
        options: block sizes, `HeadOptions` or a mapping of its fields.
        key: from scores to what is ranked instead of them, -inf to -inf.

    Returns:
        scores (..., k), or their keys, float32 at least, and ids (..., k). Where fewer than k classes are left, the
        score is -inf and the id -100.

    Example:
        >>> import torch, manymax
        >>> vectors = torch.tensor([[1.0], [3.0], [2.0]])
        >>> manymax.linear_topk(torch.tensor([[1.0]]), vectors, 2, exclude=torch.tensor([[1]]))
        (tensor([[2., 1.]]), tensor([[2, 0]]))
    """
    check_linear(input, linear_weight, linear_bias)
    classes = linear_weight.shape[0]
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= classes:
        raise ArgumentError(f"`k` must be an integer from 1 to the number of classes, {classes}; got {k!r}.")
    flat, vectors = _operands(input, linear_weight)
    left_out = read_exclude(exclude, input, classes)
    padded = -(-classes // PAD) * PAD
    step = read_options(options).rows(padded)
    buffer = flat.new_empty(min(step, max(1, flat.shape[0])), padded)
    values, ids = flat.new_empty(flat.shape[0], k), torch.empty(flat.shape[0], k, dtype=torch.long, device=flat.device)
    for start in range(0, flat.shape[0], step):
        rows = slice(start, min(start + step, flat.shape[0]))
        scores = buffer[: rows.stop - start]
        torch.mm(flat[rows], vectors.T, out=scores[:, :classes])
        if linear_bias is not None:
            scores[:, :classes] += linear_bias
        if key is not None:
            scores[:, :classes] = key(scores[:, :classes])
        scores[:, classes:] = -torch.inf
        if left_out is not None:
            row, column = (left_out[rows] >= 0).nonzero(as_tuple=True)
            scores[row, left_out[rows][row, column]] = -torch.inf
        values[rows], ids[rows] = _topk_block(scores, k)
    ids.masked_fill_(values == -torch.inf, -100)  # excluded, masked or padding: no class to recommend
    shape = (*input.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape)


def read_exclude(exclude: Tensor | None, input: Tensor, classes: int) -> Tensor | None:
    """Ids to leave out, checked, one row a query: (n, E), or None."""
    if exclude is None:
        return None
    if not isinstance(exclude, Tensor) or exclude.is_floating_point() or exclude.dtype == torch.bool:
        kind = exclude.dtype if isinstance(exclude, Tensor) else type(exclude).__name__
        raise ArgumentTypeError(f"`exclude` must be a tensor of integer ids, padded with -100; got {kind}.")
    if exclude.ndim != input.ndim or exclude.shape[:-1] != input.shape[:-1]:
        raise ArgumentError(
            f"`exclude` must have shape {(*input.shape[:-1], 'E')} to fit `input`; got {tuple(exclude.shape)}."
        )
    flat = exclude.reshape(input[..., 0].numel(), exclude.shape[-1]).long()
    if flat.numel() and (int(flat.max()) >= classes or bool(((flat < 0) & (flat != -100)).any())):
        raise ArgumentError(
            f"`exclude` ids must be in [0, {classes}) or -100; got {int(flat.min())} to {int(flat.max())}."
        )
    return flat


def _topk_block(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """topk over (rows, classes) with classes a multiple of 16, through the maxima of strided groups."""
    rows, classes = scores.shape
    width = classes // GROUP
    if width < 4 * k:
        return scores.topk(k, dim=1)
    grouped = scores.view(rows, GROUP, width)  # group l: classes l, l + width, ...
    chosen = grouped.amax(1).topk(k, dim=1, sorted=False).indices  # (rows, k)
    inside = grouped.gather(2, chosen[:, None, :].expand(rows, GROUP, k)).reshape(rows, GROUP * k)
    values, position = inside.topk(k, dim=1)
    group = chosen.gather(1, position % k)
    return values, position // k * width + group
