"""Rules out classes before their scores are known, for members whose gradient needs those above a threshold alone.

The class vectors are kept in small integers for a call, from which an upper bound of every score follows for a third
of the price (engine/quantised.h). What is left of a row is scored in float32, so that the result is what it is without
the filter. Where too much is left, as in a new model, the rest of the call goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.engine import native
from manymax.engine.blocks import Filtered, Kernel
from manymax.engine.keywords import Keywords
from manymax.engine.native_library import call, find_level
from manymax.engine.ranks import Ranks
from manymax.engine.row_target import RowTarget
from manymax.engine.scoring import Scoring

# Sizes below which the filter is not worth what it costs: the integers of all class vectors take the time of the scores
# of 5 rows, and blocks of few classes are quick anyway.
WORTH_CLASSES = 4096
WORTH_ROWS = 128
# Below, the memory of a row has no room for the lists of quantised.h; longer vectors may have inexact sums.
FEWEST_CLASSES, LONGEST = 1024, 1024
TOGETHER = 64  # classes whose integers lie together: CLASSES in quantised.h
# Bytes of integers for each score of a block, at most: half of its memory. Small blocks are there to take little of it.
MOST_BYTES = 2
# One class in so many may be left in most rows: to keep and score one takes the time of tens in a product. A single
# row may have more, up to one class in MOST, which is still less than reading all class vectors for it.
FEW, MOST = 128, 4
MOST_WIDE = 4  # with more than one row in so many that has more, the block is scored whole, and all blocks after it
TRIED_ROWS = 48  # rows of the first block that are tried first
FEW_ROWS = 16  # rows that are scored whole at a time, in memory of their own


@dataclass
class Filter:
    """The class vectors of one call in small integers.

    vectors: (C, d) float32. bias: (C,) or None.
    codes: (groups, padded d / 4, 64, 4) uint8. scales: (groups * 64,). norms, errors: (groups,).
    offset: () float64, the largest |bias|.
    level: of the native library.
    rule_out: of the member.
    pays: whether the last block had few rows with much left; None before the first block.
    """

    vectors: Tensor
    bias: Tensor | None
    codes: Tensor
    scales: Tensor
    norms: Tensor
    errors: Tensor
    offset: Tensor
    level: str
    rule_out: Callable[[Filter, Tensor, Tensor], Tensor]
    pays: bool | None = None

    @classmethod
    def of(
        cls, vectors: Tensor, bias: Tensor | None, level: str, rule_out: Callable[[Filter, Tensor, Tensor], Tensor]
    ) -> Filter | None:
        """For the class vectors of one call; None where a number is too large for it, or not finite."""
        num_classes, d = vectors.shape
        groups = -(-num_classes // TOGETHER)
        codes = torch.empty(groups * TOGETHER * (-(-d // 8) * 8), dtype=torch.uint8)
        scales, norms, errors = (vectors.new_empty(size) for size in (groups * TOGETHER, groups, groups))
        offset = torch.zeros((), dtype=torch.float64)
        bias = None if bias is None else bias.contiguous()
        made = cls(vectors, bias, codes, scales, norms, errors, offset, level, rule_out)
        call(level, "quantise_classes", vectors, vectors, num_classes, d, bias, *made.tables, offset, threads=True)
        return made if float(offset) >= 0 else None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The integers and what belongs to them, in the order in which C takes them."""
        return self.codes, self.scales, self.norms, self.errors

    def candidates(self, queries: Tensor, target: RowTarget, out: Tensor) -> Filtered | None:
        """Write what is left of each row (n, C') to `out`, packed; rows with too much left get all of their scores.

        Returns:
            None where there are too many of these: `out` then holds nothing.
        """
        queries = queries.contiguous()
        tried = len(queries) if self.pays else min(TRIED_ROWS, len(queries))
        count = self.rule_out(self, queries[:tried], out[:tried])
        self.pays = int((count < 0).sum()) * MOST_WIDE <= tried
        if self.pays and tried < len(queries):
            count = torch.cat([count, self.rule_out(self, queries[tried:], out[tried:])])
            self.pays = int((count < 0).sum()) * MOST_WIDE <= len(queries)
        if not self.pays:
            return None
        wide = (count < 0).nonzero().squeeze(1)
        for rows in wide.split(FEW_ROWS) if len(wide) else ():  # an empty tensor is split into one empty part
            scores = out.new_empty(len(rows), out.shape[1])
            native.block_scores(self.level, queries[rows], self.vectors, self.bias, scores)
            out[rows] = scores
        assert target.ids is not None
        ids = target.ids.contiguous()
        positives = queries.new_empty(ids.shape)
        operands = queries, *queries.shape, self.vectors, self.bias, ids, ids.shape[1], positives
        call(self.level, "listed_scores", queries, *operands, threads=True)
        return Filtered(count, positives)


def filter_for(
    kernel: Kernel,
    queries: Tensor,
    vectors: Tensor,
    bias: Tensor | None,
    target: RowTarget,
    scoring: Scoring,
    keywords: Keywords,
    level: str | None,
    ranks: Ranks,
    block_rows: int,
) -> Filter | None:
    """The filter of a call, where there is one and its sizes are worth it; None elsewhere.

    Args:
        kernel: of the member.
        queries: (N, d). vectors: (C, d). bias: (C,) or None.
        target: of the N rows.
        scoring: how scores follow from products.
        keywords: of the call.
        level: of the native library whose products serve the call; None where there is none.
        ranks: those that share the classes.
        block_rows: of the block of scores.
    """
    if kernel.rule_out is None or level is None or not keywords.options.filter or not find_level(level).products:
        return None
    num_classes, d = vectors.shape
    if queries.dtype != torch.float32 or not FEWEST_CLASSES <= max(WORTH_CLASSES, FEWEST_CLASSES) <= num_classes:
        return None
    if d > LONGEST or len(queries) < WORTH_ROWS or d > MOST_BYTES * block_rows:
        return None
    # All of these need a score of every class, or another one than the product: smoothing, statistics, a cap.
    plain = scoring.plain and target.excluded is None and target.ids is not None and target.share is None
    if not plain or keywords.stats or not ranks.alone:
        return None
    return Filter.of(vectors, bias, level, kernel.rule_out)
