"""The options of how a head computes, which change its time and memory but not its result.

They are read and checked once, where a caller gives them, into a frozen object that travels from there to the kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from manymax.engine.native_library import BACKENDS
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
    sparse_grad: give `linear_weight` and `linear_bias` gradients of the touched rows only (sparse COO tensors), for
        optimisers such as `manymax.optim.SparseAdam`. Refused for members whose gradient touches all rows, and with
        label smoothing, which makes it so: leave it out there. Where supports turn out to be wide, the tensor has all
        rows that are not zero and takes the memory of a dense gradient, and no more: so the type of a gradient does
        not change in the middle of training. `manymax.distributed.RowSparseGradients` averages it over processes.
    retain_graph: keep the gradients for another backward, as `backward(retain_graph=True)` does by itself; else the
        first backward frees them.
    backend: "auto" runs the native kernel of a member where there is one that serves, and plain torch elsewhere.
        On a GPU "auto" is Triton, for members that have kernels for it, once these agree with plain torch there;
        "triton" is an error where they cannot serve. "torch" is plain torch; "native" is an error where the native
        kernel cannot serve; "native-avx512vnni", "native-avx512", "native-avx2" and "native-plain" are its levels, each
        an error where the processor has not got it. The variable MANYMAX_BACKEND of the environment says what "auto"
        stands for. `manymax doctor` shows what is used, and why.
    filter: let a sparse member rule out classes by bounds of their scores from small integers, where native code
        serves, C and N are large and few classes have a part in the gradient; it looks for itself. The others are
        scored in float32. False is for comparisons.
    allow_slow: run what this processor is slow at instead of refusing it.
    compiled: the old name of `backend`. True is "native" where it serves and torch elsewhere; False is "auto".
    """

    block_scores: int = 1 << 23  # 32 MB of float32
    block_rows: int | None = None
    matmul: str = "float32"
    sparse_grad: bool = False
    retain_graph: bool = False
    backend: str = "auto"
    filter: bool = True
    allow_slow: bool = False
    compiled: bool | None = None  # None: not given

    def __post_init__(self) -> None:
        for name in ("sparse_grad", "retain_graph", "filter", "allow_slow"):
            if not isinstance(getattr(self, name), bool):  # "no" would count as true
                raise ArgumentTypeError(f"`options.{name}` must be True or False; got {getattr(self, name)!r}.")
        check_choice("options.matmul", self.matmul, ("float32", "bf16"))
        for name in ("block_scores", "block_rows"):  # a bool is an int in Python, but no number
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"`options.{name}` must be an integer of at least 1; got {value!r}.")
        check_choice("options.backend", self.backend, BACKENDS)
        if self.compiled is not None and not isinstance(self.compiled, bool):
            raise ArgumentTypeError(f"`options.compiled` must be True, False or None; got {self.compiled!r}.")

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
