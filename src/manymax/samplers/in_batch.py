"""In-batch negatives: the positives of the other rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.lookup import lookup
from manymax.samplers.base import Draw, ExactBuffers, Request, Sampler, SamplerEntry
from manymax.samplers.counts import SMOOTHING, log_probs_from_counts
from manymax.samplers.streaming import StreamingFrequency


class CountedFrequency(ExactBuffers):
    """The probability of each class from given counts; `StreamingFrequency` estimates it instead."""

    log_prob: Tensor

    @checked
    def __init__(self, counts: Tensor | Sequence[float], smoothing: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("log_prob", log_probs_from_counts(counts, smoothing=smoothing))

    def log_prob_of(self, ids: Tensor) -> Tensor:
        """log q of the ids, float64."""
        return lookup(self.log_prob, ids)


class InBatchSampler(Sampler):
    """Negatives from the positives of the other rows of the batch; their class vectors are in use anyway.

        q(c) = the share of c among all positives: counts_c / sum_j counts_j, or a streaming estimate of it

    The positives of other rows are independent draws from the distribution of the data, so that k of them, each used
    once, are k draws from q. The positive of the row itself is not such a draw: in draws per row it is left out, and in
    shared draws `Draw.source_row` marks it. Where one query has several rows (`owner`), `Draw.source_row` marks the
    positives of all of them.

    With `num_negatives=None` the whole batch is taken, for all rows. Otherwise k positions in the batch are chosen at
    random without replacement: the same ones for all rows (`shared=True`, k <= N P), or for each row among those of the
    other rows (k <= (N - 1) P).

    Args:
        num_classes: C >= 1.
        counts: (C,) how often each class is a positive; None to estimate it from the batches seen in training mode.
        smoothing: >= 0, added to every count.
        rate: of the streaming estimate, see `StreamingFrequency`.

    Example:
        >>> sampler = InBatchSampler(4, counts=[1, 1, 1, 1])
        >>> draw = sampler(None, target=torch.tensor([2, 0, 2]))
        >>> draw.ids.tolist(), draw.copies(3).tolist()
        ([2, 0, 2], [[True, False, False], [False, True, False], [False, False, True]])

    References:
        Yi et al. (2019).
    """

    @checked
    def __init__(
        self,
        num_classes: int,
        *,
        counts: Tensor | Sequence[float] | None = None,
        smoothing: float = 0.0,
        rate: float = 0.01,
    ) -> None:
        super().__init__(num_classes)
        self.frequency: CountedFrequency | StreamingFrequency
        if counts is None:
            self.frequency = StreamingFrequency(num_classes, rate)
            self.note = "log q of one draw, estimated from the gaps between occurrences of a class"
            return
        self.frequency = CountedFrequency(counts, smoothing)
        self.note = "log q of one draw if the positives follow the given counts"
        if (given := self.frequency.log_prob.numel()) != num_classes:
            raise ArgumentError(f"`counts` must have one entry for each of {num_classes} classes; got {given}.")

    def draw(self, request: Request) -> Draw:
        """Choose positions in the batch and take the positives that stand there."""
        if request.target is None:
            raise ArgumentError("`target` must be given: in-batch negatives are the positives of the batch; got None.")
        target = request.target
        self.learn(target)
        positives = target if target.dim() == 2 else target.unsqueeze(1)  # (N, P)
        position = self._positions(request, positives)
        ids = lookup(positives.reshape(-1), position)
        row, owner = position // positives.shape[1], request.owner
        # (N, k) positions are among the other rows, so that a draw is a row's own only through another row of its owner
        may_be_own = position.dim() == 1 or owner is not None
        return Draw(
            ids,
            log_q=self.log_prob_of(ids).to(request.dtype),
            log_q_target=self.log_prob_of(target).to(request.dtype),
            note=self.note,
            source_row=(row if owner is None else lookup(owner, row)) if may_be_own else None,
            owner=owner,
        )

    def learn(self, target: Tensor) -> None:
        """What a call does with its target: in training mode it updates the streaming estimate."""
        if self.training:
            self.update(target)

    @checked
    def update(self, target: Tensor) -> None:
        """Update the streaming estimate with a batch; does nothing if counts were given.

        A call of the sampler in training mode does this by itself.
        """
        if isinstance(self.frequency, StreamingFrequency):
            self.frequency.update(target)

    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """The given or estimated log-probabilities; `input` and `shared` do not matter."""
        return self.frequency.log_prob_of(ids)

    @staticmethod
    def _positions(request: Request, positives: Tensor) -> Tensor:
        """Positions in the flattened positives (N P,): (k,) if shared, else (N, k) among those of the other rows."""
        rows, size = positives.shape[0], positives.shape[1]
        if request.num_negatives is None:
            return torch.arange(rows * size, device=positives.device)
        available = rows * size if request.shared else (rows - 1) * size
        if request.num_negatives > available:
            raise ArgumentError(
                f"`num_negatives` must be at most {available}, the number of positives that the batch offers; "
                f"got {request.num_negatives}. Enlarge the batch, or pass None for all of it."
            )
        permutation = torch.randperm(available, generator=request.generator, device=positives.device)
        chosen = permutation[: request.num_negatives]
        if request.shared:
            return chosen
        # For each row the same k distances, counted from the end of its own positives and around the batch: one
        # permutation instead of N, and each row still gets a uniform choice.
        own_end = torch.arange(1, rows + 1, device=positives.device).unsqueeze(1) * size
        return (own_end + chosen) % (rows * size)


@checked
def make(num_classes: int, counts: Tensor | None = None, **options: float) -> InBatchSampler:
    """Build the sampler for `SAMPLERS`; without counts it estimates them."""
    return InBatchSampler(num_classes, counts=counts, **options)


ENTRY = SamplerEntry(
    name="in_batch",
    aliases=("batch",),
    title="In-batch",
    module=InBatchSampler,
    make=make,
    law="frequency of c among the positives",
    citation="Yi et al. (2019)",
    needs_target=True,
    limited_by_batch=True,
    settings=(SMOOTHING,),
)
