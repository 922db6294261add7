"""Rankmax of rows of scores in Triton: for each positive p the sum over the classes above its cut s_p - 1.

One program works on one row. A first read lists the classes above the lowest cut, which is that of the lowest positive.
If they find room in the list, all sums are taken over it and the gradient is kept as entries; if not, over the row, in
tiles of classes x positives, and the gradient takes the place of the scores:

    sum_p a_p 1[s > s_p - 1]   at every class,   - a_p m_p   at positive p,   a_p = coefficient weight_p / S_p
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manymax.engine import triton_backend
from manymax.engine.blocks import Block, BlockResult, Listed
from manymax.engine.row_target import RowTarget
from manymax.engine.triton_backend import launch, plain
from manymax.engine.triton_rows import (
    append,
    load_scores,
    row_of,
    scale_entries,
    slope_of_cap,
    subtract_from_entries,
    subtract_from_row,
)
from manymax.errors import ArgumentError
from manymax.ops.checks import check_finite, visible

VIOLATIONS_HELD = 2048  # violations that a program holds at a time, of some classes and some positives


@triton.jit
def gather_near_lowest(row, classes, values, places, capacity, lowest, BLOCK: tl.constexpr):
    """The maximum of a row, nan where a score is, and a list of the scores above lowest - 1; one read."""
    tops = tl.full([BLOCK], float("-inf"), row.dtype.element_ty)
    nan = tl.zeros([BLOCK], tl.int32)
    size = 0
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        s = load_scores(row, columns, classes)
        tops = tl.maximum(tops, s)
        nan |= (s != s).to(tl.int32)
        # The difference first: lowest - 1 would be rounded to the lowest where scores are large.
        size = append(values, places, size, s, columns, s - lowest > -1.0, capacity)
    tl.debug_barrier()
    return tl.where(tl.max(nan, 0) > 0, float("nan"), tl.max(tops, 0)), size


@triton.jit
def violations(s, labels):
    """max(0, s - s_p + 1) of some scores and positives; 0 for a missing positive, whose label is +inf."""
    return tl.maximum(s[:, None] - labels[None, :] + 1, 0.0)


@triton.jit
def sums_above_cuts(numbers, size, labels, SOME: tl.constexpr):
    """S, the sum of violations, and their number m, of some positives (their labels in a tensor)."""
    total = tl.zeros([SOME, labels.shape[0]], numbers.dtype.element_ty)
    number = tl.zeros([SOME, labels.shape[0]], numbers.dtype.element_ty)
    for start in range(0, size, SOME):
        u = violations(load_scores(numbers, start + tl.arange(0, SOME), size), labels)
        total += u
        number += (u > 0).to(u.dtype)
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
def write_shares(
    numbers,
    size,
    row_labels,
    shares,
    positives,
    cap,
    CAP: tl.constexpr,
    SOME: tl.constexpr,
    LANES: tl.constexpr,
):
    """sum_p share_p 1[s > s_p - 1] in place of scores, times the slope of a soft cap."""
    for start in range(0, size, SOME):
        at = start + tl.arange(0, SOME)
        s = load_scores(numbers, at, size)
        gradient = tl.zeros([SOME], numbers.dtype.element_ty)
        for first in range(0, positives, LANES):
            lanes = first + tl.arange(0, LANES)
            labels = tl.load(row_labels + lanes, mask=lanes < positives, other=float("inf"))
            share = tl.load(shares + lanes, mask=lanes < positives, other=0.0)
            gradient += tl.sum(tl.where(violations(s, labels) > 0, share[None, :], 0.0), 1)
        if CAP:
            gradient *= slope_of_cap(s, cap)
        tl.store(numbers + at, gradient, mask=at < size)


@triton.jit(do_not_specialize=["classes", "positives", "capacity"])
def rankmax_rows(
    scores,
    stride,
    classes,
    ids,
    labels,
    weights,
    positives,
    coefficient,
    shares,
    amounts,
    values,
    places,
    capacity,
    count,
    losses,
    maxima,
    cap: tl.float64,
    CAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
    LANES: tl.constexpr,
):
    """Loss and gradient of one row, which has all of its classes here; its positives are sorted, the lowest first."""
    r = tl.program_id(0)
    row, row_labels = row_of(scores, r, stride), row_of(labels, r, positives)
    own_values, own_places = row_of(values, r, capacity), row_of(places, r, capacity)
    own_shares, own_amounts = row_of(shares, r, positives), row_of(amounts, r, positives)
    cap = tl.full([], cap, row.dtype.element_ty)
    lowest = tl.load(row_labels)
    maximum, size = gather_near_lowest(row, classes, own_values, own_places, capacity, lowest, BLOCK)
    few = size <= capacity
    factor = tl.load(coefficient + r) if GRADIENT else 0.0
    loss = tl.zeros([LANES], row.dtype.element_ty)
    for first in range(0, positives, LANES):
        lanes = first + tl.arange(0, LANES)
        label = tl.load(row_labels + lanes, mask=lanes < positives, other=float("inf"))
        weight = tl.load(row_of(weights, r, positives) + lanes, mask=lanes < positives, other=0.0)
        if few:
            total, number = sums_above_cuts(own_values, size, label, SOME)
        else:
            total, number = sums_above_cuts(row, classes, label, SOME)
        # The positive itself adds exactly 1; a missing one has the sum 0, and with 1 in its place the loss 0.
        total = tl.maximum(total, 1.0)
        loss += weight * tl.log(total)
        if GRADIENT:
            share = factor * weight / total
            # In a dense row the part of the positive goes through the soft cap here, in a list with all entries.
            live = tl.where(label < float("inf"), label, 0.0)
            slope = tl.where(few, 1.0, slope_of_cap(live, cap)) if CAP else 1.0
            tl.store(own_shares + lanes, share, mask=lanes < positives)
            tl.store(own_amounts + lanes, share * number * slope, mask=lanes < positives)
    tl.store(losses + r, tl.sum(loss, 0))
    tl.store(maxima + r, maximum)
    if GRADIENT:
        # What was stored for the positives must be visible to all threads.
        tl.debug_barrier()
        own_ids = row_of(ids, r, positives)
        if few:
            write_shares(own_values, size, row_labels, own_shares, positives, cap, False, SOME, LANES)
            size = subtract_from_entries(own_values, own_places, size, own_ids, own_amounts, positives, 1.0, BLOCK)
            scale_entries(row, own_values, own_places, size, 1.0, cap, CAP, BLOCK)
            tl.store(count + r, size)
        else:
            write_shares(row, classes, row_labels, own_shares, positives, cap, CAP, SOME, LANES)
            subtract_from_row(row, own_ids, own_amounts, positives, 1.0, LANES)
            tl.store(count + r, -1)


def block_rankmax_triton(block: Block, target: RowTarget, labels: Tensor) -> BlockResult:
    """Losses and gradient of a block of scores (n, C'), which holds all classes of its rows.

    Args:
        block: of n rows.
        target: with its positives sorted by score, the lowest first.
        labels: (n, P) those scores, +inf where a positive is missing.
    """
    scores, softcap = block.scores, block.keywords.softcap
    assert target.ids is not None
    n, positives = target.ids.shape
    labels, weights = labels.contiguous(), plain(target.weights, scores)
    masked = visible(labels) and bool((labels == -torch.inf).any())
    capacity = block.num_classes // triton_backend.SPARSE
    part = Listed.empty(scores, capacity)
    part.scale.fill_(1.0)  # coefficients differ between the positives of a row: they are in the table
    losses, maxima = (scores.new_empty(n) for _ in range(2))
    lanes = next(size for size in (1, 4, triton_backend.POSITIVES) if size >= min(positives, triton_backend.POSITIVES))
    launch(
        rankmax_rows,
        (n,),
        *(scores, scores.shape[1], block.num_classes, target.ids.contiguous(), labels, weights, positives),
        *(plain(target.coefficient, scores), torch.empty_like(labels), torch.empty_like(labels)),
        *(part.values, part.classes, capacity, part.count, losses, maxima, float(softcap or 1.0)),
        CAP=softcap is not None,
        GRADIENT=target.coefficient is not None,
        BLOCK=triton_backend.BLOCK,
        SOME=min(triton_backend.BLOCK, VIOLATIONS_HELD // lanes),
        LANES=lanes,
    )
    # A row of nan or without a live class is reported as such, before a masked positive that may follow from it.
    check_finite(maxima)
    if masked:
        raise ArgumentError("`target` names a class whose score is -inf: a masked class cannot be a positive.")
    return BlockResult(losses, [] if target.coefficient is None else [part])
