"""Mixed negatives: positives of the other rows of the batch, and draws from a second sampler, in one sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.samplers.base import Draw, FixedSampler, Request, Sampler, SamplerEntry
from manymax.samplers.checks import check_number
from manymax.samplers.counts import SMOOTHING
from manymax.samplers.in_batch import InBatchSampler
from manymax.samplers.uniform import UniformSampler
from manymax.settings import Setting


class MixedSampler(Sampler):
    """Of k negatives n1 are in-batch, positives of other rows, and n2 = k - n1 come from a second sampler.

        q(c) = (n1 q1(c) + n2 q2(c)) / (n1 + n2)

    with q1 the share of c among the positives and q2 the second sampler's. In-batch negatives cost nothing and are the
    popular classes, which are hard; alone they never show classes that no batch has. How many draws come from where is
    fixed, not drawn, so that k q(c) is how often c is expected: the estimate of a sum that weighs every draw by 1 / (k
    q) is unbiased, whichever part the draw is from.

    With `num_negatives=None` the whole batch is taken, for all rows, and as many others as `in_batch_share` says. Where
    a batch offers fewer than n1 positives of other rows, the second sampler draws the rest. `Draw.source_row` marks the
    positives of the row itself, as for in-batch negatives; the few that a row leaves out are not in its n1, which
    changes its q by about 1 / n1.

    Args:
        num_classes: C >= 1.
        in_batch_share: n1 / k from 0 to 1; n1 is rounded up.
        other: the second sampler, whose q does not depend on the query; uniform if None.
        counts: (C,) how often each class is a positive; None to estimate it from the batches seen in training mode.
        smoothing: >= 0, added to every count.
        rate: of that estimate, see `StreamingFrequency`.

    Example: one negative is the positive of another row, one is uniform.
        >>> sampler = MixedSampler(4, counts=[2, 1, 1, 0])
        >>> draw = sampler(2, target=torch.tensor([0, 0]))
        >>> draw.ids[:, 0].tolist(), draw.log_q_target.exp().tolist()  # q = (0.5 + 0.25) / 2
        ([0, 0], [0.375, 0.375])

    References:
        Yang et al. (2020); for fixed numbers of draws from several distributions, Veach and Guibas (1995).
    """

    @checked
    def __init__(
        self,
        num_classes: int,
        *,
        in_batch_share: float = 0.5,
        other: FixedSampler | None = None,
        counts: Tensor | Sequence[float] | None = None,
        smoothing: float = 0.0,
        rate: float = 0.01,
    ) -> None:
        super().__init__(num_classes)
        self.in_batch_share = check_number("in_batch_share", in_batch_share, low=0.0, high=1.0)
        if not isinstance(other, FixedSampler | None):
            raise ArgumentTypeError(f"`other` must be a sampler whose q is the same for every query; got {other!r}.")
        self.in_batch = InBatchSampler(num_classes, counts=counts, smoothing=smoothing, rate=rate)
        self.other: FixedSampler = other or UniformSampler(num_classes)
        if self.other.num_classes != num_classes:
            raise ArgumentError(f"`other` must have {num_classes} classes; got one with {self.other.num_classes}.")
        self.note = f"log q of one draw from the mixture; in-batch: {self.in_batch.note}"

    def draw(self, request: Request) -> Draw:
        """Draw both parts, and state the log q of their mixture."""
        target = request.target
        if target is None:
            raise ArgumentError("`target` must be given: some negatives are the positives of the batch; got None.")
        n1, n2 = self._numbers(request, target)
        if n1:
            whole = request.num_negatives is None
            ours = self.in_batch.draw(replace(request, num_negatives=None if whole else n1))
        else:
            self.in_batch.learn(target)
            ours = Draw(target.new_empty((*request.shape[:-1], 0)), None, None, self.note)
        others = self.other.draw_ids((*ours.ids.shape[:-1], n2), request.device, request.generator)
        source_row = ours.source_row
        if source_row is not None:  # no row is the source of what the second sampler draws
            source_row = torch.cat([source_row, torch.full_like(others, -1)], -1)
        ids = torch.cat([ours.ids, others], -1)
        return Draw(
            ids,
            log_q=self._log_mixture(ids, n1, n2).to(request.dtype),
            log_q_target=self._log_mixture(target, n1, n2).to(request.dtype),
            note=self.note,
            source_row=source_row,
            owner=ours.owner,
        )

    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """log q of ids for n1 / k = `in_batch_share` exactly; `input` and `shared` do not matter."""
        return self._log_mixture(ids, self.in_batch_share, 1 - self.in_batch_share)

    def _numbers(self, request: Request, target: Tensor) -> tuple[int, int]:
        """n1 and n2."""
        share, own = self.in_batch_share, target[0].numel()
        if request.num_negatives is None:
            if share == 0:
                raise ArgumentError("`num_negatives` must be an integer >= 1 where `in_batch_share` is 0; got None.")
            return target.numel(), round(target.numel() * (1 - share) / share)
        offered = target.numel() if request.shared else target.numel() - own
        n1 = min(math.ceil(share * request.num_negatives), offered)
        return n1, request.num_negatives - n1

    def _log_mixture(self, ids: Tensor, n1: float, n2: float) -> Tensor:
        """log((n1 q1 + n2 q2) / (n1 + n2)) of the ids, float64."""
        parts = [
            sampler.log_prob_of(ids).double() + math.log(number / (n1 + n2))
            for sampler, number in ((self.in_batch, n1), (self.other, n2))
            if number
        ]
        return parts[0] if len(parts) == 1 else torch.logaddexp(*parts)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"{super().extra_repr()}, in_batch_share={self.in_batch_share}"


@checked
def make(num_classes: int, counts: Tensor | None = None, **options: Any) -> MixedSampler:
    """Build the sampler for `SAMPLERS`; without counts it estimates them."""
    return MixedSampler(num_classes, counts=counts, **options)


ENTRY = SamplerEntry(
    name="mixed",
    aliases=("mns",),
    title="Mixed (in-batch and uniform)",
    module=MixedSampler,
    make=make,
    law="(n1 frequency of c among the positives + n2 / C) / (n1 + n2)",
    citation="Yang et al. (2020)",
    needs_target=True,
    settings=(
        Setting(
            "in_batch_share",
            float,
            0.5,
            "Share of the negatives that mixed takes from the batch; the others are uniform.",
            least=0,
            most=1,
        ),
        SMOOTHING,
    ),
    examples=({}, {"in_batch_share": 1.0}, {"in_batch_share": 0.0}),
)
