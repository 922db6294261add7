"""Noise contrastive estimation: its loss, facts and theory, and its entry in `FAMILY`."""

from manymax.engine.cost import FLOAT
from manymax.engine.member import ONE_DRAW_EACH, Member
from manymax.engine.sampled_cost import sampled_cost, sampled_traffic
from manymax.members.nce.loss import FACTS, FORMULAS, SETTINGS, NCELoss, nce_kernel, nce_loss
from manymax.members.nce.theory import THEORY

MEMBER = Member(
    name="nce",
    title="Noise contrastive estimation",
    kind="sampled",
    class_name="NCE",
    loss=nce_loss,
    module=NCELoss,
    formulas=FORMULAS,
    facts=FACTS,
    settings=SETTINGS,
    takes=ONE_DRAW_EACH,
    kernel=nce_kernel,
    cost=sampled_cost(),
    traffic=sampled_traffic(sums=2, row=2 * FLOAT),
    theory=THEORY,
    citation="Gutmann and Hyvarinen, AISTATS 2010",
)
