"""`FAMILY`, the table of all members, with one folder per member; and `REFERENCE_LOSSES`, losses to compare with."""

from manymax.engine.member import Member
from manymax.members import (
    bce,
    bpr,
    bsl,
    entmax,
    gbce,
    hierarchical_softmax,
    lambda_loss,
    nce,
    psl,
    rankmax,
    rg,
    sampled_softmax,
    sl_at_k,
    softmax,
    sparsemax,
    talos,
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
    sl_at_k.MEMBER,
    psl.MEMBER,
    bsl.MEMBER,
    talos.MEMBER,
    lambda_loss.MEMBER,
    sampled_softmax.MEMBER,
    nce.MEMBER,
    hierarchical_softmax.MEMBER,
    rg.MEMBER,
)

# Losses outside of the family that it is compared with. Their entries have the same fields as those of members, so that
# heads and studies use them in the same way.
REFERENCE_LOSSES: Table[Member] = Table("reference loss", bpr.MEMBER, bce.MEMBER, gbce.MEMBER)

# The loss that approximations are measured against, and that reports compare every other loss with.
BASELINE: Member = softmax.MEMBER

__all__ = ["BASELINE", "FAMILY", "REFERENCE_LOSSES"]
