"""The exact mean and mean square of a ratio of sums of draws, such as the gradient of a sampled loss.

Step 0 draws k classes, and each earlier step t as many; a draw of class c adds x_tc to the sum of its step. With A_j
the part of class j in the sum of step 0, and B an average of the sums,

    B = first + sum_t share_t (sum of the k draws of step t),    shares that add up to 1

the ratio A_j / B has its variables above and below the line. Like log S in log_sums.py, powers of 1 / B are integrals
of exp(-t B) over u = log t,

    1 / B = integral of t exp(-t B) du,    1 / B^2 = integral of t^2 exp(-t B) du,

under which the draws are independent: the mean of exp(-t B) is a product of transforms phi_t(share_t t)^k, and a factor
A_j in front of it takes one draw of class j out of that of step 0. There is no series in 1 / k: the result is exact to
rounding for k = 1 as for k = 1000.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manymax.ops.log_sums import STEP, grid, second_moment

LEAST = torch.finfo(torch.float64).eps  # of the transform of a draw


class RatioMoments(NamedTuple):
    """Means of A_j / B and of its square, (C,) each, and of the square of sum_j A_j / B, ()."""

    mean: Tensor
    square: Tensor
    square_of_sum: Tensor


def ratio_moments(
    first: float,
    terms: Tensor,
    q: Tensor,
    num_negatives: float,
    shares: Tensor | None = None,
    counted: Tensor | None = None,
) -> RatioMoments:
    """Moments of A_j / B, where A_j is the part of class j in the sum of the draws of step 0.

    Args:
        first: the part of B that is not random, positive.
        terms: (C,), what a draw of each class adds, or (n, C) for each of n steps, that of the numerator first.
        q: (C,) probabilities of a draw.
        num_negatives: k, the draws of a step.
        shares: (n,) of the steps in B; 1 for a single step if None.
        counted: (C,) bool, the classes that `square_of_sum` is about; all if None.

    Example: with one draw, which adds 1 or 3 to a first part of 1, the shares are 1 / 2 and 3 / 4.
        >>> terms, q = torch.tensor([1.0, 3.0]).double(), torch.tensor([0.5, 0.5]).double()
        >>> ratio_moments(1.0, terms, q, 1).mean
        tensor([0.2500, 0.3750], dtype=torch.float64)
    """
    steps = terms.reshape(-1, terms.shape[-1])
    shares = steps.new_ones(1) if shares is None else shares
    weights, x, k = shares.unsqueeze(1) * steps, steps[0], num_negatives
    # In units of the mean of B, so that the grid does not depend on the scale of the terms.
    scale = first + k * float((weights * q).sum())
    first, weights, x = first / scale, weights / scale, x / scale
    log_points = grid(x.new_tensor(first), x.new_ones(()), second_moment(k * weights[0], q))
    # The integrand of 1 / B falls as t and not as t^2 towards the left end, which therefore has to be farther out.
    extra = torch.arange(-80, 0, dtype=log_points.dtype) * STEP + log_points[0]
    t = torch.cat([extra, log_points]).exp()
    log_rest = -t * first
    for earlier in weights[1:]:
        log_rest += k * torch.log1p(torch.expm1(-t.unsqueeze(1) * earlier) @ q)
    # Step 0: the transform of a draw, and that of a draw of each class times what it adds.
    each = q * torch.exp(-t.unsqueeze(1) * weights[0])
    # By log1p: k times the rounding error of a plain log(phi) would show for large k. Where phi vanishes, at the right
    # end, so does everything that it is a factor of; but its logarithm must stay a number, also times k - 1 = 0.
    log_phi = torch.log1p((torch.expm1(-t.unsqueeze(1) * weights[0]) @ q).clamp(min=LEAST - 1))
    one = STEP * k * t * (log_rest + (k - 1) * log_phi).exp()  # a factor for each draw that is taken out
    two = STEP * k * t.square() * (log_rest + (k - 1) * log_phi).exp()
    pair = STEP * k * (k - 1) * t.square() * (log_rest + (k - 2) * log_phi).exp()
    added = each * x
    inside = torch.ones_like(x) if counted is None else counted.to(x.dtype)
    return RatioMoments(
        one @ added,
        two @ (added * x) + pair @ added.square(),
        two @ (added * x @ inside) + pair @ (added @ inside).square(),
    )
