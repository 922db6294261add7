"""What a head is told beside its tensors: the options of how it computes, and the keywords that all heads share.

Both are read and checked once, where a caller gives them, into frozen objects that travel from there to the kernels. A
new keyword is a new field of `Keywords`: signatures, constructors and checks follow from it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from manymax.engine.native_library import BACKENDS
from manymax.engine.target import check_options, check_weight
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice, unknown_name

# Rows of scores are padded to a multiple of this many columns. An odd length costs a matmul dearly: padding took a
# softmax step with C = 40,981 from 0.56 to 0.39 of the time of torch's own. It is also the size of the groups of
# classes of which a top-k and the sparse maps look at the maximum first.
PAD = 16


@dataclass(frozen=True)
class HeadOptions:
    """How a head computes: options that change its time and memory, and its result by no more than rounding.

    block_scores: the number of scores held at a time. The number of rows of a block follows from it and from the number
        of classes alone, not from the machine, so that a result is the same bit for bit on every run.
    block_rows: rows of a block, if you want to set them yourself.
    matmul: "float32", or "bf16" for matmuls in bfloat16 with everything else in float32. Refused on a processor that is
        slower with it.
    sparse_grad: give `linear_weight` a gradient of the touched rows only (a sparse COO tensor).
    retain_graph: keep the gradients for another backward; otherwise the first backward frees them.
    backend: "auto" runs the native kernel of a member where there is one that serves, and plain torch elsewhere.
        "torch" is plain torch; "native" is an error where the native kernel cannot serve; "native-avx512",
        "native-avx2" and "native-plain" are its levels, each an error where the processor has not got it. The variable
        MANYMAX_BACKEND of the environment says what "auto" stands for. `manymax doctor` shows what is used, and why.
    allow_slow: run what this processor is slow at instead of refusing it.
    compiled: the old name of `backend`. True is "native" where it serves and torch elsewhere; False is "auto".
    """

    block_scores: int = 1 << 23  # 32 MB of float32
    block_rows: int | None = None
    matmul: str = "float32"
    sparse_grad: bool = False
    retain_graph: bool = False
    backend: str = "auto"
    allow_slow: bool = False
    compiled: bool | None = None  # None: not given

    @property
    def demands_native(self) -> bool:
        """Whether it is an error if the native kernel cannot serve; `compiled=True` never was so strict."""
        return self.backend.startswith("native") and not self.compiled

    def rows(self, num_classes: int) -> int:
        """Rows of a block over `num_classes` classes: `block_rows`, or a multiple of 64 from 64 to 1024."""
        if self.block_rows is not None:
            return self.block_rows
        # Each block reads all class vectors, which fewer than 64 rows would not repay: beyond 2^17 classes a block is
        # therefore larger than `block_scores`.
        return min(1024, max(64, self.block_scores // num_classes // 64 * 64))


Options = HeadOptions | Mapping[str, Any] | None

ALL_OPTIONS = frozenset(f.name for f in fields(HeadOptions))


def read_options(options: Options, honoured: frozenset[str] = ALL_OPTIONS, why: str = "") -> HeadOptions:
    """Options from None, a mapping or `HeadOptions`; unknown keys, bad values and options without effect are refused.

    Args:
        options: as the caller gives them.
        honoured: the options that have an effect on the head; others must keep their default.
        why: why the others have no effect, for the error.
    """
    if options is None:  # defaults need no check, and most calls have no other
        return HeadOptions()
    if isinstance(options, Mapping):
        known = [f.name for f in fields(HeadOptions)]
        for key in options:  # the dataclass would refuse an unknown key too, but without a suggestion
            if key not in known:
                raise unknown_name("option", key, known)
        options = HeadOptions(**options)
    if not isinstance(options, HeadOptions):
        raise ArgumentTypeError(f"`options` must be HeadOptions or a mapping; got {type(options).__name__}.")
    check_choice("options.matmul", options.matmul, ("float32", "bf16"))
    for name in ("block_scores", "block_rows"):  # a bool is an int in Python, but no number
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"`options.{name}` must be an integer of at least 1; got {value!r}.")
    check_choice("options.backend", options.backend, BACKENDS)
    if options.compiled is not None:
        options = _read_compiled(options)
    # An option that is silently ignored would be taken for one that works: `block_rows` of a sampled head, for example.
    for f in fields(HeadOptions):
        value = getattr(options, f.name)
        # Whatever head it is, "torch" is what it gets: nothing is ignored.
        if f.name not in honoured and value != f.default and (f.name, value) != ("backend", "torch"):
            raise ArgumentError(f"`options.{f.name}` has no effect on this head: {why}. Leave it out.")
    return options


def _read_compiled(options: HeadOptions) -> HeadOptions:
    """The options that the deprecated `compiled` stands for."""
    if options.compiled and options.backend == "torch":
        raise ArgumentError('`options.compiled` and `options.backend="torch"` contradict each other: leave one out.')
    warnings.warn(
        "`options.compiled` is deprecated: native kernels are used wherever they serve. Leave it out; "
        '`backend="native"` demands them, and `backend="torch"` turns them off.',
        DeprecationWarning,
        stacklevel=2,
    )
    if not options.compiled:
        return replace(options, compiled=None)
    return replace(options, backend="native") if options.backend == "auto" else options


@dataclass(frozen=True)
class Keywords:
    """The keywords that heads share, read and checked. Signatures list them in the order of the fields.

    shared, sparse_grad, generator: of heads that draw negatives: whether all rows share one draw, whether the gradient
        of the class vectors is row-sparse, and the source of randomness.
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
        """The keywords of these names as keyword-only parameters of a signature, in the order of the fields."""
        wanted, found = set(names), []
        for f in fields(cls):
            if f.name in wanted:
                # Callers may leave options out or give a mapping, which become HeadOptions when they are read.
                default, annotation = (None, "Options") if f.name == "options" else (f.default, f.type)
                kind = inspect.Parameter.KEYWORD_ONLY
                found.append(inspect.Parameter(f.name, kind, default=default, annotation=annotation))
        return found


# The keywords of a head by its kind. A keyword without a meaning for a kind is not in its signature: an exact head
# draws nothing, and label smoothing would make every class a positive of a sampled head, with negatives of its own.
EXACT_KEYWORDS = ("weight", "reduction", "ignore_index", "label_smoothing", "multilabel", "options")
SAMPLED_KEYWORDS = (
    *("shared", "sparse_grad", "generator", "weight", "reduction", "ignore_index", "multilabel", "options"),
)


def read_keywords(
    given: Mapping[str, Any], num_classes: int, honoured: frozenset[str] = ALL_OPTIONS, why: str = ""
) -> Keywords:
    """The keywords of a call over `num_classes` classes, checked; `honoured` and `why` as in `read_options`."""
    keywords = Keywords(**{**given, "options": read_options(given.get("options"), honoured, why)})
    check_options(keywords.reduction, keywords.label_smoothing, keywords.multilabel)
    check_weight(keywords.weight, num_classes)
    # Sampled heads take it as a keyword and as an option; it means the same.
    if keywords.options.sparse_grad and not keywords.sparse_grad:
        keywords = replace(keywords, sparse_grad=True)
    return keywords
