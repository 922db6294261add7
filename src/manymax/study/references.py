"""References beside the family: the pairwise and the pointwise loss that recommenders are compared with.

    bpr   mean over k negatives j of softplus(s_j - s_y)
    bce   softplus(-s_y) + mean over k negatives j of softplus(s_j)

With one negative, bpr is sampled softmax without correction. No log q enters either of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from manymax.engine.target import Target
from manymax.heads.modules import SampledHead
from manymax.heads.sampled import linear_drawn_loss
from manymax.members.bce.loss import bce_loss
from manymax.members.bpr.loss import bpr_loss
from manymax.samplers.base import Draw, Sampler


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


HEADS = {"bpr": LinearBPRLoss, "bce": LinearBCELoss}
