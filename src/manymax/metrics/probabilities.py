"""Metrics of probabilities that may be exactly 0.

Perplexity is the exponential of a mean of -log p_y, and infinite as soon as one target has probability 0. Sparse maps
give most classes that probability, and some targets are among them. The metrics of Martins et al. stay finite:

    eps-perplexity     exp(mean over rows of -log((p_y + eps) / (1 + eps C)))
    sparsemax score    mean over rows of  p_y + (1 - sum_i p_i^2) / 2

Both need no more than a few numbers of each row, `ProbabilityStats`, which `linear_probability_stats` computes from
queries and class vectors without a table of all probabilities.

Citation: Martins, Marinho and Martins, "Sparse text generation", EMNLP 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.linear import check_linear
from manymax.engine.options import Options, read_options
from manymax.engine.ranking import linear_scores
from manymax.engine.target import Form, read_target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.metrics.rows import reduce_rows
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores, visible

# How far a probability, or a sum of them, may be above 1 by rounding.
_SLACK = 1e-3


class ProbabilityStats(NamedTuple):
    """What metrics need to know of the probabilities of each row; float32 at least.

    target_prob: (...) p_y, the probability of the target; nan in rows without a positive.
    square_sum: (...) sum_i p_i^2.
    support_size: (...) the number of classes whose probability is not 0.
    """

    target_prob: Tensor
    square_sum: Tensor
    support_size: Tensor


@torch.no_grad()
@checked
def target_probability(probs: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The probability of the target of each row, p_y; for several positives the sum of theirs.

    Its mean is the probability of being right when a class is drawn from the map, and the share of rows where it is 0
    says how often a sparse map has ruled out the truth.

    Args:
        probs: (..., C) probabilities, as maps such as `manymax.sparsemax` return them.
        target: ids (...), padded ids (..., P), or bool rows (..., C); for float rows t the result is sum_i t_i p_i.
        ignore_index: the id that is no positive.

    Returns:
        (...) in the dtype of `probs`, float32 at least; nan in rows without a positive.

    Example:
        >>> import torch, manymax
        >>> probs = manymax.sparsemax(torch.tensor([[1.5, 1.0, -1.0], [1.5, 1.0, -1.0], [0.0, 0.0, 0.0]]))
        >>> manymax.metrics.target_probability(probs, torch.tensor([1, 2, -100]))
        tensor([0.2500, 0.0000,    nan])
    """
    probs = _read_probs(probs)
    read = read_target(Form.of(probs), target, None, ignore_index)
    return torch.where(read.count > 0, read.pick(probs), torch.nan)


@torch.no_grad()
@checked
def probability_stats(probs: Tensor, target: Tensor, *, ignore_index: int = -100) -> ProbabilityStats:
    """The numbers of each row that metrics need, from a table of probabilities.

    Args:
        probs, target, ignore_index: as in `target_probability`.

    Example:
        >>> import torch, manymax
        >>> probs = manymax.sparsemax(torch.tensor([[1.5, 1.0, -1.0]]))
        >>> manymax.metrics.probability_stats(probs, torch.tensor([1]))
        ProbabilityStats(target_prob=tensor([0.2500]), square_sum=tensor([0.6250]), support_size=tensor([2]))
    """
    target_prob = target_probability(probs, target, ignore_index=ignore_index)
    # As a norm: the sum of squares without a table of the squares.
    square_sum = torch.linalg.vector_norm(probs, dim=-1, dtype=target_prob.dtype).square()
    return ProbabilityStats(target_prob, square_sum, probs.count_nonzero(-1))


@torch.no_grad()
@checked
def linear_probability_stats(
    map: Callable[[Tensor], Tensor],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    options: Options = None,
) -> ProbabilityStats:
    """The numbers of each row that metrics need, from queries and class vectors, a block of rows at a time.

        p = map(input @ linear_weight.T + linear_bias)

    Args:
        map: a function from scores (n, C) to probabilities (n, C), such as `manymax.entmax`. Temperatures and the like
            go in here: `lambda scores: manymax.entmax(scores / 0.7)`.
        input: (..., d) queries.
        linear_weight: (C, d) class vectors.
        target: ids (...), padded ids (..., P), or bool or float rows (..., C).
        linear_bias: (C,).
        ignore_index: the id that is no positive.
        options: block sizes, `HeadOptions` or a mapping with "block_rows" or "block_scores".

    Returns:
        `ProbabilityStats` with the shape of the rows, (...).

    Example:
        >>> import torch, manymax
        >>> vectors = torch.tensor([[1.5], [1.0], [-1.0]])
        >>> stats = manymax.metrics.linear_probability_stats(
        ...     manymax.sparsemax, torch.ones(2, 1), vectors, torch.tensor([1, 2])
        ... )
        >>> stats.target_prob
        tensor([0.2500, 0.0000])
        >>> manymax.metrics.sparsemax_score(stats.target_prob, stats.square_sum)
        tensor(0.3125)
    """
    check_linear(input, linear_weight, linear_bias)
    shape, classes = input.shape[:-1], linear_weight.shape[0]
    if not isinstance(target, Tensor) or target.shape[: len(shape)] != shape:
        got = f"shape {tuple(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentError(
            f"`target` must be a tensor that begins with the shape {tuple(shape)} of the rows; got {got}."
        )
    honoured = frozenset({"block_scores", "block_rows"})
    step = read_options(options, honoured, "it computes in plain torch and has no gradient").rows(classes)
    queries = input.reshape(-1, input.shape[-1])
    targets = target.reshape(queries.shape[0], *target.shape[len(shape) :])
    # An empty batch is a block of no rows, so that there is always something to put together.
    found = [
        probability_stats(
            map(linear_scores(queries[start : start + step], linear_weight, linear_bias)),
            targets[start : start + step],
            ignore_index=ignore_index,
        )
        for start in range(0, max(1, queries.shape[0]), step)
    ]
    return ProbabilityStats(*(torch.cat(parts).reshape(shape) for parts in zip(*found, strict=True)))


@torch.no_grad()
@checked
def eps_perplexity(target_prob: Tensor, num_classes: int | Tensor, eps: float = 1e-6) -> Tensor:
    """Perplexity after eps was added to the probability of every class: finite if targets have probability 0.

        exp(mean over rows of -log((p_y + eps) / (1 + eps C)))

    With eps = 0 it is the perplexity. Only values at the same eps and C are comparable: each target of probability 0
    adds log(1 / eps) and a little more to the sum.

    Args:
        target_prob: (...) p_y of one positive per row, as `target_probability` returns it. Rows that are nan have no
            positive and are left out.
        num_classes: C; or (...) the number of classes that each row can choose from, where some are masked.
        eps: what is added, at least 0; the default is that of the code of Martins et al.

    Returns:
        A scalar, float32 at least; nan if there is no row with a positive.

    Example:
        >>> import torch, manymax
        >>> target_prob = torch.tensor([0.5, 0.0, 0.25])
        >>> manymax.metrics.eps_perplexity(target_prob, num_classes=1000, eps=0)
        tensor(inf)
        >>> manymax.metrics.eps_perplexity(target_prob, num_classes=1000, eps=1e-4)
        tensor(47.3881)
    """
    target_prob = _read_rows("target_prob", target_prob)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ArgumentError(f"`eps` must be a finite number of at least 0; got {eps!r}.")
    smoothed = (target_prob + eps) / (1 + eps * _read_num_classes(num_classes, target_prob))
    return reduce_rows(-smoothed.log(), "mean").exp()


@torch.no_grad()
@checked
def sparsemax_score(target_prob: Tensor, square_sum: Tensor, reduction: str = "mean") -> Tensor:
    """How good probabilities are, from 0 to 1, for any map, sparse or not.

        p_y + (1 - sum_i p_i^2) / 2  =  1 - |e_y - p|^2 / 2

    It is 1 minus the smallest sparsemax loss of scores that sparsemax maps to p. It is 1 if all probability is on the
    target, and 0 if all is on another class. Among all probabilities the truth has the largest expected score.

    Args:
        target_prob: (...) p_y of one positive per row; nan in rows without a positive.
        square_sum: (...) sum_i p_i^2. `probability_stats` and `linear_probability_stats` return both.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, float32 at least, or (...) for "none". Rows without a positive are nan there and are left out of mean
        and sum.

    Example:
        >>> import torch, manymax
        >>> probs = torch.tensor([[0.75, 0.25, 0.0], [0.75, 0.25, 0.0], [0.0, 0.0, 1.0]])
        >>> stats = manymax.metrics.probability_stats(probs, torch.tensor([1, 2, 2]))
        >>> manymax.metrics.sparsemax_score(stats.target_prob, stats.square_sum, reduction="none")
        tensor([0.4375, 0.1875, 1.0000])
    """
    target_prob, square_sum = _read_rows("target_prob", target_prob), _read_rows("square_sum", square_sum)
    if target_prob.shape != square_sum.shape:
        raise ArgumentError(
            f"`square_sum` must have the shape of `target_prob`, {tuple(target_prob.shape)}; got"
            f" {tuple(square_sum.shape)}."
        )
    return reduce_rows(target_prob + (1 - square_sum) / 2, reduction)


def _read_probs(probs: Tensor) -> Tensor:
    """Probabilities (..., C) in float32 at least; raises unless they are not negative and sum to 1."""
    check_scores(probs, "probs")
    # Rows in half precision are as good as their rounding.
    slack = max(_SLACK, 8 * torch.finfo(probs.dtype).eps)
    probs = _widened(probs)
    if visible(probs) and probs.numel():
        total = probs.sum(-1)
        # Written so that nan is wrong: every comparison with it is False.
        wrong = ~((total - 1).abs() <= slack) | (probs.amin(-1) < 0)
        if wrong.any():
            raise ArgumentError(
                "`probs` must be at least 0 and sum to 1 in every row; got a row with sum"
                f" {total[wrong][0].item():.6g} and smallest entry {probs[wrong][0].min().item():.6g}. Pass what a map"
                " returns, such as `torch.softmax(scores, -1)`, not scores or log-probabilities."
            )
    return probs


def _read_rows(argument: str, values: Tensor) -> Tensor:
    """One number from 0 to 1, or nan, for each row, in float32 at least."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentTypeError(f"`{argument}` must be a float tensor; got {kind}.")
    if visible(values) and ((values < 0) | (values > 1 + _SLACK)).any():
        raise ArgumentError(
            f"`{argument}` must be from 0 to 1, or nan in a row without a positive; got"
            f" {values[(values < 0) | (values > 1 + _SLACK)][0].item():.6g}."
        )
    return _widened(values)


def _read_num_classes(num_classes: int | Tensor, target_prob: Tensor) -> int | Tensor:
    """The number of classes, or of each row's; raises unless it is an integer of at least 1."""
    if isinstance(num_classes, Tensor):
        if num_classes.is_floating_point() or num_classes.is_complex() or num_classes.dtype == torch.bool:
            raise ArgumentTypeError(f"`num_classes` must hold integers; got {num_classes.dtype}.")
        if num_classes.ndim and num_classes.shape != target_prob.shape:
            raise ArgumentError(
                f"`num_classes` must be one number, or of the shape of `target_prob`, {tuple(target_prob.shape)}; got"
                f" shape {tuple(num_classes.shape)}."
            )
        if visible(num_classes) and (num_classes < 1).any():
            raise ArgumentError(f"`num_classes` must be at least 1; got {num_classes.min().item()}.")
    elif isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise ArgumentError(f"`num_classes` must be an integer of at least 1; got {num_classes!r}.")
    return num_classes


def _widened(values: Tensor) -> Tensor:
    """Half precision as float32, other floats as they are: 1 + eps C has no digits for a small eps in bfloat16."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
