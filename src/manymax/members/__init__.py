"""The family: one folder per member, one table; and a table of reference losses beside it, with the same fields."""

from manymax.engine.member import Member
from manymax.members import (
    bce,
    bpr,
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

# Losses that the family is compared with: rows with the same fields, so that heads and studies take them like members.
REFERENCE_LOSSES: Table[Member] = Table("reference", bpr.MEMBER, bce.MEMBER)

# What approximations are measured against, and what every comparison is made with.
BASELINE: Member = softmax.MEMBER

__all__ = ["BASELINE", "FAMILY", "REFERENCE_LOSSES"]
