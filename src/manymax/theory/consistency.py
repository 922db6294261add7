"""Does the minimiser of a loss rank as a metric wants? Risks, their minimisers, and metrics in expectation.

For a law of label sets Y with 0/1 vectors y, every member's conditional risk is linear in the losses of single labels:

    risk(s) = sum_i t_i l(i, s) + const,   t = E[y] for the sum over positives, E[y / |y|] for the normalized form

and every metric is linear in a gain per class, g, once the classes are ranked:

    metric@k = sum_{i <= k} w_i g_(class at position i)

    precision   g = E[y],            w = 1 / k
    recall      g = E[y / |y|],      w = 1           (with one label per example: Top-k accuracy)
    dcg         g = E[y],            w = 1 / log2(i + 1)
    ndcg        g = E[y / IDCG(y)],  w = 1 / log2(i + 1)

So a loss is consistent with a metric if the minimiser of its risk sorts the classes by g, however ties are broken.

References: Lapin, Hein, Schiele, CVPR 2016; Yang and Koyejo, ICML 2020 (Top-k calibration); Ravikumar, Tewari, Yang,
AISTATS 2011 (NDCG); Menon et al., NeurIPS 2019 (P@k and R@k by reductions).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.engine.target import MULTILABEL
from manymax.errors import ArgumentError, check_choice
from manymax.ops.discounts import discounts
from manymax.ops.tree import ClassTree

CONSISTENCY_METRICS = ("precision", "recall", "dcg", "ndcg")
LABELS = ("single", "multi")
TIED = 1e-5  # scores that differ by less count as tied: a search finds them no better
NEGLIGIBLE = 1e-4  # a smaller regret is within what such ties can cost


@dataclass(frozen=True)
class LabelLaw:
    """A distribution of label sets: labels (n, C) bool, and the probability of each set, probs (n,).

    >>> law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), torch.tensor([0.45, 0.55]))
    >>> law.class_weights("sum"), law.class_weights("normalized")
    (tensor([0.4500, 0.5500, 0.5500]), tensor([0.4500, 0.2750, 0.2750]))
    """

    labels: Tensor
    probs: Tensor

    @staticmethod
    def single(probs: Tensor) -> LabelLaw:
        """One label per example, drawn from probs (C,)."""
        return LabelLaw(torch.eye(len(probs), dtype=torch.bool), probs)

    def class_weights(self, multilabel: str = "sum") -> Tensor:
        """t of the conditional risk, (C,): E[y], or E[y / |y|] for "normalized"."""
        check_choice("multilabel", multilabel, MULTILABEL)
        return self.gains("dcg" if multilabel == "sum" else "recall")

    def gains(self, metric: str, cutoff: int | None = None) -> Tensor:
        """g, (C,), by which the best ranking sorts. The ideal DCG ends at `cutoff`; empty sets gain nothing."""
        check_choice("metric", metric, CONSISTENCY_METRICS)
        sizes = self.labels.sum(-1)
        per_label = torch.ones_like(self.probs)
        if metric == "recall":
            per_label = 1 / sizes.clamp_min(1).to(self.probs.dtype)
        elif metric == "ndcg":
            ideal = discounts(self.labels.shape[-1], cutoff).to(self.probs).cumsum(-1)
            per_label = 1 / ideal[sizes.clamp_min(1) - 1]
        return (self.probs * per_label) @ self.labels.to(self.probs.dtype)


def position_weights(metric: str, num_classes: int, cutoff: int | None = None) -> Tensor:
    """w, (C,) float64: the weight of each position; 0 beyond the cutoff.

    >>> position_weights("precision", 4, cutoff=2)
    tensor([0.5000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """
    check_choice("metric", metric, CONSISTENCY_METRICS)
    cutoff = num_classes if cutoff is None else cutoff
    if not 1 <= cutoff <= num_classes:
        raise ArgumentError(f"`cutoff` must be between 1 and the number of classes, {num_classes}; got {cutoff}.")
    if metric in ("dcg", "ndcg"):
        return discounts(num_classes, cutoff)
    weights = torch.ones(num_classes, dtype=torch.float64) / (cutoff if metric == "precision" else 1)
    return torch.where(torch.arange(num_classes) < cutoff, weights, 0)


def expected_metric(scores: Tensor, law: LabelLaw, metric: str, cutoff: int | None = None) -> float:
    """The metric of ranking by the scores (C,), in expectation over the law, with ties broken in the worst way.

    Example: ranked by the minimiser of the sum, then of the normalized form (see `LabelLaw`).
        >>> law = LabelLaw(torch.tensor([[1, 0, 0], [0, 1, 1]]).bool(), torch.tensor([0.45, 0.55]))
        >>> for multilabel in ("sum", "normalized"):
        ...     scores = law.class_weights(multilabel).log()
        ...     print([round(expected_metric(scores, law, metric), 3) for metric in ("dcg", "ndcg")])
        [1.122, 0.775]
        [1.072, 0.831]
    """
    gains = law.gains(metric, cutoff).double()
    order = gains.argsort(stable=True)  # of tied classes the one with the smaller gain comes first
    order = order[_levels(scores)[order].argsort(stable=True)]
    return float(position_weights(metric, len(gains), cutoff) @ gains[order])


def regret(scores: Tensor, law: LabelLaw, metric: str, cutoff: int | None = None) -> float:
    """What ranking by the scores (C,) loses against the best ranking, ties broken in the worst way."""
    gains = law.gains(metric, cutoff).double().sort(descending=True).values
    return float(position_weights(metric, len(gains), cutoff) @ gains) - expected_metric(scores, law, metric, cutoff)


def _levels(scores: Tensor) -> Tensor:
    """(C,) 0 for the highest score and those tied with it, 1 for the next, ..."""
    ranked, order = scores.double().sort(descending=True)
    new = torch.cat([ranked.new_zeros(1), (ranked[:-1] - ranked[1:] > TIED).double()])  # -inf - -inf is nan: no gap
    return torch.empty_like(new).scatter(0, order, new.cumsum(0))


# Risk ---------------------------------------------------------------------------------------------


def all_samples(log_q: Tensor, num_negatives: int) -> tuple[Tensor, Tensor]:
    """Every outcome of k draws from q, as class ids (n, k) in rising order, and their probabilities (n,).

    >>> all_samples(torch.tensor([0.5, 0.5]).log(), 2)
    (tensor([[0, 0], [0, 1], [1, 1]]), tensor([0.2500, 0.5000, 0.2500]))
    """
    num_classes = len(log_q)
    ids = torch.combinations(torch.arange(num_classes), num_negatives, with_replacement=True)
    counts = torch.nn.functional.one_hot(ids, num_classes).sum(-2).to(log_q.dtype)
    orders = math.lgamma(num_negatives + 1) - torch.lgamma(counts + 1).sum(-1)
    return ids, (orders + (counts * log_q).nan_to_num(nan=0.0).sum(-1)).exp()


def conditional_risk(
    member: Member,
    scores: Tensor,
    weights: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 2,
    tree: ClassTree | None = None,
    **settings: Any,
) -> Tensor:
    """sum_i t_i l(i, s), with the negatives of a sampled member drawn in every possible way.

    Args:
        member: a row of `FAMILY`.
        scores: (..., C); for a tree (..., M), the scores of its inner nodes.
        weights: (C,) t, see `LabelLaw.class_weights`; the probabilities where there is one label.
        log_q, num_negatives: of a sampled member, (C,) and k; uniform unless given.
        tree: of a tree member, binary.
        settings: the member's own.

    Returns:
        (...).

    Example:
        >>> from manymax.members import FAMILY
        >>> scores = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]])
        >>> conditional_risk(FAMILY["rankmax"], scores, torch.tensor([0.6, 0.22, 0.18]))
        tensor([0.5545, 0.5642])
    """
    num_classes = len(weights)
    labels = torch.arange(num_classes)
    rows = scores.unsqueeze(-2).expand(*scores.shape[:-1], num_classes, scores.shape[-1])  # one for each label
    if member.kind == "sampled":
        log_q = _uniform(num_classes).to(scores) if log_q is None else log_q
        ids, chances = all_samples(log_q, num_negatives)
        losses = member.loss(
            scores.unsqueeze(-1).expand(*scores.shape, len(ids)),
            rows.unsqueeze(-2).expand(*rows.shape[:-1], len(ids), num_classes)[
                ..., torch.arange(len(ids))[:, None], ids
            ],
            log_q_positive=log_q[:, None].expand(*scores.shape, len(ids)),
            log_q_negative=log_q[ids].expand(*scores.shape, *ids.shape),
            hits=(ids == labels[:, None, None]).expand(*scores.shape, *ids.shape),
            reduction="none",
            **settings,
        )
        return (losses @ chances) @ weights
    if member.kind == "tree":
        if tree is None:
            raise ArgumentError("`tree` must be given for a tree member; pass `HuffmanTree(counts)`.")
        vectors = torch.eye(scores.shape[-1], dtype=scores.dtype)  # node n sees coordinate n: the input is the scores
        target = labels.expand(rows.shape[:-1])
        return member.loss(rows, vectors, target, tree, reduction="none", **settings) @ weights
    target = torch.where(weights > 0, labels, -100).expand(rows.shape[:-1])  # a class of weight 0 may be at -inf
    return member.loss(rows, target, reduction="none", **settings) @ weights


def _uniform(num_classes: int) -> Tensor:
    return torch.full((num_classes,), -math.log(num_classes), dtype=torch.float64)


# Minimisers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minimisers:
    """Scores (n, C) that minimise a conditional risk, highest 0 (log P for a tree), and how they were found."""

    scores: Tensor
    how: str  # "closed form" or "search"


def minimisers(
    member: Member,
    weights: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 2,
    **settings: Any,
) -> Minimisers:
    """The scores that minimise sum_i t_i l(i, s): by a closed form where one is known, otherwise by a search.

    Closed forms, with p = t / sum(t): a Fenchel-Young member has grad Omega(p); others state theirs in their record, in
    `theory.minimisers`. NCE, the tree and sampled softmax with log q correction have log p; sampled softmax without has
    log(p / q) (hits kept in all three); rankmax has whole numbers; Taylor-softmax has one score on either side of its
    turning point.

    Args:
        member: a row of `FAMILY`.
        weights: (C,) t, see `LabelLaw.class_weights`; zeros only where a closed form is known.
        log_q, num_negatives: of a sampled member, as in `conditional_risk`.
        settings: the member's own.

    Returns:
        One row for each minimiser that is known or was found, the highest score 0 unless a shift counts.

    Example:
        >>> from manymax.members import FAMILY
        >>> weights = torch.tensor([0.6, 0.22, 0.18])
        >>> minimisers(FAMILY["sparsemax"], weights).scores, minimisers(FAMILY["rankmax"], weights).scores
        (tensor([[ 0.0000, -0.3800, -0.4200]]), tensor([[ 0., -1., -1.]]))
    """
    probs = weights / weights.sum()
    known = closed_form(member, probs, log_q=log_q, **settings)
    if known is None:
        return search_minimisers(member, probs, log_q=log_q, num_negatives=num_negatives, **settings)
    return Minimisers(_pinned(member, known), "closed form")


def search_minimisers(
    member: Member,
    weights: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 2,
    starts: int = 12,
    seed: int = 0,
    **settings: Any,
) -> Minimisers:
    """The lowest ends of descents from random scores; one descent where the loss is convex. For few classes.

    Args:
        member, weights, log_q, num_negatives, settings: as in `minimisers`; a member that sees all scores or a sample.
        starts: how many descents where the loss is not convex.
        seed: of the random scores.
    """
    probs = (weights / weights.sum()).double()
    if bool((probs <= 0).any()):
        raise ArgumentError(
            "`weights` must be positive for a search: the score of an impossible class may be infinite."
        )
    options: dict[str, Any] = {"log_q": log_q, "num_negatives": num_negatives} if member.kind == "sampled" else {}
    options |= settings
    generator = torch.Generator().manual_seed(seed)
    first = 2 * torch.randn(
        1 if member.facts.convex.value else starts, len(probs), generator=generator, dtype=torch.float64
    )
    ends = torch.stack([descend_risk(member, start, probs, options) for start in first])
    risks = conditional_risk(member, ends, probs, **options)
    return Minimisers(_pinned(member, ends[risks <= risks.min() + 1e-9]), "search")


def _pinned(member: Member, scores: Tensor) -> Tensor:
    """Scores (n, C) with the highest at 0 where a shift changes nothing."""
    return scores - scores.amax(-1, keepdim=True) if member.facts.shift_invariant.value else scores


def closed_form(member: Member, probs: Tensor, *, log_q: Tensor | None = None, **settings: Any) -> Tensor | None:
    """The minimisers (n, C) for probs (C,) by a formula, or None where none is known."""
    if member.theory.minimisers is not None:
        return member.theory.minimisers(probs, log_q, **settings)
    if member.foundation is not None:
        return member.fenchel_young(**settings).slope(probs).unsqueeze(0)
    return None


def descend_risk(member: Member, start: Tensor, weights: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A local minimum of the risk, (C,), by LBFGS."""
    scores = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scores], max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        risk = conditional_risk(member, scores, weights, **options)
        risk.backward()
        return float(risk.detach())

    optimizer.step(closure)
    return scores.detach()


# Consistency --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consistency:
    """What a search over laws found: whether every minimiser ranked best, the largest regret, and where it was.

    `holds` is True if no regret was larger than a search's own error; a False is shown by `law`, `scores`, `cutoff`.
    """

    holds: bool
    regret: float
    law: LabelLaw
    scores: Tensor
    cutoff: int
    trials: int


def consistency(
    member: Member,
    metric: str = "dcg",
    *,
    labels: str = "single",
    multilabel: str = "sum",
    num_classes: int = 4,
    trials: int = 60,
    num_negatives: int = 2,
    uniform: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Consistency:
    """Whether the minimiser of a member's risk ranks best, over random laws with ties and zeros, at every cutoff.

    With one label per example, "recall" is Top-k calibration for every k and "dcg" is DCG consistency.

    Args:
        member: a row of `FAMILY`.
        metric: "precision", "recall", "dcg" or "ndcg".
        labels: laws of "single" labels, or of sets of "multi"ple ones.
        multilabel: "sum" over positives, or "normalized".
        num_classes: C.
        trials: how many laws. Half of them have ties and zeros.
        num_negatives: of a sampled member.
        uniform: a uniform proposal for a sampled member; a random one in each trial unless set.
        seed: of the laws.
        settings: the member's own.

    Returns:
        The finding, with the law, the scores and the cutoff of the largest regret.

    Example:
        >>> from manymax.members import FAMILY
        >>> consistency(FAMILY["softmax"], "recall").holds, consistency(FAMILY["rankmax"], "recall").holds
        (True, False)
        >>> consistency(FAMILY["softmax"], "ndcg", labels="multi").holds
        False
    """
    check_choice("labels", labels, LABELS)
    generator = torch.Generator().manual_seed(seed)
    impossible = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    zeros = closed_form(member, impossible, log_q=_uniform(3), **settings) is not None
    worst = Consistency(True, -math.inf, LabelLaw.single(torch.ones(1)), torch.zeros(1), 1, trials)
    for trial in range(trials):
        law = random_law(num_classes, generator, labels=labels, ties=bool(trial % 2), zeros=zeros)
        log_q = _uniform(num_classes) if uniform else _simplex(num_classes, generator).log()
        weights = law.class_weights(multilabel)
        for scores in minimisers(member, weights, log_q=log_q, num_negatives=num_negatives, **settings).scores:
            lost, cutoff = max((regret(scores, law, metric, k), k) for k in range(1, num_classes + 1))
            if lost > worst.regret:
                worst = Consistency(lost <= NEGLIGIBLE, lost, law, scores, cutoff, trials)
    return worst


def random_law(
    num_classes: int,
    generator: torch.Generator,
    *,
    labels: str = "single",
    ties: bool = False,
    zeros: bool = False,
) -> LabelLaw:
    """A law to try a claim on: uniform on the simplex, or of a few eighths, which tie; zeros if allowed."""
    if labels == "single":
        return LabelLaw.single(_simplex(num_classes, generator, ties, zeros))
    sets = torch.rand(num_classes + 1, num_classes, generator=generator) < 0.5
    sets[torch.arange(num_classes), torch.arange(num_classes)] |= ~sets.any(-1)[:-1] | (not zeros)
    sets[-1, 0] |= ~sets[-1].any()
    return LabelLaw(sets, _simplex(num_classes + 1, generator, ties, zeros))


def _simplex(size: int, generator: torch.Generator, ties: bool = False, zeros: bool = False) -> Tensor:
    """(size,) float64 probabilities."""
    if ties:
        drawn = torch.randint(size, (8,), generator=generator).bincount(minlength=size).double()
        drawn = drawn if zeros else drawn + 1
        return drawn / drawn.sum()
    drawn = -torch.rand(size, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    return drawn / drawn.sum()
