"""manymax: losses of the softmax family, for models that choose among very many classes."""

from manymax import metrics, optim, samplers
from manymax.advisor import advise
from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError, UnknownNameError
from manymax.heads import (
    HeadOptions,
    LinearEntmaxLoss,
    LinearHead,
    LinearHierarchicalSoftmaxLoss,
    LinearNCELoss,
    LinearRankmaxLoss,
    LinearRGLoss,
    LinearSampledSoftmaxLoss,
    LinearSoftmaxLoss,
    LinearSparsemaxLoss,
    LinearTaylorSoftmaxLoss,
    LossResult,
    SoftTarget,
    group_pairs,
    linear_entmax_loss,
    linear_hierarchical_softmax_loss,
    linear_loss,
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
from manymax.heads.in_batch import InBatchLoss, SiglipLoss, in_batch_loss, siglip_loss
from manymax.members import FAMILY
from manymax.members.entmax.loss import EntmaxLoss, entmax, entmax_loss
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.members.nce.loss import NCELoss, nce_loss
from manymax.members.rankmax.loss import RankmaxLoss, rankmax, rankmax_loss
from manymax.members.rg.als import RGFactorization
from manymax.members.rg.loss import (
    RGLoss,
    class_moments,
    rg,
    rg_log_partition,
    rg_log_partition_from_moments,
    rg_loss,
)
from manymax.members.sampled_softmax.loss import SampledSoftmaxLoss, sampled_softmax_loss
from manymax.members.softmax.loss import SoftmaxLoss, softmax, softmax_loss
from manymax.members.sparsemax.loss import SparsemaxLoss, sparsemax, sparsemax_loss
from manymax.members.taylor_softmax.loss import TaylorSoftmaxLoss, taylor_softmax, taylor_softmax_loss
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
    "InBatchLoss",
    "LinearEntmaxLoss",
    "LinearHead",
    "LinearHierarchicalSoftmaxLoss",
    "LinearNCELoss",
    "LinearRGLoss",
    "LinearRankmaxLoss",
    "LinearSampledSoftmaxLoss",
    "LinearSoftmaxLoss",
    "LinearSparsemaxLoss",
    "LinearTaylorSoftmaxLoss",
    "LossResult",
    "ManymaxError",
    "NCELoss",
    "RGFactorization",
    "RGLoss",
    "RankmaxLoss",
    "SampledSoftmaxLoss",
    "SiglipLoss",
    "SoftTarget",
    "SoftmaxLoss",
    "SparsemaxLoss",
    "Target",
    "TaylorSoftmaxLoss",
    "UnknownNameError",
    "advise",
    "class_moments",
    "entmax",
    "entmax_loss",
    "group_pairs",
    "hierarchical_softmax_log_prob",
    "hierarchical_softmax_loss",
    "in_batch_loss",
    "linear_entmax_loss",
    "linear_hierarchical_softmax_loss",
    "linear_loss",
    "linear_nce_loss",
    "linear_rankmax_loss",
    "linear_rg_loss",
    "linear_sampled_softmax_loss",
    "linear_scores",
    "linear_softmax_loss",
    "linear_sparsemax_loss",
    "linear_taylor_softmax_loss",
    "linear_topk",
    "metrics",
    "nce_loss",
    "optim",
    "rankmax",
    "rankmax_loss",
    "rg",
    "rg_log_partition",
    "rg_log_partition_from_moments",
    "rg_loss",
    "sampled_softmax_loss",
    "samplers",
    "siglip_loss",
    "softmax",
    "softmax_loss",
    "sparsemax",
    "sparsemax_loss",
    "taylor_softmax",
    "taylor_softmax_loss",
]
