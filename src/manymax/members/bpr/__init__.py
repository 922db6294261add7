"""BPR: everything about this loss, which is no member of the family but a reference beside it."""

from manymax.engine.cost import FLOAT, sampled_cost, sampled_traffic
from manymax.engine.member import Member, Takes
from manymax.members.bpr.loss import FACTS, FORMULAS, bpr_loss

MEMBER = Member(
    name="bpr",
    title="BPR",
    kind="sampled",
    class_name="BPR",
    loss=bpr_loss,
    module=None,
    formulas=FORMULAS,
    facts=FACTS,
    takes=Takes(smoothing=False, float_rows=False),
    cost=sampled_cost,
    traffic=sampled_traffic(sums=2, row=2 * FLOAT),
    reference="Rendle, Freudenthaler, Gantner, Schmidt-Thieme, UAI 2009",
)
