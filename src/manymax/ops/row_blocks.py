"""Cutting rows into blocks that fit a budget of memory."""

from __future__ import annotations

# Small enough that the memory of a block is still in cache when the next block reuses it, large enough that the calls
# of the loop take no share of the time.
BLOCK_BYTES = 8 * 2**20


def row_blocks(num_rows: int, row_size: int, budget: int = BLOCK_BYTES) -> list[slice]:
    """Slices that cover `num_rows` rows: as many rows each as the budget allows, and at least one.

    Args:
        num_rows: number of rows in all; 0 gives no block.
        row_size: what one row needs, in bytes or in whatever unit the budget has.
        budget: what a block may need.

    Returns:
        the slices, in order.

    Example:
        >>> row_blocks(5, row_size=4, budget=8)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    # From the sizes alone, not from free memory or the machine: sums over blocks are then rounded the same way in every
    # run.
    size = max(1, budget // max(1, row_size))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
