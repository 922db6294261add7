"""The scores that minimise the risk of Talos, in closed form.

Up to a constant the risk at class probabilities p is KL(p, q), with q = h / H the map. With b the K-th largest score,
the h of the K best classes are between h(b) = 2^(-1 / tau) and 1, and those of the others are free:

    minimise KL(p, q)   where   M / c <= q_i <= M for the K best classes,   c = 2^(1 / tau)

Where p satisfies that for some M, q is p. Otherwise the classes above a level M are all moved to M, which their scores
reach at infinity, and those of the K best below M / c to M / c, where their scores are b: either are tied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.member import Theory
from manymax.errors import ManymaxError

# Stands for an infinite score: from here on sigma(s) is 1 in float64.
TOP = 40.0


def reachable(probs: Tensor, k: int, tau: float) -> Tensor:
    """The q (C,) closest to class probabilities probs (C,) that Talos can give them: least KL(p, q).

    Example: with c = 2 neither of the first two classes can have more than twice the probability of the third.
        >>> reachable(torch.tensor([0.5, 0.4, 0.1]), k=3, tau=1.0)
        tensor([0.4000, 0.4000, 0.2000])
    """
    ranked, order = probs.sort(descending=True)
    best, ratio = ranked[:k], 2 ** (1 / tau)
    if best[0] <= ratio * best[-1]:
        return probs
    for tops in range(1, len(best)):
        for bottoms in range(1, len(best) - tops + 1):
            level = (best[:tops].sum() + best[len(best) - bottoms :].sum()) / (tops + bottoms / ratio)
            between = best[tops : len(best) - bottoms]
            fits = best[tops - 1] >= level and best[len(best) - bottoms] <= level / ratio
            if fits and ((level / ratio <= between) & (between <= level)).all():
                clipped = torch.cat([best.clamp(level / ratio, level), ranked[k:]])
                return torch.empty_like(probs).scatter(0, order, clipped)
    raise ManymaxError(f"no level fits the probabilities {probs.tolist()}: they must be finite and sum to 1.")


def _minimisers(probs: Tensor, _: Tensor | None, k: int = 20, tau: float = 1.0) -> Tensor:
    """The scores that give the closest q, (1, C), with b = 0; `TOP` stands for infinity."""
    q = reachable(probs.double(), k, tau)
    # h is 2^(-1 / tau) at b, the score of the K-th class, and sigma(s) = h^tau.
    sigma = 0.5 * (q / q.topk(min(k, len(q))).values[-1]) ** tau
    return torch.logit(sigma.clamp(max=1)).clamp(max=TOP).to(probs.dtype).unsqueeze(0)


THEORY = Theory(minimisers=_minimisers)
