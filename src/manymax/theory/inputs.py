"""The arguments of the measurements of bias and variance: scores, labels and a proposal, checked, in blocks of rows."""

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

SCORES_PER_INPUT = 2**18  # 2 MB in float64, so that a block stays in the cache
ROWS_PER_INPUT = 64  # at most
MASKED_LOG_PROB = math.log(torch.finfo(torch.float64).tiny)  # a class with a smaller log P counts as masked
# Where there are more classes than this, that many labels stand for all of them: half as many classes stand for
# themselves, those with the largest P or q, and every bin of the others is represented by one of its classes.
LABELS_PER_ROW = 128
BIN_WIDTH = 0.125  # of log(P/q), or of log P


def check_count(argument: str, value: object, least: int = 1) -> None:
    """Raise an error that names `argument` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"`{argument}` must be an integer of at least {least}; got {value!r}.")


def read_inputs(
    member: Member | None,
    scores: Tensor,
    target: Tensor | None,
    log_q: Tensor | None,
    tree: ClassTree | Tensor | None = None,
    *,
    num_negatives: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> list[ApproximationInput]:
    """Check the arguments and cut them into blocks of rows, in float64.

    Args:
        member: the approximation that they are for, whose settings and tree are checked too; None for none.
        scores: (N, C) or (C,).
        target: (N,) labels; None for y ~ P, where every row gets several labels with their shares.
        log_q: (C,) or (N, C); None for a uniform proposal.
        tree: (N, C) log-probabilities of a tree's leaves, or a tree; read only if the member needs one.
        num_negatives: k.
        settings: of the member as an approximation.

    Returns:
        One input per block of rows.
    """
    check_scores(scores)
    if scores.ndim > 2 or not len(scores):
        raise ArgumentError(f"`scores` must be (rows, classes) with at least 1 row; got shape {tuple(scores.shape)}.")
    check_count("num_negatives", num_negatives)
    approximation: Approximation | None = None if member is None else member.needed("theory.approximation")
    all_settings = {} if member is None else _read_settings(member, settings or {})
    rows = scores.detach().double().reshape(-1, scores.shape[-1])
    check_finite(rows.amax(-1))
    proposal = _read_log_q(log_q, rows)
    labels = None if target is None else _read_target(target, rows)
    leaves = _read_tree(tree, rows) if approximation and approximation.needs_tree else None
    inputs = []
    size = min(ROWS_PER_INPUT, max(1, SCORES_PER_INPUT // rows.shape[-1]))
    for block in (slice(start, start + size) for start in range(0, len(rows), size)):
        log_probs = rows[block].log_softmax(-1)
        if labels is None:
            # Exact moments of a member that draws cost a quadrature per label: few labels stand for many classes.
            draws = approximation is not None and approximation.draws is not None
            choose_labels = _few_labels if draws and rows.shape[-1] > LABELS_PER_ROW else _all_labels
            by_probability = approximation is not None and approximation.by_probability(all_settings)
            labelled = choose_labels(log_probs, proposal[block], by_probability)
        else:
            ids = labels[block]
            labelled = ids, torch.ones_like(ids, dtype=rows.dtype), proposal[block].gather(-1, ids)
        tables = rows[block], log_probs, log_probs.exp(), proposal[block], *labelled
        tree_log_probs = None if leaves is None else leaves[block]
        inputs.append(ApproximationInput(*tables, tree_log_probs, num_negatives, all_settings))
    return inputs


def _read_settings(member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a member as an approximation, with the defaults of those that are left out."""
    known = {setting.name: setting for setting in member.needed("theory.approximation.settings")}
    for name, value in given.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"`{name}` is no setting of {member.name} as an approximation; {has}. Leave it out.")
        known[name].check(value)
    return {name: given.get(name, setting.default) for name, setting in known.items()}


def check_proposal(log_q: Tensor) -> None:
    """Raise unless log q has the logarithms of probabilities, of which -inf is one."""
    if not isinstance(log_q, Tensor) or not log_q.is_floating_point():
        kind = log_q.dtype if isinstance(log_q, Tensor) else type(log_q).__name__
        raise ArgumentTypeError(f"`log_q` must be a float tensor of log-probabilities; got {kind}.")
    if not (log_q < 1e-3).all():  # nan compares as False
        raise ArgumentError(f"`log_q` must be the log of probabilities, at most 0; got {float(log_q.max())}.")


def _read_log_q(log_q: Tensor | None, scores: Tensor) -> Tensor:
    """log q as (N, C) float64, normalised; an error unless it is finite at every class that is not masked."""
    if log_q is None:
        return scores.new_tensor(-math.log(scores.shape[-1])).expand_as(scores)
    check_proposal(log_q)
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
            "`log_q` must be finite wherever `scores` are: a class that is never drawn makes bias and variance"
            " infinite. Smooth the proposal."
        )
    return (rows - total).expand_as(scores)


def _read_target(target: Tensor, scores: Tensor) -> Tensor:
    """The labels as (N, 1); an error unless each row has one label that is not masked."""
    if (
        not isinstance(target, Tensor)
        or target.is_floating_point()
        or target.is_complex()
        or target.dtype == torch.bool
    ):
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentTypeError(f"`target` must hold integer ids; got {kind}.")
    if target.numel() != len(scores) or target.ndim > 1:
        raise ArgumentError(f"`target` must have shape ({len(scores)},), one label per row; got {tuple(target.shape)}.")
    labels = target.long().reshape(-1, 1)
    if (labels < 0).any() or (labels >= scores.shape[-1]).any():
        raise ArgumentError(
            f"`target` ids must be in [0, {scores.shape[-1]}); got {int(labels.min())} to {int(labels.max())}."
        )
    if not (scores.log_softmax(-1).gather(-1, labels) > MASKED_LOG_PROB).all():
        raise ArgumentError("`target` names a class that is masked, or whose probability is 0 in float64.")
    return labels


def _read_tree(tree: ClassTree | Tensor | None, scores: Tensor) -> Tensor:
    """log P of the tree's leaves, (N, C); a tree with free node scores can have any P, so it has that of the scores."""
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
    """Every class as a label: labels, shares and log q, (N, C) each.

    A masked class has share 0. Its label is the likeliest class instead, so that what is computed for it is finite.
    """
    probs, live = log_probs.exp(), log_probs > MASKED_LOG_PROB
    ids = torch.where(live, torch.arange(probs.shape[-1], device=probs.device), probs.argmax(-1, keepdim=True))
    return ids, torch.where(live, probs, 0), torch.where(live, log_q, 0)


def _few_labels(log_probs: Tensor, log_q: Tensor, by_probability: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Few labels that stand for y ~ P: labels, shares and log q, (N, L) each.

    The classes with the largest P or q stand for themselves. The others are put into bins of log(P/q), or of log P if
    `by_probability`, and the class nearest to the mean of its bin stands for the whole bin.
    """
    probs, live = log_probs.exp(), log_probs > MASKED_LOG_PROB
    largest = torch.where(live, torch.maximum(probs, log_q.exp()), -1).topk(LABELS_PER_ROW // 2).indices
    single_shares, single_log_q = (torch.where(live, values, 0).gather(-1, largest) for values in (probs, log_q))
    single_ids = torch.where(live.gather(-1, largest), largest, probs.argmax(-1, keepdim=True))
    live = live.scatter(-1, largest, False)
    # Bin 0 begins at the largest key of the row. Masked classes have the key -inf: they land in the last bin, or, where
    # nothing is left and inf - inf is nan, in bin 0; either way they add nothing to the sums below.
    key = torch.where(live, log_probs if by_probability else log_probs - log_q, -torch.inf)
    bins = ((key.amax(-1, keepdim=True) - key) / BIN_WIDTH).nan_to_num(0).clamp(max=LABELS_PER_ROW - 1).long()

    def mass_in_bins(values: Tensor) -> Tensor:
        """sum of P times values (N, C) over the classes of each bin, (N, L)."""
        return probs.new_zeros(len(probs), LABELS_PER_ROW).scatter_add(-1, bins, torch.where(live, probs * values, 0))

    shares = mass_in_bins(torch.ones_like(probs))
    key_mean, log_q_mean = (mass_in_bins(values) / torch.where(shares > 0, shares, 1) for values in (key, log_q))
    distance = (key - key_mean.gather(-1, bins)).abs()
    nearest = torch.full_like(shares, torch.inf).scatter_reduce(-1, bins, distance, "amin")
    rows, classes = (live & (distance == nearest.gather(-1, bins))).nonzero(as_tuple=True)
    bin_ids = single_ids[:, :1].repeat(1, LABELS_PER_ROW)  # any valid class does for an empty bin, whose share is 0
    bin_ids[rows, bins[rows, classes]] = classes
    return (
        torch.cat([single_ids, bin_ids], -1),
        torch.cat([single_shares, shares], -1),
        torch.cat([single_log_q, log_q_mean], -1),
    )
