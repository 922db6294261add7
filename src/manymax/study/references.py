"""References beside the family: the pairwise and the pointwise loss that recommenders are compared with.

    bpr   mean over k negatives j of softplus(s_j - s_y)
    bce   softplus(-s_y) + mean over k negatives j of softplus(s_j)

With one negative, bpr is sampled softmax without correction. No log q enters either of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from manymax.engine.target import Target
from manymax.heads.modules import LinearHead, SampledHead
from manymax.heads.sampled import linear_drawn_loss
from manymax.samplers.base import Draw, Sampler
from manymax.table import Table


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log sigmoid(s_y - s_j), the mean over negatives.

    Args:
        positive: (M,) scores of the positives.
        negative: (M, k) scores of their negatives.

    Returns:
        (M,).

    >>> import torch
    >>> bpr_loss(torch.tensor([2.0]), torch.tensor([[0.0, 2.0]]))
    tensor([0.4100])
    """
    return softplus(negative - positive.unsqueeze(-1)).mean(-1)


def bce_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """-log sigmoid(s_y) - log sigmoid(-s_j), the latter as mean over negatives. Shapes as in `bpr_loss`.

    >>> import torch
    >>> bce_loss(torch.tensor([0.0]), torch.tensor([[0.0, 0.0]]))
    tensor([1.3863])
    """
    return softplus(-positive) + softplus(negative).mean(-1)


def _linear(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The loss as a function of queries and class vectors, with the arguments of `linear_nce_loss`."""

    def of_draw(positive: Tensor, negative: Tensor, draw: Draw, classes: Tensor) -> Tensor:
        return loss(positive, negative)

    def linear_loss(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor | Target,
        sampler: Sampler,
        num_negatives: int | None,
        **options: Any,
    ) -> Tensor:
        return linear_drawn_loss(of_draw, input, linear_weight, target, sampler, num_negatives, **options)

    return linear_loss


class LinearBPRLoss(SampledHead):
    """BPR of a linear layer; arguments as of `LinearNCELoss`."""

    function = staticmethod(_linear(bpr_loss))


class LinearBCELoss(SampledHead):
    """Binary cross entropy of a linear layer; arguments as of `LinearNCELoss`."""

    function = staticmethod(_linear(bce_loss))


@dataclass(frozen=True)
class Reference:
    """One row of `REFERENCES`."""

    name: str
    title: str
    module: type[LinearHead]
    formula: str
    reference: str
    aliases: tuple[str, ...] = ()


REFERENCES: Table[Reference] = Table(
    "reference",
    Reference(
        "bpr",
        "BPR",
        LinearBPRLoss,
        "mean_j softplus(s_j - s_y)",
        "Rendle, Freudenthaler, Gantner, Schmidt-Thieme, UAI 2009",
    ),
    Reference(
        "bce",
        "BCE",
        LinearBCELoss,
        "softplus(-s_y) + mean_j softplus(s_j)",
        "Kang and McAuley, ICDM 2018, equation 12",
    ),
)
