"""Blocks of rows that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_BYTES = 8 * 2**20  # small enough to be reused from cache-warm memory, large enough to hide the loop


def row_blocks(num_rows: int, bytes_per_row: int, budget: int = BLOCK_BYTES) -> Iterator[slice]:
    """Slices that cover `num_rows` rows, each of at least one row and otherwise of at most `budget` bytes.

    The blocks depend on the sizes alone, so that results are the same on every run.

    Args:
        num_rows: rows in all; none gives no block.
        bytes_per_row: what one row needs.
        budget: bytes that a block may need.

    Returns:
        the slices, in order.

    Example:
        >>> list(row_blocks(5, bytes_per_row=4, budget=8))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, budget // max(1, bytes_per_row))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
