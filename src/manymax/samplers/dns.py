"""Dynamic negative sampling (DNS): the candidates with the highest scores, out of a pool of uniform draws."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.row_blocks import row_blocks
from manymax.samplers.base import Draw, Request, Sampler, SamplerEntry, unknown_log_q
from manymax.samplers.candidates import POOL, at_positions, candidate_scores, check_pool, pool_shape, target_scores
from manymax.samplers.checks import check_positive_integer


class DNSSampler(Sampler):
    """The k candidates with the highest scores out of M uniform ones: hard negatives, which cost M scores per row.

    The draws are not independent, and their distribution is no usable proposal: for C = 3000, M = 500, k = 100 three
    classes in four have q < 1e-6. So log q is None by default, and the draws are for losses that need no log q or take
    that of a uniform proposal. `marginal_log_q` gives the exact marginal distribution for a class of known rank. With
    `correction=True` draws come with this log q at estimated ranks: a class with a of b other candidates above it is
    taken to have the share (a + 1) / (b + 2) of all classes above it.

    `shared=True` keeps the k best of M shared candidates, by their mean scores over the rows.

    Scores that are computed in another order, as on several ranks, differ by rounding. Two candidates that are as near
    to each other then change places, and the weights of long runs in float32 drift apart by per cents; in float64 they
    agree.

    Args:
        num_classes: C >= 1.
        num_candidates: M >= 1, drawn with replacement; at least the number of negatives.
        shared_candidates: draw one pool for all rows, which makes the scores one matmul; each row keeps its own best.
        correction: whether draws come with the estimated marginal log q.

    Example:
        >>> sampler = DNSSampler(1000, num_candidates=64)
        >>> weight = torch.linspace(-1, 1, 1000).unsqueeze(1)
        >>> draw = sampler(4, input=torch.ones(2, 1), linear_weight=weight, generator=torch.Generator().manual_seed(0))
        >>> draw.ids.shape, bool((draw.ids > 800).all()), draw.log_q
        (torch.Size([2, 4]), True, None)

    References:
        Zhang et al. (2013).
    """

    @checked
    def __init__(
        self, num_classes: int, num_candidates: int = 500, *, shared_candidates: bool = False, correction: bool = False
    ) -> None:
        super().__init__(num_classes)
        self.num_candidates = check_positive_integer("num_candidates", num_candidates)
        self.shared_candidates = shared_candidates
        self.correction = correction
        self.note = (
            "log q is the marginal probability of the kept candidates at a rank estimated from all of them"
            if correction
            else "log q is unknown: the best of a pool are neither independent nor drawn from a usable distribution"
        )

    def draw(self, request: Request) -> Draw:
        """Draw the candidates and keep the best of them."""
        check_pool(request.count, self.num_candidates)
        shape = pool_shape(request, self.num_candidates, self.shared_candidates)
        pool = torch.randint(self.num_classes, shape, generator=request.generator, device=request.device)
        scores = candidate_scores(request, pool)  # (N, M)
        if request.shared:
            scores = scores.mean(0)  # (M,)
        kept, position = scores.topk(request.count, dim=-1)
        if visible(kept) and kept.isnan().any():
            raise ArgumentError("the scores of candidates must not be nan; got at least one that is.")
        log_q, log_q_target = self._estimated_log_q(request, scores) if self.correction else (None, None)
        return Draw(at_positions(pool, position), log_q, log_q_target, self.note)

    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        """Raises: log q of arbitrary ids is not known."""
        raise unknown_log_q(self)

    @checked
    def marginal_log_q(self, rank: Tensor, num_negatives: int) -> Tensor:
        """The marginal log-probability with which a kept candidate is a given class, by the rank r of the class.

            q(r) = (1 / k) sum_{i = 1..k} [F(i - 1; M, r / C) - F(i - 1; M, (r + 1) / C)]
                 = (M / k) integral of F(k - 1; M - 1, p) dp from r / C to (r + 1) / C

        with F(x; n, p) the binomial cdf. The second form is the one that is computed, by Gauss-Legendre quadrature: it
        has no differences that could cancel, and is exact up to M = 64 (the integrand is of degree M - 1).

        Args:
            rank: of any shape, how many classes have a higher score: from 0 (best) to C - 1; may be fractional.
            num_negatives: k <= M.

        Returns:
            float64 in the shape of `rank`.

        Example:
            >>> DNSSampler(4, num_candidates=2).marginal_log_q(torch.arange(4), 1).exp().mul(16).round().tolist()
            [7.0, 5.0, 3.0, 1.0]

        References:
            For k = 1 it is the distribution of a maximum, ((C - r) / C)^M - ((C - r - 1) / C)^M.
        """
        check_pool(check_positive_integer("num_negatives", num_negatives), self.num_candidates)
        # M/2 + 1 nodes are exact. The integrand is a smooth step of width about 1 / sqrt(M), and 32 nodes resolve it on
        # an interval of length 1 / C; with few classes the interval is long and needs more of them.
        steep = int(32 * math.sqrt(self.num_candidates) / self.num_classes)
        node, weight = _gauss_legendre(min(self.num_candidates // 2 + 1, 32 + steep), rank.device)
        flat = rank.reshape(-1, 1).double()
        log_q = flat.new_empty(len(flat))
        for rows in row_blocks(len(flat), row_size=8 * len(node) * num_negatives):
            share = (flat[rows] + node) / self.num_classes
            log_cdf = _log_binomial_cdf(num_negatives - 1, self.num_candidates - 1, share)
            log_q[rows] = (log_cdf + weight.log()).logsumexp(-1)
        return (log_q + math.log(self.num_candidates / num_negatives / self.num_classes)).view(rank.shape)

    def _estimated_log_q(self, request: Request, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """log q of the kept candidates and of the target, at estimated ranks.

        The rank depends on the position in the pool alone, so that a table of k or M + 1 positions serves all rows.
        """
        # the i-th best has i - 1 of the M - 1 others above it; a positive, which is no candidate, up to all M
        M, k = self.num_candidates, request.count
        best = self._log_q_by_position(torch.arange(k, device=scores.device), M - 1, k).to(request.dtype)
        log_q = best.expand(*scores.shape[:-1], k)
        if request.target is None:
            return log_q, None
        positive = target_scores(request, request.target)  # (N, P), or (N, N P) if shared
        if request.shared:
            positive = positive.mean(0)
        above = M - torch.searchsorted(scores.sort(-1).values, positive, right=True)
        table = self._log_q_by_position(torch.arange(M + 1, device=scores.device), M, k).to(request.dtype)
        return log_q, lookup(table, above).view(request.target.shape)

    def _log_q_by_position(self, above: Tensor, others: int, num_negatives: int) -> Tensor:
        """`marginal_log_q` for classes that have `above` of `others` candidates above them."""
        # the share of all classes above: the posterior mean under a uniform prior (Laplace's rule of succession)
        share = (above + 1) / (others + 2)
        rank = (share.double() * self.num_classes - 0.5).clamp(0, self.num_classes - 1)
        return self.marginal_log_q(rank, num_negatives)


def _gauss_legendre(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]: eigenvalues and first components of the Jacobi matrix (Golub and Welsch 1969)."""
    i = torch.arange(1, num_nodes, dtype=torch.float64)
    off_diagonal = torch.diag(i / (4 * i**2 - 1).sqrt(), 1)
    node, vector = torch.linalg.eigh(off_diagonal + off_diagonal.T)
    return ((node + 1) / 2).to(device), (vector[0] ** 2).to(device)


def _log_binomial_cdf(x: int, n: int, p: Tensor) -> Tensor:
    """log P(X <= x) for a binomial X with n trials of probability p, as a sum of positive terms.

    The shape is that of p.
    """
    i = torch.arange(x + 1, dtype=torch.float64, device=p.device)
    log_choose = math.lgamma(n + 1) - (i + 1).lgamma() - (n - i + 1).lgamma()
    p = p.unsqueeze(-1)
    log_terms: Tensor = log_choose + torch.special.xlogy(i, p) + torch.special.xlog1py(n - i, -p)
    return log_terms.logsumexp(-1)


@checked
def make(num_classes: int, counts: Tensor | None = None, **options: Any) -> DNSSampler:
    """Build the sampler for `SAMPLERS`; `counts` are not used."""
    return DNSSampler(num_classes, **options)


ENTRY = SamplerEntry(
    name="dns",
    aliases=("dynamic",),
    title="Dynamic (best of a pool)",
    module=DNSSampler,
    make=make,
    law="not i.i.d.; marginal by rank known",
    citation="Zhang et al. (2013)",
    knows_log_q=False,
    exact_log_q=False,
    needs_scores=True,
    settings=(POOL,),
    examples=({"num_candidates": 3}, {"num_candidates": 3, "shared_candidates": True}),
)
