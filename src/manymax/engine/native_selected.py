"""The native kernels of selected scores (selected.cpp): when they serve, and how they are called.

They read class vectors where they are stored, in whatever precision, and sum the gradient of each distinct class once.
engine/selected_scores.py has the same in plain torch, which is also what they are tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.native_library import SUFFIXES, call, resolve
from manymax.engine.options import HeadOptions
from manymax.errors import ArgumentError
from manymax.ops.checks import visible

# The precisions of a table of class vectors and their numbers in `with_table` of selected.cpp.
TABLE_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
LIMIT = 1 << 31  # classes, queries and numbers of entries are int32 inside


def serving_level(options: HeadOptions, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor) -> str | None:
    """The level of the native library that computes these scores; None for plain torch.

    Args:
        options: of the head; an error if they demand native code and it cannot serve.
        input: (R, d) queries.
        linear_weight: (C, d) class vectors.
        rows: (M,) the query of each row of ids.
        ids: (M, k) the selected classes.
    """
    if options.backend == "torch":
        return None
    if why := _hindrance(input, linear_weight, rows, ids):
        if options.demands_native:
            raise ArgumentError(f"`options.backend` is {options.backend!r}, but {why}. Leave it out, or say 'torch'.")
        return None
    return resolve(options.backend)


def _hindrance(input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor) -> str | None:
    """What keeps the native kernels from computing these scores, as a part of a sentence; None if nothing does."""
    # Pointers are handed to C code: tensors must have values, in this process's memory.
    if not visible(input, linear_weight, rows, ids):
        return "native code needs tensors with values on a CPU: no other device, no torch.compile, no torch.func"
    if input.dtype not in SUFFIXES or linear_weight.dtype not in TABLE_KINDS:
        return f"native code knows no queries in {input.dtype} with class vectors in {linear_weight.dtype}"
    # A copy of the table is what these kernels are there to avoid. Rows may be apart, as in a slice of columns.
    if linear_weight.shape[1] > 1 and linear_weight.stride(1) != 1:
        return "native code needs `linear_weight` with the numbers of a vector next to each other (`.contiguous()`)"
    if max(*linear_weight.shape, len(input), ids.numel()) >= LIMIT:
        return f"native code counts classes, queries and scores up to {LIMIT - 1}"
    # Gradients of a query are summed over rows that follow each other.
    if bool((rows[1:] < rows[:-1]).any()):
        return "native code needs the rows of each query next to each other, queries in order"
    return None


def check_range(ids: Tensor, size: int, name: str = "ids") -> None:
    """Raise unless all ids are from 0 to size - 1. C code would read, or write, memory that is not its own."""
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ArgumentError(f"`{name}` must be in [0, {size}); got {low if low < 0 else high}.")


def native_scores(level: str, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The scores <x_{rows_m}, w_{ids_mj}>, (M, k) in the dtype of the queries."""
    # Before any pointer is used.
    check_range(ids, len(linear_weight))
    check_range(rows, len(input), "rows")
    input, rows, ids = input.contiguous(), rows.contiguous(), ids.contiguous()
    out = input.new_empty(ids.shape)
    # No name is given to a temporary copy here: the arguments keep theirs alive until the call returns.
    table = linear_weight, linear_weight.stride(0), linear_weight.shape[1]
    kind = (TABLE_KINDS[linear_weight.dtype],)
    call(level, "selected_scores", input, input, *table, rows, ids, *ids.shape, out, numbers=kind, threads=True)
    return out


def native_gradients(
    level: str, input: Tensor, linear_weight: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """The gradients of `native_scores`.

    Args:
        level: of the native library.
        input, linear_weight, rows, ids: those of the scores, for which `native_scores` has checked the ids.
        grad: (M, k) gradient of the scores.
        wants: whether the gradients of queries and of class vectors are wanted.

    Returns:
        That of the queries (R, d), and that of the class vectors as the distinct classes (U,), sorted, and their rows
        (U, d) in the dtype of the queries; None where one is not wanted.
    """
    input, rows, ids, grad = (value.contiguous() for value in (input, rows, ids, grad))
    d, entries = input.shape[1], ids.numel()
    grad_input = torch.zeros_like(input) if wants[0] else None
    sorted_entries = spare = touched = starts = distinct = None
    if wants[1]:
        # An entry of the sort is a class and a query, int32 each, and a value: 3 floats, or 2 doubles.
        width = 3 if input.dtype == torch.float32 else 2
        sorted_entries, spare = input.new_empty(entries, width), input.new_empty(entries, width)
        touched, starts = ids.new_empty(entries), ids.new_empty(entries + 1)
        distinct = ids.new_zeros(())
    table = linear_weight, len(linear_weight), linear_weight.stride(0), d
    outputs = grad_input, sorted_entries, spare, touched, starts, distinct
    kind = (TABLE_KINDS[linear_weight.dtype],)
    call(
        level,
        "selected_gradients",
        input,
        *(*table, rows, ids, grad, *ids.shape),
        *outputs,
        numbers=kind,
        threads=True,
    )
    if touched is None or distinct is None:
        return grad_input, None
    # How many rows there are is known only now, after the sort.
    size = int(distinct)
    product = input.new_empty(size, d)
    call(level, "selected_class_sums", input, input, d, sorted_entries, starts, size, product, threads=True)
    # A copy of the ids that were found: the buffer has room for all entries, and a gradient may be kept for long.
    return grad_input, (touched[:size].clone(), product)
