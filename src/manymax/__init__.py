"""manymax: the softmax family, every way to train a model that chooses among very many classes."""

from manymax import samplers
from manymax.advisor import advise
from manymax.als import RGFactorization
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError, UnknownNameError
from manymax.heads import (
    HeadOptions,
    LinearEntmaxLoss,
    LinearHead,
    LinearNCELoss,
    LinearRankmaxLoss,
    LinearRGLoss,
    LinearSampledSoftmaxLoss,
    LinearSoftmaxLoss,
    LinearSparsemaxLoss,
    LinearTaylorSoftmaxLoss,
    group_pairs,
    linear_entmax_loss,
    linear_nce_loss,
    linear_rankmax_loss,
    linear_rg_loss,
    linear_sampled_softmax_loss,
    linear_scores,
    linear_softmax_loss,
    linear_sparsemax_loss,
    linear_taylor_softmax_loss,
    linear_topk,
)
from manymax.losses import FAMILY
from manymax.losses.entmax import EntmaxLoss, entmax, entmax_loss
from manymax.losses.fenchel_young import FenchelYoung
from manymax.losses.hierarchical_softmax import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.losses.nce import NCELoss, nce_loss
from manymax.losses.rankmax import RankmaxLoss, rankmax, rankmax_loss
from manymax.losses.rg import (
    RGLoss,
    class_moments,
    rg,
    rg_log_partition,
    rg_log_partition_from_moments,
    rg_loss,
)
from manymax.losses.sampled_softmax import SampledSoftmaxLoss, sampled_softmax_loss
from manymax.losses.softmax import SoftmaxLoss, softmax, softmax_loss
from manymax.losses.sparsemax import SparsemaxLoss, sparsemax, sparsemax_loss
from manymax.losses.taylor_softmax import TaylorSoftmaxLoss, taylor_softmax, taylor_softmax_loss
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.samplers import SAMPLERS

__version__ = "0.1.0"

__all__ = [
    "FAMILY",
    "SAMPLERS",
    "ArgumentError",
    "ArgumentTypeError",
    "ClassTree",
    "EntmaxLoss",
    "FenchelYoung",
    "HeadOptions",
    "HierarchicalSoftmaxLoss",
    "HuffmanTree",
    "LinearEntmaxLoss",
    "LinearHead",
    "LinearNCELoss",
    "LinearRGLoss",
    "LinearRankmaxLoss",
    "LinearSampledSoftmaxLoss",
    "LinearSoftmaxLoss",
    "LinearSparsemaxLoss",
    "LinearTaylorSoftmaxLoss",
    "ManymaxError",
    "NCELoss",
    "RGFactorization",
    "RGLoss",
    "RankmaxLoss",
    "SampledSoftmaxLoss",
    "SoftmaxLoss",
    "SparsemaxLoss",
    "TaylorSoftmaxLoss",
    "UnknownNameError",
    "advise",
    "class_moments",
    "entmax",
    "entmax_loss",
    "group_pairs",
    "hierarchical_softmax_log_prob",
    "hierarchical_softmax_loss",
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
    "nce_loss",
    "rankmax",
    "rankmax_loss",
    "rg",
    "rg_log_partition",
    "rg_log_partition_from_moments",
    "rg_loss",
    "sampled_softmax_loss",
    "samplers",
    "softmax",
    "softmax_loss",
    "sparsemax",
    "sparsemax_loss",
    "taylor_softmax",
    "taylor_softmax_loss",
]
