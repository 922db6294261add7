"""Rankmax: everything about this member."""

from manymax.engine.member import Member, Takes
from manymax.members.rankmax.kernel import COST, TRAFFIC
from manymax.members.rankmax.loss import FACTS, FORMULAS, RankmaxLoss, rankmax, rankmax_loss
from manymax.members.rankmax.theory import THEORY

MEMBER = Member(
    name="rankmax",
    title="Rankmax",
    kind="exact",
    map=rankmax,
    loss=rankmax_loss,
    module=RankmaxLoss,
    formulas=FORMULAS,
    facts=FACTS,
    takes=Takes(smoothing=False, float_rows=False),
    needs_label=True,
    sparse=True,
    native=True,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    reference="Kong, Krichene, Mayoraz, Rendle, Zhang, NeurIPS 2020",
)
