"""The gradients of queries, class vectors and bias from rows that are dense or lists of entries, as the device decides.

With g the gradient of the scores of a block, grad q_n = sum_c g_nc w_c and grad w_c = sum_n g_nc q_n. The host does not
know how many rows are dense. Products over the dense rows are launched for all rows of a block, and a program that
finds none in its part ends at once; so a block of small supports costs what its entries do. Sums over entries, and over
chunks of classes, are added to a gradient in no order: they may differ in their last digits from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manymax.engine.blocks import Listed
from manymax.engine.triton_backend import launch, plain
from manymax.engine.triton_rows import row_of

TILE = 32  # rows, classes or features of a tile of a product
DEPTH = 16  # classes or rows that a step of a product sums over
CHUNK = 2048  # classes that one program multiplies for the gradient of the queries
DOTS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}  # of the operands of products
ENTRIES, FEATURES = 16, 64  # entries that are looked at together, and features of their vectors


@triton.jit
def product_of(a, b, total, DOT: tl.constexpr):
    """total + a @ b, with the operands in the dtype of the product and sums in that of the total."""
    if DOT == "fp64":
        # In full, and without the matrix units: their float64 is not everywhere.
        return total + tl.sum(a[:, :, None] * b[None, :, :], 1)
    if DOT == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    return total + tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit(do_not_specialize=["classes", "features"])
def dense_to_queries(
    table,
    stride,
    classes,
    order,
    number,
    scale,
    vectors,
    features,
    class_scale,
    grad,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """grad q_n += scale_n sum_c g_nc w_c of a tile of dense rows and features, over a chunk of the classes."""
    first, dense = tl.program_id(0) * TILE, tl.load(number)
    if first < dense:
        place = first + tl.arange(0, TILE)
        here = place < dense
        rows = tl.load(order + place, mask=here, other=0)
        feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
        total = tl.zeros([TILE, TILE], grad.dtype.element_ty)
        start = tl.program_id(2) * CHUNK
        for begin in range(start, tl.minimum(start + CHUNK, classes), DEPTH):
            column = begin + tl.arange(0, DEPTH)
            live = column < classes
            g = tl.load(
                row_of(table, rows, stride)[:, None] + column[None, :], mask=here[:, None] & live[None, :], other=0.0
            )
            if SCALED:
                g *= tl.load(class_scale + column, mask=live, other=0.0)[None, :]
            w = tl.load(
                row_of(vectors, column, features)[:, None] + feature[None, :],
                mask=live[:, None] & (feature < features)[None, :],
                other=0.0,
            )
            total = product_of(g, w.to(g.dtype), total, DOT)
        factor = tl.load(scale + rows, mask=here, other=0.0)
        tl.atomic_add(
            row_of(grad, rows, features)[:, None] + feature[None, :],
            total * factor[:, None],
            mask=here[:, None] & (feature < features)[None, :],
            sem="relaxed",
        )


@triton.jit(do_not_specialize=["classes", "features"])
def dense_to_vectors(
    table,
    stride,
    classes,
    order,
    number,
    scale,
    queries,
    features,
    class_scale,
    grad,
    bias,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
    VECTORS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """grad w_c += sum_n g_nc scale_n q_n over all dense rows, of some classes and features; and that of their bias."""
    dense = tl.load(number)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = column < classes
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], table.dtype.element_ty)
    of_bias = tl.zeros([TILE], table.dtype.element_ty)
    for begin in range(0, dense, DEPTH):
        place = begin + tl.arange(0, DEPTH)
        here = place < dense
        rows = tl.load(order + place, mask=here, other=0)
        factor = tl.load(scale + rows, mask=here, other=0.0)
        g = tl.load(
            row_of(table, rows, stride)[None, :] + column[:, None], mask=live[:, None] & here[None, :], other=0.0
        )
        if BIAS:
            of_bias += tl.sum(g * factor[None, :], 1)
        if VECTORS:
            q = tl.load(
                row_of(queries, rows, features)[:, None] + feature[None, :],
                mask=here[:, None] & (feature < features)[None, :],
                other=0.0,
            )
            total = product_of(g, q * factor[:, None], total, DOT)
    if dense > 0:
        one = tl.load(class_scale + column, mask=live, other=0.0) if SCALED else tl.full([TILE], 1.0, total.dtype)
        if VECTORS:
            at = row_of(grad, column, features)[:, None] + feature[None, :]
            inside = live[:, None] & (feature < features)[None, :]
            tl.store(at, tl.load(at, mask=inside, other=0.0) + total * one[:, None], mask=inside)
        if BIAS:  # noqa: SIM102 (known when compiled)
            if tl.program_id(1) == 0:
                before = tl.load(bias + column, mask=live, other=0.0)
                tl.store(bias + column, before + of_bias * one, mask=live)


@triton.jit(do_not_specialize=["room", "features"])
def entries_of_rows(
    values,
    classes,
    room,
    count,
    vectors,
    queries,
    features,
    class_scale,
    of_queries,
    of_vectors,
    bias,
    SCALED: tl.constexpr,
    QUERIES: tl.constexpr,
    VECTORS: tl.constexpr,
    BIAS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """What the entries of one row add to the gradients of its query, of their class vectors and of their biases."""
    r = tl.program_id(0)
    size = tl.load(count + r)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < features
    total = tl.zeros([FEATURES], values.dtype.element_ty)
    query = tl.load(row_of(queries, r, features) + feature, mask=inside, other=0.0)
    for begin in range(0, size, ENTRIES):
        lanes = begin + tl.arange(0, ENTRIES)
        here = lanes < size
        g = tl.load(row_of(values, r, room) + lanes, mask=here, other=0.0)
        c = tl.load(row_of(classes, r, room) + lanes, mask=here, other=0)
        if SCALED:
            g *= tl.load(class_scale + c, mask=here, other=0.0)
        mask = here[:, None] & inside[None, :]
        if QUERIES:
            w = tl.load(row_of(vectors, c, features)[:, None] + feature[None, :], mask=mask, other=0.0)
            total += tl.sum(g[:, None] * w.to(g.dtype), 0)
        if VECTORS:
            at = row_of(of_vectors, c, features)[:, None] + feature[None, :]
            tl.atomic_add(at, g[:, None] * query[None, :], mask=mask, sem="relaxed")
        if BIAS:  # noqa: SIM102
            if tl.program_id(1) == 0:
                tl.atomic_add(bias + c, g, mask=here, sem="relaxed")
    if QUERIES and size > 0:
        at = row_of(of_queries, r, features) + feature
        tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)


def add_listed(
    part: Listed,
    queries: Tensor,
    vectors: Tensor,
    class_scale: Tensor | None,
    of_queries: Tensor | None,
    of_vectors: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Add the gradients that follow from a part of that of the scores, without a look at what it holds.

    Args:
        part: of a block of n rows.
        queries: (n, d) of the block.
        vectors: (C, d), in half precision too.
        class_scale: (C,) what products with a class vector are multiplied with to be scores; None for 1.
        of_queries: (n, d), of_vectors: (C, d), bias: (C,): contiguous, to be added to; None where nobody wants it.
        dtype: of the operands of products over dense rows.
    """
    n, d, num_classes = *queries.shape, len(vectors)
    queries, vectors, scales = queries.contiguous(), vectors.contiguous(), plain(class_scale, queries)
    dense = part.count < 0
    order, number = dense.int().argsort(descending=True, stable=True).int(), dense.sum(dtype=torch.int32)
    table = part.table, part.table.shape[1], num_classes, order, number, part.scale
    dot = DOTS[dtype]
    tile = TILE // 2 if dtype == torch.float64 else TILE
    tiles, constants = (
        triton.cdiv(d, tile),
        {"DOT": dot, "SCALED": class_scale is not None, "TILE": tile, "DEPTH": DEPTH},
    )
    if of_queries is not None:
        places = triton.cdiv(n, tile), tiles, triton.cdiv(num_classes, CHUNK)
        launch(dense_to_queries, places, *table, vectors, d, scales, of_queries, CHUNK=CHUNK, **constants)
    wants = {"VECTORS": of_vectors is not None, "BIAS": bias is not None}
    sums = plain(of_vectors, queries), plain(bias, queries)
    if any(wants.values()):
        places = triton.cdiv(num_classes, tile), tiles if wants["VECTORS"] else 1, 1
        launch(dense_to_vectors, places, *table, queries, d, scales, *sums, **wants, **constants)
    launch(
        entries_of_rows,
        (n, triton.cdiv(d, FEATURES)),
        *(part.values, part.classes, part.values.shape[1], part.count, vectors, queries, d, scales),
        *(plain(of_queries, queries), *sums),
        SCALED=class_scale is not None,
        QUERIES=of_queries is not None,
        **wants,
        ENTRIES=ENTRIES,
        FEATURES=FEATURES,
    )
