"""What a head is told beside its tensors: how it computes, and the keywords that all heads share.

Both are read once, at the edge, into frozen objects that travel from there to the kernels. A keyword that is new is a
field of `Keywords`: signatures, constructors and checks follow from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine.target import check_options, check_weight
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
    compiled: members with a native kernel run it on a CPU; it is compiled at its first use, which needs a C++
        compiler. Results are the same but for rounding. Without effect on other members and devices.
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


Options = HeadOptions | Mapping[str, Any] | None

ALL_OPTIONS = frozenset(f.name for f in fields(HeadOptions))


def read_options(options: Options, honoured: frozenset[str] = ALL_OPTIONS, why: str = "") -> HeadOptions:
    """Options from None, a mapping or `HeadOptions`; unknown keys, bad values and those without effect are refused.

    Args:
        options: as a user gives them.
        honoured: the options that have an effect on a head; others must keep their default.
        why: what the refusal of the others says.
    """
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
    for f in fields(HeadOptions):
        if f.name not in honoured and getattr(options, f.name) != f.default:
            raise ArgumentError(f"`options.{f.name}` has no effect on this head: {why}. Leave it out.")
    return options


@dataclass(frozen=True)
class Keywords:
    """The keywords that heads share, read and checked; their order is that of signatures.

    shared, sparse_grad, generator: of heads that draw negatives.
    weight, reduction, ignore_index, label_smoothing, multilabel: as in `softmax_loss`.
    options: how the head computes.
    """

    shared: bool = False
    sparse_grad: bool = False
    generator: torch.Generator | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    multilabel: str = "sum"
    options: HeadOptions = field(default=HeadOptions())

    @classmethod
    def parameters(cls, names: Iterable[str]) -> list[inspect.Parameter]:
        """The keywords of these names as parameters of a signature."""
        wanted, found = set(names), []
        for f in fields(cls):
            if f.name in wanted:
                # users may leave options out, or give a mapping
                default, annotation = (None, "Options") if f.name == "options" else (f.default, f.type)
                kind = inspect.Parameter.KEYWORD_ONLY
                found.append(inspect.Parameter(f.name, kind, default=default, annotation=annotation))
        return found


# The keywords of a head by its kind: those that it has no meaning for are not in its signature.
EXACT_KEYWORDS = ("weight", "reduction", "ignore_index", "label_smoothing", "multilabel", "options")
SAMPLED_KEYWORDS = (
    *("shared", "sparse_grad", "generator", "weight", "reduction", "ignore_index", "multilabel", "options"),
)


def read_keywords(
    given: Mapping[str, Any], num_classes: int, honoured: frozenset[str] = ALL_OPTIONS, why: str = ""
) -> Keywords:
    """The keywords of a call, checked; `honoured` and `why` as in `read_options`."""
    keywords = Keywords(**{**given, "options": read_options(given.get("options"), honoured, why)})
    check_options(keywords.reduction, keywords.label_smoothing, keywords.multilabel)
    check_weight(keywords.weight, num_classes)
    if keywords.options.sparse_grad and not keywords.sparse_grad:
        keywords = replace(keywords, sparse_grad=True)
    return keywords
