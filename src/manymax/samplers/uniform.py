"""Uniform negatives: q(c) = 1 / C."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manymax.ops.arguments import checked
from manymax.samplers.base import FixedSampler, SamplerEntry


class UniformSampler(FixedSampler):
    """All classes have the same probability.

        q(c) = 1 / C

    Args:
        num_classes: C >= 1.

    Example:
        >>> sampler = UniformSampler(1000)
        >>> draw = sampler(5, target=torch.tensor([3, 7]))
        >>> draw.ids.shape, round(draw.log_q[0, 0].item(), 4), round(draw.log_q_target[1].item(), 4)
        (torch.Size([2, 5]), -6.9078, -6.9078)
    """

    def draw_ids(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Draw integers from 0 to C - 1."""
        return torch.randint(self.num_classes, shape, generator=generator, device=device)

    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """-log C."""
        return torch.full(ids.shape, -math.log(self.num_classes), dtype=torch.float64, device=ids.device)


@checked
def make(num_classes: int, counts: Tensor | None = None) -> UniformSampler:
    """Build the sampler for `SAMPLERS`; `counts` are not used."""
    return UniformSampler(num_classes)


ENTRY = SamplerEntry(
    name="uniform",
    title="Uniform",
    module=UniformSampler,
    make=make,
    law="1 / C",
    citation="Bengio and Senecal (2003)",
)
