"""Dynamic negative sampling: of some uniform candidates, the ones that the model scores highest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.row_blocks import row_blocks
from manymax.samplers.base import Draw, Request, Sampler, SamplerEntry, check_positive_integer, unknown_log_q
from manymax.samplers.candidates import POOL, at_positions, candidate_scores, check_pool, pool_shape, target_scores


class DNSSampler(Sampler):
    """The k best of M uniform candidates: hard negatives, at the cost of scoring M per row.

    The draws are neither independent nor is their law a usable proposal: for C = 3000, M = 500, k = 100 three classes
    in four have q < 1e-6. So log q is None by default, and the draws are for losses that use none, or that of a uniform
    proposal. `marginal_log_q` gives the exact marginal law by rank; `correction=True` states it for ranks estimated
    from the candidates: (a + 1) / (b + 2) of the classes are above one that has a of b other candidates above it.

    `shared=True` keeps the k best of M shared candidates by their mean score over the rows.

    Args:
        num_classes: C >= 1.
        num_candidates: M >= 1, with replacement; at least the number of negatives.
        shared_candidates: the same candidates for all rows (one matmul, no gather), each row with its own best.
        correction: state the estimated marginal log q.

    Example:
        >>> sampler = DNSSampler(1000, num_candidates=64)
        >>> weight = torch.linspace(-1, 1, 1000).unsqueeze(1)
        >>> draw = sampler(4, input=torch.ones(2, 1), linear_weight=weight, generator=torch.Generator().manual_seed(0))
        >>> draw.ids.shape, bool((draw.ids > 800).all()), draw.log_q
        (torch.Size([2, 4]), True, None)

    References:
        Zhang et al. (2013).
    """

    def __init__(
        self, num_classes: int, num_candidates: int = 500, *, shared_candidates: bool = False, correction: bool = False
    ) -> None:
        super().__init__(num_classes)
        self.num_candidates = check_positive_integer("num_candidates", num_candidates)
        self.shared_candidates = shared_candidates
        self.correction = correction
        self.note = (
            "log q is the marginal law of the kept candidates at a rank estimated from all of them"
            if correction
            else "log q is unknown: the best of a pool are neither independent nor drawn from a usable law"
        )

    def draw(self, request: Request) -> Draw:
        """Candidates, and the best of them."""
        check_pool(request.count, self.num_candidates)
        shape = pool_shape(request, self.num_candidates, self.shared_candidates)
        pool = torch.randint(self.num_classes, shape, generator=request.generator, device=request.device)
        scores = candidate_scores(request, pool)  # (N, M)
        if request.shared:
            scores = scores.mean(0)  # (M,)
        kept, position = scores.topk(request.count, dim=-1)
        if visible(kept) and kept.isnan().any():
            raise ArgumentError("the scores of candidates must not be nan; got at least one.")
        log_q, log_q_target = self._estimated_log_q(request, scores) if self.correction else (None, None)
        return Draw(at_positions(pool, position), log_q, log_q_target, self.note)

    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        """Not known."""
        raise unknown_log_q(self)

    def marginal_log_q(self, rank: Tensor, num_negatives: int) -> Tensor:
        """The marginal law of the kept candidates, for classes with `rank` classes above them.

            q(r) = (1 / k) sum_{i = 1..k} [F(i - 1; M, r / C) - F(i - 1; M, (r + 1) / C)]
                 = (M / k) integral of F(k - 1; M - 1, p) dp from r / C to (r + 1) / C

        with F(x; n, p) the binomial cdf. The second form has no differences to cancel: it is computed by Gauss-Legendre
        quadrature, which is exact up to M = 64 (the integrand has degree M - 1).

        Args:
            rank: of any shape, from 0 (best) to C - 1; may be fractional.
            num_negatives: k <= M.

        Returns:
            float64 in the shape of `rank`.

        Example:
            >>> DNSSampler(4, num_candidates=2).marginal_log_q(torch.arange(4), 1).exp().mul(16).round().tolist()
            [7.0, 5.0, 3.0, 1.0]

        References:
            the k = 1 case is the law of the maximum, ((C - r) / C)^M - ((C - r - 1) / C)^M.
        """
        check_pool(check_positive_integer("num_negatives", num_negatives), self.num_candidates)
        # M/2 nodes are exact; 32 are enough for the step of width 1/sqrt(M), but for few classes it is steep
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
        """log q of the kept candidates and of the target, at estimated ranks: one table of at most 2 M + 1 ranks."""
        M, k = self.num_candidates, request.count
        best = self._log_q_below(torch.arange(k, device=scores.device), M - 1, k).to(request.dtype)
        log_q = best.expand(*scores.shape[:-1], k)
        if request.target is None:
            return log_q, None
        positive = target_scores(request, request.target)  # (N, P), or (N, N P) if shared
        if request.shared:
            positive = positive.mean(0)
        above = M - torch.searchsorted(scores.sort(-1).values, positive, right=True)
        table = self._log_q_below(torch.arange(M + 1, device=scores.device), M, k).to(request.dtype)
        return log_q, lookup(table, above).view(request.target.shape)

    def _log_q_below(self, above: Tensor, others: int, num_negatives: int) -> Tensor:
        share = (above + 1) / (others + 2)  # of the classes above, the posterior mean under a uniform prior
        rank = (share.double() * self.num_classes - 0.5).clamp(0, self.num_classes - 1)
        return self.marginal_log_q(rank, num_negatives)


def _gauss_legendre(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]: eigenvalues and first components of the Jacobi matrix (Golub and Welsch 1969)."""
    i = torch.arange(1, num_nodes, dtype=torch.float64)
    off_diagonal = torch.diag(i / (4 * i**2 - 1).sqrt(), 1)
    node, vector = torch.linalg.eigh(off_diagonal + off_diagonal.T)
    return ((node + 1) / 2).to(device), (vector[0] ** 2).to(device)


def _log_binomial_cdf(x: int, n: int, p: Tensor) -> Tensor:
    """log P(X <= x) for X binomial (n, p), as a sum of positive terms."""
    i = torch.arange(x + 1, dtype=torch.float64, device=p.device)
    log_choose = math.lgamma(n + 1) - (i + 1).lgamma() - (n - i + 1).lgamma()
    p = p.unsqueeze(-1)
    log_terms: Tensor = log_choose + torch.special.xlogy(i, p) + torch.special.xlog1py(n - i, -p)
    return log_terms.logsumexp(-1)


def make(num_classes: int, counts: Tensor | None = None, **options: Any) -> DNSSampler:
    """The sampler of the table; counts play no part."""
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
