"""manymax: losses of the softmax family, for models that choose among very many classes."""

from manymax import metrics, optim, samplers
from manymax.advisor import advise
from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.target import Target
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError, UnknownNameError
from manymax.heads import (
    FusedHead,
    HeadOptions,
    LinearBslLoss,
    LinearEntmaxLoss,
    LinearHead,
    LinearHierarchicalSoftmaxLoss,
    LinearLambdaLoss,
    LinearNCELoss,
    LinearPslLoss,
    LinearRankmaxLoss,
    LinearRGLoss,
    LinearSampledSoftmaxLoss,
    LinearSlAtKLoss,
    LinearSoftmaxLoss,
    LinearSparsemaxLoss,
    LinearTalosLoss,
    LinearTaylorSoftmaxLoss,
    LossResult,
    SoftTarget,
    group_pairs,
    linear_bsl_loss,
    linear_entmax_loss,
    linear_hierarchical_softmax_loss,
    linear_lambda_loss,
    linear_loss,
    linear_nce_loss,
    linear_psl_loss,
    linear_rankmax_loss,
    linear_rg_loss,
    linear_sampled_softmax_loss,
    linear_scores,
    linear_sl_at_k_loss,
    linear_softmax_loss,
    linear_sparsemax_loss,
    linear_talos_loss,
    linear_taylor_softmax_loss,
    linear_topk,
)
from manymax.heads.in_batch import InBatchLoss, SiglipLoss, in_batch_loss, siglip_loss
from manymax.members import FAMILY
from manymax.members.bsl.loss import BslLoss, bsl_loss
from manymax.members.entmax.loss import EntmaxLoss, entmax, entmax_loss
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.members.lambda_loss.loss import LambdaLoss, lambda_loss
from manymax.members.nce.loss import NCELoss, nce_loss
from manymax.members.psl.loss import PslLoss, psl, psl_loss
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
from manymax.members.sl_at_k.loss import SlAtKLoss, sl_at_k, sl_at_k_loss
from manymax.members.softmax.loss import SoftmaxLoss, softmax, softmax_loss
from manymax.members.sparsemax.loss import SparsemaxLoss, sparsemax, sparsemax_loss
from manymax.members.talos.loss import TalosLoss, talos, talos_loss
from manymax.members.taylor_softmax.loss import TaylorSoftmaxLoss, taylor_softmax, taylor_softmax_loss
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.samplers import SAMPLERS

__version__ = "0.1.0"

__all__ = [
    "FAMILY",
    "SAMPLERS",
    "ArgumentError",
    "ArgumentTypeError",
    "BslLoss",
    "ClassTree",
    "EntmaxLoss",
    "FenchelYoung",
    "FusedHead",
    "HeadOptions",
    "HierarchicalSoftmaxLoss",
    "HuffmanTree",
    "InBatchLoss",
    "LambdaLoss",
    "LinearBslLoss",
    "LinearEntmaxLoss",
    "LinearHead",
    "LinearHierarchicalSoftmaxLoss",
    "LinearLambdaLoss",
    "LinearNCELoss",
    "LinearPslLoss",
    "LinearRGLoss",
    "LinearRankmaxLoss",
    "LinearSampledSoftmaxLoss",
    "LinearSlAtKLoss",
    "LinearSoftmaxLoss",
    "LinearSparsemaxLoss",
    "LinearTalosLoss",
    "LinearTaylorSoftmaxLoss",
    "LossResult",
    "ManymaxError",
    "NCELoss",
    "PslLoss",
    "RGFactorization",
    "RGLoss",
    "RankmaxLoss",
    "SampledSoftmaxLoss",
    "SiglipLoss",
    "SlAtKLoss",
    "SoftTarget",
    "SoftmaxLoss",
    "SparsemaxLoss",
    "TalosLoss",
    "Target",
    "TaylorSoftmaxLoss",
    "UnknownNameError",
    "advise",
    "bsl_loss",
    "class_moments",
    "entmax",
    "entmax_loss",
    "group_pairs",
    "hierarchical_softmax_log_prob",
    "hierarchical_softmax_loss",
    "in_batch_loss",
    "lambda_loss",
    "linear_bsl_loss",
    "linear_entmax_loss",
    "linear_hierarchical_softmax_loss",
    "linear_lambda_loss",
    "linear_loss",
    "linear_nce_loss",
    "linear_psl_loss",
    "linear_rankmax_loss",
    "linear_rg_loss",
    "linear_sampled_softmax_loss",
    "linear_scores",
    "linear_sl_at_k_loss",
    "linear_softmax_loss",
    "linear_sparsemax_loss",
    "linear_talos_loss",
    "linear_taylor_softmax_loss",
    "linear_topk",
    "metrics",
    "nce_loss",
    "optim",
    "psl",
    "psl_loss",
    "rankmax",
    "rankmax_loss",
    "rg",
    "rg_log_partition",
    "rg_log_partition_from_moments",
    "rg_loss",
    "sampled_softmax_loss",
    "samplers",
    "siglip_loss",
    "sl_at_k",
    "sl_at_k_loss",
    "softmax",
    "softmax_loss",
    "sparsemax",
    "sparsemax_loss",
    "talos",
    "talos_loss",
    "taylor_softmax",
    "taylor_softmax_loss",
]
