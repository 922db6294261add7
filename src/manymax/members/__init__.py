"""The family: one file per member, one table."""

from manymax.engine.member import Member
from manymax.members.entmax import loss as entmax
from manymax.members.hierarchical_softmax import loss as hierarchical_softmax
from manymax.members.nce import loss as nce
from manymax.members.rankmax import loss as rankmax
from manymax.members.rg import loss as rg
from manymax.members.sampled_softmax import loss as sampled_softmax
from manymax.members.softmax import loss as softmax
from manymax.members.sparsemax import loss as sparsemax
from manymax.members.taylor_softmax import loss as taylor_softmax
from manymax.table import Table

FAMILY: Table[Member] = Table(
    "loss",
    softmax.MEMBER,
    sparsemax.MEMBER,
    entmax.MEMBER,
    rankmax.MEMBER,
    taylor_softmax.MEMBER,
    sampled_softmax.MEMBER,
    nce.MEMBER,
    hierarchical_softmax.MEMBER,
    rg.MEMBER,
)

__all__ = ["FAMILY"]
