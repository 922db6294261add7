"""Does a map keep the order of the scores? Searched for, with the counter-example.

    strict   s_i > s_j exactly when p_i > p_j
    weak     s_i > s_j implies p_i >= p_j, and somewhere p_i = p_j
    none     somewhere s_i >= s_j but p_i < p_j

A search proves the second and third answer by its witness; "strict" says that none was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError

Map = Callable[[Tensor], Tensor]

# Whole and half numbers make ties, kinks and turning points likely.
LEVELS = (-8.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
GAP = 1e-3  # scores closer than this are not compared: rounding could tie their probabilities
ROUNDING = 1e-12  # probabilities of float64 maps that differ by a smaller share count as equal


@dataclass(frozen=True)
class Witness:
    """Scores (C,) whose class `higher` scores at least as much as `lower`, and their probabilities (C,)."""

    scores: Tensor
    probs: Tensor
    higher: int
    lower: int

    def __str__(self) -> str:
        i, j = self.higher, self.lower
        relation = "<" if _lead(self.probs[i], self.probs[j]) < -ROUNDING else "="
        row = ", ".join(f"{score:.4g}" for score in self.scores.tolist())
        return f"s = ({row}): s_{i} = {self.scores[i]:.4g} > s_{j} = {self.scores[j]:.4g}, but p_{i} {relation} p_{j}"


@dataclass(frozen=True)
class OrderPreservation:
    """How a map treats the order of the scores: "strict", "weak" or "none", and what shows it."""

    kind: str
    witness: Witness | None


def member_map(member: Member, target: Tensor | None = None, **settings: Any) -> Map:
    """A member's map as a function of the scores alone.

    Args:
        member: a row of `FAMILY` that has a map.
        target: (...) the labels, for a map that needs them; class 0 unless given.
        settings: the member's own, such as `alpha`.

    Returns:
        Scores (..., C) to probabilities (..., C).
    """
    if member.map is None:
        raise ArgumentError(f"`member` must have a map from scores to probabilities; {member.name} has none.")
    if not member.needs_label:
        return partial(member.map, **settings)
    known = member.map
    return lambda scores: known(scores, label_of(scores, target), **settings)


def label_of(scores: Tensor, target: Tensor | None) -> Tensor:
    """The labels (...) that a map of scores (..., C) is told: the given ones, or class 0."""
    return torch.zeros_like(scores[..., 0], dtype=torch.long) if target is None else target


def order_preservation_of(
    map: Map, num_classes: int = 5, *, rows: int = 1000, rounds: int = 8, seed: int = 0
) -> OrderPreservation:
    """Search for scores whose order a map does not keep.

    Ties and inversions are looked for among levels and normal scores; then the rows in which p_i leads p_j by the
    least, for how far s_i leads s_j, are varied in smaller and smaller steps.

    Args:
        map: scores (rows, C) in float64 to probabilities (rows, C).
        num_classes: C, at least 2.
        rows: how many score vectors to begin with.
        rounds: how often to vary the worst of them.
        seed: of the search.

    Returns:
        The answer, and the simplest witness that the search can make of the worst row.

    Example:
        >>> from manymax.members import FAMILY
        >>> names = ("softmax", "sparsemax", "taylor_softmax")
        >>> [order_preservation_of(member_map(FAMILY[name])).kind for name in names]
        ['strict', 'weak', 'none']
        >>> print(order_preservation_of(member_map(FAMILY["taylor_softmax"]), num_classes=2).witness)
        s = (-9, -1): s_1 = -1 > s_0 = -9, but p_1 < p_0
    """
    if num_classes < 2:
        raise ArgumentError(f"`num_classes` must be at least 2, so that there is an order; got {num_classes}.")
    generator = torch.Generator().manual_seed(seed)
    scores = _first_rows(rows, num_classes, generator)
    for round_ in range(rounds):
        worst = scores[_margins(map, scores, rate=True)[0].argsort()[:50]]
        noise = torch.randn(20, *worst.shape, generator=generator, dtype=torch.float64) * 0.5**round_
        scores = torch.cat([scores, (worst + noise).flatten(0, 1).clamp(-10, 10)])
    margins, pairs = _margins(map, scores, rate=False)
    margin, row = margins.min(0)
    if margin > 0:
        return OrderPreservation("strict", None)
    kind = "none" if margin < -ROUNDING else "weak"
    return OrderPreservation(kind, _simplest(map, scores[row], pairs[row], kind))


def majorizes(upper: Tensor, lower: Tensor) -> bool:
    """Whether `upper` (C,) majorizes `lower`: the same sum, and each sum of its largest entries is at least as large.

    A map that keeps this relation is Schur-isotone; softmax, which the paper calls so, is not:

        >>> import manymax
        >>> wide, narrow = torch.tensor([3.0, 1.0, -1.0]), torch.tensor([3.0, 0.0, 0.0])
        >>> majorizes(wide, narrow), majorizes(manymax.softmax(wide), manymax.softmax(narrow))
        (True, False)
    """
    sums, others = (x.sort(descending=True).values.cumsum(-1) for x in (upper, lower))
    rounding = 8 * torch.finfo(sums.dtype).eps * float(sums.abs().max())
    return bool((sums >= others - rounding).all() and (sums[-1] - others[-1]).abs() <= rounding)


def _first_rows(rows: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """(rows, C) scores: levels, which tie, and normal ones of three spreads."""
    chosen = torch.randint(len(LEVELS), (rows, num_classes), generator=generator)
    levels = torch.tensor(LEVELS, dtype=torch.float64)[chosen]
    spread = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64).repeat(rows // 3 + 1)[:, None]
    normal = spread * torch.randn(len(spread), num_classes, generator=generator, dtype=torch.float64)
    return torch.cat([levels, normal.clamp(-10, 10)])


def _margins(map: Map, scores: Tensor, *, rate: bool) -> tuple[Tensor, Tensor]:
    """The smallest lead of p_i over p_j with s_i > s_j in each row, and its pair i C + j.

    Negative for an inversion, and for equal scores with unequal probabilities; 0 for a tie. As a rate it is
    log(p_i / p_j) / (s_i - s_j) / 2: the same for all pairs of softmax, so that it shows where a map begins to waver.
    """
    probs = map(scores)
    if probs.shape != scores.shape:
        raise ArgumentError(f"`map` must return the shape of its scores, {tuple(scores.shape)}; got {probs.shape}.")
    lead = scores[:, :, None] - scores[:, None, :]
    kept = _lead(probs[:, :, None], probs[:, None, :])
    unequal = torch.where((lead == 0) & (kept < -ROUNDING), kept, torch.inf)
    margins, pairs = torch.where(lead > GAP, kept.atanh() / lead if rate else kept, unequal).flatten(1).min(-1)
    return margins, pairs


def _lead(higher: Tensor, lower: Tensor) -> Tensor:
    """(p_i - p_j) / (|p_i| + |p_j|), 0 where both are 0: how clearly one probability is above the other."""
    size = higher.abs() + lower.abs()
    return (higher - lower) / torch.where(size > 0, size, 1)


def _simplest(map: Map, scores: Tensor, pair: Tensor, kind: str) -> Witness:
    """The witness with as few decimals as still show the same."""
    i, j = divmod(int(pair), len(scores))
    for candidate in (*(scores.round(decimals=d) for d in range(4)), scores):
        probs = map(candidate[None])[0]
        lead = float(_lead(probs[i], probs[j]))
        shown = lead < -ROUNDING if kind == "none" else abs(lead) <= ROUNDING and bool(candidate[i] > candidate[j])
        if shown and candidate[i] >= candidate[j]:
            break
    return Witness(candidate, probs, i, j)
