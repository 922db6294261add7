"""What the losses on sampled scores share: one positive and k negatives per row, on one rank or on many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine.ranks import ALONE, Ranks
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.ops.checks import visible, working

HIT_POLICIES = ("keep", "mask")


@dataclass(frozen=True)
class SampledScores:
    """Sampled scores that have been read and checked, in the dtype of the arithmetic.

    positive: (...) scores of the positives; negative: (..., K) scores of the negatives, -inf where masked.
    log_q_positive: (...), log_q_negative: (..., K), 0 where they were not given.
    num_negatives: k, the number of negatives drawn, masked ones included; on one rank that is K.
    ranks: complete sums over the negatives; positives are known to all of them.
    own: (..., K) which of the negatives this rank holds, masked ones included; None for all of them.
    """

    positive: Tensor
    negative: Tensor
    log_q_positive: Tensor
    log_q_negative: Tensor
    num_negatives: int
    ranks: Ranks
    own: Tensor | None = None


@dataclass(frozen=True)
class DrawnKernel:
    """What a sampled member does in its head, made for one call.

    rows: from sampled scores to the losses of the positives, (...).
    masks_hits: whether negatives that hit the positive are masked.
    needs_log_q: the setting that needs a proposal that is known, or None.
    """

    rows: Callable[[SampledScores], Tensor]
    masks_hits: bool = False
    needs_log_q: str | None = None


def read_sample(
    positive: Tensor,
    negative: Tensor,
    log_q_positive: Tensor | float | None,
    log_q_negative: Tensor | float | None,
    hits: Tensor | None,
    hit_policy: str,
) -> tuple[SampledScores, torch.dtype]:
    """Check sampled scores against each other and broadcast them to (...) and (..., k); with the result's dtype."""
    check_choice("hit_policy", hit_policy, HIT_POLICIES)
    for name, scores in (("positive", positive), ("negative", negative)):
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise ArgumentTypeError(f"`{name}` must be a float tensor of scores; got {kind}.")
    if negative.ndim == 0 or negative.shape[-1] == 0:
        raise ArgumentError(
            f"`negative` must be (..., k) with at least 1 negative (k = 0 has no log k); got {tuple(negative.shape)}."
        )
    pos, dtype = working(positive)
    neg = working(negative)[0].to(pos.dtype)
    shape = (*pos.shape, negative.shape[-1])
    neg = _expand("negative", neg, shape)
    check_values(pos, neg)
    masked = _read_hits(hits, hit_policy, shape)
    sample = SampledScores(
        pos,
        neg if masked is None else torch.where(masked, -torch.inf, neg),
        read_log_q("log_q_positive", log_q_positive, pos, tuple(pos.shape)),
        read_log_q("log_q_negative", log_q_negative, pos, shape),
        shape[-1],
        ALONE,
    )
    return sample, dtype


def check_values(positive: Tensor, negative: Tensor) -> None:
    """Raise where a positive is masked, or a score is no number."""
    if not visible(positive, negative) or not positive.numel():
        return
    if not positive.isfinite().all():
        raise ArgumentError(
            f"`positive` must hold finite scores: a masked class cannot be a positive; got"
            f" {positive[~positive.isfinite()][0].item()}."
        )
    highest = negative.amax(-1)  # shows nan and +inf
    if not (highest < torch.inf).all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {highest[~(highest < torch.inf)][0].item()}."
        )


def read_number(name: str, value: Tensor | float, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A number or a tensor as a tensor of `shape`, in the dtype and on the device of `like`."""
    if not isinstance(value, (Tensor, float, int)):
        raise ArgumentTypeError(f"`{name}` must be a number or a tensor; got {type(value).__name__}.")
    return _expand(name, torch.as_tensor(value, dtype=like.dtype, device=like.device), shape)


def _expand(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return value.expand(shape)
    except RuntimeError:
        raise ArgumentError(f"`{name}` must broadcast to {shape}; got shape {tuple(value.shape)}.") from None


def read_log_q(name: str, log_q: Tensor | float | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """log q as a tensor of `shape`, 0 where it was not given; refused where it is not finite."""
    value = read_number(name, 0.0 if log_q is None else log_q, like, shape)
    if visible(value) and value.numel() and not value.isfinite().all():
        raise ArgumentError(
            f"`{name}` must be finite: a class with q = 0 cannot be drawn, nor be a positive of a sampled loss; got"
            f" {value[~value.isfinite()][0].item()}. Smooth the proposal so that every class can be drawn."
        )
    return value


def _read_hits(hits: Tensor | None, hit_policy: str, shape: tuple[int, ...]) -> Tensor | None:
    """(..., k), True where a negative must be masked, or None where none must."""
    if hits is not None and (not isinstance(hits, Tensor) or hits.dtype != torch.bool):
        kind = hits.dtype if isinstance(hits, Tensor) else type(hits).__name__
        raise ArgumentTypeError(f"`hits` must be a bool tensor, True where a negative equals the positive; got {kind}.")
    if hits is None and hit_policy == "mask":
        raise ArgumentError(
            "`hits` is needed to mask accidental hits: pass `negative_ids == target.unsqueeze(-1)`, or"
            " `hit_policy='keep'`."
        )
    masked = None if hits is None else _expand("hits", hits, shape)
    return masked if hit_policy == "mask" else None
