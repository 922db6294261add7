"""What an entmax head tells about each row beside its loss: entropy, support, and the probability of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.blocks import Block
from manymax.engine.statistics import target_statistics
from manymax.ops import levels

# What the kernel can tell, on one rank and on several.
ENTMAX_STATISTICS = ("nll", "entropy", "target_prob", "support")


def wanted_sums(block: Block) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the entropy and the support size of each row, (n,); None where they are not asked for."""
    n, wanted = len(block.scores), block.keywords.stats
    entropy = torch.zeros(n, dtype=torch.float64, device=block.scores.device) if "entropy" in wanted else None
    support = torch.zeros(n, dtype=torch.long, device=block.scores.device) if "support" in wanted else None
    return entropy, support


def add_statistics(probs: Tensor, rows: Tensor | slice, entropy: Tensor | None, support: Tensor | None) -> None:
    """Write entropy and support size of some rows, from their probabilities (m, K)."""
    if entropy is not None:
        entropy[rows] = torch.special.entr(probs).sum(1, dtype=torch.float64)
    if support is not None:
        support[rows] = (probs > 0).sum(1)


def statistics(
    block: Block,
    positive_scores: Tensor,
    maximum: Tensor,
    level: Tensor,
    alpha: float,
    entropy: Tensor | None,
    support: Tensor | None,
) -> dict[str, Tensor]:
    """The statistics of the rows that are asked for.

    Args:
        positive_scores: (n, P) or (n, C) scores of the listed classes.
        maximum: (n, 1). level: (n,).
        entropy, support: (n,) of the classes of this rank, or None.
    """
    wanted, dtype, sum_over_ranks = block.keywords.stats, block.scores.dtype, block.ranks.sum
    if not wanted:
        return {}
    below = (positive_scores - maximum).double()
    log_probs = levels.probabilities_(below, level.double().unsqueeze(1), alpha - 1).log()
    found = target_statistics(wanted, block.target, log_probs, sum_over_ranks)
    if entropy is not None:
        found["entropy"] = sum_over_ranks(entropy)
    found = {name: value.to(dtype) for name, value in found.items()}
    if support is not None:
        found["support"] = sum_over_ranks(support)
    return found
