"""Sparsemax: its map, loss, kernel, facts and closed forms, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.entmax.kernel import SIMPLE_COST, TRAFFIC
from manymax.members.entmax.statistics import ENTMAX_STATISTICS
from manymax.members.sparsemax.kernel import sparsemax_kernel
from manymax.members.sparsemax.loss import FACTS, FORMULAS, SparsemaxLoss, foundation, sparsemax, sparsemax_loss
from manymax.members.sparsemax.theory import THEORY

MEMBER = Member(
    name="sparsemax",
    title="Sparsemax",
    kind="exact",
    map=sparsemax,
    loss=sparsemax_loss,
    module=SparsemaxLoss,
    foundation=foundation,
    formulas=FORMULAS,
    facts=FACTS,
    sparse=True,
    statistics=ENTMAX_STATISTICS,
    native=True,
    kernel=sparsemax_kernel,
    cost=SIMPLE_COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Martins and Astudillo, ICML 2016",
)
