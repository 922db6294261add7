"""Alpha-entmax: its map, loss, kernel, facts and closed forms, and its entry in `FAMILY`."""

from manymax.engine.member import Member
from manymax.members.entmax.kernel import TRAFFIC, entmax_cost, entmax_kernel
from manymax.members.entmax.loss import (
    FACTS,
    FORMULAS,
    SETTINGS,
    EntmaxLoss,
    entmax,
    entmax_loss,
    foundation,
)
from manymax.members.entmax.statistics import ENTMAX_STATISTICS
from manymax.members.entmax.theory import THEORY

MEMBER = Member(
    name="entmax",
    title="Alpha-entmax",
    kind="exact",
    map=entmax,
    loss=entmax_loss,
    module=EntmaxLoss,
    foundation=foundation,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    examples=({"alpha": 1.5}, {"alpha": 1.25}, {"alpha": 1.8}),
    sparse=True,
    statistics=ENTMAX_STATISTICS,
    native=True,
    kernel=entmax_kernel,
    cost=entmax_cost,
    traffic=TRAFFIC,
    theory=THEORY,
    citation="Peters, Niculae, Martins, ACL 2019; Correia, Niculae, Martins, EMNLP 2019",
)
