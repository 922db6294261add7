"""The conditional risk of a member and the scores that minimise it.

For a distribution of label sets Y with 0/1 vectors y, every member's conditional risk is linear in the losses of single
labels:

    risk(s) = sum_i t_i l(i, s) + const,   t = E[y] for the sum over positives, E[y / |y|] for the normalized form
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.tree import ClassTree
from manymax.theory.inputs import check_proposal


@checked(log_q="floats C", least={"num_negatives": 1})
def all_samples(log_q: Tensor, num_negatives: int) -> tuple[Tensor, Tensor]:
    """Every outcome of k draws from q, as class ids (n, k) in rising order, and their probabilities (n,).

    >>> all_samples(torch.tensor([0.5, 0.5]).log(), 2)
    (tensor([[0, 0], [0, 1], [1, 1]]), tensor([0.2500, 0.5000, 0.2500]))
    """
    check_proposal(log_q)
    num_classes = len(log_q)
    # Not torch.combinations, which first counts the sequences of draws and overflows.
    ids = torch.tensor(list(combinations_with_replacement(range(num_classes), num_negatives)))
    counts = torch.nn.functional.one_hot(ids, num_classes).sum(-2).to(log_q.dtype)
    # log of k! / prod_j counts_j!, the number of sequences of draws with these counts; 0 * -inf is nan and counts as 0.
    log_sequences = math.lgamma(num_negatives + 1) - torch.lgamma(counts + 1).sum(-1)
    return ids, (log_sequences + (counts * log_q).nan_to_num(nan=0.0).sum(-1)).exp()


@checked(least={"num_classes": 1})
def uniform_log_q(num_classes: int) -> Tensor:
    """log q of a uniform proposal, (C,) float64."""
    return torch.full((num_classes,), -math.log(num_classes), dtype=torch.float64)


@checked(scores="finite ... V", weights="probs C", log_q="floats C", least={"num_negatives": 1})
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
    """sum_i t_i l(i, s); for a sampled member the exact mean over its draws, by enumeration of all of them.

    Args:
        member: a row of `FAMILY`.
        scores: (..., C); for a member on a tree (..., M), the scores of its inner nodes.
        weights: (C,) t, see `LabelLaw.class_weights`; with one label per example its probabilities.
        log_q, num_negatives: for a sampled member, the proposal (C,), uniform if None, and k.
        tree: for a member on a tree, a binary tree.
        settings: settings of the member, such as `alpha`.

    Returns:
        (...), one risk per row of scores.

    Example:
        >>> from manymax.members import FAMILY
        >>> scores = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0]])
        >>> conditional_risk(FAMILY["rankmax"], scores, torch.tensor([0.6, 0.22, 0.18]))
        tensor([0.5545, 0.5642])
    """
    num_classes = len(weights)
    labels = torch.arange(num_classes)
    rows = scores.unsqueeze(-2).expand(*scores.shape[:-1], num_classes, scores.shape[-1])  # each row once per label
    if member.kind == "sampled":
        log_q = uniform_log_q(num_classes).to(scores) if log_q is None else log_q
        return _sampled_losses(member, scores, log_q, num_negatives, settings) @ weights
    if member.kind == "tree":
        if tree is None:
            raise ArgumentError("`tree` must be given for a tree member; pass `HuffmanTree(counts)`.")
        # With unit vectors as node vectors the inner product of node n and the input is coordinate n of the input.
        vectors = torch.eye(scores.shape[-1], dtype=scores.dtype)
        target = labels.expand(rows.shape[:-1])
        return member.loss(rows, vectors, target, tree, reduction="none", **settings) @ weights
    # A class of weight 0 may have the score -inf, and 0 times its infinite loss would be nan: -100 leaves it out.
    target = torch.where(weights > 0, labels, -100).expand(rows.shape[:-1])
    return member.loss(rows, target, reduction="none", **settings) @ weights


def _sampled_losses(
    member: Member, scores: Tensor, log_q: Tensor, num_negatives: int, settings: Mapping[str, Any]
) -> Tensor:
    """The loss of a sampled member with every class as the label, (..., C): its mean over all n samples of k draws."""
    ids, chances = all_samples(log_q, num_negatives)  # (n, k), (n,)
    labels, samples = torch.arange(len(log_q)), torch.arange(len(ids))
    rows = scores.unsqueeze(-2).expand(*scores.shape, len(log_q))  # (..., C labels, C classes)
    losses = member.loss(
        scores.unsqueeze(-1).expand(*scores.shape, len(ids)),
        rows.unsqueeze(-2).expand(*rows.shape[:-1], len(ids), len(log_q))[..., samples[:, None], ids],
        log_q_positive=log_q[:, None].expand(*scores.shape, len(ids)),
        log_q_negative=log_q[ids].expand(*scores.shape, *ids.shape),
        hits=(ids == labels[:, None, None]).expand(*scores.shape, *ids.shape),
        reduction="none",
        **settings,
    )
    return losses @ chances


# Minimisers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Minimisers:
    """Scores that minimise a conditional risk.

    scores: (n, C), one row per minimiser; the highest is 0 if shifts do not change the loss. For a tree, log P.
    how: "closed form" or "search".
    """

    scores: Tensor
    how: str


@checked(weights="probs C", log_q="floats C", least={"num_negatives": 1})
def minimisers(
    member: Member,
    weights: Tensor,
    *,
    log_q: Tensor | None = None,
    num_negatives: int = 2,
    **settings: Any,
) -> Minimisers:
    """The scores that minimise sum_i t_i l(i, s): by a closed form where one is known, otherwise by a search.

    Closed forms, with p = t / sum(t): a Fenchel-Young member has grad Omega(p); others give theirs in
    `Member.theory.minimisers`. NCE, the tree and sampled softmax with log q correction have log p; sampled softmax
    without correction has log(p / q) (hits kept in all three); rankmax has whole numbers; Taylor-softmax has one score
    on either side of its turning point.

    Args:
        member: a row of `FAMILY`.
        weights: (C,) t, see `LabelLaw.class_weights`; zeros only where a closed form is known.
        log_q, num_negatives: for a sampled member, as in `conditional_risk`.
        settings: settings of the member.

    Returns:
        One row of scores for each minimiser that is known or was found.

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
    return Minimisers(_highest_at_zero(member, known), "closed form")


@checked(weights="probs C", log_q="floats C", least={"num_negatives": 1, "starts": 1})
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
    """The minimisers that descents from random scores find; for few classes.

    Args:
        member, weights, log_q, num_negatives, settings: as in `minimisers`, for a member that sees all scores or a
            sample of them.
        starts: how many descents; a convex loss needs only one and makes only one.
        seed: of the random scores.

    Returns:
        The ends of those descents whose risk is the lowest of all.
    """
    if member.held is not None:
        raise ArgumentError(
            f"`member`: no formula is known for the minimiser of {member.name} with these settings, and a descent finds"
            f" none, because the gradient holds {member.held} constant."
        )
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
    return Minimisers(_highest_at_zero(member, ends[risks <= risks.min() + 1e-9]), "search")


@checked(probs="probs C", log_q="floats C")
def closed_form(member: Member, probs: Tensor, *, log_q: Tensor | None = None, **settings: Any) -> Tensor | None:
    """The minimisers (n, C) for class probabilities probs (C,) by a formula; None where none is known."""
    if log_q is not None:
        check_proposal(log_q)
    if member.theory.minimisers is not None:
        return member.theory.minimisers(probs, log_q, **settings)
    if member.foundation is not None:
        return member.fenchel_young(**settings).slope(probs).unsqueeze(0)
    return None


@checked(start="finite V", weights="probs C")
def descend_risk(member: Member, start: Tensor, weights: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A local minimum of the risk near the scores `start` (C,), by LBFGS; options are those of `conditional_risk`."""
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


def _highest_at_zero(member: Member, scores: Tensor) -> Tensor:
    """Scores (n, C), shifted so that the highest of each row is 0, if a shift does not change the member's loss."""
    return scores - scores.amax(-1, keepdim=True) if member.facts.shift_invariant.value else scores
