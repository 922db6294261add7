"""manymax: the softmax family, every way to train a model that chooses among very many classes."""

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError, UnknownNameError
from manymax.losses import FAMILY
from manymax.losses.entmax import EntmaxLoss, entmax, entmax_loss
from manymax.losses.fenchel_young import FenchelYoung
from manymax.losses.rankmax import RankmaxLoss, rankmax, rankmax_loss
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
    "RankmaxLoss",
    "SoftmaxLoss",
    "SparsemaxLoss",
    "TaylorSoftmaxLoss",
    "UnknownNameError",
    "entmax",
    "entmax_loss",
    "rankmax",
    "rankmax_loss",
    "softmax",
    "softmax_loss",
    "sparsemax",
    "sparsemax_loss",
    "taylor_softmax",
    "taylor_softmax_loss",
]
