"""Metrics of the top of a ranking: precision, propensity scored precision and the mean reciprocal rank.

All of them compare a ranking with the positives of each row:

    ranking   float (..., C): the scores of all classes, of which the largest come first; or integers (..., K): ids of
              classes, best first, padded with -100, as `manymax.linear_topk` returns them
    target    ids (...), ids (..., P) padded with `ignore_index`, or bool rows (..., C)

Lists of ids are all that is needed, so that nobody has to hold a table of all scores. Computed in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.engine.target import Form, read_target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.metrics.hits import precision, reciprocal_rank
from manymax.metrics.rows import reduce_rows
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores, visible
from manymax.ops.lookup import lookup

# Padding in a ranking, and what stands for padding in sorted lists of positives: larger than the id of any class.
_NOTHING_LISTED, _NO_POSITIVE = -100, torch.iinfo(torch.int64).max


@torch.no_grad()
@checked
def precision_at_k(
    ranking: Tensor, target: Tensor, cutoff: int, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """P@k, the share of positives among the first k classes of a ranking.

        P@k = (y_1 + ... + y_k) / k,   y_i = 1 if the class at place i is a positive, else 0

    Args:
        ranking: (..., C) scores of all classes, or (..., K) ids of classes, best first, padded with -100.
        target: ids (...), padded ids (..., P) or bool rows (..., C).
        cutoff: k, at most C or K. The sum is divided by it, also where a list is padded before that place.
        ignore_index: the id in `target` that is no positive.
        reduction: "mean", "sum" or "none".

    Returns:
        A float64 scalar, or (...) for "none". Rows without a positive are nan there and are left out of mean and sum.

    Example:
        >>> import torch, manymax
        >>> scores = torch.tensor([[0.1, 0.7, 0.2, 0.5], [0.9, 0.3, 0.8, 0.1]])
        >>> positives = torch.tensor([[1, 3], [1, -100]])
        >>> manymax.metrics.precision_at_k(scores, positives, 2)
        tensor(0.5000, dtype=torch.float64)
        >>> manymax.metrics.precision_at_k(torch.tensor([[1, 3], [0, 2]]), positives, 2, reduction="none")
        tensor([1., 0.], dtype=torch.float64)
    """
    read = _read(ranking, target, cutoff, ignore_index)
    return reduce_rows(read.per_row(precision(read.hits, read.relevant)), reduction)


@torch.no_grad()
@checked
def mrr(
    ranking: Tensor,
    target: Tensor,
    cutoff: int | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The mean reciprocal rank: 1 / the place of the first positive, or 0 if the list has none, averaged over the rows.

    Args:
        ranking: (..., C) scores of all classes, or (..., K) ids of classes, best first, padded with -100.
        target: ids (...), padded ids (..., P) or bool rows (..., C).
        cutoff: the last place that counts; None for all that the ranking has.
        ignore_index: the id in `target` that is no positive.
        reduction: "mean", "sum" or "none".

    Returns:
        A float64 scalar, or (...) for "none". Rows without a positive are nan there and are left out of mean and sum.

    Example:
        >>> import torch, manymax
        >>> scores = torch.tensor([[0.1, 0.7, 0.2, 0.5], [0.9, 0.3, 0.8, 0.1]])
        >>> manymax.metrics.mrr(scores, torch.tensor([3, 0]))
        tensor(0.7500, dtype=torch.float64)
        >>> manymax.metrics.mrr(scores, torch.tensor([3, 0]), cutoff=1)
        tensor(0.5000, dtype=torch.float64)
    """
    read = _read(ranking, target, cutoff, ignore_index)
    return reduce_rows(read.per_row(reciprocal_rank(read.hits, read.relevant)), reduction)


@torch.no_grad()
@checked
def propensities(counts: Tensor, num_rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """How likely it is that a positive of each class was noticed when the data was labelled, from its frequency.

        p_l = 1 / (1 + c exp(-a log(n_l + b))),   c = (log N - 1) (b + 1)^a

    Rare classes are missed most often, and `psp_at_k` gives more for finding one.

    Args:
        counts: (C,) n_l, the number of rows of the training data of which class l is a positive.
        num_rows: N, the number of rows of the training data, at least 3.
        a, b: parameters that Jain et al. estimated: 0.5 and 0.4 for articles of Wikipedia, 0.6 and 2.6 for products of
            Amazon, and 0.55 and 1.5 for other data.

    Returns:
        (C,) float64, above 0 and at most 1.

    Example:
        >>> import torch, manymax
        >>> manymax.metrics.propensities(torch.tensor([0, 10, 1000]), num_rows=2000)
        tensor([0.1026, 0.2596, 0.8036], dtype=torch.float64)

    References:
        Jain, Prabhu and Varma, "Extreme multi-label loss functions for recommendation, tagging, ranking and other
        missing label applications", KDD 2016.
    """
    if not isinstance(counts, Tensor) or counts.is_complex() or counts.dtype == torch.bool:
        kind = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise ArgumentTypeError(f"`counts` must be a tensor of numbers, one per class; got {kind}.")
    if counts.ndim != 1 or not counts.numel():
        raise ArgumentError(f"`counts` must be (C,) with at least 1 class; got shape {tuple(counts.shape)}.")
    # With fewer than e rows log N - 1 is negative, and the formula gives more than 1.
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 3:
        raise ArgumentError(f"`num_rows` must be an integer of at least 3; got {num_rows!r}.")
    if not (a >= 0 and b > 0 and math.isfinite(a + b)):
        raise ArgumentError(f"`a` must be at least 0 and `b` positive, both finite; got {a} and {b}.")
    # Written so that nan is wrong: every comparison with it is False.
    if visible(counts) and not ((counts >= 0) & (counts <= num_rows)).all():
        raise ArgumentError(
            f"`counts` must be from 0 to `num_rows`, {num_rows}, because a row counts once for a class; got"
            f" {counts.min().item()} to {counts.max().item()}."
        )
    scale = (math.log(num_rows) - 1) * (b + 1) ** a
    return 1 / (1 + scale * (counts.double() + b) ** -a)


class PropensityGains(NamedTuple):
    """What the top of each ranking is worth if a positive of class l counts 1 / p_l, and what it could be worth.

    found: (...) (y_1 / p_1 + ... + y_k / p_k) / k, over the classes at the places 1 to k.
    best: (...) the largest value that `found` can have: that of a ranking which begins with the rarest positives.
    """

    found: Tensor
    best: Tensor


@torch.no_grad()
@checked
def psp_gains_at_k(
    ranking: Tensor, target: Tensor, propensity: Tensor, cutoff: int, *, ignore_index: int = -100
) -> PropensityGains:
    """Numerator and denominator of `psp_at_k` for each row, for rankings that are computed batch by batch.

    Add up both over all batches and divide: `found.sum() / best.sum()`. A mean of the quotients of batches or of rows
    is something else.

    Args:
        ranking, target, propensity, cutoff, ignore_index: as in `psp_at_k`.

    Returns:
        Both (...) in float64; 0 in rows without a positive.

    Example:
        >>> import torch, manymax
        >>> ranking, positives = torch.tensor([[1, 0], [2, 1]]), torch.tensor([[1, 2], [0, -100]])
        >>> manymax.metrics.psp_gains_at_k(ranking, positives, torch.tensor([1.0, 0.5, 0.25]), 2)
        PropensityGains(found=tensor([1., 0.], dtype=torch.float64), best=tensor([3.0000, 0.5000], dtype=torch.float64))
    """
    _check_propensity(propensity)
    read = _read(ranking, target, cutoff, ignore_index, propensity.shape[0])
    # One class more, that is worth nothing: padding points at it.
    nothing = propensity.shape[0]
    worth = torch.cat([1 / propensity.double(), propensity.new_zeros(1, dtype=torch.float64)])
    listed = torch.where(read.hits, read.listed, nothing)
    positives = lookup(worth, read.positives.clamp(max=nothing))
    best = positives.topk(min(cutoff, positives.shape[1]), dim=1).values
    found = lookup(worth, listed).sum(1) / cutoff
    return PropensityGains(found.reshape(read.shape), (best.sum(1) / cutoff).reshape(read.shape))


@torch.no_grad()
@checked
def psp_at_k(
    ranking: Tensor,
    target: Tensor,
    propensity: Tensor,
    cutoff: int,
    *,
    ignore_index: int = -100,
    normalize: bool = True,
) -> Tensor:
    """PSP@k, precision in which each positive counts 1 / p_l: the rarer its class, the more.

        PSP@k = sum over rows of (y_1 / p_1 + ... + y_k / p_k)
                / sum over rows of the largest value that this can have

    Labels of large data are incomplete, and rare classes are missed most often. Dividing by the propensity p_l, the
    probability that a positive was noticed, makes up for that on average. Without the denominator the values have no
    fixed range; with it they are from 0 to 1, where 1 is reached by a ranking that begins with the rarest positives.

    Args:
        ranking: (..., C) scores of all classes, or (..., K) ids of classes, best first, padded with -100.
        target: ids (...), padded ids (..., P) or bool rows (..., C).
        propensity: (C,) p_l of every class, above 0 and at most 1; `propensities` computes it from frequencies.
        cutoff: k, at most C or K.
        ignore_index: the id in `target` that is no positive.
        normalize: whether to divide by the best possible value, as published tables do; otherwise the result is the
            mean over the rows that have a positive of (y_1 / p_1 + ... + y_k / p_k) / k.

    Returns:
        A float64 scalar; nan if no row has a positive. `psp_gains_at_k` has the values of the rows.

    Example:
        >>> import torch, manymax
        >>> ranking, positives = torch.tensor([[1, 0], [2, 0]]), torch.tensor([[1, 2], [0, -100]])
        >>> propensity = torch.tensor([1.0, 0.5, 0.25])
        >>> manymax.metrics.psp_at_k(ranking, positives, propensity, 2)  # (2 + 1) / ((4 + 2) + 1)
        tensor(0.4286, dtype=torch.float64)

    References:
        Jain, Prabhu and Varma, KDD 2016. The extreme classification repository publishes this normalised form, and
        xclib and napkinXC compute it.
    """
    found, best = psp_gains_at_k(ranking, target, propensity, cutoff, ignore_index=ignore_index)
    # A positive is worth at least 1, so that `best` is 0 only in rows that have none.
    return found.sum() / (best.sum() if normalize else (best > 0).sum())


class _Ranked(NamedTuple):
    """Rankings and positives, read and compared. The rows are flattened to n; `shape` is that of the caller."""

    shape: torch.Size
    listed: Tensor  # (n, k) ids, -100 where nothing is listed
    positives: Tensor  # (n, P) distinct ids in ascending order, then _NO_POSITIVE
    hits: Tensor  # (n, k) bool
    relevant: Tensor  # (n,) number of positives

    def per_row(self, values: Tensor) -> Tensor:
        """Values (n,) in the shape of the rows, nan where there is no positive."""
        return torch.where(self.relevant > 0, values, torch.nan).reshape(self.shape)


def _read(
    ranking: Tensor, target: Tensor, cutoff: int | None, ignore_index: int, num_classes: int | None = None
) -> _Ranked:
    """Check rankings and targets and find the hits."""
    if not isinstance(ranking, Tensor):
        raise ArgumentTypeError(f"`ranking` must be a tensor; got {type(ranking).__name__}.")
    if ranking.is_floating_point():
        check_scores(ranking, "ranking")
        if num_classes not in (None, ranking.shape[-1]):
            raise ArgumentError(
                f"`ranking` must have a score for each of the {num_classes} classes of `propensity`; got shape"
                f" {tuple(ranking.shape)}."
            )
        num_classes = ranking.shape[-1]
    elif ranking.is_complex() or ranking.dtype == torch.bool:
        raise ArgumentTypeError(f"`ranking` must hold float scores or integer ids; got dtype {ranking.dtype}.")
    elif ranking.ndim == 0 or ranking.shape[-1] == 0:
        raise ArgumentError(f"`ranking` must be (..., K) with at least 1 place; got shape {tuple(ranking.shape)}.")
    positives, num_classes = _read_positives(ranking, target, ignore_index, num_classes)
    flat = ranking.reshape(-1, ranking.shape[-1])
    listed = _read_places(flat, _read_cutoff(cutoff, ranking), num_classes)
    # Where each listed class would stand among the sorted positives: it is one of them if it stands there already.
    place = torch.searchsorted(positives, listed).clamp(max=positives.shape[1] - 1)
    hits = positives.gather(1, place) == listed
    return _Ranked(ranking.shape[:-1], listed, positives, hits, (positives != _NO_POSITIVE).sum(1))


def _read_cutoff(cutoff: int | None, ranking: Tensor) -> int:
    """The number of places that count."""
    places = ranking.shape[-1]
    if cutoff is None:
        return places
    if isinstance(cutoff, bool) or not isinstance(cutoff, int) or not 1 <= cutoff <= places:
        raise ArgumentError(
            f"`cutoff` must be an integer from 1 to {places}, the places of `ranking`; got {cutoff!r}. Pad shorter"
            " lists with -100."
        )
    return cutoff


def _read_places(ranking: Tensor, cutoff: int, num_classes: int | None) -> Tensor:
    """The ids at the first places, (n, cutoff) and contiguous, from scores (n, C) or from ids (n, K)."""
    if ranking.is_floating_point():
        if visible(ranking) and ranking.isnan().any():
            raise ArgumentError("`ranking` must not hold nan; got at least one score that is nan.")
        values, ids = ranking.topk(cutoff, dim=1)
        # A masked class is not listed, as in `linear_topk`.
        return ids.masked_fill_(values == -torch.inf, _NOTHING_LISTED)
    ids = ranking[:, :cutoff].long().contiguous()
    if not visible(ids) or not ids.numel():
        return ids
    padding = ids == _NOTHING_LISTED
    outside = (ids < 0) & ~padding
    if num_classes is not None:
        outside |= ids >= num_classes
    if outside.any():
        bound = "at least 0" if num_classes is None else f"in [0, {num_classes})"
        raise ArgumentError(f"`ranking` ids must be {bound}, or -100 for padding; got {ids[outside][0].item()}.")
    ordered = ids.sort(1).values
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _NOTHING_LISTED)).any():
        raise ArgumentError("`ranking` lists a class twice in one row, which would count twice; list each class once.")
    return ids


def _read_positives(
    ranking: Tensor, target: Tensor, ignore_index: int, num_classes: int | None
) -> tuple[Tensor, int | None]:
    """The positives of each row, (n, P) ascending ids and then _NO_POSITIVE; and the number of classes, if known."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentTypeError(f"`target` must hold ids, padded ids or bool rows; got {kind}.")
    shape = tuple(ranking.shape[:-1])
    if target.dtype == torch.bool:
        if tuple(target.shape[:-1]) != shape or not target.ndim or num_classes not in (None, target.shape[-1]):
            expected = (*shape, "C" if num_classes is None else num_classes)
            raise ArgumentError(f"`target` as bool rows must have shape {expected}; got {tuple(target.shape)}.")
        return _listed_positives(target.reshape(-1, target.shape[-1])), target.shape[-1]
    # Lists of ids alone do not say how many classes there are: then any id will do.
    form = Form((*shape, _NO_POSITIVE if num_classes is None else num_classes), torch.float32, ranking.device)
    read = read_target(form, target, None, ignore_index)
    assert read.ids is not None
    ids = torch.where(read.weights > 0, read.ids, _NO_POSITIVE).sort(-1).values
    return ids.reshape(-1, ids.shape[-1]), num_classes


def _listed_positives(rows: Tensor) -> Tensor:
    """Bool rows (n, C) as ascending ids (n, P), P at least 1, filled up with _NO_POSITIVE."""
    row, column = rows.nonzero(as_tuple=True)
    counts = rows.sum(1)
    # `nonzero` goes through the rows in order: an entry's place in its row is its number minus that of the row's first.
    place = torch.arange(len(row), device=rows.device) - (counts.cumsum(0) - counts)[row]
    width = max(1, int(counts.max())) if len(rows) else 1
    ids = torch.full((len(rows), width), _NO_POSITIVE, device=rows.device)
    ids[row, place] = column
    return ids


def _check_propensity(propensity: Tensor) -> None:
    """Raise unless propensities are (C,) floats above 0 and at most 1."""
    if not isinstance(propensity, Tensor) or not propensity.is_floating_point():
        kind = propensity.dtype if isinstance(propensity, Tensor) else type(propensity).__name__
        raise ArgumentTypeError(f"`propensity` must be a float tensor, one number per class; got {kind}.")
    if propensity.ndim != 1 or not propensity.numel():
        raise ArgumentError(f"`propensity` must be (C,) with at least 1 class; got shape {tuple(propensity.shape)}.")
    if visible(propensity) and not ((propensity > 0) & (propensity <= 1)).all():
        raise ArgumentError(
            f"`propensity` must be above 0 and at most 1; got {propensity.min().item():.6g} to"
            f" {propensity.max().item():.6g}. Pass p_l, not its inverse."
        )
