"""Two other computations of the exact losses, to compare with the heads in a study.

`computation="table"` is how such losses are usually computed: a whole table of scores with one row per (user, item)
pair, autograd, and a sort for the sparse losses. Values and gradients are those of the heads; the seconds differ.

`computation="detached"` has the values of the heads, but item vectors get gradients only as positives: it shows how
training goes when negatives do not learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from manymax.engine.head import LinearHead
from manymax.engine.linear import read_head_target
from manymax.engine.member import Member
from manymax.engine.target import Target
from manymax.members.rankmax.loss import rankmax_loss
from manymax.study.computations import Computation


def sorted_sparsemax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sparsemax with the threshold from sorted scores (Martins and Astudillo 2016).

    Args:
        scores: (N, C).

    Returns:
        Probabilities (N, C) and -Omega of them (N,).

    >>> sorted_sparsemax(torch.tensor([[1.0, 0.5, -1.0]]))[0]
    tensor([[0.7500, 0.2500, 0.0000]])
    """
    ordered = scores.sort(dim=1, descending=True).values
    rank = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
    total = ordered.cumsum(1) - 1
    size = (rank * ordered > total).sum(1, keepdim=True)
    tau = total.gather(1, size - 1) / size
    probs = (scores - tau).clamp(min=0)
    return probs, (1 - probs.square().sum(1)) / 2


def sorted_entmax15(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Entmax with alpha = 1.5, with the threshold from sorted scores (Peters, Niculae and Martins 2019).

    Args:
        scores: (N, C).

    Returns:
        Probabilities (N, C) and -Omega of them (N,).

    >>> sorted_entmax15(torch.tensor([[1.0, 1.0, -3.0]]))[0]
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    halves = (scores - scores.amax(1, keepdim=True)) / 2
    ordered = halves.sort(dim=1, descending=True).values
    rank = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
    mean, mean_square = ordered.cumsum(1) / rank, ordered.square().cumsum(1) / rank
    taus = mean - ((1 / rank) - (mean_square - mean.square())).clamp(min=0).sqrt()
    size = (taus <= ordered).sum(1, keepdim=True)
    probs = (halves - taus.gather(1, size - 1)).clamp(min=0).square()
    return probs, 4 / 3 * (1 - probs.pow(1.5).sum(1))


class SortedLoss(torch.autograd.Function):
    """The Fenchel-Young loss <p - y, s> - Omega(p), (N,), with its gradient p - y.

    The gradient is given in closed form, so that nothing has to be differentiated through the sort.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, sorted_map: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        probs, entropy = sorted_map(scores)
        difference = probs.scatter_add(1, target.unsqueeze(1), -torch.ones_like(target, dtype=probs.dtype).unsqueeze(1))
        ctx.save_for_backward(difference)
        return (difference * scores).sum(1) + entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (difference,) = ctx.saved_tensors
        return grad.unsqueeze(1) * difference, None, None


def _rankmax(scores: Tensor, target: Tensor) -> Tensor:
    return rankmax_loss(scores, target, reduction="none")


TABLE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda scores, target: cross_entropy(scores, target, reduction="none"),
    "sparsemax": lambda scores, target: SortedLoss.apply(scores, target, sorted_sparsemax),
    "entmax": lambda scores, target: SortedLoss.apply(scores, target, sorted_entmax15),
    "rankmax": _rankmax,
}


class WholeTable(LinearHead):
    """The head of a loss of `TABLE_LOSSES`: the mean over rows of the sum of the losses of a row's positives.

    Each positive has a row of scores of its own, also where several belong to one query: that is what `group_pairs` and
    the heads avoid.
    """

    def __init__(self, member: Member, num_classes: int) -> None:
        super().__init__(None, num_classes)
        self.loss = TABLE_LOSSES[member.name]

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (N, d) and class vectors (C, d)."""
        vectors, _ = self.vectors(linear_weight)
        read = read_head_target(input, target, None, -100, "sum", self.num_classes)
        rows, column = (read.weights != 0).nonzero(as_tuple=True)
        classes = column if read.ids is None else read.ids[rows, column]
        losses = self.loss(input[rows] @ vectors.T, classes) * read.weights[rows, column]
        return losses.sum() / read.divisor.sum()


class Detached(LinearHead):
    """A head whose class vectors get gradients only as positives, not from the other scores of a row.

    A library computes in this way if it makes its table of item vectors once per epoch, outside of the graph of
    gradients. The value of the loss is that of the member.
    """

    def __init__(self, member: Member, num_classes: int) -> None:
        super().__init__(None, num_classes)
        self.loss = member.loss

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (N, d) and class vectors (C, d)."""
        vectors, _ = self.vectors(linear_weight)
        read = read_head_target(input, target, None, -100, "sum", self.num_classes)
        assert read.ids is not None
        rows, column = (read.weights != 0).nonzero(as_tuple=True)
        classes = read.ids[rows, column]
        fixed = vectors.detach()
        # Zero in value, but with the gradient of s_y in the vectors: added to the scores of the positives alone.
        zero = (input.detach()[rows] * (vectors - fixed)[classes]).sum(1)
        scores = (input @ fixed.T).index_put((rows, classes), zero, accumulate=True)
        return self.loss(scores, read.ids.where(read.weights != 0, -100))


def in_table(member: Member) -> bool:
    """Whether the loss of a member is one of `TABLE_LOSSES`."""
    return member.name in TABLE_LOSSES


# The package's entry points in pyproject.toml name these two: `manymax.study.computations` finds them there.
TABLE = Computation("table", in_table, build=WholeTable, defaults_only=True)
DETACHED = Computation("detached", in_table, build=Detached, defaults_only=True)
