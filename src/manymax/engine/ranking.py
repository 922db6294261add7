"""Scores and exact top-k of a linear head; the top-k in blocks, without the (rows, classes) table of scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manymax.engine.call_keywords import scaled_queries
from manymax.engine.exclude import read_listed_ids
from manymax.engine.half import widened
from manymax.engine.keywords import read_scoring
from manymax.engine.linear import check_linear
from manymax.engine.options import PAD, Options, read_options
from manymax.engine.scoring import Scoring
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import working
from manymax.ops.topk import topk_block


@torch.no_grad()
@checked
def linear_scores(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    block_rows: int = 1024,
    *,
    normalize: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """input @ linear_weight.T + linear_bias, without gradients.

    Args:
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        linear_bias: (C,).
        block_rows: rows computed at a time.
        normalize, temperature, softcap: as in a head.

    Returns:
        (..., C) in the dtype of `input`, float32 at least.

    Example:
        >>> import torch, manymax
        >>> manymax.linear_scores(torch.tensor([[2.0]]), torch.tensor([[1.0], [3.0]]))
        tensor([[2., 6.]])
    """
    check_linear(input, linear_weight, linear_bias)
    flat = scaled_queries(_queries(input), read_scoring(normalize, temperature, softcap))
    scoring = Scoring.of(linear_weight, linear_bias, normalize, softcap, None)
    # Straight into the result: blocks of a few rows, to which the bias is added while they are in cache.
    out = flat.new_empty(flat.shape[0], linear_weight.shape[0])
    for start in range(0, flat.shape[0], block_rows):
        block = out[start : start + block_rows]
        _multiply(flat[start : start + block_rows], linear_weight, block)
        scoring.finish(block)
    return out.reshape(*input.shape[:-1], linear_weight.shape[0])


def _queries(input: Tensor) -> Tensor:
    """The queries as rows (N, d), in float32 at least: scores in half precision tie, which leaves ranks to chance."""
    return working(input.reshape(-1, input.shape[-1]))[0]


def _multiply(queries: Tensor, linear_weight: Tensor, out: Tensor) -> None:
    """Write queries (n, d) @ class vectors (C, d) to out (n, C), in the precision of the queries."""
    if linear_weight.dtype == queries.dtype:
        torch.mm(queries, linear_weight.T, out=out)
        return
    for classes, vectors in widened(linear_weight, queries.dtype):
        torch.mm(queries, vectors.T, out=out[:, classes])


@torch.no_grad()
@checked
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    exclude: Tensor | None = None,
    options: Options = None,
    key: Callable[[Tensor], Tensor] | None = None,
    normalize: bool = False,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best classes of each query, exactly, best first, without the table of scores.

    The maxima of groups of 16 classes are ranked first, and then the classes of the k groups with the largest maxima.
    The k best classes are always among those.

    Args:
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        k: the number of classes to return, at most C.
        linear_bias: (C,).
        exclude: (..., E) integer ids to leave out, padded with -100.
        options: block sizes, `HeadOptions` or a mapping of its fields.
        key: a function from scores to the numbers that classes are ranked by instead; it keeps -inf.
        normalize, temperature, softcap: as in a head.

    Returns:
        scores (..., k), or their keys, float32 at least, and ids (..., k). Where fewer than k classes are left, the
        score is -inf and the id -100. Which of several classes with equal scores comes first is up to torch's topk.

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
    flat = scaled_queries(_queries(input), read_scoring(normalize, temperature, softcap))
    scoring = Scoring.of(linear_weight, linear_bias, normalize, softcap, None)
    # Checked before the first block, so that a bad id is an error and not a class that stays in the list.
    left_out = read_listed_ids("exclude", exclude, input.shape[:-1], classes)
    padded = -(-classes // PAD) * PAD  # for the matmul, and so that every class is in a group of 16
    step = read_options(options).rows(padded)  # blocks as in a training step, in one buffer
    buffer = flat.new_empty(min(step, max(1, flat.shape[0])), padded)
    values, ids = flat.new_empty(flat.shape[0], k), torch.empty(flat.shape[0], k, dtype=torch.long, device=flat.device)
    for start in range(0, flat.shape[0], step):
        rows = slice(start, min(start + step, flat.shape[0]))
        scores = buffer[: rows.stop - start]
        _multiply(flat[rows], linear_weight, scores[:, :classes])
        scoring.finish(scores)
        if key is not None:
            scores[:, :classes] = key(scores[:, :classes])
        scores[:, classes:] = -torch.inf  # padding never ranks
        if left_out is not None:  # after the key, which could make a number of -inf; -100 is dropped
            row, column = (left_out[rows] >= 0).nonzero(as_tuple=True)
            scores[row, left_out[rows][row, column]] = -torch.inf
        values[rows], ids[rows] = topk_block(scores, k)  # k <= C <= padded: there are always k columns
    ids.masked_fill_(values == -torch.inf, -100)  # excluded, masked by the bias, or padding: no class to recommend
    shape = (*input.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape)
