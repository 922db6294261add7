"""Log-probabilities of the classes from their counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.samplers.checks import check_number
from manymax.settings import Setting

# The setting that all samplers with counts have.
SMOOTHING = Setting("smoothing", float, 0.0, "Added to the counts in popularity and in-batch sampling.", least=0)


def log_probs_from_counts(counts: Tensor | Sequence[float], power: float = 1.0, smoothing: float = 0.0) -> Tensor:
    """log q of all classes, from a power of their counts.

        q(c) = (counts_c + smoothing)^power / sum_j (counts_j + smoothing)^power

    Args:
        counts: (C,) non-negative, not all zero.
        power: >= 0; 1 follows the counts, 0 is uniform.
        smoothing: >= 0, added to every count.

    Returns:
        (C,) float64; -inf for a count of zero, unless it is smoothed or the power is 0.

    Example:
        >>> log_probs_from_counts([3, 0, 1]).exp().float().tolist()
        [0.75, 0.0, 0.25]
    """
    counts = torch.as_tensor(counts, dtype=torch.float64)
    check_number("power", power, low=0.0)
    check_number("smoothing", smoothing, low=0.0)
    if counts.dim() != 1 or counts.numel() == 0:
        raise ArgumentError(f"`counts` must be (C,) with at least one class; got shape {tuple(counts.shape)}.")
    if visible(counts):
        low, high = torch.aminmax(counts)  # both are nan if any count is
        if not (low >= 0 and high.isfinite()):
            raise ArgumentError("`counts` must be finite and non-negative; got a negative, infinite or nan count.")
        if high + smoothing == 0:
            raise ArgumentError("`counts` must have a positive entry; got only zeros. Add `smoothing`.")
    # In the log domain no power overflows; xlogy(0, 0) = 0 makes 0^0 = 1.
    log_weights: Tensor = torch.special.xlogy(power, counts + smoothing)
    return log_weights.log_softmax(0)
