"""Blocks of rows that fit a budget."""

from __future__ import annotations

BLOCK_BYTES = 8 * 2**20  # small enough to be reused from cache-warm memory, large enough to hide the loop


def row_blocks(num_rows: int, row_size: int, budget: int = BLOCK_BYTES) -> list[slice]:
    """Slices that cover `num_rows` rows, each of at least one row and otherwise of at most the budget.

    The blocks depend on the sizes alone, so that results are the same on every run.

    Args:
        num_rows: rows in all; none gives no block.
        row_size: what one row needs, in bytes or in whatever the budget counts.
        budget: what a block may need.

    Returns:
        the slices, in order.

    Example:
        >>> row_blocks(5, row_size=4, budget=8)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, budget // max(1, row_size))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
