"""The passes of PSL over rows of scores in Triton: sums for each positive, and the gradient in place of the scores.

As h = g(s - s_y)^(1 / tau) rises with the score, the largest term of each positive belongs to the largest score of the
row: one read finds it, the next one sums h and h r relative to it for some positives at a time, a third writes

    sum_p share_p h r,   with r = g' / g.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manymax.engine import triton_backend
from manymax.engine.triton_backend import launch
from manymax.engine.triton_rows import load_scores, log1p, row_of

TERMS_HELD = 1024  # terms that a program holds at a time, of some classes and some positives
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def terms(d, tau, TANH: tl.constexpr):
    """log h and the slope r of log g at score differences; -inf and 0 where g is 0, as at masked classes."""
    live = d > float("-inf")
    x = tl.where(live, d, 0.0)
    if TANH:
        # 1 + tanh(d) = 2 sigma(2 d): far below 0 the sum has no digits, and its logarithm has all of them.
        small = tl.exp(-2 * tl.abs(x))
        log_g = LOG_2 + 2 * tl.minimum(x, 0.0) - log1p(small)
        slope = 2 * tl.where(x > 0, small, 1.0) / (1 + small)
    else:
        live = live & (1 + x > 0)
        g = tl.where(live, 1 + x, 1.0)
        log_g = tl.log(g)
        slope = 1 / g
    return tl.where(live, log_g / tau, float("-inf")), tl.where(live, slope, 0.0)


@triton.jit(do_not_specialize=["classes", "positives"])
def sums_of_rows(
    scores,
    stride,
    classes,
    labels,
    positives,
    tops,
    references,
    totals,
    slopes,
    tau: tl.float64,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
    LANES: tl.constexpr,
):
    """The maximum of a row, nan where a score is; for each positive the largest log h, and sums relative to it."""
    r = tl.program_id(0)
    row, own = row_of(scores, r, stride), row_of(labels, r, positives)
    tau = tl.full([], tau, row.dtype.element_ty)
    highest = tl.full([BLOCK], float("-inf"), row.dtype.element_ty)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, classes, BLOCK):
        s = load_scores(row, start + tl.arange(0, BLOCK), classes)
        highest = tl.maximum(highest, s)
        nan |= (s != s).to(tl.int32)
    top = tl.max(highest, 0)
    tl.store(tops + r, tl.where(tl.max(nan, 0) > 0, float("nan"), top))
    for first in range(0, positives, LANES):
        lanes = first + tl.arange(0, LANES)
        label = tl.load(own + lanes, mask=lanes < positives, other=float("inf"))
        reference, _ = terms(top - label, tau, TANH)
        offset = tl.where(reference > float("-inf"), reference, 0.0)
        total = tl.zeros([SOME, LANES], row.dtype.element_ty)
        slope = tl.zeros([SOME, LANES], row.dtype.element_ty)
        for start in range(0, classes, SOME):
            s = load_scores(row, start + tl.arange(0, SOME), classes)
            log_h, rise = terms(s[:, None] - label[None, :], tau, TANH)
            h = tl.exp(log_h - offset[None, :])
            total += h
            slope += h * rise
        at = tl.cast(r, tl.int64) * positives + lanes
        tl.store(references + at, reference.to(tl.float64), mask=lanes < positives)
        tl.store(totals + at, tl.sum(total, 0).to(tl.float64), mask=lanes < positives)
        tl.store(slopes + at, tl.sum(slope, 0).to(tl.float64), mask=lanes < positives)


@triton.jit(do_not_specialize=["classes", "positives"])
def gradient_of_rows(
    scores,
    stride,
    classes,
    labels,
    positives,
    references,
    shares,
    tau: tl.float64,
    TANH: tl.constexpr,
    SOME: tl.constexpr,
    LANES: tl.constexpr,
):
    """sum_p share_p h r in place of a row, with h relative to the references."""
    r = tl.program_id(0)
    row = row_of(scores, r, stride)
    tau = tl.full([], tau, row.dtype.element_ty)
    for start in range(0, classes, SOME):
        columns = start + tl.arange(0, SOME)
        s = load_scores(row, columns, classes)
        gradient = tl.zeros([SOME], row.dtype.element_ty)
        for first in range(0, positives, LANES):
            lanes = first + tl.arange(0, LANES)
            here = lanes < positives
            label = tl.load(row_of(labels, r, positives) + lanes, mask=here, other=float("inf"))
            reference = tl.load(row_of(references, r, positives) + lanes, mask=here, other=0.0)
            share = tl.load(row_of(shares, r, positives) + lanes, mask=here, other=0.0)
            log_h, rise = terms(s[:, None] - label[None, :], tau, TANH)
            h = tl.exp(log_h - reference.to(s.dtype)[None, :])
            gradient += tl.sum(h * rise * share[None, :], 1)
        tl.store(row + columns, gradient, mask=columns < classes)


def sums_triton(
    scores: Tensor, num_classes: int, labels: Tensor, tau: float, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The largest score of each row (n, 1); the largest log h of each positive, and sums of h and h r, (n, P) float64.

    Args:
        scores: (n, C'), without the positives.
        num_classes: columns that are classes.
        labels: (n, P) the scores of the positives, +inf where there is none.
    """
    n, positives = labels.shape
    top = scores.new_empty(n, 1)
    found = scores.new_empty(3, n, positives, dtype=torch.float64)
    some, lanes = _tile(positives)
    launch(
        sums_of_rows,
        (n,),
        *(scores, scores.shape[1], num_classes, labels.contiguous(), positives, top, *found, float(tau)),
        TANH=tanh,
        BLOCK=triton_backend.BLOCK,
        SOME=some,
        LANES=lanes,
    )
    return top, found[0], found[1], found[2]


def write_gradient_triton(
    scores: Tensor, num_classes: int, labels: Tensor, references: Tensor, shares: Tensor, tau: float, tanh: bool
) -> None:
    """sum_p shares_p h r in place of the scores (n, C'), with h relative to the references, (n, P) each."""
    some, lanes = _tile(labels.shape[1])
    references = torch.where(references > -torch.inf, references, 0)
    launch(
        gradient_of_rows,
        (len(labels),),
        *(scores, scores.shape[1], num_classes, labels.contiguous(), labels.shape[1], references),
        *(shares.to(scores.dtype).contiguous(), float(tau)),
        TANH=tanh,
        SOME=some,
        LANES=lanes,
    )


def _tile(positives: int) -> tuple[int, int]:
    """How many classes and positives a program looks at together."""
    lanes = 1 if positives == 1 else triton_backend.POSITIVES
    return min(triton_backend.BLOCK, TERMS_HELD // lanes), lanes
