"""BPR, a reference loss: no member of the family, but a loss to compare members with."""

from manymax.engine.cost import FLOAT
from manymax.engine.member import ONE_DRAW_EACH, Member
from manymax.engine.sampled_cost import sampled_cost, sampled_traffic
from manymax.members.bpr.loss import FACTS, FORMULAS, bpr_kernel, bpr_loss

MEMBER = Member(
    name="bpr",
    title="BPR",
    kind="sampled",
    class_name="BPR",
    loss=bpr_loss,
    module=None,
    formulas=FORMULAS,
    facts=FACTS,
    takes=ONE_DRAW_EACH,
    kernel=bpr_kernel,
    cost=sampled_cost(),
    traffic=sampled_traffic(sums=2, row=2 * FLOAT),
    citation="Rendle, Freudenthaler, Gantner, Schmidt-Thieme, UAI 2009",
)
