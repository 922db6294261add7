"""Sampled softmax of a block of rows that share their negatives: losses, and the gradient in place of the scores.

    loss      l = log(exp(c_y) + sum_j exp(c_j)) - c_y
    gradient  p_y - 1 on the positive, p_j on the negatives, p = softmax(c)

Autograd on `rows` of loss.py gives the same in about fifteen passes over the scores. Here there are six in torch, and
two in kernel.cpp, where a row stays in the cache between them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from manymax.engine.native_library import call
from manymax.engine.sampled_scores import DrawnBlock, DrawnGradient


def block_gradient(block: DrawnBlock, correction: str) -> DrawnGradient:
    """Losses and gradient of a block; `correction` as in `sampled_softmax_loss`."""
    logit = torch.zeros_like(block.positive)  # c_y, relative to the score of the positive
    log_q: Tensor | None = None
    shift: Tensor | None = None
    if correction == "logq":
        # The shift is the same for all logits of a row, and the loss depends on their differences alone.
        log_q, logit = block.log_q, -block.log_q_positive
    elif correction in ("partition", "corrected_logq"):
        log_q, shift = block.log_q + math.log(block.negative.shape[1]), block.shift
    found = (_in_torch if block.level is None else _native)(block, logit, log_q, shift)
    return replace(found, losses=weighted_by_doubt(found.losses)) if correction == "corrected_logq" else found


def weighted_by_doubt(losses: Tensor) -> Tensor:
    """(1 - P_y) (log Z' - s_y) from l = log(exp(s_y) + Z') - s_y = -log P_y, both (...), where Z' leaves out y.

    With w = 1 - P_y = 1 - exp(-l) it is w (l + log w), because log Z' - s_y = log((1 - P_y) / P_y).
    """
    doubt = -torch.expm1(-losses)
    return doubt * losses + torch.xlogy(doubt, doubt)  # 0 where Z' is: nothing was drawn but the positive


def _native(block: DrawnBlock, logit: Tensor, log_q: Tensor | None, shift: Tensor | None) -> DrawnGradient:
    assert block.level is not None
    negative, positive = block.negative, block.positive.contiguous()
    loss, grad_positive, scale = (torch.empty_like(positive) for _ in range(3))
    # Rows of the buffer are padded. Others are vectors, which C reads as they lie.
    given = [None if value is None else value.contiguous() for value in (logit, log_q, shift, block.coefficient)]
    sizes = negative.shape[0], negative.stride(0), negative.shape[1]
    results = loss, grad_positive, scale
    call(block.level, "sampled_softmax_rows", negative, negative, *sizes, positive, *given, *results, threads=True)
    return DrawnGradient(loss, grad_positive, negative, scale)


def _in_torch(block: DrawnBlock, logit: Tensor, log_q: Tensor | None, shift: Tensor | None) -> DrawnGradient:
    logits = block.negative.sub_((block.positive if shift is None else block.positive + shift).unsqueeze(1))
    if log_q is not None:
        logits.sub_(log_q)
    largest = logits.amax(1)  # nan if any score is
    top = torch.maximum(logit, largest)
    # Relative to the largest no exponential exceeds 1.
    exponentials = logits.sub_(top.unsqueeze(1)).exp_()
    others = exponentials.sum(1)
    whole = others + (logit - top).exp()
    # log1p where the positive is the largest: the others may be too small to show in 1 + their sum.
    loss = torch.where(logit >= largest, others.log1p(), whole.log() + (top - logit))
    if block.coefficient is None:
        return DrawnGradient(loss, loss, exponentials, loss)
    # p_y - 1 = -(1 - p_y), without the difference: where p_y is nearly 1 it would have no digits.
    return DrawnGradient(loss, -block.coefficient * (others / whole), exponentials, block.coefficient / whole)
