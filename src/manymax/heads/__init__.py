"""Heads: queries and class vectors to a loss, in blocks, never the (rows, classes) table."""

from manymax.engine.options import HeadOptions
from manymax.engine.row_target import group_pairs
from manymax.heads.linear import (
    linear_entmax_loss,
    linear_rankmax_loss,
    linear_softmax_loss,
    linear_sparsemax_loss,
    linear_taylor_softmax_loss,
)
from manymax.heads.modules import (
    LinearEntmaxLoss,
    LinearHead,
    LinearNCELoss,
    LinearRankmaxLoss,
    LinearRGLoss,
    LinearSampledSoftmaxLoss,
    LinearSoftmaxLoss,
    LinearSparsemaxLoss,
    LinearTaylorSoftmaxLoss,
)
from manymax.heads.ranking import linear_scores, linear_topk
from manymax.heads.sampled import linear_nce_loss, linear_sampled_softmax_loss
from manymax.members.rg.kernel import linear_rg_loss

__all__ = [
    "HeadOptions",
    "LinearEntmaxLoss",
    "LinearHead",
    "LinearNCELoss",
    "LinearRGLoss",
    "LinearRankmaxLoss",
    "LinearSampledSoftmaxLoss",
    "LinearSoftmaxLoss",
    "LinearSparsemaxLoss",
    "LinearTaylorSoftmaxLoss",
    "group_pairs",
    "linear_entmax_loss",
    "linear_nce_loss",
    "linear_rankmax_loss",
    "linear_rg_loss",
    "linear_sampled_softmax_loss",
    "linear_scores",
    "linear_softmax_loss",
    "linear_sparsemax_loss",
    "linear_taylor_softmax_loss",
    "linear_topk",
]
