"""A member that is not part of the package, all of it in this file: rankmax with a margin m in place of 1.

    map       p_i(s; y) = u_i / S,   u_i = max(0, s_i - s_y + m),   S = sum_j u_j
    loss      l(y, s) = -log p_y = log(S / m)
    gradient  (1_P - |P| e_y) / S,   P = {j: u_j > 0}

Its map needs the label, it has one setting with a range, and its gradient has few entries. Map and loss are those of
rankmax at s / m; the kernel is written out, sums over ranks included. As a plugin of pytest (`-p
tests.contracts.marginmax`) this file adds the member to `FAMILY` before any test is collected.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import manymax
from manymax import FAMILY, ArgumentError
from manymax.distributed import ShardedHead
from manymax.engine.blocks import Block, BlockResult, Kernel, Sparse
from manymax.engine.cost import DOUBLE, MARKED, EntryCost, Work, exact_cost, exact_traffic
from manymax.engine.member import Formulas, Member, Setting
from manymax.engine.module import ExactLoss
from manymax.heads import head_class
from manymax.ops.checks import check_finite, check_scores

NAME = "marginmax"


def marginmax(scores: Tensor, target: Tensor, margin: float = 0.5, dim: int = -1) -> Tensor:
    """The probabilities p_i = max(0, s_i - s_y + m) / S, given the label.

    Args:
        scores: (..., C).
        target: (...) ids, the label of each row.
        margin: m, how far the label must lead.
        dim: the dimension of the classes.

    Returns:
        Probabilities (..., C).

    >>> marginmax(torch.tensor([2.0, 1.5, -1.0]), torch.tensor(1))
    tensor([0.6667, 0.3333, 0.0000])
    """
    check_scores(scores)
    return manymax.rankmax(scores / margin, target, dim)


def marginmax_loss(
    scores: Tensor,
    target: Tensor,
    *,
    margin: float = 0.5,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
) -> Tensor:
    """The loss log(S / m), which is 0 where the label exceeds every other score by m.

    Args:
        scores, target, weight, ignore_index, reduction, label_smoothing, multilabel: as in `manymax.rankmax_loss`.
        margin: m, how far the label must lead.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    >>> marginmax_loss(torch.tensor([[2.0, 1.5, -1.0]]), torch.tensor([1]))
    tensor(1.0986)
    """
    check_scores(scores)
    return manymax.rankmax_loss(
        scores / margin,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
    )


class MarginmaxLoss(ExactLoss):
    """Module form of `marginmax_loss`."""

    loss_name, takes = "marginmax", manymax.FAMILY["rankmax"].takes

    def __init__(self, margin: float = 0.5, weight: Tensor | None = None, **options: Any) -> None:
        super().__init__(weight, **options)
        self.margin = margin

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return marginmax_loss(scores, target, margin=self.margin, **self.options())


def marginmax_kernel(margin: float = 0.5) -> Kernel:
    """The kernel: for each positive a sum over the classes above s_y - m, completed over the ranks."""

    def run(block: Block) -> BlockResult:
        target, scores, ranks = block.target, block.scores, block.ranks
        check_finite(ranks.maximum(scores.amax(1)))
        # Exactly one rank holds a positive and the others add 0: the sum carries its score and weight to all ranks.
        positive_scores = torch.where(target.weights != 0, target.pick(scores), 0)
        labels, weights = ranks.sum(torch.stack([positive_scores, target.weights]).double())  # (n, P) each
        if (labels == -torch.inf).any():
            raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
        # (n, P, C), which is more memory than a kernel of the package takes: this one is written to be read.
        violations = (scores.double().unsqueeze(1) - labels.unsqueeze(2) + margin).clamp(min=0)
        sums, sizes = ranks.sum(torch.stack([violations.sum(2), violations.sign().sum(2)]))
        sums = torch.where(weights != 0, sums, margin)  # padding of the positives: log(m / m) = 0
        result = BlockResult((weights * (sums / margin).log()).sum(1).to(scores.dtype))
        if target.coefficient is None:
            return result
        shares = target.coefficient.double().unsqueeze(1) * weights / sums
        table = (shares.unsqueeze(2) * violations.sign()).sum(1)
        row, column = table.nonzero(as_tuple=True)
        result.parts.append(Sparse(row, column, table[row, column].to(scores.dtype)))
        # The positives' own part, -m_p share_p, of those that this rank holds.
        assert target.ids is not None
        row, position = (target.weights != 0).nonzero(as_tuple=True)
        own = (-shares * sizes)[row, position]
        result.parts.append(Sparse(row, target.ids[row, position], own.to(scores.dtype)))
        return result

    return Kernel(run)


# The facts of rankmax hold: dividing the scores by a constant changes none of them.
FACTS = replace(
    FAMILY["rankmax"].facts,
    smoothness=replace(FAMILY["rankmax"].facts.smoothness, fn=lambda num_classes, margin=0.5: _steepest(num_classes)),
    cost=replace(FAMILY["rankmax"].facts.cost, fn=lambda batch, num_classes, margin=0.5: float(batch * num_classes)),
)


def _steepest(num_classes: int) -> float:
    return math.inf if num_classes > 1 else 0.0


MEMBER = Member(
    name=NAME,
    title="Rankmax with a margin",
    kind="exact",
    map=marginmax,
    loss=marginmax_loss,
    module=MarginmaxLoss,
    formulas=Formulas(
        map="p_i = max(0, s_i - s_y + m) / S", loss="log(S / m)", gradient="(1_P - |P| e_y) / S, P = {j: s_j > s_y - m}"
    ),
    facts=FACTS,
    settings=(Setting("margin", float, 0.5, "How far the label must lead.", above=0, most=10),),
    examples=({"margin": 0.5}, {"margin": 2.0}),
    needs_label=True,
    sparse=True,
    takes=FAMILY["rankmax"].takes,  # it calls the loss of rankmax, which checks targets and gives the reason
    kernel=marginmax_kernel,
    cost=exact_cost(
        EntryCost(Work(streamed=8), calls=150, plain=5.5, each=True),
        sparse=EntryCost(Work(streamed=3), calls=500, tables=0.1),
    ),
    traffic=exact_traffic(sums=3, row=MARKED, each=4 * DOUBLE),
    citation="this file",
)


def pytest_configure() -> None:
    """Called by pytest, where this file is a plugin."""
    FAMILY.add(MEMBER)


def on_ranks(group: dist.ProcessGroup) -> list[Tensor]:
    """Differences between a sharded head and the head on one process: loss, and gradients of queries, vectors, bias."""
    random = torch.Generator().manual_seed(0)
    input = torch.randn(9, 4, generator=random, dtype=torch.float64)
    target = torch.randint(31, (9, 3), generator=random)
    target[::2, 1] = -100
    found = []
    for sharded in (True, False):
        torch.manual_seed(1)
        head: Any = head_class(MEMBER)(4, 31, 0.7, bias=True, dtype=torch.float64, options={"block_rows": 4})
        if sharded:
            head = ShardedHead(head, group=group)
        queries = input.clone().requires_grad_()
        value = head(queries, target)
        value.backward()
        span = slice(*head.span.tolist()) if sharded else slice(None)
        linear = (head.head if sharded else head).linear
        found.append([value.detach(), queries.grad, linear.weight.grad, linear.bias.grad, span])
    (value, queries, weight, bias, span), (whole_value, whole_queries, whole_weight, whole_bias, _) = found
    pairs = [(value, whole_value), (queries, whole_queries), (weight, whole_weight[span]), (bias, whole_bias[span])]
    return [one - other for one, other in pairs]
