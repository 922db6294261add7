"""Frequencies of the classes, estimated from a stream of batches."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.ops.arguments import checked
from manymax.ops.lookup import lookup
from manymax.samplers.base import ExactBuffers
from manymax.samplers.checks import check_ids, check_number, check_positive_integer


class StreamingFrequency(ExactBuffers):
    """The probability of each class, estimated from the gaps between its occurrences in O(batch) per update.

    Time t is the number of examples seen. For a class that occurs m times in a batch and was last seen at time A, the
    mean gap since then is (t - A) / m. With n occurrences before, its running mean gap B is updated by

        B <- (1 - w) B + w (t - A) / m,    A <- t,    w = max(1 - (1 - rate)^m, m / (n + 1 + m)),    B = C at first
        q(c) = (1 / B_c) / sum_j (1 / B_j),    B_c = C + t for a class never seen

    As long as n < 1 / rate this is the add-one estimate (n + 1) / (t + C), afterwards a moving average that follows a
    drift. Because time counts examples and not steps, a class that is twice in every batch is told from one that is
    there once, and batches may differ in size. A class that no longer occurs keeps its last gap. In a distributed run
    every process estimates from its own part of the data.

    Args:
        num_classes: C >= 1.
        rate: weight of the newest gap, in (0, 1]; smaller is smoother and slower to follow.

    Example:
        >>> frequency = StreamingFrequency(3)
        >>> for _ in range(200):
        ...     frequency.update(torch.tensor([0, 0, 0, 1]))
        >>> frequency.log_prob_of(torch.arange(3)).exp().mul(100).round().tolist()
        [75.0, 25.0, 0.0]

    References:
        Yi et al. (2019), who count time in steps (m = 1).
    """

    last_seen: Tensor
    mean_gap: Tensor
    num_seen: Tensor
    time: Tensor
    num_unseen: Tensor
    seen_total: Tensor

    @checked
    def __init__(self, num_classes: int, rate: float = 0.01) -> None:
        super().__init__()
        self.num_classes = check_positive_integer("num_classes", num_classes)
        self.rate = check_number("rate", rate, low=1e-12, high=1.0)
        self.register_buffer("last_seen", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("mean_gap", torch.full((num_classes,), float(num_classes), dtype=torch.float64))
        self.register_buffer("num_seen", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("time", torch.zeros((), dtype=torch.int64))
        # The normaliser, sum_j 1 / B_j, is kept up to date instead of summed over all classes at every call: as the
        # number of classes never seen, whose B depends on the time, and the sum over the others.
        self.register_buffer("num_unseen", torch.tensor(num_classes))
        self.register_buffer("seen_total", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    @checked
    def update(self, target: Tensor) -> None:
        """Update the estimate with a batch of occurrences, ids of any shape."""
        target = check_ids("target", target, self.num_classes)
        ids, times = torch.unique(target.reshape(-1), return_counts=True)
        seen, before = self.num_seen[ids], self.mean_gap[ids]
        self.time += target.numel()
        gap = (self.time - self.last_seen[ids]).double() / times
        weight = torch.maximum(1 - (1 - self.rate) ** times.double(), times.double() / (seen + 1 + times))
        after = before + weight * (gap - before)

        self.num_unseen -= (seen == 0).sum()
        self.seen_total += (1 / after - (seen > 0) / before).sum()
        self.mean_gap[ids], self.last_seen[ids], self.num_seen[ids] = after, self.time, seen + times

    @checked
    def log_prob_of(self, ids: Tensor) -> Tensor:
        """log q of the ids, float64."""
        ids = check_ids("ids", ids, self.num_classes)
        unseen_gap = (self.num_classes + self.time).double()
        gap = torch.where(lookup(self.num_seen, ids) > 0, lookup(self.mean_gap, ids), unseen_gap)
        return -gap.log() - (self.seen_total + self.num_unseen / unseen_gap).log()
