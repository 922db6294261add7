"""Taylor-softmax: its map, loss, kernel, facts and closed forms, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.taylor_softmax.kernel import COST, TAYLOR_STATISTICS, TRAFFIC, taylor_kernel
from manymax.members.taylor_softmax.loss import (
    FACTS,
    FORMULAS,
    SETTINGS,
    TaylorSoftmaxLoss,
    ranking_key,
    taylor_softmax,
    taylor_softmax_loss,
)
from manymax.members.taylor_softmax.theory import THEORY

MEMBER = Member(
    name="taylor_softmax",
    title="Taylor-softmax",
    kind="exact",
    map=taylor_softmax,
    loss=taylor_softmax_loss,
    module=TaylorSoftmaxLoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    examples=({"order": 2}, {"order": 4}),
    ranking_key=ranking_key,
    statistics=TAYLOR_STATISTICS,
    kernel=taylor_kernel,
    cost=COST,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="de Brebisson and Vincent, ICLR 2016; Banerjee et al. 2020",
)
