"""Popularity negatives: classes with probabilities proportional to a power of their counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manymax.ops.alias import alias_table, draw_from_alias_table
from manymax.ops.arguments import checked
from manymax.ops.lookup import lookup
from manymax.samplers.base import FixedSampler, SamplerEntry
from manymax.samplers.counts import SMOOTHING, log_probs_from_counts
from manymax.settings import Setting


class PopularitySampler(FixedSampler):
    """Classes with probabilities proportional to a power of their counts; an alias table makes a draw O(1).

        q(c) = (counts_c + smoothing)^power / sum_j (counts_j + smoothing)^power

    A class with a count of zero is never drawn and its log q is -inf; such a class as a positive is an error. Give
    `smoothing` if classes without counts can be positives.

    Args:
        counts: (C,) non-negative, not all zero; the sampler is on their device.
        power: >= 0; word2vec takes 0.75.
        smoothing: >= 0, added to every count.

    Example:
        >>> sampler = PopularitySampler([3, 0, 1])
        >>> draw = sampler(1000, shared=True, target=torch.tensor([2]))
        >>> sorted(set(draw.ids.tolist())), draw.log_q_target.exp().tolist()
        ([0, 2], [0.25])

    References:
        Mikolov et al. (2013) for the power; Walker (1977) for the table.
    """

    log_prob: Tensor
    keep: Tensor
    alias: Tensor

    @checked
    def __init__(self, counts: Tensor | Sequence[float], *, power: float = 1.0, smoothing: float = 0.0) -> None:
        log_prob = log_probs_from_counts(counts, power, smoothing)
        super().__init__(log_prob.numel())
        keep, alias = alias_table(log_prob.exp())
        self.register_buffer("log_prob", log_prob)
        self.register_buffer("keep", keep)
        self.register_buffer("alias", alias)

    def draw_ids(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Draw from the alias table."""
        return draw_from_alias_table(self.keep, self.alias, shape, generator)

    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """The stored log-probabilities."""
        return lookup(self.log_prob, ids)


@checked
def make(num_classes: int, counts: Tensor, **options: float) -> PopularitySampler:
    """Build the sampler for `SAMPLERS`; `num_classes` is the number of counts."""
    return PopularitySampler(counts, **options)


ENTRY = SamplerEntry(
    name="popularity",
    aliases=("pop", "unigram"),
    title="Popularity",
    module=PopularitySampler,
    make=make,
    law="(counts_c + smoothing)^power / normaliser",
    citation="Mikolov et al. (2013)",
    needs_counts=True,
    settings=(
        Setting("power", float, 1.0, "Exponent of the counts in popularity sampling.", least=0),
        SMOOTHING,
    ),
    examples=({}, {"power": 0.75, "smoothing": 1.0}),
)
