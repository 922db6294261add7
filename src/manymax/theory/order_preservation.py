"""Order preservation: whether a map from scores to probabilities keeps the order of the scores, found by a search.

    strict   s_i > s_j exactly when p_i > p_j
    weak     s_i > s_j implies p_i >= p_j, and somewhere s_i > s_j but p_i = p_j
    none     somewhere s_i >= s_j but p_i < p_j

The answers "weak" and "none" are proved by a witness, an example of scores; "strict" says that no such example was
found.
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
from manymax.ops.arguments import checked

Map = Callable[[Tensor], Tensor]

# Scores to begin with: at whole and half numbers ties of probabilities, kinks and turning points are likely.
LEVELS = (-8.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
GAP = 1e-3  # scores closer than this are not compared: rounding could tie their probabilities
ROUNDING = 1e-12  # probabilities of float64 maps that differ by a smaller share count as equal


@dataclass(frozen=True)
class Witness:
    """An example of scores whose order is not kept.

    scores, probs: (C,) each.
    higher, lower: two classes; `higher` has at least the score of `lower`, but not a higher probability.
    """

    scores: Tensor
    probs: Tensor
    higher: int
    lower: int

    def __str__(self) -> str:
        i, j = self.higher, self.lower
        relation = "<" if _relative_lead(self.probs[i], self.probs[j]) < -ROUNDING else "="
        row = ", ".join(f"{score:.4g}" for score in self.scores.tolist())
        return f"s = ({row}): s_{i} = {self.scores[i]:.4g} > s_{j} = {self.scores[j]:.4g}, but p_{i} {relation} p_{j}"


@dataclass(frozen=True)
class OrderPreservation:
    """How a map treats the order of the scores: "strict", "weak" or "none", and a witness unless "strict"."""

    kind: str
    witness: Witness | None


@checked
def member_map(member: Member, target: Tensor | None = None, **settings: Any) -> Map:
    """A member's map as a function of the scores alone.

    Args:
        member: a row of `FAMILY` that has a map.
        target: (...) the labels, for a map that needs them; class 0 if None.
        settings: settings of the member, such as `alpha`.

    Returns:
        A function from scores (..., C) to probabilities (..., C).

    Example:
        >>> from manymax.members import FAMILY
        >>> member_map(FAMILY["entmax"], alpha=2.0)(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    if member.map is None:
        raise ArgumentError(f"`member` must have a map from scores to probabilities; {member.name} has none.")
    if not member.needs_label:
        return partial(member.map, **settings)
    map_with_label = member.map
    return lambda scores: map_with_label(scores, label_of(scores, target), **settings)


@checked
def label_of(scores: Tensor, target: Tensor | None) -> Tensor:
    """The labels (...) for a map of scores (..., C) that needs them: the given ones, or class 0 everywhere."""
    return torch.zeros_like(scores[..., 0], dtype=torch.long) if target is None else target


@checked(least={"rows": 1, "rounds": 0})
def order_preservation_of(
    map: Map, num_classes: int = 5, *, rows: int = 1000, rounds: int = 8, seed: int = 0
) -> OrderPreservation:
    """Search for scores whose order a map does not keep.

    The search begins with scores at fixed levels and with normal scores. It then varies, in smaller and smaller steps,
    the rows that are closest to a violation: those in which p_i exceeds p_j by the least for the lead of s_i over s_j.

    Args:
        map: function from scores (rows, C) in float64 to probabilities (rows, C).
        num_classes: C, at least 2.
        rows: how many score vectors of each kind to begin with.
        rounds: how many times to vary the worst of them.
        seed: of the search.

    Returns:
        The answer, and the worst row, rounded as far as it still shows the violation, as the witness.

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
        worst = scores[_smallest_margins(map, scores, rate=True)[0].argsort()[:50]]
        noise = torch.randn(20, *worst.shape, generator=generator, dtype=torch.float64) * 0.5**round_
        scores = torch.cat([scores, (worst + noise).flatten(0, 1).clamp(-10, 10)])
    margins, pairs = _smallest_margins(map, scores, rate=False)
    margin, row = margins.min(0)
    if margin > 0:
        return OrderPreservation("strict", None)
    kind = "none" if margin < -ROUNDING else "weak"
    return OrderPreservation(kind, _rounded_witness(map, scores[row], pairs[row], kind))


@checked(upper="finite C", lower="finite C")
def majorizes(upper: Tensor, lower: Tensor) -> bool:
    """Whether `upper` (C,) majorizes `lower` (C,).

    That is: both have the same sum, and for every n the n largest entries of `upper` sum to at least as much as those
    of `lower`. A map that keeps this relation is Schur-isotone. The paper calls softmax so, but it is not:

        >>> import manymax
        >>> wide, narrow = torch.tensor([3.0, 1.0, -1.0]), torch.tensor([3.0, 0.0, 0.0])
        >>> majorizes(wide, narrow), majorizes(manymax.softmax(wide), manymax.softmax(narrow))
        (True, False)
    """
    sums, others = (x.sort(descending=True).values.cumsum(-1) for x in (upper, lower))
    rounding = 8 * torch.finfo(sums.dtype).eps * float(sums.abs().max())
    return bool((sums >= others - rounding).all() and (sums[-1] - others[-1]).abs() <= rounding)


def _first_rows(rows: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Scores to begin with, (about 2 rows, C): random levels, some of them tied, and normal ones of three spreads."""
    ids = torch.randint(len(LEVELS), (rows, num_classes), generator=generator)
    levels = torch.tensor(LEVELS, dtype=torch.float64)[ids]
    spread = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64).repeat(rows // 3 + 1)[:, None]
    normal = spread * torch.randn(len(spread), num_classes, generator=generator, dtype=torch.float64)
    return torch.cat([levels, normal.clamp(-10, 10)])


def _smallest_margins(map: Map, scores: Tensor, *, rate: bool) -> tuple[Tensor, Tensor]:
    """The smallest lead of p_i over p_j among the pairs with s_i > s_j of each row, and its pair.

    A lead is negative for an inversion, and for equal scores with unequal probabilities; it is 0 for a tie.

    Args:
        map, scores: as in `order_preservation_of`, (rows, C).
        rate: take log(p_i / p_j) / (s_i - s_j) / 2 instead of the lead. For softmax it is the same for all pairs, so a
            small rate shows where a map comes close to a violation, however close the scores are.

    Returns:
        (rows,) margins; (rows,) pairs, encoded as i C + j.
    """
    probs = map(scores)
    if probs.shape != scores.shape:
        raise ArgumentError(f"`map` must return the shape of its scores, {tuple(scores.shape)}; got {probs.shape}.")
    score_lead = scores[:, :, None] - scores[:, None, :]  # (rows, C, C)
    prob_lead = _relative_lead(probs[:, :, None], probs[:, None, :])
    if_tied = torch.where((score_lead == 0) & (prob_lead < -ROUNDING), prob_lead, torch.inf)
    # atanh((p_i - p_j) / (p_i + p_j)) = log(p_i / p_j) / 2
    if_ahead = prob_lead.atanh() / score_lead if rate else prob_lead
    margins, pairs = torch.where(score_lead > GAP, if_ahead, if_tied).flatten(1).min(-1)
    return margins, pairs


def _relative_lead(higher: Tensor, lower: Tensor) -> Tensor:
    """(p_i - p_j) / (|p_i| + |p_j|), between -1 and 1; 0 where both probabilities are 0."""
    size = higher.abs() + lower.abs()
    return (higher - lower) / torch.where(size > 0, size, 1)


def _rounded_witness(map: Map, scores: Tensor, pair: Tensor, kind: str) -> Witness:
    """A witness from scores (C,) and a pair i C + j, rounded to as few decimals as still show the same violation."""
    i, j = divmod(int(pair), len(scores))
    for candidate in (*(scores.round(decimals=d) for d in range(4)), scores):
        probs = map(candidate[None])[0]
        lead = float(_relative_lead(probs[i], probs[j]))
        shown = lead < -ROUNDING if kind == "none" else abs(lead) <= ROUNDING and bool(candidate[i] > candidate[j])
        if shown and candidate[i] >= candidate[j]:
            break
    return Witness(candidate, probs, i, j)
