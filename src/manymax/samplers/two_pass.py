"""Two-pass negatives: a pool of candidates is drawn, and from it negatives by the scores of the model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.categorical import draw_categorical
from manymax.samplers.base import Draw, FixedSampler, Request, Sampler, SamplerEntry, unknown_log_q
from manymax.samplers.candidates import POOL, at_positions, candidate_scores, check_pool, pool_shape, target_scores
from manymax.samplers.checks import check_positive_integer
from manymax.samplers.uniform import UniformSampler


class TwoPassSampler(Sampler):
    """M candidates are drawn from a base proposal q0, and k of them are drawn again by their importance weights.

        P(position m | pool) = w_m / sum_j w_j,    w_j = exp(s_j) / q0(c_j)
        log q(c | pool) = log P(position | pool) + log(M q0(c)) = s_c - log Z_pool,    Z_pool = (1 / M) sum_j w_j

    As M grows, the distribution of the draws becomes softmax(s). log q is that of one draw over all classes,
    conditional on the pool: M q0(c) is how often c is expected in a pool, and with this log q the importance-weighted
    estimate of the partition function is unbiased. For log q of a positive, the positive takes the place of one
    candidate in Z_pool, which makes exp(log q) an unbiased estimate of its marginal probability. The k draws of a row
    are independent given the pool, but not without it.

    `shared=True` draws one pool for all rows, and from it with the means of P and of q over the rows.

    Args:
        num_classes: C >= 1.
        num_candidates: M >= 1, drawn with replacement; at least the number of negatives, better several times as many.
        base: the proposal for the candidates, a sampler whose q does not depend on the query; uniform if None.
        shared_candidates: draw one pool for all rows, which makes the scores one matmul; each row has its own draws.

    Example:
        >>> sampler = TwoPassSampler(1000, num_candidates=64)
        >>> weight = torch.linspace(-5, 5, 1000).unsqueeze(1)
        >>> draw = sampler(3, input=torch.ones(2, 1), linear_weight=weight, target=torch.tensor([999, 0]))
        >>> draw.ids.shape, draw.log_q.shape, draw.log_q_target.shape
        (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([2]))

    References:
        Rubin (1988), sampling importance resampling.
    """

    note = "log q of one draw over all classes, conditional on the pool of candidates: s_c - log Z_pool"

    @checked
    def __init__(
        self,
        num_classes: int,
        num_candidates: int = 500,
        *,
        base: FixedSampler | None = None,
        shared_candidates: bool = False,
    ) -> None:
        super().__init__(num_classes)
        self.num_candidates = check_positive_integer("num_candidates", num_candidates)
        self.shared_candidates = shared_candidates
        if not isinstance(base, FixedSampler | None):
            raise ArgumentTypeError(f"`base` must be a sampler whose q is the same for every query; got {base!r}.")
        self.base: FixedSampler = base or UniformSampler(num_classes)
        if self.base.num_classes != num_classes:
            raise ArgumentError(f"`base` must have {num_classes} classes; got one with {self.base.num_classes}.")

    def draw(self, request: Request) -> Draw:
        """Draw the candidates from the base, then positions among them by their weights."""
        check_pool(request.count, self.num_candidates)
        shape = pool_shape(request, self.num_candidates, self.shared_candidates)
        pool = self.base.draw_ids(shape, request.device, request.generator)
        scores = candidate_scores(request, pool)  # (N, M)
        log_weights = scores - self.base.log_prob_of(pool).to(scores.dtype)
        log_z = log_weights.logsumexp(-1, keepdim=True) - math.log(self.num_candidates)
        log_q_target = None if request.target is None else self._log_q_target(request, request.target, log_weights)
        log_prob, log_q = log_weights - log_z, scores - log_z
        if request.shared:
            log_prob, log_q = _log_mean_exp(log_prob), _log_mean_exp(log_q)  # (M,)
        position = draw_categorical(log_prob, request.count, request.generator)
        log_q = log_q.gather(-1, position).to(request.dtype)
        return Draw(at_positions(pool, position), log_q, log_q_target, self.note)

    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        """Raises: log q of arbitrary ids is not known without a pool."""
        raise unknown_log_q(self)

    def _log_q_target(self, request: Request, target: Tensor, log_weights: Tensor) -> Tensor:
        """s_y - log Z_pool, with the positive in the place of the last candidate."""
        scores = target_scores(request, target)  # (N, P), or (N, N P) if shared
        ids = target.reshape(-1) if request.shared else target.reshape(scores.shape)
        log_weight = scores - self.base.log_prob_of(ids).to(scores.dtype)
        others = log_weights[:, :-1].logsumexp(-1, keepdim=True)
        log_q = scores - (torch.logaddexp(others, log_weight) - math.log(self.num_candidates))
        return (_log_mean_exp(log_q) if request.shared else log_q).to(request.dtype).view(target.shape)


def _log_mean_exp(log_values: Tensor) -> Tensor:
    """log of the mean over the rows of exp(log_values): (M,) for (N, M)."""
    return log_values.logsumexp(0) - math.log(len(log_values))


@checked
def make(num_classes: int, counts: Tensor | None = None, **options: Any) -> TwoPassSampler:
    """Build the sampler for `SAMPLERS`; `counts` are not used, except by a popularity sampler passed as `base`."""
    return TwoPassSampler(num_classes, **options)


ENTRY = SamplerEntry(
    name="two_pass",
    aliases=("sir",),
    title="Two-pass (resampled pool)",
    module=TwoPassSampler,
    make=make,
    law="exp(s_c) / Z_pool, given the pool",
    citation="Rubin (1988)",
    exact_log_q=False,
    needs_scores=True,
    settings=(POOL,),
    examples=({"num_candidates": 3}, {"num_candidates": 3, "shared_candidates": True}),
)
