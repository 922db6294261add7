"""gBCE, a reference loss: no member of the family, but a loss to compare members with."""

from manymax.engine.cost import FLOAT
from manymax.engine.member import ONE_DRAW_EACH, Member
from manymax.engine.sampled_cost import sampled_cost, sampled_traffic
from manymax.members.gbce.loss import FACTS, FORMULAS, SETTINGS, gbce_kernel, gbce_loss

MEMBER = Member(
    name="gbce",
    title="gBCE",
    kind="sampled",
    class_name="GBCE",
    loss=gbce_loss,
    module=None,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    examples=({}, {"t": 0.0}, {"t": 1.0}),
    takes=ONE_DRAW_EACH,
    kernel=gbce_kernel,
    cost=sampled_cost(),
    traffic=sampled_traffic(sums=2, row=2 * FLOAT),
    citation="Petrov and Macdonald, RecSys 2023",
)
