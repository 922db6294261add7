"""What bias and variance are asked of: scores, labels and a proposal, checked and in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manymax.engine.approximation import ApproximationInput
from manymax.engine.member import Approximation, Member
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_finite, check_scores
from manymax.ops.tree import ClassTree

TABLE = 2**18  # scores at once, so that they stay in the cache
MASKED = math.log(torch.finfo(torch.float64).tiny)  # a class with a smaller log P counts as masked
LABELS = 128  # that stand for y ~ P, where there are more classes: half of them the classes that count most,
LABEL_WIDTH = 0.125  # the others each for those within so much of log(P/q)


def check_count(argument: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"`{argument}` must be an integer of at least {least}; got {value!r}.")


def read_cases(
    member: Member | None,
    scores: Tensor,
    target: Tensor | None,
    log_q: Tensor | None,
    tree: ClassTree | Tensor | None = None,
    *,
    num_negatives: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> list[ApproximationInput]:
    """The arguments, checked, in float64 and in blocks of rows; those of an approximation if `member` is one."""
    check_scores(scores)
    if scores.ndim > 2 or not len(scores):
        raise ArgumentError(f"`scores` must be (rows, classes) with at least 1 row; got shape {tuple(scores.shape)}.")
    check_count("num_negatives", num_negatives)
    approximation: Approximation | None = None if member is None else member.needed("theory.approximation")
    own = {} if member is None else _read_settings(member, settings or {})
    rows = scores.detach().double().reshape(-1, scores.shape[-1])
    check_finite(rows.amax(-1))
    proposal = _read_log_q(log_q, rows)
    labels = None if target is None else _read_target(target, rows)
    leaves = _read_tree(tree, rows) if approximation and approximation.needs_tree else None
    cases = []
    size = min(64, max(1, TABLE // rows.shape[-1]))
    for at in (slice(start, start + size) for start in range(0, len(rows), size)):
        log_probs = rows[at].log_softmax(-1)
        if labels is None:
            drawn = approximation is not None and approximation.draws is not None and rows.shape[-1] > LABELS
            by_probability = approximation is not None and approximation.by_probability(own)
            labelled = (_few_labels if drawn else _all_labels)(log_probs, proposal[at], by_probability)
        else:
            ids = labels[at]
            labelled = ids, torch.ones_like(ids, dtype=rows.dtype), proposal[at].gather(-1, ids)
        tables = rows[at], log_probs, log_probs.exp(), proposal[at], *labelled
        cases.append(ApproximationInput(*tables, None if leaves is None else leaves[at], num_negatives, own))
    return cases


def _read_settings(member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a member as an approximation, those left out at their default."""
    known = {setting.name: setting for setting in member.needed("theory.approximation.settings")}
    for name, value in given.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"`{name}` is no setting of {member.name} as an approximation; {has}. Leave it out.")
        known[name].check(value)
    return {name: given.get(name, setting.default) for name, setting in known.items()}


def _read_log_q(log_q: Tensor | None, scores: Tensor) -> Tensor:
    """log q, (N, C), normalised."""
    if log_q is None:
        return scores.new_tensor(-math.log(scores.shape[-1])).expand_as(scores)
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        kind = log_q.dtype if isinstance(log_q, Tensor) else type(log_q).__name__
        raise ArgumentTypeError(f"`log_q` must be a float tensor of log-probabilities; got {kind}.")
    if log_q.shape not in (scores.shape, scores.shape[-1:]):
        raise ArgumentError(
            f"`log_q` must have shape ({scores.shape[-1]},) or {tuple(scores.shape)}; got {tuple(log_q.shape)}."
        )
    rows = log_q.detach().double()
    total = rows.logsumexp(-1, keepdim=True)
    if not (total.abs() < 1e-3).all():
        raise ArgumentError(
            f"`log_q` must be the log of probabilities that sum to 1; got a row that sums to"
            f" {total.exp().flatten()[(total.flatten().abs() - 1e-3).argmax()].item():.4g}."
        )
    if ((rows == -torch.inf) & (scores > -torch.inf)).any():
        raise ArgumentError(
            "`log_q` must be finite wherever `scores` are: a class that is never drawn leaves bias and variance without"
            " bound. Smooth the proposal."
        )
    return (rows - total).expand_as(scores)


def _read_target(target: Tensor, scores: Tensor) -> Tensor:
    """(N, 1) labels."""
    if (
        not isinstance(target, Tensor)
        or target.is_floating_point()
        or target.is_complex()
        or target.dtype == torch.bool
    ):
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentTypeError(f"`target` must hold integer ids; got {kind}.")
    if target.numel() != len(scores) or target.ndim > 1:
        raise ArgumentError(f"`target` must have shape ({len(scores)},), one label a row; got {tuple(target.shape)}.")
    labels = target.long().reshape(-1, 1)
    if (labels < 0).any() or (labels >= scores.shape[-1]).any():
        raise ArgumentError(
            f"`target` ids must be in [0, {scores.shape[-1]}); got {int(labels.min())} to {int(labels.max())}."
        )
    if not (scores.log_softmax(-1).gather(-1, labels) > MASKED).all():
        raise ArgumentError("`target` names a class that is masked, or whose probability is 0 in float64.")
    return labels


def _read_tree(tree: ClassTree | Tensor | None, scores: Tensor) -> Tensor:
    """log P of the tree's classes, (N, C)."""
    if isinstance(tree, ClassTree):
        if tree.num_classes != scores.shape[-1]:
            raise ArgumentError(f"`tree` must be over the {scores.shape[-1]} classes; got {tree.num_classes}.")
        return scores.log_softmax(-1)
    if not isinstance(tree, Tensor):
        raise ArgumentTypeError(
            f"`tree` must hold the log-probabilities {tuple(scores.shape)} that a tree's leaves have, or be a tree"
            f" whose node scores are free; got {type(tree).__name__}."
        )
    if tree.shape != scores.shape:
        raise ArgumentError(f"`tree` log-probabilities must have shape {tuple(scores.shape)}; got {tuple(tree.shape)}.")
    return tree.detach().double()


def _all_labels(log_probs: Tensor, log_q: Tensor, by_probability: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, shares and log q of all classes, (N, C) each."""
    probs, live = log_probs.exp(), log_probs > MASKED
    ids = torch.where(live, torch.arange(probs.shape[-1], device=probs.device), probs.argmax(-1, keepdim=True))
    return ids, torch.where(live, probs, 0), torch.where(live, log_q, 0)


def _few_labels(log_probs: Tensor, log_q: Tensor, by_probability: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, shares and log q, (N, L) each, that stand for y ~ P.

    The classes with the largest P or q stand for themselves. Of the others, one stands for all whose log(P/q), or log P
    `by_probability`, are within a bin: the one nearest to their mean.
    """
    probs, live = log_probs.exp(), log_probs > MASKED
    apart = torch.where(live, torch.maximum(probs, log_q.exp()), -1).topk(LABELS // 2).indices
    alone = [torch.where(live, values, 0).gather(-1, apart) for values in (probs, log_q)]
    ids = torch.where(live.gather(-1, apart), apart, probs.argmax(-1, keepdim=True))
    live = live.scatter(-1, apart, False)
    key = torch.where(live, log_probs if by_probability else log_probs - log_q, -torch.inf)
    bins = ((key.amax(-1, keepdim=True) - key) / LABEL_WIDTH).nan_to_num(0).clamp(max=LABELS - 1).long()

    def summed(values: Tensor) -> Tensor:
        return probs.new_zeros(len(probs), LABELS).scatter_add(-1, bins, torch.where(live, probs * values, 0))

    shares = summed(torch.ones_like(probs))
    key_mean, log_q_mean = (summed(values) / torch.where(shares > 0, shares, 1) for values in (key, log_q))
    distance = (key - key_mean.gather(-1, bins)).abs()
    nearest = torch.full_like(shares, torch.inf).scatter_reduce(-1, bins, distance, "amin")
    rows, classes = (live & (distance == nearest.gather(-1, bins))).nonzero(as_tuple=True)
    others = ids[:, :1].repeat(1, LABELS)  # for empty bins, whose share is 0
    others[rows, bins[rows, classes]] = classes
    return torch.cat([ids, others], -1), torch.cat([alone[0], shares], -1), torch.cat([alone[1], log_q_mean], -1)
