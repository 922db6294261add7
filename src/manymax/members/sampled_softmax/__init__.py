"""Sampled softmax: its loss, facts and theory, and its entry in `FAMILY`."""

from manymax.engine.cost import FLOAT
from manymax.engine.member import ONE_DRAW_EACH, Member
from manymax.engine.sampled_cost import sampled_cost, sampled_traffic
from manymax.members.sampled_softmax.loss import (
    FACTS,
    FORMULAS,
    SETTINGS,
    SampledSoftmaxLoss,
    check_settings,
    sampled_softmax_kernel,
    sampled_softmax_loss,
)
from manymax.members.sampled_softmax.theory import THEORY

MEMBER = Member(
    name="sampled_softmax",
    title="Sampled softmax",
    kind="sampled",
    aliases=("ssm",),
    loss=sampled_softmax_loss,
    module=SampledSoftmaxLoss,
    formulas=FORMULAS,
    log_partition=True,
    per_pair="compositional",
    facts=FACTS,
    settings=SETTINGS,
    examples=({"correction": "logq"}, {"correction": "none"}, {"correction": "partition"}),
    takes=ONE_DRAW_EACH,
    kernel=sampled_softmax_kernel,
    check=check_settings,
    cost=sampled_cost(closed_form=True),
    traffic=sampled_traffic(sums=3, row=4 * FLOAT),
    theory=THEORY,
    citation="Jean et al., ACL 2015; Ma and Collins, EMNLP 2018",
)
