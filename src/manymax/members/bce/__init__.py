"""BCE, a reference loss: no member of the family, but a loss to compare members with."""

from manymax.engine.cost import FLOAT
from manymax.engine.member import ONE_DRAW_EACH, Member
from manymax.engine.sampled_cost import sampled_cost, sampled_traffic
from manymax.members.bce.loss import FACTS, FORMULAS, bce_kernel, bce_loss

MEMBER = Member(
    name="bce",
    title="BCE",
    kind="sampled",
    class_name="BCE",
    loss=bce_loss,
    module=None,
    formulas=FORMULAS,
    facts=FACTS,
    takes=ONE_DRAW_EACH,
    kernel=bce_kernel,
    cost=sampled_cost(),
    traffic=sampled_traffic(sums=2, row=2 * FLOAT),
    citation="Kang and McAuley, ICDM 2018, equation 12",
)
