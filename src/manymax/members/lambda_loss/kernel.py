"""LambdaRank and LambdaLoss of a block of scores: each row is sorted once, and every positive takes a pass over it.

In the order of the ranks a row is a list without gaps, so that the weights of the pairs of a positive follow from small
tables over ranks and their distances. The gradient is summed up in that order and goes back to the classes at the end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from manymax.engine import native
from manymax.engine.blocks import Block, BlockResult, Dense, Kernel, native_rows, piece_size
from manymax.engine.cost import EntryCost, NativeCost, Work, exact_cost
from manymax.engine.row_target import RowTarget
from manymax.errors import ArgumentError
from manymax.members.lambda_loss.loss import DISTANCE, RANK, best_first, beyond, gain, ideal_dcg, near
from manymax.ops.checks import check_finite, readable, visible
from manymax.ops.row_blocks import row_blocks

COST = exact_cost(
    EntryCost(Work(exponentials=4, passes=42), calls=100, tables=0.1, plain=12, each=True),
    # A sort of the row, as in torch; then for each positive an exponential, a logarithm and two divisions per score.
    native=NativeCost(Work(passes=30), each=Work(exponentials=2)),
)


class Tables(NamedTuple):
    """What the weights of pairs are made of, in the dtype of the scores, for ranks from 1 to C.

    near: (2 C - 1,) for distances of ranks from 1 - C to C - 1; 0 at 0. beyond: (C,).
    gains: (C,) of LambdaRank, which needs nothing else; None for the others.
    """

    near: Tensor
    beyond: Tensor
    gains: Tensor | None

    def weights(self, own: Tensor, other: Tensor) -> Tensor:
        """delta of pairs of a positive and a negative, from ranks (n, 1) and (C,) that are counted from 0 on."""
        if self.gains is not None:
            return (self.gains[own] - self.gains[other]).abs()
        return self.near[other - own + len(self.beyond) - 1] * self.beyond[torch.maximum(own, other)]


@lru_cache(maxsize=8)  # the same for every block of a training
def _tables(num_classes: int, variant: str, k: int, dtype: torch.dtype, device: torch.device) -> Tables:
    # In float64 first: the gain of a rank far down differs from the next in its last digits.
    ranks = torch.arange(1, num_classes + 1, dtype=torch.float64, device=device)
    side = near(ranks[:-1], variant)
    both = torch.cat([side.flip(0), side.new_zeros(1), side])
    gains = gain(ranks, k).to(dtype) if variant == RANK else None
    return Tables(both.to(dtype), beyond(ranks, k).to(dtype), gains)


def lambda_kernel(variant: str = DISTANCE, k: int = 20, sigma: float = 1.0) -> Kernel:
    """The kernel of LambdaRank and LambdaLoss.

    Example:
        >>> import torch, manymax
        >>> input, vectors = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.5, 5.0], [-1.0, 3.0]])
        >>> manymax.linear_lambda_loss(input, vectors, torch.tensor([1]), variant="lambdaloss", k=0)
        tensor(0.5607)
    """

    def run(block: Block) -> BlockResult:
        scores, weights = block.scores, block.target.weights
        counts = weights != 0
        if visible(scores) and (counts & (block.target.pick(scores) == -torch.inf)).any():
            check_finite(scores.amax(1))  # reported before a masked positive that may follow from it
            raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
        # Fake tensors are not for keeping: those of another mode are of no use to the next.
        tables_of = _tables if readable(scores) else _tables.__wrapped__
        tables = tables_of(block.num_classes, variant, k, scores.dtype, scores.device)
        ideal = ideal_dcg(counts.sum(1), counts.shape[1], k).to(weights.dtype)
        target = replace(block.target, weights=weights / ideal.unsqueeze(1))
        block = replace(block, target=target)
        return _native_rows(block, tables, sigma) if block.level is not None else _rows(block, tables, sigma)

    return Kernel(run, undoes_cap=native_rows)


def _native_rows(block: Block, tables: Tables, sigma: float) -> BlockResult:
    """The result of a block by kernel.cpp."""
    rows = native.KernelCall(block)
    rows.run("lambda_rows", *tables, torch.tensor(sigma, dtype=torch.float64))
    check_finite(rows.maximum)
    return BlockResult(rows.value.to(block.scores.dtype), [*rows.parts])


def _rows(block: Block, tables: Tables, sigma: float) -> BlockResult:
    """The result of a block in plain torch, a few rows at a time; the gradient overwrites the scores."""
    scores, target = block.scores[:, : block.num_classes], block.target
    check_finite(scores.amax(1))
    losses = scores.new_zeros(len(scores))
    for rows in row_blocks(
        len(scores), scores.shape[1], piece_size(scores)
    ):  # in pieces, which stay in cache between the passes
        losses[rows], gradient = _piece(scores[rows], target[rows], tables, sigma)
        scores[rows] = gradient
    parts = [] if target.coefficient is None else [Dense(block.scores, target.coefficient)]
    return BlockResult(losses, [*parts])


def _piece(scores: Tensor, target: RowTarget, tables: Tables, sigma: float) -> tuple[Tensor, Tensor]:
    """Losses (n,) and gradient (n, C) of some rows of scores (n, C)."""
    assert target.ids is not None  # the engine lists the positives of a joint member
    counts = target.weights != 0  # padding has the weight 0
    positive = torch.zeros_like(scores).scatter_add_(1, target.ids, counts.to(scores.dtype)) > 0
    order = best_first(scores, positive)
    places = torch.arange(scores.shape[1], device=scores.device)
    ranks = torch.empty_like(order).scatter_(1, order, places.expand_as(order)).gather(1, target.ids)  # from 0 on
    ranked, negative = scores.gather(1, order), ~positive.gather(1, order)
    gradient, losses = torch.zeros_like(scores), scores.new_zeros(len(scores), dtype=torch.float64)
    for rank, weight in zip(ranks.split(1, 1), (target.weights / math.log(2)).split(1, 1), strict=True):
        delta = tables.weights(rank, places) * negative
        above = sigma * (ranked - ranked.gather(1, rank).where(weight != 0, 0))
        losses += weight.squeeze(1) * (delta * -logsigmoid(-above)).sum(1, dtype=torch.float64)
        slopes = weight * sigma * delta * above.sigmoid()
        gradient += slopes.scatter_add_(1, rank, -slopes.sum(1, keepdim=True))
    return losses.to(scores.dtype), torch.empty_like(scores).scatter_(1, order, gradient)
