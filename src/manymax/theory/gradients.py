"""Ties and gradients: what ties cost a ranking, which classes get a signal, and matrices to look at.

    ties       m values at positions z+1 .. z+m, r of them relevant, in random order have the expected DCG
               (r/m) sum_i w_{z+i}, w_i = 1/log2(i+1); in the best order they have sum_{i <= r} w_{z+i}
    direction  d = sum_i sum_j w_{position of i} (e_j - e_i) over relevant i and irrelevant j: the gradient of a
               pairwise loss that is consistent with DCG
    alignment  <p - y, d>; with the zeros of the irrelevant classes filled by f_j it grows by sum_j f_j sum_i w_i

The paper prints "at least" for the loss by ties and "at most" for the alignment: both are equalities. It also calls d
the direction of improvement, while the formula is that of a gradient; as -d the inequality would be reversed. Sparse
maps have ties in their probabilities and none in the scores: whoever ranks by scores loses nothing.

Reference: the paper's section "Theoretical understandings of WOP".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_scores
from manymax.ops.discounts import discounts
from manymax.theory.order_preservation import Map


def expected_dcg(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """The DCG of a ranking by `values` in which ties are broken at random: (r/m) sum_i w_{z+i} for each block of ties.

    Args:
        values: (..., C) scores or probabilities, highest first.
        relevant: (..., C) bool.
        cutoff: positions beyond it count nothing.

    Returns:
        (...) float64.

    Example: the relevant class shares the first two places.

        >>> expected_dcg(torch.tensor([2.0, 2.0, 1.0]), torch.tensor([True, False, False]))
        tensor(0.8155, dtype=torch.float64)
    """
    _check_relevant(values, relevant)
    ranked, order = values.sort(-1, descending=True)
    weights = discounts(values.shape[-1], cutoff).expand(values.shape)
    starts = torch.cat([torch.ones_like(ranked[..., :1], dtype=torch.bool), ranked[..., 1:] != ranked[..., :-1]], -1)
    block = starts.cumsum(-1) - 1  # number of the block of ties at each position
    zero = torch.zeros_like(weights)
    mean = zero.scatter_add(-1, block, weights) / zero.scatter_add(-1, block, torch.ones_like(weights)).clamp(min=1)
    return (mean.gather(-1, block) * relevant.gather(-1, order)).sum(-1)


def best_dcg(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """The DCG of a ranking by `values` in which ties are broken in favour of relevant classes, (...) float64."""
    _check_relevant(values, relevant)
    first = relevant.int().argsort(dim=-1, descending=True, stable=True)
    order = first.gather(-1, values.gather(-1, first).argsort(dim=-1, descending=True, stable=True))
    return (discounts(values.shape[-1], cutoff) * relevant.gather(-1, order)).sum(-1)


def tie_loss(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """What ties cost: sum_{i <= r} w_{z+i} - (r/m) sum_{i <= m} w_{z+i} over all blocks of ties, (...) float64.

    Example: sparsemax ties the classes that it gives nothing; their scores do not tie.

        >>> import manymax
        >>> scores, relevant = torch.tensor([3.0, 1.0, 0.5, 0.0]), torch.tensor([False, True, False, False])
        >>> tie_loss(manymax.sparsemax(scores), relevant), tie_loss(scores, relevant)
        (tensor(0.1104, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    return best_dcg(values, relevant, cutoff) - expected_dcg(values, relevant, cutoff)


def dcg_direction(scores: Tensor, relevant: Tensor) -> Tensor:
    """d = sum_i sum_j w_{position of i} (e_j - e_i) over relevant i and irrelevant j, (..., C) float64.

    Args:
        scores: (..., C), which give the positions.
        relevant: (..., C) bool.
    """
    _check_relevant(scores, relevant)
    position = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    weights = torch.where(relevant, discounts(scores.shape[-1])[position], 0)
    others = (~relevant).sum(-1, keepdim=True)
    return torch.where(relevant, -weights * others, weights.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Alignment:
    """<p - y, d> of a sparse map, the same with its zeros filled, and what the zeros lose, (...) each.

    sparse = filled - lost, exactly.
    """

    sparse: Tensor
    filled: Tensor
    lost: Tensor


def alignment(probs: Tensor, scores: Tensor, relevant: Tensor, fill: Tensor) -> Alignment:
    """How much of the direction of DCG the gradient p - y of a sparse map has, and how much more without zeros.

    Args:
        probs: (..., C) what a sparse map makes of the scores.
        scores: (..., C).
        relevant: (..., C) bool, y.
        fill: (..., C) not negative: what the irrelevant classes with p_j = 0 would have.

    Returns:
        Alignment: three numbers a row.

    Example:
        >>> import manymax
        >>> scores, relevant = torch.tensor([1.0, 3.0, 0.0]).double(), torch.tensor([True, False, False])
        >>> alignment(manymax.sparsemax(scores), scores, relevant, manymax.softmax(scores)).lost
        tensor(0.0265, dtype=torch.float64)
    """
    direction = dcg_direction(scores, relevant)
    zeroed = zeroed_negatives(probs, relevant)
    gradient = probs - relevant.to(probs.dtype)
    filled = torch.where(zeroed, fill, gradient)
    lost = torch.where(zeroed, fill * direction, 0).sum(-1)
    return Alignment((gradient * direction).sum(-1), (filled * direction).sum(-1), lost)


def zeroed_negatives(probs: Tensor, relevant: Tensor) -> Tensor:
    """Z(s) = {j: p_j = 0 and y_j = 0}, (..., C) bool: negatives whose gradient p_j - y_j is 0."""
    _check_relevant(probs, relevant)
    return (probs == 0) & ~relevant


def gradient(member: Member, scores: Tensor, target: Tensor, **settings: Any) -> Tensor:
    """The gradient of a member's loss in the scores, row by row.

    Args:
        member: a row of `FAMILY` whose loss sees all scores.
        scores: (N, C).
        target: as the loss takes it.
        settings: the member's own, such as `alpha`.

    Returns:
        (N, C).

    Example:
        >>> from manymax.members import FAMILY
        >>> gradient(FAMILY["sparsemax"], torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([1]))
        tensor([[ 0.7500, -0.7500,  0.0000]])
    """
    check_scores(scores)
    if member.kind not in ("exact", "quadratic"):
        raise ArgumentError(f"`member` must be a loss of all scores; {member.name} is not: see `sampled_gradient`.")
    leaf = scores.detach().requires_grad_()
    return torch.autograd.grad(member.loss(leaf, target, reduction="sum", **settings), leaf)[0]


def sampled_gradient(
    member: Member,
    scores: Tensor,
    target: Tensor,
    *,
    log_q: Tensor,
    num_negatives: int,
    draws: int = 1,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> Tensor:
    """The gradient of a sampled loss in the scores of all classes, in the mean over draws.

    Args:
        member: a row of `FAMILY` that draws negatives.
        scores: (N, C).
        target: (N,) labels.
        log_q: (C,) the proposal.
        num_negatives: k.
        draws: how often each row draws k negatives.
        generator: of the draws.
        settings: the member's own, such as `correction`.

    Returns:
        (N, C); 0 at classes that were not drawn.

    Example:
        >>> from manymax.members import FAMILY
        >>> scores, target, log_q = torch.zeros(1, 4), torch.tensor([0]), torch.tensor([1.0, 1.0, 1.0, 1e-9]).log()
        >>> g = sampled_gradient(FAMILY["ssm"], scores, target, log_q=log_q.log_softmax(-1), num_negatives=8)
        >>> g[0, 3], g.sum().abs() < 1e-6
        (tensor(0.), tensor(True))
    """
    check_scores(scores)
    if member.kind != "sampled":
        raise ArgumentError(f"`member` must draw negatives; {member.name} does not: see `gradient`.")
    leaf, count = scores.detach().requires_grad_(), len(scores) * draws * num_negatives
    ids = torch.multinomial(log_q.exp(), count, replacement=True, generator=generator).view(len(scores), draws, -1)
    rows = torch.arange(len(scores))[:, None, None]
    loss = member.loss(
        leaf.gather(-1, target.unsqueeze(-1)).expand(-1, draws),
        leaf[rows, ids],
        log_q_positive=log_q[target].unsqueeze(-1).expand(-1, draws),
        log_q_negative=log_q[ids],
        hits=ids == target[:, None, None],
        reduction="sum",
        **settings,
    )
    return torch.autograd.grad(loss, leaf)[0] / draws


def without_signal(gradient: Tensor, target: Tensor) -> Tensor:
    """The negatives that learn nothing: gradient 0 and not the label, (N, C) bool.

    >>> without_signal(torch.tensor([[0.75, -0.75, 0.0]]), torch.tensor([1]))
    tensor([[False, False,  True]])
    """
    labels = torch.zeros_like(gradient, dtype=torch.bool).scatter(-1, target.unsqueeze(-1), True)
    return (gradient == 0) & ~labels


def undrawn_probability(log_q: Tensor, num_negatives: int) -> Tensor:
    """(1 - q_j)^k, (C,): how likely class j gets no signal from k draws.

    >>> undrawn_probability(torch.tensor([0.5, 0.25, 0.25]).log(), 2)
    tensor([0.2500, 0.5625, 0.5625])
    """
    return (num_negatives * torch.log1p(-log_q.exp())).exp()


def by_score(matrix: Tensor, scores: Tensor) -> Tensor:
    """A matrix to look at: classes in decreasing order of their scores.

    Args:
        matrix: (N, C), each row in the order of its own scores; or (C, C), a Jacobian, both ways.
        scores: (N, C) for the first, (C,) for the second.

    Returns:
        The matrix, reordered.

    Example:
        >>> by_score(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[0.0, 2.0, 1.0]]))
        tensor([[0.7000, 0.2000, 0.1000]])
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if scores.ndim == 1:
        return matrix[order][:, order]
    return matrix.gather(-1, order)


def top_jacobian(map: Map, scores: Tensor, count: int) -> Tensor:
    """The Jacobian among the classes with the highest scores, in their order, without a (C, C) table.

    Args:
        map: scores (C,) to probabilities (C,).
        scores: (C,).
        count: how many classes, n.

    Returns:
        (n, n).

    Example:
        >>> import manymax
        >>> top_jacobian(manymax.sparsemax, torch.tensor([-1.0, 1.0, 0.5]), 2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    leaf = scores.detach().requires_grad_()
    probs, order = map(leaf), scores.argsort(dim=-1, descending=True, stable=True)[:count]
    rows = [torch.autograd.grad(probs[i], leaf, retain_graph=True)[0][order] for i in order]
    return torch.stack(rows)


def _check_relevant(values: Tensor, relevant: Tensor) -> None:
    check_scores(values, "values")
    if not isinstance(relevant, Tensor) or relevant.dtype != torch.bool:
        kind = relevant.dtype if isinstance(relevant, Tensor) else type(relevant).__name__
        raise ArgumentTypeError(f"`relevant` must be a bool tensor; got {kind}.")
    if relevant.shape != values.shape:
        raise ArgumentError(
            f"`relevant` must have the shape of the scores, {tuple(values.shape)}; got {tuple(relevant.shape)}."
        )
