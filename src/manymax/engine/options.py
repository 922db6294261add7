"""How a head computes: block sizes, matmul precision, kind of gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from manymax.errors import ArgumentError, ArgumentTypeError, check_choice, unknown_name

PAD = 16  # rows of scores are padded to a multiple of this: an odd length costs a matmul dearly


@dataclass(frozen=True)
class HeadOptions:
    """Settings of a head that change its cost, never its meaning.

    block_scores: scores held at a time. The number of rows of a block follows from it and from the number
        of classes alone, so that a result is the same bit for bit on every run.
    block_rows: rows of a block, if you want to set them yourself.
    matmul: "float32", or "bf16" for matmuls in bfloat16 with everything else in float32.
    sparse_grad: give `linear_weight` a gradient of the touched rows only (a sparse COO tensor).
    retain_graph: keep the gradients for another backward; otherwise the first one frees them.
    compiled: sparsemax, entmax-1.5 and rankmax on a CPU by code that is compiled at its first use, which needs a C++
        compiler. Results are the same but for rounding. Without effect on other members and devices, and on shards.
    """

    block_scores: int = 1 << 23
    block_rows: int | None = None
    matmul: str = "float32"
    sparse_grad: bool = False
    retain_graph: bool = False
    compiled: bool = False

    def rows(self, num_classes: int) -> int:
        """Rows of a block, a multiple of 64: every block reads all class vectors, which fewer rows would not repay."""
        if self.block_rows is not None:
            return self.block_rows
        return min(1024, max(64, self.block_scores // num_classes // 64 * 64))


def read_options(options: HeadOptions | Mapping[str, Any] | None) -> HeadOptions:
    """Options from None, a mapping or `HeadOptions`; unknown keys and bad values are refused."""
    if options is None:
        return HeadOptions()
    if isinstance(options, Mapping):
        known = [f.name for f in fields(HeadOptions)]
        for key in options:
            if key not in known:
                raise unknown_name("option", key, known)
        options = HeadOptions(**options)
    if not isinstance(options, HeadOptions):
        raise ArgumentTypeError(f"`options` must be HeadOptions or a mapping; got {type(options).__name__}.")
    check_choice("options.matmul", options.matmul, ("float32", "bf16"))
    for name in ("block_scores", "block_rows"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"`options.{name}` must be an integer of at least 1; got {value!r}.")
    return options
