"""The family: one file per member, one table."""

from manymax.losses import (
    entmax,
    hierarchical_softmax,
    nce,
    rankmax,
    rg,
    sampled_softmax,
    softmax,
    sparsemax,
    taylor_softmax,
)
from manymax.losses.facts import Member
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
