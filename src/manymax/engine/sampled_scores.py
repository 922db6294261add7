"""What the losses on sampled scores share: reading and checking one positive and k negatives per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manymax.engine.ranks import ALONE, Ranks
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.ops.checks import visible, working

# What to do with a negative that equals the positive: count it as a draw like any other, or leave it out.
HIT_POLICIES = ("keep", "mask")


@dataclass(frozen=True)
class SampledScores:
    """Sampled scores that have been read and checked, in the dtype of the arithmetic.

    positive: (...) scores of the positives, known to all ranks.
    negative: (..., K) scores of the negatives that this rank holds, -inf where masked.
    log_q_positive: (...), log_q_negative: (..., K): log q, 0 where it was not given.
    num_negatives: k, the number of negatives drawn on all ranks, masked ones included; on one rank that is K. Masked
        draws count, because the estimate is a mean over draws.
    num_classes: C; 0 where only scores are given, which do not tell it.
    ranks: complete sums over the negatives.
    own: (..., K) False in columns that are no draws: those that fill up the rows of this rank, and given negatives;
        None where there are none.
    decoupled, z_loss: the keywords of these names, for members that take them.
    """

    positive: Tensor
    negative: Tensor
    log_q_positive: Tensor
    log_q_negative: Tensor
    num_negatives: int
    num_classes: int
    ranks: Ranks
    own: Tensor | None = None
    decoupled: bool = False
    z_loss: float = 0.0


@dataclass(frozen=True)
class DrawnBlock:
    """The sampled scores of a block of rows that share their negatives, on one rank.

    positive: (n,). negative: (n, k), -inf where masked; may be overwritten.
    log_q_positive: (n,), log_q: (k,).
    shift: (n,) to be added to log q of positives and negatives of a row; None for 0.
    num_classes: C.
    coefficient: (n,) factor of each row's loss in the result; None if no gradient is wanted.
    level: of the native library; None for plain torch.
    """

    positive: Tensor
    negative: Tensor
    log_q_positive: Tensor
    log_q: Tensor
    shift: Tensor | None
    num_classes: int
    coefficient: Tensor | None
    level: str | None

    def sample(self) -> SampledScores:
        """The block in the form of `DrawnKernel.rows`, with scores that may require a gradient."""
        log_q_positive, log_q = self.log_q_positive, self.log_q.expand(self.negative.shape)
        if self.shift is not None:
            log_q_positive, log_q = log_q_positive + self.shift, log_q + self.shift.unsqueeze(1)
        sizes = self.negative.shape[1], self.num_classes
        return SampledScores(self.positive, self.negative, log_q_positive, log_q, *sizes, ALONE)


@dataclass(frozen=True)
class DrawnGradient:
    """The losses of a block of rows that share their negatives, and their gradient in the scores.

    losses: (n,). The others are only looked at if a gradient is wanted, and have the coefficients of the rows in them:
    positive: (n,) gradient in the scores of the positives.
    table, scale: (n, k) and (n,): scale_m table_mj is the gradient in the scores of the negatives.
    setting: gradient in the kernel's setting, or None.
    """

    losses: Tensor
    positive: Tensor
    table: Tensor
    scale: Tensor
    setting: Tensor | None = None


@dataclass(frozen=True)
class DrawnKernel:
    """What a sampled member computes in its head, made for one call.

    rows: from sampled scores to the losses of the positives, (...).
    masks_hits: whether negatives that equal the positive are masked.
    misses: whether it is told the log q of a draw that is no hit, and k counts only these; see `shift_of_misses`.
    needs_log_q: the name of a setting that makes no sense without the log q of the sampler, for the error; or None.
    setting: a scalar tensor in which the loss is differentiated too, or None.
    block: from a block of rows that share their negatives to losses and gradient, where that is faster than to
        differentiate `rows`; or None.
    gamma: the share of a step's sum in the moving average that each training pair keeps; None where none is kept.
    """

    rows: Callable[[SampledScores], Tensor]
    masks_hits: bool = False
    misses: bool = False
    needs_log_q: str | None = None
    setting: Tensor | None = None
    block: Callable[[DrawnBlock], DrawnGradient] | None = None
    gamma: float | None = None

    def gradient(self, block: DrawnBlock, wants_setting: bool) -> DrawnGradient:
        """Losses and gradient of a block: by the member's closed form, or by differentiating its losses."""
        if self.block is not None:
            return self.block(block)
        coefficient = block.coefficient
        if coefficient is None:
            with torch.no_grad():
                losses = self.rows(block.sample())
            return DrawnGradient(losses, losses, block.negative, losses)
        # A graph of this block alone, which is gone when its gradient is known. The scores are its leaves.
        scores = [value.detach().requires_grad_() for value in (block.positive, block.negative)]
        with torch.enable_grad():
            losses = self.rows(replace(block, positive=scores[0], negative=scores[1]).sample())
            leaves = [*scores, self.setting] if wants_setting and self.setting is not None else scores
            # A loss may not depend on all of them: the positives of a loss that only looks at negatives, for example.
            positive, table, *more = torch.autograd.grad(losses, leaves, coefficient, materialize_grads=True)
        # A masked score is a constant, whatever the derivative of the loss at -inf is.
        table = torch.where(block.negative == -torch.inf, 0, table)
        return DrawnGradient(losses.detach(), positive, table, torch.ones_like(positive), more[0] if more else None)


def read_sample(
    positive: Tensor,
    negative: Tensor,
    log_q_positive: Tensor | float | None,
    log_q_negative: Tensor | float | None,
    hits: Tensor | None,
    hit_policy: str,
) -> tuple[SampledScores, torch.dtype]:
    """Check sampled scores against each other and broadcast them to (...) and (..., k).

    Args:
        positive: (...) scores of the positives.
        negative: (..., k) scores of the negatives, or a shape that broadcasts to it.
        log_q_positive, log_q_negative: numbers or tensors of these shapes, or None.
        hits: (..., k) bool, True where a negative equals the positive, or None.
        hit_policy: "keep" or "mask".

    Returns:
        The sampled scores, and the dtype of the result.
    """
    check_choice("hit_policy", hit_policy, HIT_POLICIES)
    for name, scores in (("positive", positive), ("negative", negative)):
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise ArgumentTypeError(f"`{name}` must be a float tensor of scores; got {kind}.")
    # Without a negative there is nothing to compare the positive with, and log k is -inf.
    if negative.ndim == 0 or negative.shape[-1] == 0:
        raise ArgumentError(
            f"`negative` must be (..., k) with at least 1 negative (k = 0 has no log k); got {tuple(negative.shape)}."
        )
    # The positives decide about shape and dtype: there is one loss for each of them.
    pos, dtype = working(positive)
    neg = working(negative)[0].to(pos.dtype)
    shape = (*pos.shape, negative.shape[-1])
    # Negatives that all rows share come as (k,): they are expanded without a copy.
    neg = _expand("negative", neg, shape)
    check_values(pos, neg)
    # -inf, the score of a masked class: exp of it is 0, so that every loss leaves it out without another case.
    masked = _read_hits(hits, hit_policy, shape)
    sample = SampledScores(
        pos,
        neg if masked is None else torch.where(masked, -torch.inf, neg),
        read_log_q("log_q_positive", log_q_positive, pos, tuple(pos.shape)),
        read_log_q("log_q_negative", log_q_negative, pos, shape),
        shape[-1],  # before masking: k is the number of draws
        0,
        ALONE,  # given scores are all there are
    )
    return sample, dtype


def check_values(positive: Tensor, negative: Tensor) -> None:
    """Raise if a positive is masked (-inf), or if a score is nan or +inf."""
    # Without values there is nothing to look at; on a GPU looking would make the host wait for it.
    if not visible(positive, negative) or not positive.numel():
        return
    # The loss of a positive at -inf is infinite, and its gradient nan.
    if not positive.isfinite().all():
        raise ArgumentError(
            f"`positive` must hold finite scores: a masked class cannot be a positive; got"
            f" {positive[~positive.isfinite()][0].item()}."
        )
    # Both show in the maximum of a row, of which there are k times fewer to look at.
    highest = negative.amax(-1)
    if not (highest < torch.inf).all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {highest[~(highest < torch.inf)][0].item()}."
        )


def read_number(name: str, value: Tensor | float, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A number or a tensor as a tensor of `shape`, in the dtype and on the device of `like`; refused if not finite."""
    value = _as_tensor(name, value, like, shape)
    if visible(value) and value.numel() and not value.isfinite().all():
        raise ArgumentError(f"`{name}` must be finite; got {value[~value.isfinite()][0].item()}.")
    return value


def _as_tensor(name: str, value: Tensor | float, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(value, (Tensor, float, int)):
        raise ArgumentTypeError(f"`{name}` must be a number or a tensor; got {type(value).__name__}.")
    return _expand(name, torch.as_tensor(value, dtype=like.dtype, device=like.device), shape)


def _expand(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`value` broadcast to `shape`, without a copy."""
    try:
        return value.expand(shape)
    except RuntimeError:
        raise ArgumentError(f"`{name}` must broadcast to {shape}; got shape {tuple(value.shape)}.") from None


def read_log_q(name: str, log_q: Tensor | float | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """log q as a tensor of `shape`, 0 where it was not given; refused where it is not finite."""
    value = _as_tensor(name, 0.0 if log_q is None else log_q, like, shape)
    # -inf would make a weight of 1 / q infinite, and a loss of nan some steps later.
    if visible(value) and value.numel() and not value.isfinite().all():
        raise ArgumentError(
            f"`{name}` must be finite: a class with q = 0 cannot be drawn, nor be a positive of a sampled loss; got"
            f" {value[~value.isfinite()][0].item()}. Smooth the proposal so that every class can be drawn."
        )
    return value


def shift_of_misses(share: Tensor, log_q_positive: Tensor) -> Tensor:
    """log(n / k) - log(1 - q_y), (...), which added to log(k q_j) makes it log(n q_j / (1 - q_y)).

    A draw that is not the positive y has the distribution q_j / (1 - q_y), and n of the k draws are such.

    Args:
        share: (...) float64, n / k. Where it is 0 the shift does not matter, and is 0.
        log_q_positive: (...) log q_y.
    """
    others = -torch.expm1(log_q_positive.double())  # 1 - q_y with all digits
    # Where an estimate of q_y says that nothing but y can be drawn, the draws say otherwise.
    others = others.clamp(min=torch.finfo(others.dtype).eps)
    return torch.where(share > 0, torch.where(share > 0, share, 1).log() - others.log(), 0)


def _read_hits(hits: Tensor | None, hit_policy: str, shape: tuple[int, ...]) -> Tensor | None:
    """(..., k), True where a negative must be masked; None if none must."""
    if hits is not None and (not isinstance(hits, Tensor) or hits.dtype != torch.bool):
        kind = hits.dtype if isinstance(hits, Tensor) else type(hits).__name__
        raise ArgumentTypeError(f"`hits` must be a bool tensor, True where a negative equals the positive; got {kind}.")
    # Given scores do not tell which classes they belong to: only the caller knows the hits.
    if hits is None and hit_policy == "mask":
        raise ArgumentError(
            "`hits` is needed to mask accidental hits: pass `negative_ids == target.unsqueeze(-1)`, or"
            " `hit_policy='keep'`."
        )
    masked = None if hits is None else _expand("hits", hits, shape)  # a wrong shape is refused under both policies
    return masked if hit_policy == "mask" else None
