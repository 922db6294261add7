"""Log-uniform (Zipf-like) negatives, for ids sorted from the most frequent to the rarest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.ops.arguments import checked
from manymax.samplers.base import FixedSampler, SamplerEntry


class LogUniformSampler(FixedSampler):
    """Class 0 is drawn most often, and probabilities fall about as 1 / (c + 1).

        q(c) = log((c + 2) / (c + 1)) / log(C + 1)

    It assumes that ids are sorted by falling frequency; where they are not, use the popularity sampler. A draw is
    floor(exp(u log(C + 1))) - 1 for a uniform u, which inverts the cdf log(c + 2) / log(C + 1).

    Args:
        num_classes: C >= 1.

    Example:
        >>> LogUniformSampler(3).log_probs().exp().mul(100).round().tolist()
        [50.0, 29.0, 21.0]
    """

    def draw_ids(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Invert the cdf at uniform heights."""
        height = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        # Rounding may reach C + 1 from below, or fall short of 1.
        return (height * math.log(self.num_classes + 1)).exp().long().sub_(1).clamp_(0, self.num_classes - 1)

    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """log(log1p(1 / (c + 1)) / log(C + 1))."""
        return (1 / (ids.double() + 1)).log1p().log() - math.log(math.log(self.num_classes + 1))


@checked
def make(num_classes: int, counts: Tensor | None = None) -> LogUniformSampler:
    """Build the sampler for `SAMPLERS`; `counts` are not used, but ids should be sorted by them."""
    return LogUniformSampler(num_classes)


ENTRY = SamplerEntry(
    name="log_uniform",
    aliases=("zipf",),
    title="Log-uniform",
    module=LogUniformSampler,
    make=make,
    law="log((c + 2) / (c + 1)) / log(C + 1)",
    citation="the candidate sampler of the same name in TensorFlow",
)
