"""Pools of candidates and their scores, for samplers that choose some of the candidates by score."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.lookup import lookup
from manymax.ops.selected_scores import selected_scores
from manymax.samplers.base import Request
from manymax.settings import Setting

# The setting that all samplers with a pool have.
POOL = Setting("num_candidates", int, 500, "Candidates from which dns and two_pass choose.", least=1, option="pool")


def pool_shape(request: Request, num_candidates: int, shared_candidates: bool) -> tuple[int, ...]:
    """The shape of a pool of M candidates: (M,) if all queries share it, else (N, M)."""
    return (num_candidates,) if request.shared or shared_candidates else (*request.rows, num_candidates)


def at_positions(pool: Tensor, position: Tensor) -> Tensor:
    """The entries of a pool (M,) or (N, M) at the given positions, (k,) or (N, k)."""
    return lookup(pool, position) if pool.dim() == 1 else pool.gather(-1, position)


def check_pool(num_negatives: int, num_candidates: int) -> None:
    """Raise unless the pool has at least as many candidates as negatives are wanted."""
    if num_negatives > num_candidates:
        raise ArgumentError(
            f"`num_negatives` must be at most `num_candidates` = {num_candidates}; got {num_negatives}. "
            "Build the sampler with more candidates."
        )


def candidate_scores(request: Request, ids: Tensor) -> Tensor:
    """The scores of a few ids for every query: input . linear_weight[id] + linear_bias[id].

    Args:
        request: with `input` and `linear_weight`, or `scores`.
        ids: (M,), the same ids for every query, or (N, M), other ids for each query.

    Returns:
        (N, M), float32 at least.
    """
    if request.scores is not None:
        scores = request.scores(ids)
    else:
        scores = _linear_scores(*linear_arguments(request), ids)
        if request.linear_bias is not None:
            scores = scores + lookup(request.linear_bias, ids)
    if scores.dim() != 2 or scores.shape[-1] != ids.shape[-1]:
        raise ArgumentError(f"`scores` must return (N, M) for ids {tuple(ids.shape)}; got shape {tuple(scores.shape)}.")
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def target_scores(request: Request, target: Tensor) -> Tensor:
    """The scores of the positives, (N,) or (N, P).

    Returns:
        (N, P), each row with its own positives; (N, N P), each row with the positives of all rows, if draws are shared.
    """
    if request.shared:
        return candidate_scores(request, target.reshape(-1))
    return candidate_scores(request, target.reshape(len(target), -1))


def linear_arguments(request: Request) -> tuple[Tensor, Tensor]:
    """`input` (N, d) and `linear_weight` (C, d); raises unless both are given."""
    input, weight = request.input, request.linear_weight
    if input is None or weight is None:
        raise ArgumentError("`input` and `linear_weight` (or `scores`) must be given: this sampler needs scores.")
    return input, weight


def _linear_scores(input: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    if ids.dim() == 1:  # shared ids: one matmul with M class vectors instead of N M dot products
        return input @ lookup(weight, ids).T
    return selected_scores(input, weight, ids)
