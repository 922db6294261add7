"""SigLIP's loss: a logistic loss for each pair of a query and a document, that of `manymax.siglip_loss`.

It is in no table: its scores need a bias far below 0, which two towers learn beside their temperature.
"""

from manymax.engine.member import Member, Takes
from manymax.members.siglip.kernel import siglip_kernel
from manymax.members.siglip.loss import FACTS, FORMULAS, pairwise_logistic_loss

MEMBER = Member(
    name="siglip",
    title="SigLIP",
    kind="exact",
    loss=pairwise_logistic_loss,
    module=None,
    formulas=FORMULAS,
    facts=FACTS,
    takes=Takes(smoothing=False, float_rows=False, why="Every pair is a positive or a negative."),
    kernel=siglip_kernel,
    citation="Zhai et al., ICCV 2023, algorithm 1",
)
