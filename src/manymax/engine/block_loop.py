"""Runs a kernel over blocks of rows: scores, losses and gradients, never the (rows, classes) table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Block, Kernel
from manymax.engine.filter import filter_for
from manymax.engine.gradients import Gradients
from manymax.engine.half import WIDENED, for_products, product, widened
from manymax.engine.keywords import Keywords
from manymax.engine.list_bound import block_bound
from manymax.engine.options import PAD, HeadOptions
from manymax.engine.positives import mask_
from manymax.engine.ranks import Shards
from manymax.engine.row_target import RowTarget
from manymax.engine.scoring import Scoring
from manymax.engine.statistics import of_scores
from manymax.engine.triton_backend import BACKEND as TRITON
from manymax.ops.checks import visible

# Class vectors that are converted to float64 at a time: a float64 copy of all of them would be twice their size.
FLOAT64_ROWS = 1 << 16
# On a device: scores and rows of a block at most. 1 GB of float32, or an eighth of the free memory if that is less.
DEVICE_SCORES = 1 << 28
DEVICE_ROWS = 1 << 13


def run(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: RowTarget,
    kernel: Kernel,
    keywords: Keywords,
    shards: Shards,
    wants: tuple[bool, bool, bool],
    collect: type[Gradients] = Gradients,
) -> tuple[Tensor, Gradients, Tensor, list[Tensor]]:
    """Run a kernel over all rows, block by block.

    Args:
        input: (N, d) queries.
        linear_weight, linear_bias: (classes of this rank, d), in half precision too, and (classes of this rank,).
        target: of the N rows; its coefficient is None if no gradient is wanted.
        kernel: of the member.
        keywords: of the call.
        shards: which classes this rank holds.
        wants: which gradients are wanted: of queries, class vectors and bias.
        collect: what the parts of the gradients are given to.

    Returns:
        Losses (N,), the accumulated gradients, the gradient in the kernel's setting, () in float64, and the statistics
        (N,) that `keywords.stats` names, in that order.
    """
    options = keywords.options
    step = block_rows(options, shards, input.device)
    # One buffer for all blocks: writing to memory for the first time costs about as much as the matmul.
    buffer = input.new_empty(min(step, input.shape[0]), padded_length(linear_weight.shape[0]))
    scorer = Scorer.of(input, linear_weight, linear_bias, keywords, native.level_for(options, buffer))
    scoring, level = scorer.scoring, scorer.level
    given = kernel, input, linear_weight, linear_bias, target, scoring, keywords
    sieve = filter_for(*given, level if scorer.by_native else None, shards.ranks, len(buffer))
    weights = target.class_weight
    spread_of = None if weights is None else _weighted_score_sum(weights, linear_weight, scoring)
    through_cap = scoring.softcap is not None and target.coefficient is not None
    kept: Tensor | None = None
    # The budget of sparse entries is the size of the buffer: entries may take about as much memory as scores do.
    how = options.sparse_grad, buffer.numel(), scoring, level
    gradients = collect(input, linear_weight, scorer.matmul_vectors, wants, *how)
    # In float64: one number that sums terms of both signs over all rows and classes.
    losses, grad_setting = [], input.new_zeros((), dtype=torch.float64)
    stats: list[dict[str, Tensor]] = []
    for start in range(0, input.shape[0], step):
        queries = input[start : start + step]  # a view; the last block may be shorter
        part = target[start : start + step]
        scores = buffer[: len(queries)]
        filtered = sieve.candidates(queries, part, scores) if sieve is not None and sieve.pays is not False else None
        tops = scorer.score(queries, part, scores) if filtered is None else None
        # Before classes are left out: those of the list of K may be among them.
        bound = _bound(part, scores, kernel.list_length, shards)
        tops = leave_out(part, scores, tops, len(linear_weight), level)
        spread = None if spread_of is None else spread_of(queries, scores)
        rescore = partial(scorer.rescore, queries, part)
        known = of_scores(keywords.stats, scores, tops, part, shards, kernel.ranking_key)
        block = Block(
            *(scores, part, len(linear_weight), spread, rescore, shards.ranks, keywords, level, tops, bound),
            triton=options.backend == TRITON,
            filtered=filtered,
        )
        capped = None
        if through_cap and not kernel.undoes_cap(block):
            # The slope of a cap is a function of the capped scores, which the kernel overwrites: a second table. Blocks
            # of half as many rows would take a tenth of a step longer.
            kept = torch.empty_like(buffer) if kept is None else kept
            capped = kept[: len(queries)].copy_(scores)
        # On several ranks this call exchanges sums with the others, who are at the same block.
        result = kernel.run(block)
        losses.append(result.losses)
        stats.append({**result.stats, **known})
        # At once: a dense part is the buffer itself, which the next block overwrites.
        for gradient in result.parts:
            gradients.add(start, gradient, capped)
        if result.grad_setting is not None:
            grad_setting = grad_setting + result.grad_setting
    rows = [torch.cat([block[name] for block in stats]) if stats else input.new_zeros(0) for name in keywords.stats]
    return torch.cat(losses) if losses else input.new_zeros(0), gradients, grad_setting, rows


def block_rows(options: HeadOptions, shards: Shards, device: torch.device) -> int:
    """The number of rows of a block, the same on every rank."""
    # From the largest shard, not from this rank's own: a kernel exchanges sums for each block, so that ranks that cut
    # the rows differently would add up sums of different rows, or wait for each other for ever.
    classes = padded_length(max(shards.sizes))
    given = options.block_rows is not None or options.block_scores != HeadOptions.block_scores
    if device.type == "cpu" or given:
        return options.rows(classes)
    # No cache to stay in: as few launches as memory allows. Ranks may have devices of different sizes.
    scores = DEVICE_SCORES if shards.ranks.alone else DEVICE_SCORES // 4
    if shards.ranks.alone and device.type == "cuda" and torch.cuda.is_available():
        # A power of two: blocks, and with them the order of sums, stay the same while memory comes and goes a little.
        free = torch.cuda.mem_get_info(device)[0] // 32
        scores = min(scores, 1 << max(free.bit_length() - 1, 20))
    return min(DEVICE_ROWS, max(64, scores // classes // 64 * 64))


@dataclass(frozen=True)
class Scorer:
    """Computes the scores of blocks of queries.

    vectors: (C, d), in any precision. bias: (C,) or None.
    matmul_vectors: (C, d), the class vectors in the dtype of the matmuls.
    scoring: how scores follow from products.
    matmul: the option of this name.
    by_native: whether native code computes the products; `level` is then its dispatch level.
    level: of the native library that serves the call; None where plain torch does.
    """

    vectors: Tensor
    bias: Tensor | None
    matmul_vectors: Tensor
    scoring: Scoring
    matmul: str
    by_native: bool
    level: str | None

    @classmethod
    def of(cls, input: Tensor, vectors: Tensor, bias: Tensor | None, keywords: Keywords, level: str | None) -> Scorer:
        """For the queries of one call."""
        matmul = keywords.options.matmul
        scoring = Scoring.of(vectors, bias, keywords.normalize, keywords.softcap, level)
        # Converted once for all blocks; half the size of the class vectors.
        matmul_vectors = for_products(vectors) if matmul == "bf16" else vectors
        by_native = matmul == "float32" and native.multiplies(level, input, vectors)
        return cls(vectors, bias, matmul_vectors, scoring, matmul, by_native, level)

    def score(self, queries: Tensor, target: RowTarget, out: Tensor) -> Tensor | None:
        """Write scores (n, C') to `out`; returns the maxima of groups of classes, where they come with the scores."""
        return self._multiply(queries, target.ids, out)

    def rescore(self, queries: Tensor, target: RowTarget, rows: Tensor) -> Tensor:
        """Fresh scores (m, C') of some rows (m,) of a block, in memory of their own."""
        scores = queries.new_empty(len(rows), padded_length(len(self.vectors)))
        self.score(queries[rows], target[rows], scores)
        leave_out(target[rows], scores, None, len(self.vectors), self.level)
        return scores

    def _multiply(self, queries: Tensor, ids: Tensor | None, out: Tensor) -> Tensor | None:
        """Write the scores of all classes."""
        plain = self.scoring.plain
        if self.by_native and self.level is not None:
            transform = self.scoring.transform()
            return native.block_scores(self.level, queries, self.vectors, self.bias, out, transform)
        scores = out[:, : len(self.vectors)]
        if self.matmul == "bf16":
            scores.copy_(product(queries.bfloat16(), self.matmul_vectors.T))
            if ids is not None:
                # The scores of the positives enter the loss one by one, where rounding does not average out as it does
                # in a sum over the classes: they are computed again in full precision.
                positives = self.vectors[ids].to(queries.dtype) @ queries.unsqueeze(2)
                scores.scatter_(1, ids, positives.squeeze(2))
        elif self.vectors.dtype != queries.dtype:
            for classes, vectors in widened(self.vectors, queries.dtype):
                torch.mm(queries, vectors.T, out=scores[:, classes])
        else:
            torch.mm(queries, self.vectors.T, out=scores)
        # Written for every block, because the kernel overwrote the padding of the last one.
        out[:, len(self.vectors) :] = -torch.inf
        if not plain:
            return self.scoring.finish(out)
        if self.bias is not None:
            scores += self.bias  # -inf masks a class
        return None


def padded_length(num_classes: int) -> int:
    """The length of a row of scores with its padding, the next multiple of `PAD`."""
    return -(-num_classes // PAD) * PAD


def _bound(target: RowTarget, scores: Tensor, k: int | None, shards: Shards) -> Tensor | None:
    """What scores (n, C') are compared with, (n, 1): the bound that is given, or the k-th largest; None without a k."""
    if k is None:
        return None
    return block_bound(scores, k, shards.ranks) if target.bound is None else target.bound.unsqueeze(1)


def leave_out(
    target: RowTarget, scores: Tensor, tops: Tensor | None, num_classes: int, level: str | None
) -> Tensor | None:
    """Mask the classes that are excluded in scores (n, C'); returns the maxima of groups, as far as they still hold."""
    if target.excluded is None:
        return tops
    if level is not None:
        native.leave_out(level, scores, target.excluded, tops, num_classes)
        return tops
    if visible(scores):
        row, column = (target.excluded >= 0).nonzero(as_tuple=True)
        scores[row, target.excluded[row, column]] = -torch.inf
    else:
        mask_(scores, target.excluded, target.excluded >= 0)
    return None  # a maximum may be gone


def _weighted_score_sum(
    class_weight: Tensor, linear_weight: Tensor, scoring: Scoring
) -> Callable[[Tensor, Tensor], Tensor]:
    """From queries (n, d) and their scores to sum_c class_weight_c s_c, (n,) in float64, which label smoothing needs.

    The sum is linear in the query: one vector, sum_c class_weight_c w_c, serves all rows, and no scores are needed. In
    float64, because a common offset of the scores is in the sum C times, and is subtracted again later: in float32
    the difference would have lost its digits. Under a soft cap nothing is linear, and the scores are summed.
    """
    if scoring.softcap is not None:
        return lambda queries, scores: _sum_of_scores(scores[:, : len(class_weight)], class_weight)
    weights = class_weight if scoring.scale is None else class_weight * scoring.scale
    vector = linear_weight.new_zeros(linear_weight.shape[1], dtype=torch.float64)
    for part, vectors in zip(weights.split(FLOAT64_ROWS), linear_weight.split(FLOAT64_ROWS), strict=True):
        vector += part.double() @ vectors.double()
    shift = vector.new_zeros(())
    if scoring.bias is not None:
        # A masked class has weight 0, and 0 x -inf is nan.
        shift = (class_weight.double() * torch.where(scoring.bias > -torch.inf, scoring.bias, 0)).sum()
    return lambda queries, scores: queries.double() @ vector + shift


def _sum_of_scores(scores: Tensor, class_weight: Tensor) -> Tensor:
    """sum_c class_weight_c s_c of scores (n, C), (n,) in float64, without a float64 copy of all of them."""
    total = scores.new_zeros(len(scores), dtype=torch.float64)
    for part, weights in zip(scores.split(WIDENED, 1), class_weight.split(WIDENED), strict=True):
        total += torch.where(part > -torch.inf, part, 0).double() @ weights.double()
    return total
