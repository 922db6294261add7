"""The contestants of heads.py: manymax's heads with their defaults, their peers, and matrix products as the limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import entmax as package
import torch
import torch.nn.functional as F
from head_problems import Loss, Problem
from measure import Contestants, interleave, median
from torch import Tensor

import manymax

OURS: dict[str, Loss] = {
    "softmax": manymax.linear_softmax_loss,
    "sparsemax": manymax.linear_sparsemax_loss,
    "entmax-1.5": partial(manymax.linear_entmax_loss, alpha=1.5),
    "entmax-1.3": partial(manymax.linear_entmax_loss, alpha=1.3),
    "rankmax": manymax.linear_rankmax_loss,
}


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of a full (N, C) table of scores, the usual way in torch."""
    return F.cross_entropy(F.linear(x, w), y)


def torch_chunked(chunk: int | None, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's own linear cross entropy, which scores `chunk` rows at a time; None leaves the choice to torch."""
    return F.linear_cross_entropy(x, w, y, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk))


def packaged(function: Callable[..., Tensor], settings: dict[str, Any], x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """A loss of the entmax package, which takes the full table of scores."""
    return function(F.linear(x, w), y, **settings).mean()


PLAIN: dict[str, Loss] = {"eager": eager, "torch, default chunk": partial(torch_chunked, None)}
TORCH_CHUNKS: dict[str, Loss] = {
    f"torch, chunk {rows}": partial(torch_chunked, rows) for rows in (64, 128, 256, 512, 1024)
}
# k is the length of the package's partial sort, which it doubles for rows whose support is larger; C sorts whole rows.
PACKAGE: dict[str, dict[str, Loss]] = {
    member: {
        f"package {member}, k = {k or 'C'}": partial(packaged, function, {"k": k})
        for k in (10, 100, 512, 2_048, 8_192, None)
    }
    for member, function in (("sparsemax", package.sparsemax_loss), ("entmax-1.5", package.entmax15_loss))
}
PACKAGE["entmax-1.3"] = {"package entmax-1.3, bisection": partial(packaged, package.entmax_bisect_loss, {"alpha": 1.3})}
ALL_LOSSES: dict[str, Loss] = (
    OURS | PLAIN | TORCH_CHUNKS | {k: v for group in PACKAGE.values() for k, v in group.items()}
)


def fastest(contestants: Contestants) -> str:
    """The name of the fastest contestant, by the median of three interleaved runs."""
    if len(contestants) == 1:
        return next(iter(contestants))
    times = interleave(contestants, 3, may_leave=contestants, budget=0.0)
    return min(contestants, key=lambda name: median(times[name]))


def best_setting(problem: Problem, settings: dict[str, Loss]) -> str:
    """The name of the fastest setting of a peer on a problem."""
    return fastest({name: problem.step(loss) for name, loss in settings.items()})


# The limit ---------------------------------------------------------------------------------------


def products(problem: Problem, count: int) -> Callable[[], object]:
    """The products that no dense head can do without: the limit of this machine, without any loss.

        count = 1:  S = Q W^T                          all scores
        count = 3:  S = Q W^T,  S W,  S^T Q            the scores and both gradients

    The scores are made whole, or in blocks of rows into one buffer: whichever is fastest here. Whole rows, because a
    loss needs all scores of a row; in tiles of some classes the scores of a row would never exist at the same time.
    """
    q, w = problem.queries.detach(), problem.vectors.detach()
    return _in_blocks(q, w, count, _best_rows(*q.shape, len(w), count))


@lru_cache
def _best_rows(rows: int, dim: int, classes: int, count: int) -> int:
    """The number of rows of the fastest block."""
    q, w = torch.randn(rows, dim), torch.randn(classes, dim)
    blocks = {f"{n}": min(n, rows) for n in (64, 128, 192, 256, 512, 1024, rows)}
    return blocks[fastest({name: _in_blocks(q, w, count, n) for name, n in blocks.items()})]


def _in_blocks(q: Tensor, w: Tensor, count: int, rows: int) -> Callable[[], object]:
    """One or three products in blocks of so many rows."""
    grad_q, grad_w = torch.empty_like(q), torch.empty_like(w)
    # Rows of scores begin at multiples of 64 bytes; other lengths can double the time.
    buffer = q.new_empty(rows, -(-len(w) // 16) * 16)

    def run() -> object:
        for row in range(0, len(q), rows):
            block = slice(row, row + rows)
            scores = buffer[: len(q[block]), : len(w)]
            torch.mm(q[block], w.T, out=scores)
            if count == 3:  # a sum over the blocks; the first block overwrites what was there
                torch.mm(scores, w, out=grad_q[block])
                torch.addmm(grad_w, scores.T, q[block], beta=int(row > 0), out=grad_w)
        return grad_q, grad_w

    return run


# Sampled softmax ---------------------------------------------------------------------------------


def sampled_step(classes: int, rows: int, ours: bool, negatives: int = 100, dim: int = 64) -> Callable[[], object]:
    """A training step of sampled softmax with SparseAdam; labels and negatives are drawn from p(c) ~ 1 / rank(c).

    The peer is what one writes with `nn.Embedding(sparse=True)`, autograd and torch's SparseAdam. It draws by our
    sampler, which is faster than `torch.multinomial`, and makes the same correction for the proposal.
    """
    rng = torch.Generator().manual_seed(0)
    ranks = torch.randperm(classes, generator=rng) + 1
    sampler = manymax.samplers.PopularitySampler(1 / ranks)
    table = torch.nn.Embedding(classes, dim, sparse=True)
    with torch.no_grad():
        table.weight.copy_(0.1 * torch.randn(classes, dim, generator=rng))
    queries = torch.randn(rows, dim, generator=rng).requires_grad_()
    target = sampler.draw_ids((rows,), torch.device("cpu"), rng)
    optimizer = (manymax.optim if ours else torch.optim).SparseAdam(table.parameters(), lr=1e-4)

    def our_loss() -> Tensor:
        return manymax.linear_sampled_softmax_loss(
            queries, table.weight, target, sampler, negatives, sparse_grad=True, generator=rng
        )

    def peer_loss() -> Tensor:
        drawn = sampler.draw_ids((rows, negatives), torch.device("cpu"), rng)
        ids = torch.cat([target.unsqueeze(1), drawn], 1)
        scores = torch.bmm(table(ids), queries.unsqueeze(2)).squeeze(2) - sampler.log_prob[ids]
        return F.cross_entropy(scores, torch.zeros(rows, dtype=torch.long))

    def step() -> object:
        queries.grad = table.weight.grad = None
        (our_loss() if ours else peer_loss()).backward()
        return optimizer.step()

    return step
