"""manymax: the softmax family, every way to train a model that chooses among very many classes."""

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError, UnknownNameError
from manymax.losses import FAMILY
from manymax.losses.entmax import EntmaxLoss, entmax, entmax_loss
from manymax.losses.fenchel_young import FenchelYoung
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

__version__ = "0.1.0"

__all__ = [
    "FAMILY",
    "ArgumentError",
    "ArgumentTypeError",
    "EntmaxLoss",
    "FenchelYoung",
    "ManymaxError",
    "NCELoss",
    "RGLoss",
    "RankmaxLoss",
    "SampledSoftmaxLoss",
    "SoftmaxLoss",
    "SparsemaxLoss",
    "TaylorSoftmaxLoss",
    "UnknownNameError",
    "class_moments",
    "entmax",
    "entmax_loss",
    "nce_loss",
    "rankmax",
    "rankmax_loss",
    "rg",
    "rg_log_partition",
    "rg_log_partition_from_moments",
    "rg_loss",
    "sampled_softmax_loss",
    "softmax",
    "softmax_loss",
    "sparsemax",
    "sparsemax_loss",
    "taylor_softmax",
    "taylor_softmax_loss",
]
