"""Rankmax: its map, loss, kernel, facts and closed forms, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.rankmax.kernel import COST, TRAFFIC, rankmax_kernel
from manymax.members.rankmax.loss import FACTS, FORMULAS, SETTINGS, TAKES, RankmaxLoss, rankmax, rankmax_loss
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
    settings=SETTINGS,
    takes=TAKES,
    needs_label=True,
    sparse=True,
    native=True,
    statistics=("nll",),
    kernel=rankmax_kernel,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Kong, Krichene, Mayoraz, Rendle, Zhang, NeurIPS 2020",
)
