"""Ties and gradients: what ties cost a ranking, which classes get a gradient, and matrices sorted for heat maps.

    ties       m tied values at positions z+1 .. z+m, r of them relevant, have the expected DCG (r/m) sum_i w_{z+i} if
               they are ranked at random, w_i = 1/log2(i+1); ranked in the best way they have sum_{i <= r} w_{z+i}
    direction  d = sum_i sum_j w_{position of i} (e_j - e_i) over relevant i and irrelevant j: the gradient of a
               pairwise loss that is consistent with DCG
    alignment  <p - y, d>; if the zero probabilities of irrelevant classes j are replaced by f_j, it grows by
               sum_j f_j sum_i w_i

The paper prints "at least" for the cost of ties and "at most" for the alignment: both are equalities. It also calls d
the direction of improvement, while the formula is that of a gradient; with -d the inequality would be reversed. Sparse
maps tie probabilities and not scores: a ranking by scores loses nothing.

Citation: the paper's section "Theoretical understandings of WOP" (weak order preservation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.member import Member
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores
from manymax.ops.discounts import discounts
from manymax.theory.inputs import check_proposal
from manymax.theory.order_preservation import Map


@checked(values="scores ... C", relevant="bools ... C", least={"cutoff": 1})
def expected_dcg(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """Expected DCG of a ranking by `values` with ties broken at random: (r/m) sum_i w_{z+i} for each group of ties.

    Args:
        values: (..., C) scores or probabilities; the highest is ranked first.
        relevant: (..., C) bool.
        cutoff: positions beyond it add nothing; None for all positions.

    Returns:
        (...) float64.

    Example: the relevant class shares the first two places.

        >>> expected_dcg(torch.tensor([2.0, 2.0, 1.0]), torch.tensor([True, False, False]))
        tensor(0.8155, dtype=torch.float64)
    """
    _check_relevant(values, relevant)
    ranked, permutation = values.sort(-1, descending=True)
    weights = discounts(values.shape[-1], cutoff).expand(values.shape)
    starts = torch.cat([torch.ones_like(ranked[..., :1], dtype=torch.bool), ranked[..., 1:] != ranked[..., :-1]], -1)
    group = starts.cumsum(-1) - 1  # number of the group of ties at each position
    # Each class of a group gets the mean weight of the group's positions.
    zero = torch.zeros_like(weights)
    sizes = zero.scatter_add(-1, group, torch.ones_like(weights)).clamp(min=1)
    mean = zero.scatter_add(-1, group, weights) / sizes
    return (mean.gather(-1, group) * relevant.gather(-1, permutation)).sum(-1)


@checked(values="scores ... C", relevant="bools ... C", least={"cutoff": 1})
def best_dcg(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """DCG of a ranking by `values` with ties broken in favour of relevant classes, (...); see `expected_dcg`."""
    _check_relevant(values, relevant)
    # Two stable sorts, by relevance and then by value: among tied classes the relevant ones come first.
    by_relevance = relevant.int().argsort(dim=-1, descending=True, stable=True)
    by_value = values.gather(-1, by_relevance).argsort(dim=-1, descending=True, stable=True)
    permutation = by_relevance.gather(-1, by_value)
    return (discounts(values.shape[-1], cutoff) * relevant.gather(-1, permutation)).sum(-1)


@checked(values="scores ... C", relevant="bools ... C", least={"cutoff": 1})
def tie_loss(values: Tensor, relevant: Tensor, cutoff: int | None = None) -> Tensor:
    """Best minus expected DCG: sum_{i <= r} w_{z+i} - (r/m) sum_{i <= m} w_{z+i}, summed over all groups of ties.

    Args:
        values, relevant, cutoff: as in `expected_dcg`.

    Returns:
        (...) float64, never negative.

    Example: sparsemax gives several classes the probability 0, which ties them; their scores are not tied.

        >>> import manymax
        >>> scores, relevant = torch.tensor([3.0, 1.0, 0.5, 0.0]), torch.tensor([False, True, False, False])
        >>> tie_loss(manymax.sparsemax(scores), relevant), tie_loss(scores, relevant)
        (tensor(0.1104, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    return best_dcg(values, relevant, cutoff) - expected_dcg(values, relevant, cutoff)


@checked(scores="scores ... C", relevant="bools ... C")
def dcg_direction(scores: Tensor, relevant: Tensor) -> Tensor:
    """d = sum_i sum_j w_{position of i} (e_j - e_i) over relevant i and irrelevant j, (..., C) float64.

    Args:
        scores: (..., C), whose ranking gives the positions.
        relevant: (..., C) bool.

    Example: the relevant class is second, so its weight is 1 / log2(3).

        >>> dcg_direction(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([False, True, False]))
        tensor([ 0.6309, -1.2619,  0.6309], dtype=torch.float64)
    """
    _check_relevant(scores, relevant)
    position = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    weights = torch.where(relevant, discounts(scores.shape[-1])[position], 0)
    others = (~relevant).sum(-1, keepdim=True)
    return torch.where(relevant, -weights * others, weights.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Alignment:
    """Alignment of the gradient of a sparse map with the direction of DCG, (...) each.

    sparse: <p - y, d>.
    filled: the same with the zero probabilities of irrelevant classes filled.
    lost: filled - sparse, by its own formula.
    """

    sparse: Tensor
    filled: Tensor
    lost: Tensor


@checked(probs="probs ... C", scores="scores ... C", relevant="bools ... C", fill="probs ... C")
def alignment(probs: Tensor, scores: Tensor, relevant: Tensor, fill: Tensor) -> Alignment:
    """The alignment <p - y, d> of the gradient of a sparse map, and what its zero probabilities take from it.

    Args:
        probs: (..., C) the sparse map of the scores.
        scores: (..., C).
        relevant: (..., C) bool, y.
        fill: (..., C) not negative: probabilities that replace the zeros of irrelevant classes.

    Returns:
        Three numbers per row, (...) each.

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


@checked(probs="probs ... C", relevant="bools ... C")
def zeroed_negatives(probs: Tensor, relevant: Tensor) -> Tensor:
    """The set {j: p_j = 0 and y_j = 0} as (..., C) bool: negatives whose gradient p_j - y_j is 0."""
    _check_relevant(probs, relevant)
    return (probs == 0) & ~relevant


@checked(scores="scores N C")
def gradient(member: Member, scores: Tensor, target: Tensor, **settings: Any) -> Tensor:
    """The gradient of a member's loss in the scores, row by row.

    Args:
        member: a row of `FAMILY` whose loss sees all scores.
        scores: (N, C).
        target: labels (N,), or any other target of the member's loss.
        settings: settings of the member, such as `alpha`.

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


@checked(scores="finite N C", target="ids N < C", log_q="floats C", least={"num_negatives": 1, "draws": 1})
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
    """The gradient of a sampled loss in the scores of all classes, averaged over draws.

    Args:
        member: a row of `FAMILY` that draws negatives.
        scores: (N, C).
        target: (N,) labels.
        log_q: (C,) the proposal.
        num_negatives: k.
        draws: how many times each row draws k negatives.
        generator: of the draws; torch's default if None.
        settings: settings of the member, such as `correction`.

    Returns:
        (N, C); 0 at classes that are neither the label nor drawn.

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
    check_proposal(log_q)
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


@checked(gradient="finite N C", target="ids N < C")
def without_signal(gradient: Tensor, target: Tensor) -> Tensor:
    """The negatives that learn nothing, (N, C) bool: their gradient is 0 and they are not the label.

    >>> without_signal(torch.tensor([[0.75, -0.75, 0.0]]), torch.tensor([1]))
    tensor([[False, False,  True]])
    """
    labels = torch.zeros_like(gradient, dtype=torch.bool).scatter(-1, target.unsqueeze(-1), True)
    return (gradient == 0) & ~labels


@checked(log_q="floats C", least={"num_negatives": 1})
def undrawn_probability(log_q: Tensor, num_negatives: int) -> Tensor:
    """The probability (1 - q_j)^k that class j is in none of k draws and gets no gradient as a negative, (C,).

    >>> undrawn_probability(torch.tensor([0.5, 0.25, 0.25]).log(), 2)
    tensor([0.2500, 0.5625, 0.5625])
    """
    check_proposal(log_q)
    return (num_negatives * torch.log1p(-log_q.exp())).exp()


@checked(matrix="any ... C")
def by_score(matrix: Tensor, scores: Tensor) -> Tensor:
    """A matrix with its classes sorted by decreasing score, for heat maps.

    Args:
        matrix: (N, C), of which each row is sorted by its own scores; or a Jacobian (C, C), of which rows and columns
            are sorted.
        scores: (N, C) for the first, (C,) for the second.

    Returns:
        The matrix in the new arrangement, of the same shape.

    Example:
        >>> by_score(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[0.0, 2.0, 1.0]]))
        tensor([[0.7000, 0.2000, 0.1000]])
    """
    permutation = scores.argsort(dim=-1, descending=True, stable=True)
    if scores.ndim == 1:
        return matrix[permutation][:, permutation]
    return matrix.gather(-1, permutation)


@checked(scores="scores C", least={"count": 1})
def top_jacobian(map: Map, scores: Tensor, count: int) -> Tensor:
    """The part of a map's Jacobian that belongs to the classes with the highest scores, without a (C, C) table.

    Args:
        map: function from scores (C,) to probabilities (C,).
        scores: (C,).
        count: n, the number of classes; the highest score comes first.

    Returns:
        (n, n).

    Example:
        >>> import manymax
        >>> top_jacobian(manymax.sparsemax, torch.tensor([-1.0, 1.0, 0.5]), 2)
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])
    """
    leaf = scores.detach().requires_grad_()
    probs, highest = map(leaf), scores.argsort(dim=-1, descending=True, stable=True)[:count]
    rows = [torch.autograd.grad(probs[i], leaf, retain_graph=True)[0][highest] for i in highest]
    return torch.stack(rows)


def _check_relevant(values: Tensor, relevant: Tensor) -> None:
    """Raise an error unless values are scores and `relevant` is a bool tensor of the same shape."""
    check_scores(values, "values")
    if not isinstance(relevant, Tensor) or relevant.dtype != torch.bool:
        kind = relevant.dtype if isinstance(relevant, Tensor) else type(relevant).__name__
        raise ArgumentTypeError(f"`relevant` must be a bool tensor; got {kind}.")
    if relevant.shape != values.shape:
        raise ArgumentError(
            f"`relevant` must have the shape of the scores, {tuple(values.shape)}; got {tuple(relevant.shape)}."
        )
